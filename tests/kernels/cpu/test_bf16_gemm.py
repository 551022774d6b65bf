"""The core's BF16 product: what follows it bit for bit as torch does it in FP32, any strides.

Its sums are held to exact values: products of small integers, whose sums FP32 holds in any order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridq
from gemm_cases import check, decoded, integers, make
from hybridq.kernels.choice.arguments import GemmArgs
from hybridq.kernels.cpu import bf16_gemm as product
from hybridq.kernels.decoded import decoded_gemm as exact
from hybridq.kernels.scaled_mm.epilogue import finish

pytestmark = pytest.mark.skipif(
    product.product_reason() is not None, reason=str(product.product_reason())
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m,n", [(1, 5), (8, 50), (9, 47), (70, 130)])
def test_what_follows_is_torchs_own_fp32_arithmetic(m: int, n: int, dtype: torch.dtype) -> None:
    """Factors, bias and accumulation in their order, then one rounding: no bit differs."""
    a, b = integers(m, 40, 1), integers(n, 40, 2)
    sums = a.float() @ b.float().t()
    bias, into = torch.randn(n).to(dtype), torch.randn(m, 2 * n).to(dtype)[:, ::2]
    for row in (None, torch.randn(1), torch.randn(m)):
        for col in (None, torch.randn(1), torch.randn(n)):
            for args in (
                GemmArgs(None, None, dtype),
                GemmArgs(bias, None, dtype),
                GemmArgs(bias, into, dtype),
                GemmArgs(None, into.float(), dtype),
            ):
                got = product.multiply(a, b, row, col, args)
                want = finish(sums, row, col, args)
                assert got.dtype == dtype and torch.equal(got, want)


def test_infinite_and_nan_sums_are_rounded_as_torch_rounds_them() -> None:
    a, b = integers(9, 32, 3), integers(20, 32, 4)
    a[1, 3], a[2, 5], b[7, 9] = float("inf"), float("nan"), float("-inf")
    for dtype in DTYPES:
        got = product.multiply(a, b, torch.tensor([1e38]), None, GemmArgs(None, None, dtype))
        want = (a.float() @ b.float().t() * 1e38).to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.0, 1.0, -1.0), want.nan_to_num(0.0, 1.0, -1.0))


@pytest.mark.parametrize("k", [0, 1, 31, 33, 64])
def test_any_strides_and_nothing_beside_the_rows_counts(k: int) -> None:
    wide = torch.full((60, 80), float("nan"), dtype=torch.bfloat16)
    wide[:, :k] = integers(60, k, 5)
    a, b = wide[:11, :k], integers(k, 50, 6).t()
    want = a.float() @ b.float().t()
    for left in (a, a.contiguous(), wide[::5, :k][:11], a[:1]):
        got = product.multiply(left, b, None, None, GemmArgs(None, None, torch.float32))
        assert torch.equal(got, left.float() @ b.float().t())
    assert torch.equal(want.isnan(), torch.zeros_like(want, dtype=torch.bool))


def test_sums_do_not_depend_on_the_threads() -> None:
    a, b = torch.randn(300, 5000).bfloat16(), torch.randn(200, 5000).bfloat16()
    before, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            made.append(product.multiply(a, b, None, None, GemmArgs(None, None, torch.float32)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, made[0]) for one in made)
    check(made[0], a.double().numpy(), b.double().numpy())


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3", "mxfp8", "bf16"])
@pytest.mark.usefixtures("without_tiles")
def test_a_gemm_that_needs_fp32_takes_it(name: str, monkeypatch) -> None:
    """A factor, a bias, an accumulation or an FP32 result: BF16 operands, and no FP32 product."""
    a, b = make(torch.randn(20, 96).bfloat16(), name), make(torch.randn(30, 96), "mxfp8")
    calls = []

    def counted(*args: object) -> torch.Tensor:
        calls.append(args)
        return product.multiply(*args)

    monkeypatch.setattr(exact, "multiply", counted)
    bias = torch.randn(30)
    check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))
    y = hybridq.gemm(a, b, bias=bias, out_dtype=torch.bfloat16)
    check(y, decoded(a), decoded(b), bias.double().numpy()[None, :])
    assert len(calls) == 2
    assert all(side.dtype == torch.bfloat16 for call in calls for side in call[:2])


def test_a_forced_variant_has_no_product() -> None:
    core = product.core
    used = core.variant()
    x = make(torch.randn(4, 32), "nvfp4")
    try:
        core.set_variant("baseline")
        assert product.product_reason() == "the core's BF16 product needs AVX512_BF16"
        y = hybridq.gemm(x, x, out_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="product: this CPU has no AVX512_BF16"):
            core.product(1, 8, 1, 8, 1, 1, 8, 0, 0, 0, 0, 0, 0, "float32", 0, 0, 1, "float32")
    finally:
        core.set_variant(used)
    check(y, decoded(x), decoded(x))
    assert np.isfinite(y.float().numpy()).all()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"m": -1}, "rows and cols must be >= 0"),
        ({"a": 0}, "a must not be null"),
        ({"out": 0}, "out must not be null"),
        ({"a_stride": 3}, "rows must be at least k = 8 elements apart, got 3 and 8"),
        ({"out_dtype": "int8"}, "int8"),
        ({"threads": 0}, "threads must be >= 1"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    x, out = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 2)
    arguments = {
        "a": x.data_ptr(),
        "a_stride": 8,
        "b": x.data_ptr(),
        "b_stride": 8,
        "m": 2,
        "n": 2,
        "k": 8,
        "row_factor": 0,
        "row_step": 0,
        "col_factor": 0,
        "col_step": 0,
        "bias": 0,
        "into": 0,
        "into_dtype": "float32",
        "into_stride0": 0,
        "into_stride1": 0,
        "out": out.data_ptr(),
        "out_dtype": "float32",
        "threads": 1,
    }
    with pytest.raises(ValueError, match=message):
        product.core.product(**{**arguments, **changes})
