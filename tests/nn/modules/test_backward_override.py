"""Choices of the backward: which operands it multiplies, what it saves, precision by GEMM.

The oracle is torch's own autograd of `torch.nn.functional.linear`, run on the operands that the
choice names: between planes that are not quantized the three products are torch's, bit for bit.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import linear as torch_linear
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq import recipes
from hybridq.recipes import (
    ByName,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    GemmPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    bind,
)
from linear_model import equal, run, saved_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OVERRIDES = ("high_precision", "dequantized")
#: Delayed scaling takes no override.
QUANTIZING = tuple(
    name for name in recipes.names() if name not in ("bf16", "high_precision", "fp8_delayed")
)
FORWARD = tuple(name for name in QUANTIZING if name != "high_precision_fwd_mxfp8_bwd")
CLASSES = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


def _case(dtype=torch.float32, rows=37, inner=80, outer=45):
    layer = hybridq.Linear(inner, outer, dtype=dtype)
    x, dy = torch.randn(rows, inner), torch.randn(rows, outer) / 8
    x[0, 0], x[rows // 2] = 40.0, 0.0
    return layer, x.to(dtype), dy.to(dtype)


def _decoded(x, name, slot):
    quantizer = recipes.get(name).quantizer(QuantizerRole("linear", slot))
    return quantizer.with_usage(columnwise=False)(x.detach()).dequantize()


def _gradients(x, weight, bias, dy):
    """dx, dw, dbias of torch's linear."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    return torch.autograd.grad(torch_linear(*leaves), leaves, dy)


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", QUANTIZING)
def test_the_backward_is_torchs_on_the_chosen_operands(name, override, dtype):
    layer, x, dy = _case(dtype)
    recipe = recipes.get(name).with_choices(backward_override=override)
    torch.manual_seed(3)
    y, *gradients = run(layer, x, dy, recipe=recipe)
    torch.manual_seed(3)
    plain_y, *usual = run(layer, x, dy, recipe=name)
    assert torch.equal(y, plain_y), "the forward is not the backward's business"
    operands = [x, layer.weight.detach()]
    if override == "dequantized":
        operands = [_decoded(x, name, "input"), _decoded(layer.weight, name, "weight")]
        if name in FORWARD:
            assert not torch.equal(operands[0], x) and not torch.equal(operands[1], layer.weight)
    assert equal(gradients, _gradients(*operands, layer.bias, dy))
    if name not in ("mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_high_precision_bwd"):
        assert not torch.equal(gradients[0], usual[0]), "the recipe's own backward is another"


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("cls", CLASSES)
def test_built_in_recipes_take_it_by_keyword(cls, override):
    recipe = cls(backward_override=override)
    assert recipe == cls().with_choices(backward_override=override) != cls()
    assert recipe.key != cls().key and override in repr(recipe)
    assert "override" not in repr(cls())
    assert recipe.with_choices(backward_override=None) == cls()
    assert recipe.with_choices(backward_override=None).key == cls().key
    for twin in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert twin == recipe and twin.key == recipe.key
    assert recipes.recipe.recipe_by_key(recipe.key) == recipe
    with pytest.raises(AttributeError):
        recipe.backward_override = None


@pytest.mark.parametrize("name", FORWARD)
def test_dequantized_saves_the_rowwise_planes(name):
    layer, x, _ = _case(torch.bfloat16, 64, 128, 96)
    x.requires_grad_()
    recipe = recipes.get(name).with_choices(backward_override="dequantized")
    with hybridq.autocast(recipe=recipe), saved_tensors() as saved:
        layer(x)
    plan, expected = bind(recipe), 0
    for tensor, slot in ((x, "input"), (layer.weight, "weight")):
        quantizer = recipes.get(name).quantizer(QuantizerRole("linear", slot))
        plane = quantizer.with_usage(columnwise=False)(tensor.detach()).rowwise
        expected += sum(buffer.nbytes for buffer in plane.tensors)
    assert sum(t.nbytes for t in saved) == expected + (8 if plan.is_stochastic else 0)
    assert expected < 0.6 * (x.nbytes + layer.weight.nbytes)


@pytest.mark.parametrize("name", QUANTIZING)
def test_high_precision_saves_the_tensors_themselves(name):
    layer, x, _ = _case(torch.bfloat16)
    x.requires_grad_()
    recipe = recipes.get(name).with_choices(backward_override="high_precision")
    with hybridq.autocast(recipe=recipe), saved_tensors() as saved:
        layer(x)
    assert {t.data_ptr() for t in saved if t.numel() > 1} == {x.data_ptr(), layer.weight.data_ptr()}


def test_gradients_are_not_rounded_stochastically_where_they_are_not_quantized():
    assert bind(recipes.get("nvfp4")).is_stochastic
    for override in OVERRIDES:
        assert not bind(NVFP4BlockScaling(backward_override=override)).is_stochastic
    plan = bind(CustomRecipe(_one_way, backward_override="high_precision"))
    assert plan.grad_output.row.is_plain and plan.grad_output.col.is_plain


def _one_way(role):
    """Rowwise planes only: no backward of its own."""
    return hybridq.MXFP8Quantizer(columnwise=False)


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_factory_without_a_backward_has_one_by_choice(override):
    layer, x, dy = _case()
    with pytest.raises(hybridq.RecipeError), hybridq.autocast(recipe=CustomRecipe(_one_way)):
        layer(x)
    got = run(layer, x, dy, recipe=CustomRecipe(_one_way, backward_override=override))
    assert equal(got, run(layer, x, dy, recipe=MXFP8BlockScaling(backward_override=override)))


def test_nothing_is_left_where_nothing_was_quantized():
    recipe = CustomRecipe(
        recipes.zoo.high_precision_fwd_mxfp8_bwd_factory, backward_override="dequantized"
    )
    assert bind(recipe).is_plain
    assert bind(recipes.get("bf16").with_choices(backward_override="high_precision")).is_plain


@pytest.mark.parametrize("name", [name for name in QUANTIZING if name != "nvfp4_1d_weight"])
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_columnwise_source(name, source):
    """The same bits as a factory that says it for input and weight itself."""

    def factory(role):
        made = recipes.get(name).quantizer(role)
        if role.tensor_type == "grad_output":
            return made
        return hybridq.HybridQuantizer(
            rowwise_quantizer=made.with_usage(columnwise=False),
            columnwise_quantizer=made.with_usage(rowwise=False),
            columnwise_source=source,
        )

    layer, x, dy = _case()
    results = []
    sources = ("original", "rowwise_dequantized")
    other = sources[source == sources[0]]
    for recipe in (
        recipes.get(name).with_choices(columnwise_source=source),
        CustomRecipe(factory),
        recipes.get(name).with_choices(columnwise_source=other),
    ):
        torch.manual_seed(5)
        results.append(run(layer, x, dy, recipe=recipe))
    assert equal(results[0], results[1])
    assert torch.equal(results[0][0], results[2][0])
    if "nvfp4" in name and name != "nvfp4_row_scaled_fwd_mxfp8_bwd":
        # An E4M3 value rounded twice, with scales that are powers of two, is as good as always the
        # value rounded once: only NVFP4's planes are sure to show the source.
        assert not equal(results[0], results[2])


@pytest.mark.more
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_current", "fp8_block_fwd_mxfp8_bwd"])
def test_compiled(name, override):
    layer, x, dy = _case()
    recipe = recipes.get(name).with_choices(backward_override=override)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for chosen in (name, recipe, recipe, recipe):
        got, expected = (run(one, x, dy, recipe=chosen) for one in (compiled, layer))
        assert torch.equal(got[0], expected[0])
        assert chosen == "nvfp4" or equal(got, expected)  # other seeds than eager's
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("override", OVERRIDES)
def test_recomputed(override, use_reentrant):
    layer, x, dy = _case()
    recipe = MXFP8BlockScaling(backward_override=override)
    expected = run(layer, x, dy, recipe=recipe)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with hybridq.autocast(recipe=recipe):
        y = checkpoint(layer, leaf, use_reentrant=use_reentrant)
    y.backward(dy)
    assert equal([y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad], expected)


@pytest.mark.parametrize("override", OVERRIDES)
def test_cached_weights(override):
    layer, _, dy = _case()
    xs = [torch.randn(37, 80) for _ in range(3)]
    recipe = NVFP4BlockScaling(backward_override=override)
    for number, x in enumerate(xs):
        expected = run(layer, x, dy, recipe=recipe)
        assert equal(run(layer, x, dy, recipe=recipe, is_first_microbatch=number == 0), expected)
    with torch.no_grad():
        layer.weight.data.zero_()  # which nothing can see: what is kept is used
    y, dx, dw, _ = run(layer, x, dy, recipe=recipe, is_first_microbatch=False)
    assert torch.equal(y, expected[0]) and torch.equal(dw, expected[2])
    assert torch.equal(dx, expected[1]) == (override == "dequantized")


@pytest.mark.parametrize("frozen", ["weight", "input"])
@pytest.mark.parametrize("override", OVERRIDES)
def test_only_what_a_gradient_needs_is_saved(override, frozen):
    layer, x, dy = _case()
    recipe = MXFP8BlockScaling(backward_override=override)
    _, dx, dw, _ = run(layer, x, dy, recipe=recipe)
    x.requires_grad_(frozen != "input")
    layer.weight.requires_grad_(frozen != "weight")
    layer.zero_grad()
    with hybridq.autocast(recipe=recipe), saved_tensors() as saved:
        y = layer(x)
    y.backward(dy)
    held = [one for one in saved if one.numel()]  # but for what stands for a second derivative
    assert len(held) == (1 if override == "high_precision" else 2)  # data and scale
    if frozen == "weight":
        assert torch.equal(x.grad, dx) and layer.weight.grad is None
    else:
        assert torch.equal(layer.weight.grad, dw) and x.grad is None


def test_a_weight_that_was_written_before_its_backward_is_refused():
    """Nothing but the weight itself is saved, and so its version is watched, as torch does."""
    layer, x, dy = _case()
    x.requires_grad_()
    with hybridq.autocast(recipe=MXFP8BlockScaling(backward_override="high_precision")):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.usefixtures("fast_products")
def test_torch_autocast():
    layer, x, dy = _case()
    recipe = MXFP8BlockScaling(backward_override="high_precision")
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw, _ = run(layer, x, dy.bfloat16(), recipe=recipe)
    expected = _gradients(
        x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16(), dy.bfloat16()
    )
    assert y.dtype == torch.bfloat16
    assert torch.equal(dx, expected[0].float()) and torch.equal(dw, expected[1].float())


# ---- precision by GEMM


THREE = GemmPrecision("fast", "exact", "auto")


@pytest.mark.parametrize("given", [THREE, {"dgrad": "exact", "fprop": "fast"}])
@pytest.mark.parametrize("by", ["recipe", "autocast", "with_precision"])
def test_each_gemm_has_its_own(given, by, asked):
    layer, x, dy = _case()
    options = {
        "recipe": {"recipe": MXFP8BlockScaling(precision=given)},
        "autocast": {"recipe": "mxfp8", "precision": given},
        "with_precision": {"recipe": recipes.get("mxfp8").with_precision(given)},
    }[by]
    run(layer, x, dy, **options)
    assert asked == list(THREE)
    asked.clear()
    with hybridq.autocast(**options):
        assert hybridq.autocast(**options).recipe.precision == THREE
        hybridq.gemm(x, layer.weight.detach())  # outside of any module
    assert asked == ["fast"]


@pytest.mark.more
def test_each_gemm_has_its_own_when_compiled(asked):
    layer, x, dy = _case()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        run(compiled, x, dy, recipe=MXFP8BlockScaling(precision=THREE))
    assert asked == [*THREE] * 2
    asked.clear()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, wgrad):
        with hybridq.autocast(recipe="mxfp8", precision=GemmPrecision("fast", "exact", wgrad)):
            return layer(x)

    for wgrad in ("auto", "fast"):
        step(x.requires_grad_(), wgrad).backward(dy)
    assert asked == ["fast", "exact", "auto", "fast", "exact", "fast"]


def test_equal_precisions_are_one_value():
    one = MXFP8BlockScaling(precision="fast")
    same = MXFP8BlockScaling(precision={"fprop": "fast", "dgrad": "fast", "wgrad": "fast"})
    assert one == same and one.key == same.key and same.precision == "fast"
    assert MXFP8BlockScaling(precision={}) == MXFP8BlockScaling()
    three = MXFP8BlockScaling(precision=THREE)
    assert three != one and len({three.key, one.key, MXFP8BlockScaling().key}) == 3
    assert pickle.loads(pickle.dumps(three)) == three == copy.deepcopy(three)


# ---- errors


@dataclass(frozen=True)
class Bare(Recipe):
    """A recipe without a field for choices."""

    def quantizer(self, role):
        return hybridq.MXFP8Quantizer()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MXFP8BlockScaling(backward_override="bf16"),
            ValueError,
            "MXFP8BlockScaling: backward_override must be None or one of high_precision, "
            "dequantized, got 'bf16'",
        ),
        (lambda: CustomRecipe(_one_way, backward_override=True), ValueError, "got True"),
        (lambda: NVFP4BlockScaling(columnwise_source="row"), ValueError, "original, rowwise"),
        (
            lambda: MXFP8BlockScaling(
                backward_override="dequantized", columnwise_source="original"
            ),
            ValueError,
            "got columnwise_source='original'",
        ),
        (
            lambda: NVFP4BlockScaling(columnwise_source="original").with_choices(
                backward_override="dequantized"
            ),
            ValueError,
            "there are none",
        ),
        (
            lambda: Bare().with_choices(backward_override="dequantized"),
            TypeError,
            "Bare has no field backward_override to set, got 'dequantized'",
        ),
        (
            lambda: MXFP8BlockScaling().with_choices(precise="exact"),
            TypeError,
            "a choice must be one of precision, backward_override, columnwise_source",
        ),
        (
            lambda: MXFP8BlockScaling(precision={"forward": "exact"}),
            ValueError,
            "the GEMM of a precision must be one of fprop, dgrad, wgrad, got 'forward'",
        ),
        (lambda: MXFP8BlockScaling(precision={"dgrad": "half"}), ValueError, "got 'half'"),
        (lambda: MXFP8BlockScaling(precision=GemmPrecision("half")), ValueError, "got 'half'"),
        (lambda: MXFP8BlockScaling(precision=("auto",) * 3), ValueError, "got \\('auto'"),
        (lambda: MXFP8BlockScaling(precision=["auto"]), ValueError, "got \\['auto'\\]"),
        (lambda: hybridq.autocast(precision={"dgrad": "half"}), ValueError, "autocast: precision"),
        (lambda: MXFP8BlockScaling("E4M3", False, "dequantized"), TypeError, "positional"),
    ],
)
def test_wrong_choices(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_recipe_without_the_fields():
    assert Bare().with_choices(backward_override=None, precision="auto") == Bare()
    layer, x, dy = _case()
    assert equal(run(layer, x, dy, recipe=Bare()), run(layer, x, dy, recipe="mxfp8"))


def test_choices_per_module():
    """Per module means by name: each follows its recipe's own choices."""
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    recipe = ByName(
        [("1", MXFP8BlockScaling(backward_override="high_precision", precision="exact"))],
        default="mxfp8",
    )
    assert bind(recipe, "1").grad_output.row.is_plain
    assert not bind(recipe, "0").grad_output.row.is_plain
    assert bind(recipe, "1").precision == GemmPrecision("exact", "exact", "exact")
    assert bind(recipe, "0").precision == GemmPrecision()
    x, dy = torch.randn(8, 64), torch.randn(8, 64)
    hidden = run(model[0], x, dy, recipe="mxfp8")[0]
    last = run(model[1], hidden, dy, recipe=MXFP8BlockScaling(backward_override="high_precision"))
    first = run(model[0], x, last[1], recipe="mxfp8")
    assert equal(run(model, x, dy, recipe=recipe), [last[0], first[1], *first[2:], *last[2:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_gradients_through_a_norm_are_those_of_the_plain_module(name, normalization, dtype) -> None:
    """In high precision nothing of the backward is quantized: torch's own bits, of the norm too."""
    torch.manual_seed(0)
    recipe = hybridq.recipes.get(name).with_choices(backward_override="high_precision")
    layer = hybridq.LayerNormLinear(
        64, 32, normalization=normalization, return_layernorm_output=True, dtype=dtype
    )
    norm = getattr(nn, normalization)(64, eps=layer.eps, dtype=dtype)
    linear = hybridq.Linear(64, 32, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(layer.layer_norm_weight.uniform_(0.5, 1.5))
        for key in ("weight", "bias"):
            getattr(linear, key).copy_(getattr(layer, key))
    x, dy = torch.randn(8, 64, dtype=dtype), torch.randn(8, 32, dtype=dtype)
    found = []
    for own, apart in ((recipe, False), (recipe, True), (None, False)):
        given = x.clone().requires_grad_()
        for module in (layer, norm, linear):
            module.zero_grad()
        with hybridq.autocast(own is not None, own):
            seen = norm(given)
            y = linear(seen) if apart else layer(given)
        y, seen = (y, seen) if apart else y
        y.backward(dy)
        weights = (norm.weight, linear.weight, linear.bias)
        if not apart:
            weights = (layer.layer_norm_weight, layer.weight, layer.bias)
        found.append(
            [given.grad, *(one.grad.clone() for one in weights), seen.detach(), y.detach()]
        )
    fused, alone, plain = found
    assert all(torch.equal(a, b) for a, b in zip(fused, alone, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fused[:5], plain[:5], strict=True))
    assert not torch.equal(fused[5], plain[5])
