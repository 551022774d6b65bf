"""What runs on a device of another kind: `other_device_program.py HAS_FLOAT64 NAME...`.

The oracle is the CPU: the same bits of planes, and products and losses within FP32's rounding.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybridq
import other_device

DEVICE = "other"
FORMATS = ("fp8_e4m3", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4")
RECIPES = ("mxfp8", "nvfp4", "fp8_delayed", "fp8_block", "mxfp8_fwd_nvfp4_bwd")


def bits(tensor: torch.Tensor) -> Any:
    plain = tensor.cpu().contiguous()
    return plain.flatten().view(torch.uint8).tolist() if plain.numel() else []


def assert_same(found: torch.Tensor, want: torch.Tensor, *what: Any) -> None:
    assert found.dtype is want.dtype and bits(found) == bits(want), what


def assert_near(found: torch.Tensor, want: torch.Tensor, *what: Any, bound: float = 1e-6) -> None:
    found, want = found.detach().cpu().double(), want.detach().cpu().double()
    assert (found - want).abs().max() <= bound * want.abs().max(), what


def planes() -> None:
    x = torch.randn(70, 300)
    x[3, 7], x[60, :] = 3e38, 0.0
    for dtype in (torch.float32, torch.bfloat16):
        own = x.to(dtype)
        for first in FORMATS:
            second = "nvfp4" if first == "mxfp8" else "mxfp8"
            want = hybridq.quantize(own, first, columnwise=second)
            made = hybridq.quantize(own.to(DEVICE), first, columnwise=second)
            assert made.device.type == DEVICE
            for name in ("rowwise", "columnwise"):
                one, other = getattr(want, name), getattr(made, name)
                assert other.data.device.type == DEVICE
                assert_same(other.data, one.data, first, name)
                assert_same(other.scale, one.scale, first, name)
            assert_same(made.dequantize(), want.dequantize(), first)
            # What was made here has the same values there.
            assert_same(want.to(DEVICE).dequantize(), want.dequantize(), first)


def products() -> None:
    a, b = torch.randn(33, 200), torch.randn(48, 200)
    for first in FORMATS:
        for second in ("mxfp8", "nvfp4", first):
            pair = hybridq.quantize(a, first), hybridq.quantize(b, second)
            made = hybridq.gemm(pair[0].to(DEVICE), pair[1].to(DEVICE))
            assert made.device.type == DEVICE
            assert_near(made, hybridq.gemm(*pair), first, second)


def trained(
    model: nn.Module, x: torch.Tensor, recipe: str, device: str, *more: Any
) -> list[torch.Tensor]:
    own, x = copy.deepcopy(model).to(device), x.detach().clone().to(device).requires_grad_()
    for _ in range(2):  # delayed scaling has a history
        own.zero_grad()
        x.grad = None
        with hybridq.autocast(recipe=recipe):
            y = own(x, *more)
        y.float().square().mean().backward()
    return [y, x.grad, *[parameter.grad for parameter in own.parameters()]]


def modules() -> None:
    x = torch.randn(60, 96)
    made: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (hybridq.convert(nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 64))), ()),
        (hybridq.LayerNormLinear(96, 64), ()),
        (hybridq.LayerNormMLP(96, 128), ()),
        (hybridq.GroupedLinear(3, 96, 64), ([20, 0, 40],)),
    ]
    for recipe in RECIPES:
        rounds = "nvfp4" in recipe  # stochastically, with bits of each device's own
        for model, more in made:
            pairs = [trained(model, x, recipe, device, *more) for device in (DEVICE, "cpu")]
            for k, (found, want) in enumerate(zip(*pairs, strict=True)):
                bound = 0.5 if rounds and k else 1e-6
                what = (recipe, type(model).__name__, k)
                assert_near(found, want, *what, bound=bound)


def autocast() -> None:
    """Products in FP32 of what is decoded stay in FP32 under torch's autocast."""
    model = hybridq.convert(nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 64)))
    x, made = torch.randn(60, 96), []
    for device in (DEVICE, "cpu"):
        own = copy.deepcopy(model).to(device)
        with torch.autocast(device, dtype=torch.bfloat16), hybridq.autocast(recipe="mxfp8"):
            y = own(x.to(device))
        y.float().square().mean().backward()
        made.append([y, *[parameter.grad for parameter in own.parameters()]])
    for found, want in zip(*made, strict=True):
        assert_same(found, want)


def quantized() -> None:
    for recipe in ("mxfp8", "fp8_block"):
        with hybridq.quantized_model_init(recipe):
            model = hybridq.convert(nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 64)))
        x, made = torch.randn(60, 96), []
        for device in (DEVICE, "cpu"):
            own = copy.deepcopy(model).to(device)
            optimizer = hybridq.optim.AdamW(own.parameters(), lr=1e-2)
            for _ in range(3):
                with hybridq.autocast(recipe=recipe):
                    loss = own(x.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert type(own[0].weight) is type(model[0].weight)
            made.append([loss, *[weight.dequantize() for weight in own.parameters()]])
            file = io.BytesIO()
            torch.save(own.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            assert_same(loaded["0.weight"].dequantize(), own[0].weight.dequantize())
        for found, want in zip(*made, strict=True):
            assert_near(found, want, recipe)


def compiled() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 64))).to(DEVICE)
    x, call = torch.randn(60, 96).to(DEVICE), torch.compile(model, fullgraph=True, backend="eager")
    for recipe in ("mxfp8", "fp8_current"):
        made = []
        for run in (call, model):
            with hybridq.autocast(recipe=recipe):
                made.append(run(x))
        assert_near(*made, recipe)


def tools() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 64)))
    x = torch.randn(60, 96)
    rows, codes, shown = [], [], []
    for device in (DEVICE, "cpu"):
        own = copy.deepcopy(model).to(device)
        data = x.to(device)
        found = hybridq.report(own, lambda m, d=data: m(d).square().mean(), formats=["mxfp8"])
        told = json.loads(found.to_json())
        rows.append({key: told[key] for key in told if key in ("slots", "products")})
        report = hybridq.calibration.gptq(own, [data], recipe="nvfp4")
        codes.append([own[0].weight.dequantize(), own[2].weight.dequantize()])
        assert report.weights
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record.jsonl"
            with hybridq.monitor(own, every=1, to=str(path)), hybridq.autocast(recipe="mxfp8"):
                own(data).square().mean().backward()
        shown.append(str(hybridq.show(hybridq.quantize(data, "nvfp4"))))
    assert rows[0] and _near(*rows), rows
    for found, want in zip(*codes, strict=True):
        assert_same(found, want)
    assert shown[0].replace(DEVICE, "cpu").replace("cpu:0", "cpu") == shown[1]


def _near(found: Any, want: Any) -> bool:
    """Whether two results of JSON are the same, numbers within the rounding of products."""
    if isinstance(found, dict):
        return found.keys() == want.keys() and all(_near(found[key], want[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(want) and all(map(_near, found, want))
    if isinstance(found, float):
        return abs(found - want) <= 1e-5 * abs(want)
    return bool(found == want)


def told() -> None:
    """What runs where is said: once by a line of the log, and by `explain`."""
    found = hybridq.explain("encode", "mxfp8", device=DEVICE)
    assert found.chosen == "host", found
    x = torch.randn(4, 32).to(DEVICE)
    with hybridq.backend("reference"):
        try:
            hybridq.quantize(x, "mxfp8")
        except hybridq.BackendError as error:
            assert "rounds in FP64, which other does not have" in str(error), error
        else:
            raise AssertionError("the reference ran")
    assert "host" in str(hybridq.explain("encode", "mxfp8", device="mps"))
    assert hybridq.explain("encode", "mxfp8", device="cpu").chosen == "cpu"


def told_float64() -> None:
    assert hybridq.explain("encode", "mxfp8", device=DEVICE).chosen == "reference"
    x = torch.randn(40, 64)
    with hybridq.backend("host"):
        made = hybridq.quantize(x.to(DEVICE), "nvfp4")
    assert_same(made.dequantize(), hybridq.quantize(x, "nvfp4").dequantize())


if __name__ == "__main__":
    other_device.start(sys.argv[1] == "1", sys.argv[1] == "1")
    for name in sys.argv[2:]:
        torch.manual_seed(0)
        function: Callable[[], None] = globals()[name]
        function()
