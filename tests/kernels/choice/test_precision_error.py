"""What FP8 tensor cores and folding add to a product's error, against BF16's rounding.

The figures of `kernels.choice.precision` (and docs/reference/gemm.md) are computed here. The tensor
core is a model, as published for Hopper's FP8 unit: the 32 products of one instruction and the sum
so far are aligned to the largest exponent among them and cut, towards zero, at 13 fraction bits.
Each 128 products begin a new sum, and these are added in FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gemm_cases import decoded, make
from hybridq import reference
from hybridq.formats import PlaneSpec, format
from hybridq.kernels import folded_backend as backend_fold
from hybridq.kernels.choice import precision as precision
from hybridq.kernels.choice.arguments import Operand

K = 4096


def cut(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis of FP64 terms, aligned to the largest and cut at 13 bits."""
    _, exponent = torch.frexp(terms.abs().amax(-1, keepdim=True))
    step = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - 1 - 13)
    return ((terms / step).trunc() * step).sum(-1)


def tensor_core(a: torch.Tensor, b: torch.Tensor, promote: int) -> torch.Tensor:
    """`a @ b.T` of FP64 values that are FP8 numbers up to a scale per row and 128 columns."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    inner = torch.zeros_like(total, dtype=torch.float64)
    for k in range(0, a.shape[1], 32):
        products = a[:, None, k : k + 32] * b[None, :, k : k + 32]
        inner = cut(torch.cat((products, inner[..., None]), -1))
        if (k + 32) % promote == 0 or k + 32 == a.shape[1]:
            total = total + inner.float()
            inner = torch.zeros_like(inner)
    return total.double()


def rms(x: torch.Tensor) -> float:
    """Root mean square."""
    return float(x.double().square().mean().sqrt())


def channels(x: torch.Tensor) -> torch.Tensor:
    """Some columns a hundred times as large, as activations have them."""
    x[:, :: x.shape[1] // 16] *= 100.0
    return x


FAMILIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "laplace": lambda x: x.sign() * torch.empty_like(x).exponential_(),
    "student": lambda x: x / torch.randn(3, *x.shape).square().mean(0).sqrt(),
    "lognormal channels": lambda x: x * (1.5 * torch.randn(x.shape[1])).exp(),
    "large channels": channels,
    "squared relu": lambda x: x.relu().square(),
    "heavy tails": lambda x: x.sign() * (3.0 * torch.randn_like(x)).exp(),
}


def folded(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """The plane's FP64 values, those after folding, its groups' amax, the share that changed."""
    plane = make(x, name)
    made = backend_fold.fold(Operand(plane.tensors, plane.spec, *plane.matrix))
    element = backend_fold.folded_spec(PlaneSpec(format(name))).format.element
    values = reference.decode_codes(made.codes, element).double()
    values = values * made.scale.double().repeat_interleave(128, 1)
    want = torch.from_numpy(decoded(plane))
    top = want.reshape(len(x), -1, 128).abs().amax(2)
    return want, values, top, made.changed.item() / x.numel()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp6_e2m3"])
def test_folding_stays_below_bf16s_rounding(family: str, name: str) -> None:
    """Within the bound of `fold_plane`, and in the mean a tenth of BF16's rounding or less."""
    a, a_folded, a_top, _ = folded(FAMILIES[family](torch.randn(64, K)), name)
    b, b_folded, b_top, _ = folded(FAMILIES[family](torch.randn(64, K)), name)
    exact = a @ b.t()
    added = a_folded @ b_folded.t() - exact
    sums = [one.reshape(64, -1, 128).abs().sum(2) for one in (a, b)]
    limit = precision.FOLD_LIMIT
    bound = limit * (a_top @ sums[1].t() + sums[0] @ b_top.t())
    bound = bound + limit**2 * 128 * a_top @ b_top.t() + 2.0**-40 * (a.abs() @ b.abs().t())
    assert (added.abs() <= bound).all()
    rounding = exact.to(torch.bfloat16).double() - exact
    assert rms(added) <= 0.1 * rms(rounding)


def test_the_figures_for_normal_data() -> None:
    a, a_folded, _, changed = folded(torch.randn(48, K), "mxfp8")
    b, b_folded, _, _ = folded(torch.randn(48, K), "mxfp8")
    exact = a @ b.t()
    size = rms(exact)
    rounding = rms(exact.to(torch.bfloat16).double() - exact) / size
    assert 0.8 < rounding / precision.BF16_ROUNDING < 1.2
    fold = rms(a_folded @ b_folded.t() - exact) / size
    assert fold <= 1.5 * precision.FOLD_RMS and changed < 1e-4
    core = tensor_core(a_folded, b_folded, 128)
    error = rms(core - exact) / size
    assert 0.7 < error / precision.TENSOR_CORE_RMS < 1.3
    assert error < 0.1 * rounding


@pytest.mark.parametrize("family", ["laplace", "large channels", "squared relu", "heavy tails"])
def test_tensor_cores_with_promotion_stay_below_bf16s_rounding(family: str) -> None:
    _, a, _, _ = folded(FAMILIES[family](torch.randn(32, K)), "mxfp8")
    _, b, _, _ = folded(FAMILIES[family](torch.randn(32, K)), "mxfp8")
    exact = a @ b.t()
    rounding = rms(exact.to(torch.bfloat16).double() - exact)
    assert rms(tensor_core(a, b, 128) - exact) < 0.6 * rounding


def test_without_promotion_they_would_not() -> None:
    """Why `use_fast_accum` stays off: positive data loses the small terms beside a large sum."""
    _, a, _, _ = folded(torch.rand(32, K), "mxfp8")
    _, b, _, _ = folded(torch.rand(32, K), "mxfp8")
    exact = a @ b.t()
    rounding = rms(exact.to(torch.bfloat16).double() - exact)
    assert rms(tensor_core(a, b, K) - exact) > rounding
    assert rms(tensor_core(a, b, 128) - exact) < rounding
