"""LayerNormLinear, RMSNormLinear and LayerNormMLP: their bits are those of their parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridq
from fused_model import (
    INNER,
    KINDS,
    MAKERS,
    apart,
    assert_same,
    data,
    linear,
    mlp,
    named,
)
from hybridq import LayerNormLinear, LayerNormMLP, recipes
from hybridq.quantizers import IdentityQuantizer, MXFP8Quantizer
from hybridq.recipes import CustomRecipe, autocast, bind, get
from linear_model import Recorder, equal, run, saved_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZING = tuple(name for name in recipes.names() if name not in ("bf16", "high_precision"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("maker", MAKERS)
def test_fused_gives_the_bits_of_its_parts(maker, recipe, dtype):
    module = MAKERS[maker](dtype=dtype)
    parts = apart(module, is_ours=True)
    x, dy = data(module)
    torch.manual_seed(3)
    expected = run(parts, x, dy, recipe=recipe)
    torch.manual_seed(3)
    got = run(module, x, dy, recipe=recipe)
    assert_same(module, got, expected)
    plain = run(module, x, dy, enabled=False)
    # Bits equal to the unquantized ones would mean that nothing was quantized.
    assert not any(torch.equal(a, b) for a, b in zip(got[1:3], plain[1:3], strict=True))


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_norm_and_activation_are_quantized_as_they_are_made(recipe):
    """No matrix between: one operation each, and `encode` for the weights and gradients only."""
    if recipe == "fp8_delayed":
        pytest.skip("its amax is seen as the matrix is encoded, by an operation of its own")
    module = mlp("swiglu")
    x, dy = data(module)
    with Recorder() as seen, autocast(recipe=recipe):
        y = module(x.requires_grad_())
    forward = [name.split("::")[1] for name in seen.ops if name.startswith("hybridq::")]
    made = ("norm_encode", "activation_encode")
    slot = bind(get(recipe)).input
    if slot.row.is_plain or (slot.col.is_plain and not slot.saves_row):
        made = ("norm", "activation")  # a plane is the matrix itself
    assert [name for name in forward if name.startswith(("norm", "activation"))] == list(made)
    with Recorder() as seen:
        y.backward(dy)
    backward = [name.split("::")[1] for name in seen.ops if name.startswith("hybridq::")]
    ends = [name for name in backward if name.startswith(("norm", "activation"))]
    assert ends == ["activation_backward", "norm_backward"]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fwd_mxfp8_bwd"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", KINDS)
def test_every_activation(activation, bias, recipe):
    module = mlp(activation, bias=bias)
    x, dy = data(module)
    expected = run(apart(module, is_ours=True), x, dy, recipe=recipe)
    assert_same(module, run(module, x, dy, recipe=recipe), expected)


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("mode", ["FP32", "BF16", "FP64", "autocast"])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_without_a_recipe_it_is_torch(normalization, activation, mode):
    dtype = {"BF16": torch.bfloat16, "FP64": torch.float64}.get(mode, torch.float32)
    for module in (mlp(activation, normalization, dtype=dtype), linear(normalization, dtype=dtype)):
        parts = apart(module, is_ours=False)
        x, dy = data(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            dy = dy.bfloat16() if mode == "autocast" else dy
            expected = run(parts, x, dy, enabled=False)
            assert_same(module, run(module, x, dy, enabled=False), expected)
            if mode != "FP64":
                assert_same(module, run(module, x, dy, recipe="high_precision"), expected)


@pytest.mark.parametrize("maker", MAKERS)
def test_ten_adamw_steps_with_identity_quantizers(maker):
    ours = MAKERS[maker]()
    plain = apart(ours, is_ours=False)
    batches = torch.randn(10, 16, INNER)
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in batches:
            with autocast(recipe="high_precision"):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(list(ours.parameters()), list(plain.parameters()))


def only(slot: str):
    """A factory that quantizes one slot of all."""

    def factory(role):
        return MXFP8Quantizer() if role.tensor_type == slot else IdentityQuantizer()

    return CustomRecipe(factory)


@pytest.mark.parametrize("slot", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("maker", MAKERS)
def test_slots_that_are_left_alone(maker, slot):
    """A plane of the norm's result itself: then that result is made, with the same bits."""
    module = MAKERS[maker]()
    x, dy = data(module)
    expected = run(apart(module, is_ours=True), x, dy, recipe=only(slot))
    assert_same(module, run(module, x, dy, recipe=only(slot)), expected)


@pytest.mark.parametrize("quantized", ["fc1", "fc2"])
def test_one_part_quantized_and_the_other_not(quantized):
    def factory(role):
        return MXFP8Quantizer() if role.name.endswith(quantized) else IdentityQuantizer()

    module = mlp("swiglu", name="block.mlp")
    parts = apart(module, is_ours=True)
    torch_parts = apart(module, is_ours=False)
    parts[1].name, parts[3].name = "fc1", "fc2"
    for i in (0, 1) if quantized == "fc2" else (2, 3):  # what is plain is torch's own
        parts[i] = torch_parts[i]
    x, dy = data(module)
    recipe = CustomRecipe(factory)
    assert_same(module, run(module, x, dy, recipe=recipe), run(parts, x, dy, recipe=recipe))


def test_the_names_of_the_parts_reach_the_factory():
    seen = []

    def factory(role):
        seen.append((role.module_type, role.tensor_type, role.name))
        return MXFP8Quantizer()

    model = hybridq.convert(nn.ModuleDict({"mlp": mlp(), "qkv": linear(name="given")}))
    slots = ("input", "weight", "grad_output")
    with autocast(recipe=CustomRecipe(factory)):
        model["mlp"](torch.randn(2, INNER))
        assert seen == [("linear", s, f"mlp.{n}") for n in ("fc1", "fc2") for s in slots]
        seen.clear()
        model["qkv"](torch.randn(2, INNER))
        assert seen == [("linear", s, "given") for s in slots]
        seen.clear()
        mlp()(torch.randn(2, INNER))
        assert {name for _, _, name in seen} == {"fc1", "fc2"}


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 0, 3), (0,), (1, 2, 1, 4)])
@pytest.mark.parametrize("maker", MAKERS)
def test_any_batch_shape(maker, leading):
    module = MAKERS[maker]()
    x, dy = torch.randn(*leading, INNER), torch.randn(*leading, data(module)[1].shape[1])
    for options in ({"recipe": "mxfp8"}, {"enabled": False}):
        y, dx, *rest = run(module, x, dy, **options)
        flat = run(module, x.reshape(-1, INNER), dy.reshape(-1, dy.shape[-1]), **options)
        assert y.shape == dy.shape and dx.shape == x.shape
        assert equal([y.reshape(flat[0].shape), dx.reshape(-1, INNER), *rest], flat)


@pytest.mark.parametrize("sizes", [(1, 1), (7, 129), (300, 33)])
def test_any_size(sizes):
    inner, outer = sizes
    for module in (LayerNormLinear(inner, outer), LayerNormMLP(inner, outer, activation="geglu")):
        x = torch.randn(5, inner)
        dy = torch.randn(5, module(x).shape[1])
        expected = run(apart(module, is_ours=True), x, dy, recipe="nvfp4_fwd_mxfp8_bwd")
        assert_same(module, run(module, x, dy, recipe="nvfp4_fwd_mxfp8_bwd"), expected)


def test_strided_inputs_and_gradients():
    module = mlp("swiglu")
    x, dy = torch.randn(INNER, 3, 7).permute(1, 2, 0), torch.randn(INNER, 3, 7).permute(1, 2, 0)
    strided = run(module, x, dy, recipe="mxfp8")
    packed = run(module, x.contiguous(), dy.contiguous(), recipe="mxfp8")
    for name, one, other in zip(named(module, strided), strided, packed, strict=True):
        # torch's sum over tokens follows the strides, as nn.Linear's bias gradient does.
        assert torch.equal(one, other) or name == "fc2_bias"


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_torch_autocast(maker, amp):
    """Input, weight and bias in its dtype, the norm's weights as they are; gradients come back."""
    module = MAKERS[maker]()
    parts = apart(module, is_ours=True)
    for part in parts:
        if isinstance(part, hybridq.Linear):
            part.to(amp)
    x, dy = data(module)
    recipe = "mxfp8_fwd_high_precision_bwd"
    expected = run(parts, x.to(amp), dy.to(amp), recipe=recipe)
    with torch.autocast("cpu", dtype=amp):
        got = run(module, x, dy.to(amp), recipe=recipe)
    assert got[0].dtype == amp and all(one.dtype == torch.float32 for one in got[1:])
    assert_same(module, got, [e.to(g.dtype) for e, g in zip(expected, got, strict=True)])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", None])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_recomputation_gives_the_same_bits(maker, use_reentrant, recipe):
    module = MAKERS[maker]()
    x, dy = data(module)
    options = {"recipe": recipe, "enabled": recipe is not None}
    torch.manual_seed(1)
    expected = run(module, x, dy, **options)
    outer = nn.Module()
    outer.inner = module
    outer.forward = lambda x: checkpoint(module, x, use_reentrant=use_reentrant)
    torch.manual_seed(1)
    assert_same(module, run(outer, x, dy, **options), expected)


@pytest.mark.parametrize("maker", ["LayerNormLinear", "LayerNormMLP, RMSNorm, swiglu"])
def test_cached_weights(maker):
    module = MAKERS[maker]()
    batches = [data(module) for _ in range(3)]

    def steps(flags):
        module.zero_grad()
        ys = []
        for (x, dy), first in zip(batches, flags, strict=True):
            with autocast(recipe="mxfp8"):
                ys.append(module(x, is_first_microbatch=first))
            ys[-1].backward(dy)
        return [*ys, *(p.grad.clone() for p in module.parameters())]

    expected = steps([None] * 3)
    assert not module._cached_weights
    assert equal(steps([True, False, False]), expected)
    parts = {""} if maker == "LayerNormLinear" else {"fc1", "fc2"}
    assert set(module._cached_weights) == parts
    before = {part: kept.row[0] for part, kept in module._cached_weights.items()}
    steps([False] * 3)
    assert all(module._cached_weights[part].row[0] is one for part, one in before.items())
    hybridq.forget(module)
    assert not module._cached_weights


def _nbytes(text: str, rows: int, cols: int, dtype) -> int:
    buffers = hybridq.PlaneSpec.parse(text).buffers(rows, cols)
    return sum(torch.empty(b.shape, dtype=b.dtype or dtype).nbytes for b in buffers)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_fwd_mxfp8_bwd"])
def test_saved_are_planes_and_inputs_and_never_what_a_prologue_makes(recipe):
    rows, inner, ffn = 64, 128, 96
    module = LayerNormMLP(inner, ffn, activation="swiglu", dtype=torch.bfloat16)
    x = torch.randn(rows, inner, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=recipe), saved_tensors() as saved:
        module(x)
    plan = bind(get(recipe))
    col, w_col = plan.input.col.spec, plan.weight.col.spec
    expected = _nbytes(col, inner, rows, x.dtype) + _nbytes(w_col, inner, 2 * ffn, x.dtype)
    expected += _nbytes(col, ffn, rows, x.dtype) + _nbytes(w_col, ffn, inner, x.dtype)
    expected += x.nbytes + rows * 2 * ffn * 2  # the two inputs
    expected += 2 * rows * 4 + inner * 2  # mean, 1/std, gamma
    assert sum(t.nbytes for t in saved) == expected + (16 if plan.is_stochastic else 0)


@pytest.mark.parametrize("frozen", range(2**4))
def test_only_the_gradients_that_are_wanted(frozen):
    module = linear()
    x, dy = data(module)
    full = named(module, run(module, x, dy, recipe="mxfp8"))
    module.zero_grad()
    wanted = {
        name: not frozen >> i & 1
        for i, name in enumerate(("layer_norm_weight", "layer_norm_bias", "weight"))
    }
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted.get(name, True))
    leaf = x.clone().requires_grad_(not frozen >> 3 & 1)
    with autocast(recipe="mxfp8"), saved_tensors() as saved, Recorder() as seen:
        y = module(leaf)
        y.backward(dy)
    assert torch.equal(y, full["y"])
    for name, parameter in [("dx", leaf), *module.named_parameters()]:
        assert (parameter.grad is None) is not parameter.requires_grad
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, full[name]), name
    needs_dgrad = leaf.requires_grad or wanted["layer_norm_weight"] or wanted["layer_norm_bias"]
    gemms = 1 + needs_dgrad + wanted["weight"]
    assert seen.ops.count("hybridq::gemm") == gemms
    assert any(t.shape == x.shape and t.dtype == x.dtype for t in saved) == needs_dgrad


def test_nothing_is_saved_without_gradients():
    module = mlp().requires_grad_(False)
    x, _ = data(module)
    with autocast(recipe="mxfp8"), saved_tensors() as saved:
        y = module(x)
    assert not saved and not y.requires_grad
    with autocast(recipe="mxfp8"), torch.inference_mode():
        assert torch.equal(module(x), y)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fwd_mxfp8_bwd", None])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_norms_result_and_the_bias_on_request(maker, recipe):
    options = {"recipe": recipe, "enabled": recipe is not None}
    module = MAKERS[maker]()
    both = MAKERS[maker](return_bias=True, return_layernorm_output=True)
    both.load_state_dict(module.state_dict())
    x, dy = data(module, dtype=torch.float32)
    dn = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    with autocast(**options):
        y, bias, normed = both(leaf)
        out = MAKERS[maker](return_layernorm_output=True)(leaf)
        assert len(out) == 2 and out[1].shape == x.shape
        assert len(MAKERS[maker](return_bias=True)(leaf)) == 2
    ((y + bias) * dy).sum().backward()
    _, dx, *_ = run(module, x, dy, **options)
    assert bias is dict(both.named_parameters())[list(module.state_dict())[-1]]
    parts = apart(module, is_ours=recipe is not None)
    assert torch.equal(normed, parts[0](x))
    if recipe != "nvfp4_fwd_mxfp8_bwd":  # else dy + 0 is rounded as dy, here too
        assert torch.equal(leaf.grad, dx)
    # The norm's result has a gradient of its own, which adds up.
    leaf2 = x.clone().requires_grad_()
    with autocast(**options):
        y, _, normed = both(leaf2)
    torch.autograd.backward([y, normed], [dy, dn])
    leaf3 = x.clone().requires_grad_()
    with autocast(**options):
        seen = parts[0](leaf3)
        y = parts[1:](seen)
    torch.autograd.backward([y, seen], [dy, dn])
    assert torch.equal(leaf2.grad, leaf3.grad)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_is_a_clear_error(maker):
    for options in ({}, {"return_layernorm_output": True}):
        module = MAKERS[maker](**options)
        x, _ = data(module)
        x.requires_grad_()
        with autocast(recipe="mxfp8"):
            y = module(x)
        y = y[0] + y[1].sum() if options else y
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"double backward is not supported|no derivative"):
            dx.square().sum().backward()


def test_an_input_changed_after_the_forward_is_noticed():
    module = linear()
    x, dy = data(module)
    with autocast(recipe="mxfp8"):
        y = module(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_nested_tensors_are_named():
    """Their error was of torch's inside: "NestedTensorImpl doesn't support sizes"."""
    parts = [torch.randn(2, 64), torch.randn(3, 64)]
    fused = hybridq.LayerNormLinear(64, 48)
    modules = (fused, hybridq.Linear(64, 48), hybridq.GroupedLinear(2, 64, 48))
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        for module in modules:
            sizes = ([2, 3],) if isinstance(module, hybridq.GroupedLinear) else ()
            with autocast(recipe="mxfp8"), pytest.raises(TypeError, match="no nested tensor"):
                module(x, *sizes)
    assert torch.equal(modules[1](x).values(), modules[1](x.values()))
