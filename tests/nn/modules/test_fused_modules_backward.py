"""Fused modules: gradients against FP64, choices of the backward, quantized tensors between."""

from __future__ import annotations

import pytest
import torch

import hybridq
from fused_model import (
    ACTIVATIONS,
    INNER,
    KINDS,
    MAKERS,
    OUTER,
    apart,
    assert_same,
    data,
    linear,
    mlp,
    torch_activation,
)
from hybridq.recipes import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    autocast,
)
from linear_model import equal, run, saved_tensors

CHOICES = {
    f"{cls.__name__}, {choice}": cls(**{field: choice})
    for cls in (MXFP8BlockScaling, NVFP4BlockScaling, Float8CurrentScaling)
    for field, choice in (
        ("backward_override", "high_precision"),
        ("backward_override", "dequantized"),
        ("columnwise_source", "rowwise_dequantized"),
    )
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("maker", MAKERS)
def test_choices_of_the_backward(maker, choice):
    module = MAKERS[maker]()
    # Where no gradient is quantized, a norm or an activation is torch's own.
    parts = apart(module, is_ours="high_precision" not in choice, quantizes=True)
    x, dy = data(module)
    torch.manual_seed(3)
    expected = run(parts, x, dy, recipe=CHOICES[choice])
    torch.manual_seed(3)
    assert_same(module, run(module, x, dy, recipe=CHOICES[choice]), expected)


def test_a_dequantized_backward_saves_the_rowwise_plane_of_the_norm():
    module = linear()
    x, _ = data(module, rows=64)
    recipe = MXFP8BlockScaling(backward_override="dequantized")
    with autocast(recipe=recipe), saved_tensors() as saved:
        y = module(x.requires_grad_())
    wide = [t for t in saved if t.dtype == torch.float32 and t.numel() >= x.numel()]
    assert len(wide) == 1 and wide[0].data_ptr() == x.data_ptr() and y.requires_grad


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_quantized_tensors_between_modules(recipe):
    """fp8_output, fp8_grad, and an input that is quantized: the norm sees its values."""
    one, two = linear(), hybridq.Linear(OUTER, INNER)
    one.output_quantizer_role = QuantizerRole("linear", "input", "")
    x, dy = data(one)[0], torch.randn(37, INNER)
    results = []
    for is_quantized in (False, True):
        for module in (one, two):
            module.zero_grad()
        leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe):
            y = one(leaf, fp8_output=is_quantized)
            assert isinstance(y, hybridq.QuantizedTensor) == is_quantized
            z = two(y)
        z.backward(dy)
        grads = [p.grad.clone() for module in (one, two) for p in module.parameters()]
        results.append([z.detach(), leaf.grad, *grads])
    assert equal(*results)
    given = hybridq.quantize(x, "mxfp8")
    with autocast(recipe=recipe):
        for module in (one, mlp("swiglu")):
            assert torch.equal(module(given), module(given.dequantize()))
    leaf = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        one(leaf, fp8_grad=True).backward(torch.randn(37, OUTER))
    assert leaf.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_activation_against_fp64(kind):
    """FP32 formulas: within 8 roundings of the size of their terms.

    With f(v) = v * s(v), s at most 1 and |v * s'(v)| at most 1.2, f' is a sum of terms of size at
    most 1 + 1.2; an error in the argument of s, of a few roundings, counts at most |v| times.
    """
    x = torch.cat([torch.linspace(-9, 9, 1024), torch.randn(1024)]).view(32, -1)
    x = x[:, torch.randperm(x.shape[1])]
    is_gated = kind not in ACTIVATIONS
    dy = torch.randn(32, x.shape[1] // (1 + is_gated))
    exact = x.double().requires_grad_()
    torch_activation(kind, exact).backward(dy.double())
    got = torch.ops.hybridq.activation_backward(dy, x, kind)
    size = dy.abs() * (1 + x.abs()) if not is_gated else None
    if is_gated:
        first, second = x.abs().chunk(2, 1)
        slope = 1 + first  # of the squared ReLU 2 v, of the others below 1.2
        size = torch.cat([dy.abs() * second * slope, dy.abs() * first * slope], 1)
    assert ((got.double() - exact.grad).abs() <= 8 * 2.0**-24 * size + 1e-38).all()
    # BF16: the same values, rounded once.
    half = torch.ops.hybridq.activation_backward(dy.bfloat16(), x.bfloat16(), kind)
    wide = torch.ops.hybridq.activation_backward(dy.bfloat16().float(), x.bfloat16().float(), kind)
    assert torch.equal(half, wide.bfloat16())


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_gradient_of_a_norm_against_fp64(kind, zero_centered):
    """Sums of n terms in FP32: within (n + 16) roundings of the sum of their sizes."""
    rows, cols = 24, 65
    x, dy, gamma = torch.randn(rows, cols) + 1, torch.randn(rows, cols), torch.randn(cols)
    beta = torch.randn(cols) if kind == "LayerNorm" else None
    _, mean, rstd = torch.ops.hybridq.norm(x, gamma, beta, 1e-5, kind, zero_centered)
    leaves = [t.double().requires_grad_() for t in (x, gamma)]
    scale = 1 + leaves[1] if zero_centered else leaves[1]
    if kind == "LayerNorm":
        exact = torch.nn.functional.layer_norm(leaves[0], (cols,), scale, beta.double(), 1e-5)
    else:
        exact = torch.nn.functional.rms_norm(leaves[0], (cols,), scale, 1e-5)
    exact.backward(dy.double())
    given = (gamma, mean, rstd, kind, zero_centered)
    needs_beta = beta is not None
    dx, dgamma, *dbeta = torch.ops.hybridq.norm_backward(dy, x, *given, True, True, needs_beta)
    ulp = 2.0**-24
    h = (x.abs() + 2) * rstd[:, None]
    dh = dy.abs() * scale.detach().abs().float()
    size = rstd[:, None] * (dh + dh.mean(1, True) + h * (dh * h).mean(1, True))
    assert ((dx.double() - leaves[0].grad).abs() <= (cols + 16) * ulp * size).all()
    bound = (rows + cols + 16) * ulp * (dy.abs() * h).sum(0)
    assert ((dgamma.double() - leaves[1].grad).abs() <= bound).all()
    if dbeta:
        assert ((dbeta[0] - dy.double().sum(0)).abs() <= rows * ulp * dy.abs().sum(0)).all()
    half = [t.bfloat16() for t in (dy, x)]
    wide = [t.float() for t in half]
    made = [torch.ops.hybridq.norm_backward(*t, *given, True, True, False) for t in (half, wide)]
    assert torch.equal(made[0][0], made[1][0].bfloat16()) and torch.equal(made[0][1], made[1][1])
