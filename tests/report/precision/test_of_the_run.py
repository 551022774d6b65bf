"""Whose planes and products a report has: those of the model that the run makes, and no others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hybridq
from hybridq.gemm import CONTRACT
from hybridq.recipes import ByName, Recipe, get, with_attention
from hybridq.report import BadValue

Loop = Callable[[nn.Module], torch.Tensor]


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def mlp(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return hybridq.convert(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def test_a_teacher_beside_the_model_is_not_measured() -> None:
    """Its names are the student's, its outliers and its NaN are not."""
    student, x = mlp(2), torch.randn(64, 64)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        teacher[1].weight[:, ::16] = 1e5
        target = teacher(x)

    def loop(model: nn.Module) -> torch.Tensor:
        with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
            taught = teacher(x)
        assert taught.shape == target.shape
        return mean_square(model(x) - target)

    alone = hybridq.report(student, x, recipe="mxfp8", loss=lambda y: mean_square(y - target))
    both = hybridq.report(student, loop, recipe="mxfp8")
    assert both.slots == alone.slots and both.products == alone.products
    assert both.shapes == alone.shapes
    with torch.no_grad():
        teacher[0].weight[3, 5] = math.nan
    assert hybridq.report(student, loop, recipe="mxfp8").first_bad is None
    advice = hybridq.advise(
        student, loop, device="b200", candidates=["mxfp8"], prefer="memory", budget=1
    )
    assert {one.layer for one in advice.products} == {"0", "1"}


def test_attention_of_a_teacher_is_not_measured() -> None:
    attention = hybridq.nn.DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="no_mask", name="core"
    )
    q = torch.randn(2, 12, 2, 16)
    student = mlp(1)

    def loop(model: nn.Module) -> torch.Tensor:
        attention(q, q, q)
        return mean_square(model(torch.ones(4, 64)))

    found = hybridq.report(student, loop, recipe=with_attention(get("mxfp8")))
    assert {row.layer for row in found.slots} == {"0"}


def frozen_layer() -> tuple[nn.Module, Loop]:
    model, x = mlp(), torch.randn(64, 64)
    model[1].requires_grad_(False)
    return model, lambda model: mean_square(model(x))


def frozen_all_but_a_bias() -> tuple[nn.Module, Loop]:
    model, x = mlp(2).requires_grad_(False), torch.randn(64, 64)
    model[0].bias.requires_grad_()
    return model, lambda model: mean_square(model(x))


def norm_before() -> tuple[nn.Module, Loop]:
    """A norm's weight needs dgrad, the batch does not; the second weight is frozen."""
    model = hybridq.convert(nn.Sequential(hybridq.LayerNormMLP(64, 96, bias=False)), least_width=0)
    model[0].fc2_weight.requires_grad_(False)
    x = torch.randn(64, 64)
    return model, lambda model: mean_square(model(x))


def frozen_norm() -> tuple[nn.Module, Loop]:
    model, loop = norm_before()
    model[0].layer_norm_weight.requires_grad_(False)
    model[0].layer_norm_bias.requires_grad_(False)
    return model, loop


def frozen_experts() -> tuple[nn.Module, Loop]:
    """All weights of the first are frozen, of the second one: that has a gradient by the others."""
    parts = (hybridq.GroupedLinear(3, 64, 64), hybridq.GroupedLinear(3, 64, 64))
    model = hybridq.convert(nn.Sequential(*parts), least_width=0)
    model[0].requires_grad_(False)
    model[1].weight0.requires_grad_(False)
    x, sizes = torch.randn(96, 64), [32, 32, 32]
    return model, lambda model: mean_square(model[1](model[0](x, sizes), sizes))


def fused_gradients() -> tuple[nn.Module, Loop]:
    parts = [hybridq.Linear(64, 64, fuse_wgrad_accumulation=True) for _ in range(2)]
    model = hybridq.convert(nn.Sequential(*parts), least_width=0)
    for part in parts:
        part.weight.main_grad = torch.zeros(64, 64)
    x = torch.randn(64, 64)
    return model, lambda model: mean_square(model(x))


def checkpointed(is_reentrant: bool) -> tuple[nn.Module, Loop]:
    model, x = mlp(), torch.randn(64, 64)
    model[1].requires_grad_(False)

    def loop(model: nn.Module) -> torch.Tensor:
        last = nn.Sequential(model[1], model[2])
        return mean_square(hybridq.checkpoint(last, model[0](x), use_reentrant=is_reentrant))

    return model, loop


KINDS = {
    "frozen layer": frozen_layer,
    "bias alone": frozen_all_but_a_bias,
    "norm before": norm_before,
    "frozen norm": frozen_norm,
    "frozen experts": frozen_experts,
    "main_grad": fused_gradients,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_report_are_those_that_change_gradients(kind: str) -> None:
    """A product is in the run if and only if its formats change a bit of the loss or a gradient."""
    torch.manual_seed(0)
    model, loop = KINDS[kind]()
    found = hybridq.report(model, loop, ["fp8"], recipe="mxfp8")
    mxfp8 = dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp8")

    def result(rules: list[tuple[str, Recipe]]) -> list[torch.Tensor]:
        model.zero_grad()
        with hybridq.autocast(recipe=ByName(rules, hybridq.recipe(**mxfp8))):
            value = loop(model)
        value.backward()
        seen = [value.detach()]
        for one in model.parameters():
            if one.grad is not None:
                seen.append(one.grad.clone())
            if hasattr(one, "main_grad"):
                seen.append(one.main_grad.clone())
                one.main_grad.zero_()
        return seen

    plain = result([])
    want = set()
    for shape in found.shapes:
        for gemm in mxfp8:
            other = hybridq.recipe(**{**mxfp8, gemm: "fp8_e5m2"})
            changed = result([(shape.role, other), (f"{shape.role}.[0-9]*", other)])
            if not all(map(torch.equal, plain, changed)):
                want.add((shape.layer, gemm))
    assert 1 < len(want) < 3 * len(found.shapes)
    for in_run in (True, False):
        assert {(one.layer, one.gemm) for one in found.products if one.in_run == in_run} == want
        planes = {
            (shape.layer, *side)
            for shape in found.shapes
            for gemm in CONTRACT
            if (shape.layer, gemm.name) in want
            for side in ((gemm.a, gemm.a_direction), (gemm.b, gemm.b_direction))
        }
        assert {(r.layer, r.tensor, r.direction) for r in found.rows(in_run=in_run)} == planes
    with hybridq.monitor(model, layers=None) as watch:
        with hybridq.autocast(recipe="mxfp8"):
            loop(model).backward()
        record = watch.step()
    slots = {(*one.place.split("/")[:2], one.direction) for one in record.slots if one.direction}
    assert slots == planes or kind == "reentrant checkpoint"
    assert slots >= planes


def test_advice_has_the_products_that_the_run_makes() -> None:
    model, loop = frozen_layer()
    options = {"candidates": ["mxfp8"], "prefer": "memory", "budget": 1, "device": "b200"}
    advice = hybridq.advise(model, loop, **options)
    assert [(one.layer, one.gemm) for one in advice.products] == [
        *(("0", "fprop"), ("0", "wgrad")),
        *(("1", "fprop"), ("1", "dgrad")),
        *(("2", "fprop"), ("2", "dgrad"), ("2", "wgrad")),
    ]
    assert "7 of 7 products quantized" in str(advice)
    # The layers agree in what they make, so one recipe is all.
    assert advice.recipe == hybridq.recipe(fprop="mxfp8", dgrad="mxfp8", wgrad="mxfp8")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_bad_value_of_an_expert_is_found_where_it_is(recipe: str) -> None:
    model = nn.Sequential(hybridq.GroupedLinear(8, 32, 32, name="experts"))
    x, sizes = torch.randn(64, 32), [8] * 8

    def bad(x: torch.Tensor) -> BadValue | None:
        run = lambda m: m[0](x, sizes).square().mean()  # noqa: E731
        return hybridq.report(model, run, recipe=recipe).first_bad

    y = x.clone()
    y[45, 2] = math.nan
    found = bad(y)
    assert (found.tensor, found.group, found.position) == ("input", 5, (45, 2))
    assert "input of expert 5, rowwise" in str(found) and "(row 45, column 2)" in str(found)
    with torch.no_grad():
        model[0].weight5[3, 7] = math.nan
    found = bad(x)
    assert (found.tensor, found.group, found.position) == ("weight", 5, (3, 7))


def test_a_spoiled_expert_is_named_though_the_others_are_larger() -> None:
    """One expert of eight has values far below an outlier of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(hybridq.GroupedLinear(8, 64, 64, name="experts"))
    with torch.no_grad():
        model[0].weight5.mul_(1e-6)[0, 0] = 0.02
    x, sizes = torch.randn(64, 64), [8] * 8

    def run(model: nn.Module) -> torch.Tensor:
        return model[0](x, sizes).square().mean()

    found = hybridq.report(model, run, ["mxfp8"], recipe="nvfp4")
    worst = found.worst()[0]
    assert (worst.tensor, worst.direction, worst.worst_expert) == ("weight", "rowwise", 5)
    own = model[0].weight5.detach()
    made = hybridq.quantize(own, "nvfp4_16x16").rowwise.dequantize()
    known = (own.abs() <= 10 * own.abs().median()).double()
    lost = ((made - own).double() * known).norm() / (own.double() * known).norm()
    assert worst.severity == pytest.approx(float(lost), rel=1e-5) and worst.severity > 0.3
    assert worst.statistics.severity < 0.15  # of all eight
    assert f"5: {float(lost):.3g}" in str(found)
    assert worst.as_dict()["worst_expert"] == 5

    given = {"candidates": ["nvfp4", "mxfp8"], "prefer": "memory", "budget": 1.0}
    advice = hybridq.advise(model, run, **given)
    fprop = next(one for one in advice.products if one.gemm == "fprop")
    assert fprop.formats == ("mxfp8", "mxfp8")


@pytest.mark.parametrize("function", [hybridq.report, hybridq.advise])
def test_gradients_of_a_batch_stay(function: Callable[..., object]) -> None:
    model, x = nn.Sequential(hybridq.Linear(64, 64, name="0")), torch.randn(8, 64)
    batch, other = {"input": x.requires_grad_()}, torch.randn(8, 64, requires_grad=True)
    other.grad = torch.full((8, 64), 3.0)
    formats = {"recipe": "mxfp8"} if function is hybridq.report else {"candidates": ["mxfp8"]}

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    function(model, batch, loss=loss, **formats)
    function(model, [other], loss=loss, **formats)
    assert x.grad is None and torch.equal(other.grad, torch.full((8, 64), 3.0))


@pytest.mark.parametrize("function", [hybridq.report, hybridq.advise])
def test_a_layer_that_no_format_takes_is_named(function: Callable[..., object]) -> None:
    model = nn.Sequential(hybridq.Linear(64, 64, name="0").double())
    with pytest.raises(TypeError, match=r"report: 0: .* got torch.float64; cast the model first"):
        function(model, torch.randn(8, 64).double(), loss=lambda y: y.square().mean())


def test_a_bad_bias_is_none_of_the_products() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with torch.no_grad():
        model[1].bias[9] = math.nan
    found = hybridq.report(
        model, torch.randn(32, 64), recipe="mxfp8", loss=lambda y: y.square().mean()
    ).first_bad
    assert (found.layer, found.tensor, found.position, found.is_made) == (
        "1",
        "bias",
        (0, 9),
        False,
    )
    assert str(found).endswith("there already")
