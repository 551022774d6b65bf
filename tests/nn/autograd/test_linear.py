"""Numerics of hybridq.Linear against an FP64 model of the same quantization."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridq import recipes
from hybridq.formats import PlaneSpec
from hybridq.nn import Linear
from hybridq.nn.autograd import linear
from hybridq.quantizers import IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
from hybridq.recipes import CustomRecipe, NVFP4BlockScaling, autocast, bind, get
from linear_model import Recorder, draw_like_a_module, equal, quantized_linear, run, saved_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Delayed scaling depends on what came before: tests/quantizers/test_delayed.py.
QUANTIZING = tuple(
    name
    for name in recipes.names()
    if name not in ("bf16", "high_precision") and not bind(get(name)).is_delayed
)


def stochastic_everywhere(role):
    """Return a quantizer whose planes are both stochastic, for every slot."""
    return NVFP4Quantizer(stochastic_rounding=True)


RECIPES = (*QUANTIZING, NVFP4BlockScaling(disable_2d_quantization=True, disable_rht=True))


def _case(dtype, rows=37, inner=52, outer=45, bias=True):
    """A layer, an input with an outlier and zeros, and an output gradient."""
    layer = Linear(inner, outer, bias, dtype=dtype)
    x, dy = torch.randn(rows, inner), torch.randn(rows, outer) / 8
    if rows:
        x[0, 0], x[rows // 2] = 40.0, 0.0
    return layer, x.to(dtype), dy.to(dtype)


def _compare(layer, x, dy, recipe):
    """Run layer and model from the same generator state; return what the layer gave."""
    torch.manual_seed(11)
    seed = draw_like_a_module()
    flat, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    bias = None if layer.bias is None else layer.bias.detach()
    expected = quantized_linear(flat, layer.weight.detach(), bias, flat_dy, recipe, seed)
    torch.manual_seed(11)
    y, dx, dw, *dbias = run(layer, x, dy, recipe=recipe)
    got = {"y": y.reshape(-1, y.shape[-1]), "dx": dx.reshape(flat.shape), "dw": dw}
    for name, tensor in got.items():
        error = (tensor.double() - expected[name].value).abs()
        assert tensor.dtype == x.dtype
        assert bool((error <= expected[name].bound).all()), (
            name,
            (error / expected[name].bound).max().item(),
        )
    if dbias:
        assert torch.equal(dbias[0], flat_dy.sum(0))
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_three_gemms_against_fp64(recipe, dtype):
    layer, x, dy = _case(dtype)
    got = _compare(layer, x, dy, recipe)
    plain = run(layer, x, dy, enabled=False)
    kept = {"high_precision_fwd_mxfp8_bwd": ("y",)}.get(recipe, ())
    for (name, tensor), reference in zip(got.items(), plain[:3], strict=True):
        # Bits equal to the unquantized ones would mean that nothing was quantized.
        assert torch.equal(tensor, reference) == (name in kept)


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 16, 8), (5, 1, 3), (2, 129, 131), (130, 33, 1)])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "nvfp4"])
def test_any_size(recipe, shape):
    rows, inner, outer = shape
    layer, x, dy = _case(torch.float32, rows, inner, outer, bias=inner % 2 == 0)
    _compare(layer, x, dy, recipe)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 0, 3), (1, 2, 1, 4)])
def test_any_batch_shape(leading):
    layer = Linear(20, 12)
    x, dy = torch.randn(*leading, 20), torch.randn(*leading, 12)
    y, dx, *rest = run(layer, x, dy, recipe="mxfp8")
    flat = run(layer, x.reshape(-1, 20), dy.reshape(-1, 12), recipe="mxfp8")
    assert y.shape == dy.shape and dx.shape == x.shape
    assert equal([y.reshape(-1, 12), dx.reshape(-1, 20), *rest], flat)


def test_strided_inputs_and_gradients():
    layer = Linear(20, 12)
    x, dy = torch.randn(20, 3, 7).permute(1, 2, 0), torch.randn(12, 3, 7).permute(1, 2, 0)
    strided = run(layer, x, dy, recipe="nvfp4_fwd_mxfp8_bwd")
    packed = run(layer, x.contiguous(), dy.contiguous(), recipe="nvfp4_fwd_mxfp8_bwd")
    assert equal(strided[:3], packed[:3])
    # The bias's gradient is torch's sum, whose order follows the strides, as nn.Linear's does.
    assert torch.equal(strided[3], run(layer, x, dy, enabled=False)[3])
    expanded = run(layer, x[:1, :1].expand(3, 7, 20), dy[:1, :1].expand(3, 7, 12), recipe="mxfp8")
    full = run(layer, x[:1, :1].repeat(3, 7, 1), dy[:1, :1].repeat(3, 7, 1), recipe="mxfp8")
    assert equal(expanded[:3], full[:3])


def test_streams_of_all_slots_are_distinct():
    """The FP64 model takes its streams from its own table: six planes, six streams."""
    layer, x, dy = _case(torch.float32)
    _compare(layer, x, dy, CustomRecipe(stochastic_everywhere))


def test_stochastic_rounding_follows_the_generator():
    layer, x, dy = _case(torch.float32)
    torch.manual_seed(3)
    one = run(layer, x, dy, recipe="nvfp4")
    two = run(layer, x, dy, recipe="nvfp4")
    torch.manual_seed(3)
    again = run(layer, x, dy, recipe="nvfp4")
    assert equal(one, again)
    assert torch.equal(one[0], two[0])  # the forward is rounded to nearest
    assert not torch.equal(one[1], two[1]) and not torch.equal(one[2], two[2])


@pytest.mark.parametrize("grad", [True, False])
def test_the_generator_moves_only_for_stochastic_recipes(grad):
    layer, x, _ = _case(torch.float32)
    for recipe, moves in (("nvfp4", True), ("mxfp8", False), ("bf16", False)):
        before = torch.get_rng_state()
        with torch.set_grad_enabled(grad), autocast(recipe=recipe):
            layer(x)
        assert torch.equal(before, torch.get_rng_state()) is not moves


def _nbytes(spec: PlaneSpec, rows: int, cols: int, dtype) -> int:
    return sum(
        torch.empty(b.shape, dtype=b.dtype or dtype).nbytes for b in spec.buffers(rows, cols)
    )


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_saved_are_the_columnwise_planes_and_the_seed(recipe):
    """A columnwise plane that is the decoded rowwise one is saved as the rowwise one."""
    layer, x, _ = _case(torch.bfloat16, 64, 128, 96)
    x.requires_grad_()
    with autocast(recipe=recipe), saved_tensors() as saved:
        layer(x)
    plan = bind(get(recipe))
    specs, expected = [], 0
    for slot, rows in ((plan.input, 64), (plan.weight, 96)):
        specs.append(slot.row.spec if slot.saves_row else slot.col.spec)
        sizes = (rows, 128) if slot.saves_row else (128, rows)
        expected += _nbytes(PlaneSpec.parse(specs[-1]), *sizes, x.dtype)
    assert sum(t.nbytes for t in saved) == expected + (8 if plan.is_stochastic else 0)
    if recipe == "mxfp8":  # (8 bits + 8 / 32 of scale) / 16
        assert _nbytes(PlaneSpec.parse(specs[0]), 128, 64, x.dtype) / x.nbytes < 0.52
    if recipe == "nvfp4":
        assert _nbytes(PlaneSpec.parse(specs[0]), 128, 64, x.dtype) / x.nbytes < 0.283


def test_a_plane_that_is_the_tensor_itself_is_not_copied():
    def factory(role):
        return IdentityQuantizer() if role.tensor_type == "input" else MXFP8Quantizer()

    layer, x, dy = _case(torch.float32)
    x.requires_grad_()
    with autocast(recipe=CustomRecipe(factory)), saved_tensors() as saved:
        layer(x)
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    _compare(layer, x.detach(), dy, CustomRecipe(factory))


@pytest.mark.parametrize(
    ("train_x", "train_w", "grad", "planes"),
    [
        (True, True, True, ("both", "both")),
        (True, False, True, ("row", "both")),
        (False, True, True, ("both", "row")),
        (False, False, True, ("row", "row")),
        (True, True, False, ("row", "row")),
    ],
)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fwd_mxfp8_bwd"])
def test_no_columnwise_plane_without_its_gradient(recipe, train_x, train_w, grad, planes):
    layer, x, dy = _case(torch.float32)
    full = run(layer, x, dy, recipe=recipe)
    layer.weight.requires_grad_(train_w)
    layer.bias.requires_grad_(False)
    layer.zero_grad()
    x.requires_grad_(train_x)
    with Recorder() as seen, torch.set_grad_enabled(grad), autocast(recipe=recipe):
        y = layer(x)
    made = tuple("both" if row and col else "row" if row else "col" for row, col in seen.encodes)
    assert made == planes
    assert torch.equal(y, full[0])
    if not y.requires_grad:
        assert not (grad and (train_x or train_w))
        return
    with Recorder() as seen:
        y.backward(dy)
    (row, col), *others = seen.encodes
    assert (bool(row), bool(col), others) == (train_x, train_w, [])
    assert seen.ops.count("hybridq::gemm") == train_x + train_w
    if train_x:
        assert torch.equal(x.grad, full[1])
    if train_w:
        assert torch.equal(layer.weight.grad, full[2])


def test_only_the_bias_is_trained():
    layer, x, dy = _case(torch.float32)
    layer.weight.requires_grad_(False)
    with autocast(recipe="mxfp8"), Recorder() as seen:
        y = layer(x)
        y.backward(dy)
    assert torch.equal(layer.bias.grad, dy.sum(0)) and layer.weight.grad is None
    assert len(seen.encodes) == 2 and seen.ops.count("hybridq::gemm") == 1


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
def test_identity_planes_give_the_bits_of_nn_linear(dtype, bias):
    plan = bind(get("high_precision"))
    for rows, inner, outer in ((1, 1, 1), (3, 5, 7), (64, 64, 64), (33, 129, 50), (0, 8, 8)):
        layer = nn.Linear(inner, outer, bias, dtype=dtype)
        x = torch.randn(rows, inner, dtype=dtype, requires_grad=True)
        dy = torch.randn(rows, outer, dtype=dtype)
        leaves = [x, *layer.parameters()]
        y = layer(x)
        ours = linear(x, layer.weight, layer.bias, plan)
        assert torch.equal(y, ours)
        assert equal(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(ours, leaves, dy))


@pytest.mark.parametrize("recipe", ["bf16", "high_precision"])
def test_recipes_that_leave_everything_alone(recipe):
    layer, x, dy = _case(torch.bfloat16)
    assert equal(run(layer, x, dy, recipe=recipe), run(layer, x, dy, enabled=False))
    with autocast(recipe=recipe), Recorder() as seen:
        layer(x)
    assert seen.encodes == []


def test_ten_adamw_steps_with_identity_quantizers():
    torch.manual_seed(0)
    ours = nn.Sequential(Linear(24, 40), nn.GELU(), Linear(40, 8))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))
    data = torch.randn(10, 16, 24)
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in data:
            with autocast(recipe="high_precision"):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(list(ours.parameters()), list(plain.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_is_a_clear_error():
    layer, x, _ = _case(torch.float32)
    x.requires_grad_()
    with autocast(recipe="mxfp8"):
        y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.square().sum().backward()
    with autocast(recipe="mxfp8"):
        y = layer(x)
    y.square().sum().backward(create_graph=True)  # once is fine
    assert x.grad is not None


def test_an_input_changed_after_the_forward():
    """Planes are copies, so a later write to x is harmless; a plain plane is x, and is guarded."""
    layer, x, dy = _case(torch.float32)
    before = run(layer, x, dy, recipe="mxfp8")
    for recipe in ("mxfp8", "high_precision"):
        layer.zero_grad()
        changed = x.clone()
        with autocast(recipe=recipe):
            y = layer(changed)
        changed.zero_()
        if recipe == "mxfp8":
            y.backward(dy)
            assert torch.equal(layer.weight.grad, before[2])
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(dy)
