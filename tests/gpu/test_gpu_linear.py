"""Layers under every recipe on a GPU, against the FP64 model that the CPU's tests use."""

from __future__ import annotations

import pytest
import torch

import hybridq
from gpu_tools import exactly, no_waiting
from hybridq import recipes
from hybridq.nn import Linear
from linear_model import draw_like_a_module, quantized_linear, run

#: Delayed scaling depends on what came before: tests/quantizers/test_delayed.py.
RECIPES = tuple(
    name for name in recipes.names() if name not in ("bf16", "high_precision", "fp8_delayed")
)
SHAPES = ((128, 256, 192), (37, 52, 45))


def _case(dtype, rows, inner, outer):
    layer = Linear(inner, outer, dtype=dtype)
    x, dy = torch.randn(rows, inner), torch.randn(rows, outer) / 8
    x[0, 0], x[rows // 2] = 40.0, 0.0
    there = Linear(inner, outer, dtype=dtype, device="cuda")
    there.load_state_dict(layer.state_dict())
    return layer, there, x.to(dtype), dy.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products_against_fp64(recipe, shape, dtype) -> None:
    """Bound: FP32 accumulation and one rounding, derived in `linear_model.product`."""
    layer, there, x, dy = _case(dtype, *shape)
    torch.cuda.manual_seed(11)
    seed = draw_like_a_module("cuda").cpu()
    bias = layer.bias.detach()
    want = quantized_linear(x, layer.weight.detach(), bias, dy, exactly(recipe), seed)
    torch.cuda.manual_seed(11)
    y, dx, dw, dbias = run(there, x.cuda(), dy.cuda(), recipe=exactly(recipe))
    for name, tensor in {"y": y, "dx": dx, "dw": dw}.items():
        error = (tensor.double().cpu() - want[name].value).abs()
        worst = float((error / want[name].bound).max())
        assert tensor.dtype == dtype and worst <= 1.0, (name, worst)
    torch.testing.assert_close(dbias, dy.cuda().sum(0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_default_precision_is_close_to_the_exact_one(recipe) -> None:
    """What fast products add is below the rounding of a BF16 result, in the root mean square."""
    _, there, x, dy = _case(torch.bfloat16, 256, 512, 384)
    results = []
    for chosen in (exactly(recipe), recipes.get(recipe)):
        torch.cuda.manual_seed(11)
        results.append(run(there, x.cuda(), dy.cuda(), recipe=chosen))
    for exact, default in zip(*results, strict=True):
        difference = (exact.double() - default.double()).square().mean().sqrt()
        # Both are rounded to BF16, and the second has an error of its own of that size.
        assert float(difference / exact.double().square().mean().sqrt()) <= 3**0.5 * 1.7e-3 * 1.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_torch_autocast(recipe) -> None:
    layer = Linear(96, 80, device="cuda")
    x = torch.randn(64, 96, device="cuda", requires_grad=True)
    chosen = exactly(recipe)
    with torch.autocast("cuda", torch.bfloat16), hybridq.autocast(recipe=chosen):
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    low = Linear(96, 80, device="cuda", dtype=torch.bfloat16)
    low.load_state_dict(layer.state_dict())
    with torch.no_grad(), hybridq.autocast(recipe=chosen):
        assert torch.equal(low(x.detach().to(torch.bfloat16)), y)
    assert torch.isfinite(x.grad).all() and torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd"])
def test_memory_does_not_grow(recipe) -> None:
    layer = Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = []
    for _ in range(50):
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        with hybridq.autocast(recipe=recipe):
            y = layer(x)
        y.float().square().mean().backward()
        optimizer.step()
        del y
        held.append(torch.cuda.memory_allocated())
    assert max(held[5:]) == min(held[5:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_never_waits_for_the_gpu(recipe) -> None:
    layer = Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(96, 256, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(96, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        run(layer, x, dy, recipe=recipe)
    with no_waiting():
        run(layer, x, dy, recipe=recipe)


def test_a_step_of_mxfp8_is_the_products_of_its_planes() -> None:
    """Whatever the chip makes of them on the way: for Hopper they are encoded folded."""
    layer = Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    y, dx, dw = run(layer, x, dy, recipe="mxfp8")[:3]
    with torch.no_grad():
        left, weight, grad = (
            hybridq.quantize(one, "mxfp8", "mxfp8") for one in (x, layer.weight, dy)
        )
    assert torch.equal(y, hybridq.gemm(left, weight))
    assert torch.equal(dx, hybridq.gemm(grad, weight.mT))
    assert torch.equal(dw, hybridq.gemm(grad.mT, left.mT))


def test_training_lowers_the_loss_as_bf16_does() -> None:
    torch.manual_seed(0)
    target = torch.randn(64, 256, device="cuda") / 16
    x = torch.randn(512, 256, device="cuda")
    losses = {}
    for recipe in ("bf16", "mxfp8", "nvfp4"):
        torch.manual_seed(1)
        layer = Linear(256, 64, bias=False, device="cuda")
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            with hybridq.autocast(recipe=recipe):
                loss = (layer(x) - x @ target.t()).square().mean()
            loss.backward()
            optimizer.step()
        losses[recipe] = float(loss)
    # NVFP4 has two significant bits in a code: its noise floor on this task is its own rounding.
    assert losses["mxfp8"] < 0.05 and losses["nvfp4"] < 0.2, losses
