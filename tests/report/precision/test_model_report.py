"""`hybridq.report`: its numbers against NumPy in FP64, and what it says of spoiled layers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import hybridq
from hybridq.converters import register_experts
from hybridq.moe import ExpertsLayout
from hybridq.report import PrecisionReport, SlotRow
from own_experts import OwnExperts


class StackedExperts(OwnExperts):
    """Experts of this file's own class, which is registered once."""


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def mlp(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return hybridq.convert(model)


def row_of(found: PrecisionReport, layer: str, tensor: str, direction: str, fmt: str) -> SlotRow:
    (row,) = [
        one
        for one in found.slots
        if (one.layer, one.tensor, one.direction, one.format) == (layer, tensor, direction, fmt)
    ]
    return row


def norm_ratio(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_errors_of_slots_and_products_are_those_of_numpy() -> None:
    """Of a linear layer all three matrices are known: y = x w^T, and dy = 2 y / y.numel()."""
    torch.manual_seed(1)
    layer = hybridq.convert(nn.Sequential(nn.Linear(96, 64, bias=False)))
    x = torch.randn(48, 96)
    given = x.clone().requires_grad_()  # without, there is no dgrad
    found = hybridq.report(layer, given, ["mxfp8", "nvfp4"], loss=mean_square)
    w = layer[0].weight.detach()
    y = x @ w.T
    dy = 2 * y / y.numel()
    tensors = {"input": x, "weight": w, "grad_output": dy}
    gemms = {
        "fprop": (("input", "rowwise"), ("weight", "rowwise")),
        "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
        "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
    }
    assert found.recipe is None and found.loss == pytest.approx(float(mean_square(y)), rel=1e-6)
    for fmt in ("mxfp8", "nvfp4"):
        decoded, exact = {}, {}
        for name, tensor in tensors.items():
            planes = hybridq.quantize(tensor, fmt, columnwise=fmt)
            for direction in ("rowwise", "columnwise"):
                values = getattr(planes, direction).dequantize().double().numpy()
                want = tensor.double().numpy()
                row = row_of(found, "0", name, direction, fmt)
                error = row.statistics.relative_error
                assert error == pytest.approx(norm_ratio(values, want), rel=1e-4), (name, fmt)
                assert not row.in_run
                is_row = direction == "rowwise"
                decoded[name, direction] = values if is_row else values.T
                exact[name, direction] = want if is_row else want.T
        for gemm, (a, b) in gemms.items():
            (one,) = [p for p in found.products if (p.gemm, p.format) == (gemm, fmt)]
            want = norm_ratio(decoded[a] @ decoded[b].T, exact[a] @ exact[b].T)
            assert one.relative_error == pytest.approx(want, rel=1e-3)
    gradient = row_of(found, "0", "grad_output", "rowwise", "nvfp4")
    assert gradient.gradient_to_noise == pytest.approx(1 / gradient.statistics.relative_error)


def test_the_planes_of_the_run_are_its_recipes() -> None:
    """Mixed formats in one run: each layer has its own, and a decoded columnwise source."""
    rules = [("0", hybridq.recipe(fprop="mxfp8", dgrad="nvfp4", wgrad="bf16")), ("1", "bf16")]
    recipe = hybridq.recipes.ByName(rules, default="nvfp4")
    model, x = mlp(), torch.randn(32, 64, requires_grad=True)
    found = hybridq.report(model, x, recipe=recipe, loss=mean_square, gemms=False)
    formats = {
        (row.layer, row.tensor, row.direction): row.format for row in found.rows(in_run=True)
    }
    assert formats["0", "input", "rowwise"] == "mxfp8"
    assert formats["0", "input", "columnwise"] == "bf16"
    assert formats["0", "weight", "columnwise"] == "nvfp4"
    assert {text for key, text in formats.items() if key[0] == "1"} == {"bf16"}
    assert formats["2", "weight", "rowwise"] == "nvfp4_16x16"
    assert formats["2", "grad_output", "columnwise"].startswith("nvfp4;sr;rht")
    weight = model[0].weight.detach()
    once = hybridq.quantize(weight, "mxfp8").rowwise.dequantize()
    twice = hybridq.quantize(once, "nvfp4", columnwise="nvfp4").columnwise.dequantize()
    error = norm_ratio(twice.double().numpy(), weight.double().numpy())
    row = row_of(found, "0", "weight", "columnwise", "nvfp4")
    assert row.statistics.relative_error == pytest.approx(error, rel=1e-6)


def test_the_model_stays_as_it_is() -> None:
    model, x = mlp(), torch.randn(32, 64)
    norm = nn.Sequential(model, nn.BatchNorm1d(64), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hybridq.autocast(recipe="fp8_delayed"):
        mean_square(norm(x)).backward()
        optimizer.step()
        want = {name: value.clone() for name, value in norm.state_dict().items()}
        grads = [one.grad for one in model.parameters()]
        copies = [one.clone() for one in grads]
        history = model[0]._scaling[""].restorer.__self__.__dict__
        stats = [history[name].clone() for name in ("forward_stats", "forward_amaxes")]
        state = torch.random.get_rng_state()
        found = hybridq.report(norm, x, ["mxfp8"], loss=mean_square, switch=True)
    assert found.rows(in_run=True)[0].format == "fp8_e4m3"
    assert torch.equal(state, torch.random.get_rng_state())
    for one, grad, copy in zip(model.parameters(), grads, copies, strict=True):
        assert one.grad is grad and torch.equal(grad, copy)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, want[name]), name
    for name, value in zip(("forward_stats", "forward_amaxes"), stats, strict=True):
        assert torch.equal(history[name], value)


class Counter(nn.Linear):
    """Puts another tensor in its buffer's place in each forward."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_buffers_that_a_forward_replaces_are_what_they_were() -> None:
    model = nn.Sequential(mlp(), Counter())
    before = model[1].calls
    hybridq.report(model, torch.randn(32, 64), recipe="mxfp8", loss=mean_square, switch=True)
    assert model[1].calls is before and before.item() == 0.0


def outliers(model: nn.Sequential, x: torch.Tensor) -> None:
    """Some channels of one projection's input are larger than the rest by six orders."""
    far = torch.zeros(64)
    far[5::16] = 1e6
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + far,))


def tiny_gradient(model: nn.Sequential, x: torch.Tensor) -> None:
    """Rows of a gradient that lie below what the format has beside those of the last rows."""

    class Shrink(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: torch.Tensor) -> torch.Tensor:
            return y.view_as(y)

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            scale = torch.ones_like(dy)
            scale[:-4] = 1e-9
            return dy * scale

    model[1].register_forward_hook(lambda module, args, y: Shrink.apply(y))


def bad_block(model: nn.Sequential, x: torch.Tensor) -> None:
    with torch.no_grad():
        model[1].weight[40, 33:50] = math.nan


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", None])
@pytest.mark.parametrize(
    ("spoil", "layer", "tensor"),
    [(outliers, "2", "input"), (tiny_gradient, "1", "grad_output"), (bad_block, "1", "weight")],
)
def test_a_spoiled_slot_is_named_first(
    spoil: Callable[..., None], layer: str, tensor: str, recipe: str | None
) -> None:
    model, x = mlp(4), torch.randn(64, 64)
    spoil(model, x)
    formats = ["fp8", "mxfp8", "nvfp4"] if recipe is None else []
    found = hybridq.report(model, x, formats, recipe=recipe, loss=mean_square)
    first = found.worst()[0]
    assert (first.layer, first.tensor) == (layer, tensor), str(found)
    bad = found.first_bad
    if spoil is not bad_block:
        assert bad is None
        return
    assert bad is not None and not bad.is_made
    assert (bad.layer, bad.tensor, bad.position, bad.value) == ("1", "weight", (40, 33), "nan")
    blocks = {"fp8_current": (0, 0), "mxfp8": (40, 1), "nvfp4": (2, 2), None: (40, 33)}
    assert bad.block == blocks[recipe]


def test_a_switched_slot_is_what_the_loss_says() -> None:
    """What the first weight's format adds: loss less that of a run with this slot in BF16."""
    model, x = mlp(2), torch.randn(64, 64)
    found = hybridq.report(model, x, recipe="nvfp4", loss=mean_square, switch=True)
    factory = hybridq.recipes.get("nvfp4")

    def but_one(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        if (role.name, role.tensor_type) == ("0", "weight"):
            return hybridq.IdentityQuantizer()
        return factory.quantizer(role)

    losses = []
    for recipe in (factory, hybridq.CustomRecipe(but_one)):
        with hybridq.autocast(recipe=recipe), torch.no_grad():
            losses.append(float(mean_square(model(x))))
    row = row_of(found, "0", "weight", "rowwise", "nvfp4_16x16")
    assert row.loss_change == losses[0] - losses[1] != 0.0
    changes = [one.loss_change for one in found.rows(in_run=True)]
    assert None not in changes
    assert found.worst(by="loss_change")[0].loss_change == max(changes)


def test_experts_and_fused_modules_are_measured() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"mlp": hybridq.LayerNormMLP(64, 96), "experts": hybridq.GroupedLinear(3, 64, 32)}
    )
    x, sizes = torch.randn(24, 64), [10, 0, 14]

    def loop(model: nn.Module) -> torch.Tensor:
        return mean_square(model["experts"](model["mlp"](x), sizes))

    found = hybridq.report(model, loop, ["mxfp8"])
    layers = list(dict.fromkeys(row.layer for row in found.slots))
    assert layers == ["mlp.fc1", "mlp.fc2", "experts"]
    assert len(found.rows(format="mxfp8")) == 3 * 6
    seen = model["mlp"](x).detach()
    parts = [hybridq.quantize(one, "mxfp8").rowwise.dequantize() for one in seen.split(sizes)[::2]]
    error = norm_ratio(torch.cat(parts).double().numpy(), seen.double().numpy())
    row = row_of(found, "experts", "input", "rowwise", "mxfp8")
    assert row.statistics.relative_error == pytest.approx(error, rel=1e-4)
    assert row.statistics.calls == 2  # an expert without tokens is no tensor
    assert list(row.experts) == [0, 2]
    for own, one, made in zip(row.experts.values(), seen.split(sizes)[::2], parts, strict=True):
        error = norm_ratio(made.double().numpy(), one.double().numpy())
        assert math.sqrt(own.noise / own.signal) == pytest.approx(error, rel=1e-4)
    with hybridq.autocast(recipe="nvfp4"):
        under = hybridq.report(model, loop)
    assert {row.format for row in under.rows() if row.tensor == "weight"} == {"nvfp4_16x16"}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_layers_are_seen_once(is_reentrant: bool) -> None:
    model, x = mlp(2), torch.randn(16, 64, requires_grad=True)

    def loop(model: nn.Sequential) -> torch.Tensor:
        y = x
        for layer in model:
            y = hybridq.checkpoint(layer, y, use_reentrant=is_reentrant)
        return mean_square(y)

    found = hybridq.report(model, loop, ["mxfp8"])
    assert {row.statistics.calls for row in found.slots} == {1}
    assert len(found.rows(format="mxfp8")) == 2 * 6


def test_what_a_report_writes(tmp_path: Path) -> None:
    model, x = mlp(2), torch.randn(32, 64)
    found = hybridq.report(model, x, ["nvfp4"], recipe="mxfp8", loss=mean_square)
    read = json.loads(found.to_json())
    assert len(read["slots"]) == len(found.slots) and read["first_bad"] is None
    assert read["slots"][0]["relative_error"] == found.slots[0].statistics.relative_error
    assert sum(read["slots"][0]["scale_exponents"].values()) == 32 * 2
    console = Console(record=True, width=200)
    console.print(found)
    assert "gradient / noise" in console.export_text()
    assert found._repr_html_().count("<table>") == 2
    errors = [one.statistics.relative_error for one in found.sorted("relative_error")]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, x: hybridq.report(3, x), TypeError, "model must be an nn.Module, got int"),
        (lambda m, x: hybridq.report(m, 3), TypeError, "batch must be .* got int"),
        (lambda m, x: hybridq.report(m, x), ValueError, "needs a loss of one element"),
        (lambda m, x: hybridq.report(m, x, "mxfp8"), TypeError, "collection of names"),
        (lambda m, x: hybridq.report(m, x, None), TypeError, "collection of names, got None"),
        (lambda m, x: hybridq.report(m, x, [3]), TypeError, "name, a spec string or a Recipe"),
        (lambda m, x: hybridq.report(m, x, ["mxfp9"]), ValueError, "mxfp8"),
        (
            lambda m, x: hybridq.report(nn.Linear(64, 1), x, loss=mean_square),
            ValueError,
            "must have modules of hybridq",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[..., object], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        call(mlp(1), torch.randn(4, 64))


@pytest.mark.parametrize("count", [-1, 1.5, "3", None])
def test_a_number_of_rows_that_is_none_is_named(count: object) -> None:
    found = hybridq.report(mlp(1), torch.randn(4, 64), ["mxfp8"], backward=False)
    assert found.worst(0) == [] and not found.tables(0)[0].rows
    with pytest.raises(ValueError, match=f"worst: count must be an integer >= 0, got {count!r}"):
        found.worst(count)
    with pytest.raises(ValueError, match=f"tables: count must be an integer >= 0, got {count!r}"):
        found.tables(count)


def test_experts_of_mixed_formats_are_rows_of_their_own() -> None:
    """A stack of four experts, one of which has another format; what-if rows are of all four."""
    torch.manual_seed(0)
    layout = ExpertsLayout()
    model = nn.ModuleDict({"experts": StackedExperts(layout, sizes=(4, 64, 32))})
    register_experts(StackedExperts, layout)
    hybridq.convert(model)
    x, weights = torch.randn(24, 64), torch.rand(24, 2)
    top = torch.arange(48).reshape(24, 2) % 4

    def loop(model: nn.Module) -> torch.Tensor:
        return mean_square(model["experts"](x, top, weights))

    rules = [("experts.gate_up_proj.1", "nvfp4")]
    recipe = hybridq.recipes.ByName(rules, default="mxfp8")
    found = hybridq.report(model, loop, ["fp8"], recipe=recipe)
    rows = [
        (row.format, row.in_run, row.statistics.calls)
        for row in found.slots
        if (row.layer, row.tensor, row.direction) == ("experts.gate_up_proj", "weight", "rowwise")
    ]
    assert rows == [("mxfp8", True, 3), ("fp8_e4m3", False, 4), ("nvfp4_16x16", True, 1)]
    own = model["experts"].gate_up_proj.detach()[1]
    plane = hybridq.quantize(own, "nvfp4_16x16").rowwise.dequantize()
    row = row_of(found, "experts.gate_up_proj", "weight", "rowwise", "nvfp4_16x16")
    error = norm_ratio(plane.double().numpy(), own.double().numpy())
    assert row.statistics.relative_error == pytest.approx(error, rel=1e-6)


def test_an_empty_report_says_what_it_needs(tmp_path) -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(32, 32)))
    x = torch.randn(4, 32)
    hint = "none, nothing was quantized; give formats=[...], or run it under hybridq.autocast"
    empty = hybridq.report(model, x, backward=False)
    assert f"recipe: {hint}" in str(empty)
    empty.to_html(tmp_path / "page.html")
    assert f"<code>{hint}</code>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    told = hybridq.report(model, x, formats=["mxfp8"], backward=False)
    assert "recipe: none, nothing was quantized\n" in str(told)
