"""Experts whose weights are quantized from the start: one tensor, each expert with own planes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hybridq
from experts_oracle import Formats, relative
from hybridq.distributed import prepare_fsdp2
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.tensor import is_quantized
from own_experts import OwnExperts, clamped, routing

LAYOUTS = {
    "plain": ExpertsLayout(),
    "gpt-oss": ExpertsLayout(
        gate_up_bias="b1",
        down_bias="b2",
        is_transposed=True,
        is_concatenated=False,
        activation=clamped,
    ),
}
SIZES = (5, 64, 96)
WEIGHTS = ("gate_up_proj", "down_proj")


def made(layout: ExpertsLayout, init=None, dtype=torch.bfloat16, sizes=SIZES, **options):
    """Return converted experts; inside `quantized_model_init(init)` if that is given."""
    torch.manual_seed(0)
    module = OwnExperts(layout, dtype, sizes)
    with hybridq.quantized_model_init(init, enabled=init is not None, **options):
        convert_experts(module, layout)
    assert is_quantized(module.down_proj) == (init is not None)
    return module


def run(module: nn.Module, recipe, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(31, module._features()[0], generator=generator).to(dtype).requires_grad_()
    indices, weights = routing(31)
    module.zero_grad()
    torch.manual_seed(2)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = module(x, indices, weights.to(dtype))
    y.double().square().mean().backward()
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: one.grad for name, one in module.named_parameters()}


def equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert (one is None and got[name] is None) or torch.equal(got[name], one), name


@pytest.mark.parametrize("sizes", [SIZES, (3, 48, 40), (1, 64, 32)], ids=str)
@pytest.mark.parametrize(
    "recipe",
    [
        *("mxfp8", "nvfp4", "fp8_current"),
        # The columnwise plane is made of the decoded rowwise one.
        *("mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight", "nvfp4_fwd_mxfp8_bwd"),
    ],
)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_planes_that_are_held_give_the_bits_of_those_that_are_made(name, recipe, sizes) -> None:
    """Under the recipe; without one what they decode to, which a product rounds once less."""
    layout = LAYOUTS[name]
    low, plain = made(layout, recipe, sizes=sizes), made(layout, sizes=sizes)
    assert all(is_quantized(getattr(low, one)) for one in WEIGHTS)
    equal(run(low, recipe), run(plain, recipe))
    decoded = made(layout, sizes=sizes)
    decoded.load_state_dict(hybridq.dequantized_state_dict(low))
    assert not torch.equal(decoded.down_proj, plain.down_proj)
    assert relative(run(low, None)["output"], run(decoded, None)["output"]) < 2e-2
    assert low.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("weight", ["nvfp4_16x16", "mxfp8_32x32", "fp8_e4m3"])
def test_gradients_are_those_of_what_is_held(name: str, weight: str) -> None:
    """Against FP64 of what the parameter decodes to, in both directions of the products."""
    layout = LAYOUTS[name]
    pair, plain = ("mxfp8", "mxfp8"), ("fp32", "fp32")
    recipe = Formats(pair, (weight, weight), pair).recipe()
    low = made(layout, recipe, torch.float32)
    assert all(is_quantized(getattr(low, one)) for one in WEIGHTS)
    twin = made(layout, None, torch.float32)
    twin.load_state_dict(hybridq.dequantized_state_dict(low))
    got = run(low, recipe, torch.float32)
    want = run(twin.in_double(Formats(pair, plain, pair)), None, torch.float64)
    for one in got:
        assert relative(got[one], want[one]) < 3e-3, one


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_expert_has_an_amax_of_its_own(name: str) -> None:
    """One expert's outlier leaves the planes of the others as they are."""
    layout = LAYOUTS[name]
    small, large = OwnExperts(layout, torch.bfloat16, SIZES), made(layout, "nvfp4")
    with torch.no_grad():
        values = large.down_proj.detach().dequantize()
        values[2, 0, 0] = 1e4
        large.down_proj.copy_(values)
        small.down_proj.copy_(values)
    assert large.down_proj.tensor_storage.first.amax.shape == (5, 1)
    with hybridq.quantized_model_init("nvfp4"):
        convert_experts(small, layout)
    planes = [one.down_proj.tensor_storage.first for one in (small, large)]
    assert all(torch.equal(*pair) for pair in zip(*(one.tensors for one in planes), strict=True))
    assert torch.equal(planes[0].amax[:, 0], values.float().abs().amax((1, 2)))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_experts_on_the_meta_device_have_planes_there(name: str) -> None:
    layout = LAYOUTS[name]
    low = made(layout, "nvfp4")
    with torch.device("meta"):
        empty = made(layout, "nvfp4")
    for one in WEIGHTS:
        mine, its = getattr(empty, one), getattr(low, one)
        assert mine.is_meta and is_quantized(mine) and mine.quantizer == its.quantizer
    empty.to_empty(device="cpu")
    assert is_quantized(empty.down_proj) and not empty.down_proj.is_meta
    empty.load_state_dict(low.state_dict())
    equal(run(empty, "nvfp4"), run(low, "nvfp4"))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_steps_write_all_planes(name: str) -> None:
    layout = LAYOUTS[name]
    low, plain = made(layout, "mxfp8"), made(layout)
    plain.load_state_dict(hybridq.dequantized_state_dict(low))
    for module in (low, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=4.0)
        run(module, "mxfp8")
        optimizer.step()
    for one in WEIGHTS:
        own = getattr(low, one)
        assert is_quantized(own)
        want = hybridq.quantize(getattr(plain, one).detach(), "mxfp8").dequantize()
        assert relative(own.detach().dequantize(), want) < 2e-2
    again = made(layout)
    again.load_state_dict(hybridq.dequantized_state_dict(low))
    for one, other in zip(run(low, "mxfp8").values(), run(again, "mxfp8").values(), strict=True):
        assert relative(one, other) < 2e-2


def test_frozen_experts_hold_one_plane() -> None:
    for layout in LAYOUTS.values():
        low = made(layout, "mxfp8", frozen=True)
        for one in WEIGHTS:
            weight = getattr(low, one)
            assert len(weight.tensor_storage.planes) == 1 and not weight.requires_grad
            assert weight.nbytes < 1.1 * weight.numel()
        got, want = run(low, "mxfp8"), run(made(layout), "mxfp8")
        assert torch.equal(got["output"], want["output"])
        assert relative(got["input"], want["input"]) < 5e-2


def test_copies_and_files() -> None:
    low = made(LAYOUTS["gpt-oss"], "mxfp8")
    want = run(low, "mxfp8")
    equal(run(copy.deepcopy(low), "mxfp8"), want)
    with torch.no_grad():
        low.down_proj[1:2].copy_(low.down_proj[1:2].dequantize())  # its own planes alone
    equal(run(low, "mxfp8"), want)
    file = io.BytesIO()
    torch.save(low.state_dict(), file)
    file.seek(0)
    other = made(LAYOUTS["gpt-oss"], "mxfp8")
    with torch.no_grad():
        other.down_proj.zero_()
    other.load_state_dict(torch.load(file))
    equal(run(other, "mxfp8"), want)
    values = {
        name: one.dequantize().detach() for name, one in low.named_parameters() if one.dim() == 3
    }
    prepare_fsdp2(low)
    for name, one in values.items():
        assert torch.equal(getattr(low, name).dequantize(), one)
    alone = made(LAYOUTS["plain"])
    alone.down_proj = nn.Parameter(hybridq.quantize(alone.down_proj.detach(), "mxfp8"))
    with pytest.raises(NotImplementedError, match=r"must have planes of each matrix"):
        prepare_fsdp2(alone)


@pytest.mark.more
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_compiled_experts_take_the_planes_as_they_are(name: str) -> None:
    low = made(LAYOUTS[name], "nvfp4")
    want = run(low, "nvfp4")
    low.forward = torch.compile(low.forward, fullgraph=True, backend="aot_eager")
    equal(run(low, "nvfp4"), want)
