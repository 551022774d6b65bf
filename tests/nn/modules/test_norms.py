"""LayerNorm and RMSNorm against their formulas in FP64."""

from __future__ import annotations

import pytest
import torch

import hybridq

KINDS = {"LayerNorm": hybridq.nn.LayerNorm, "RMSNorm": hybridq.nn.RMSNorm}


def _by_formula(kind, x, weight, bias, eps, zero_centered):
    x = x.double()
    gamma = weight.double() + (1 if zero_centered else 0)
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (var + eps).sqrt() * gamma + bias.double()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_its_gradients_follow_the_formula(kind, dtype, zero_centered):
    torch.manual_seed(0)
    norm = KINDS[kind](24, eps=1e-3, zero_centered_gamma=zero_centered, dtype=dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, 3, 24, dtype=dtype, requires_grad=True)
    dy = torch.randn(5, 3, 24, dtype=dtype)
    y = norm(x)
    y.backward(dy)

    wide = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    bias = wide[2] if kind == "LayerNorm" else None
    expected = _by_formula(kind, wide[0], wide[1], bias, 1e-3, zero_centered)
    expected.backward(dy.double())
    # One rounding of y; FP32 sums of at most 24 terms. Of gradients in BF16: torch rounds its
    # products of dy and gamma where both are BF16, two roundings more.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(y.double(), expected, rtol=unit, atol=unit)
    for got, want in zip((x, *norm.parameters()), wide, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=3 * unit, atol=8 * unit)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_centered_bf16_weights_keep_their_bits(kind):
    # 1 + 2^-12 is no BF16 value: the factor is made in FP32.
    norm = KINDS[kind](2, eps=0.0, zero_centered_gamma=True, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2.0**-12)
    y = norm(torch.tensor([[1.0, -1.0]]))
    assert y.tolist() == [[1.0 + 2.0**-12, -1.0 - 2.0**-12]]


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_names_and_marks(kind):
    norm = KINDS[kind]((4, 6), sequence_parallel=True, params_dtype=torch.bfloat16)
    names = ["weight", "bias"] if kind == "LayerNorm" else ["weight"]
    assert list(norm.state_dict()) == names
    assert all(p.sequence_parallel and p.dtype == torch.bfloat16 for p in norm.parameters())
    assert norm.weight.shape == (4, 6) and bool((norm.weight == 1).all())
    assert norm(torch.ones(2, 4, 6, dtype=torch.bfloat16)).shape == (2, 4, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_told(kind):
    with pytest.raises(ValueError, match=f"{kind}: eps must be finite"):
        KINDS[kind](4, eps=-1.0)
    with pytest.raises(ValueError, match=f"{kind}: normalized_shape must be"):
        KINDS[kind](0)
    with pytest.raises(RuntimeError, match=rf"{kind}: the last dimensions .* \(4,\), got shape"):
        KINDS[kind](4)(torch.ones(2, 5))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_fused_sequence_they_are_a_step_of_the_linear_module(kind, zero_centered):
    torch.manual_seed(0)
    norm = KINDS[kind](64, zero_centered_gamma=zero_centered)
    torch.nn.init.normal_(norm.weight)
    linear = hybridq.Linear(64, 32)
    fused = hybridq.nn.FusedSequential(norm, linear)
    one = hybridq.LayerNormLinear(64, 32, normalization=kind, zero_centered_gamma=zero_centered)
    own = {f"layer_norm_{name}": value for name, value in norm.state_dict().items()}
    one.load_state_dict({**own, **linear.state_dict()})
    x = torch.randn(20, 64)
    with hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(fused(x), one(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_under_autocast_the_result_has_its_dtype(kind, dtype):
    torch.manual_seed(0)
    norm = getattr(hybridq.nn, kind)(16)
    x = torch.randn(3, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = norm(x)
    assert y.dtype == dtype
    assert torch.equal(y, norm(x).to(dtype))
    y.sum().backward()
    assert x.grad.dtype == norm.weight.grad.dtype == torch.float32
