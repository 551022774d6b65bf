"""The core's FP32 product of planes: what it decodes on the way is what `decode` gives, any shape.

Its sums are held to exact values (products of small integers, whose sums FP32 holds in any order)
and, of any values, to the bound of docs/reference/numerics.md against FP64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import hybridq
from gemm_cases import integers, operand
from hybridq.kernels.choice.arguments import GemmArgs, Operand
from hybridq.kernels.cpu import planes_gemm as product
from hybridq.kernels.cpu.backend import core
from hybridq.kernels.scaled_mm.epilogue import finish

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Every element, scale and kind of block, factors of a tensor and of rows, a transform.
SPECS = [
    "mxfp8",
    "mxfp8_e5m2_32x32",
    "mxfp6_e3m2",
    "mxfp4",
    "fp8_e4m3",
    "fp8_1x128",
    "fp8_128x128",
    "nvfp4",
    "nvfp4_16x16",
    "nvfp4;rows",
    "nvfp4;rht=3039",
]


@pytest.fixture(autouse=True, params=["x86-64-v3", "x86-64-v4"])
def variant(request) -> Iterator[str]:
    """Each table of kernels that has the product, on a CPU that is taken to have no other."""
    if core is None or request.param not in core.build_info()["variants"]:
        pytest.skip(f"this CPU does not run {request.param}")
    before = core.variant()
    core.set_variant(request.param)
    yield request.param
    core.set_variant(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (6, 16, 256), (7, 33, 40), (97, 70, 300)])
def test_what_follows_is_torchs_own_fp32_arithmetic(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """Bias and accumulation in their order, then one rounding: no bit differs."""
    a, b = integers(m, k, 1), integers(n, k, 2)
    sums = a.float() @ b.float().t()
    bias, into = torch.randn(n).to(dtype), torch.randn(m, 2 * n).to(dtype)[:, ::2]
    for args in (
        GemmArgs(None, None, dtype),
        GemmArgs(bias, None, dtype),
        GemmArgs(bias, into, dtype),
        GemmArgs(None, into.double(), dtype),
    ):
        got = product.multiply_matrices(a, b.float(), args)
        assert got.dtype == dtype
        assert torch.equal(got, finish(sums, None, None, args))


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 5, 0)])
def test_empty_sides_give_zeros_or_nothing(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    args = GemmArgs(torch.ones(n), None, torch.float32)
    got = product.multiply_matrices(torch.ones(m, k), torch.ones(n, k), args)
    assert torch.equal(got, torch.ones(m, n))


def test_blocks_of_every_side_and_threads_change_no_bit(monkeypatch) -> None:
    """More than one block of rows (1056), columns (2048) and k (256), none of them whole."""
    m, n, k = 1061, 2051, 259
    a, b = torch.randn(m, k), torch.randn(n, k)
    args = GemmArgs(None, None, torch.float32)
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(product, "_threads", lambda count=threads: count)
        results.append(product.multiply_matrices(a, b, args))
    assert torch.equal(*results)
    part = product.multiply_matrices(a[1050:], b[2040:], args)  # the sums of a row are its own
    assert torch.equal(part, results[0][1050:, 2040:])
    whole = a.double() @ b.double().t()
    bound = k * 2.0**-24 * (a.double().abs() @ b.double().abs().t())
    assert bool(((results[0].double() - whole).abs() <= bound).all())


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("m,n,k", [(9, 31, 37), (20, 40, 544)])
def test_codes_are_decoded_as_they_are_read(m: int, n: int, k: int, text: str) -> None:
    """Against the decoded planes in FP64; a wrong scale or code is far outside of the bound."""
    torch.manual_seed(m)
    if "rht" in text:  # a product keeps what the last group's padding holds, and a decode does not
        k = k // 16 * 16
    x, y = torch.randn(m, k).bfloat16(), (torch.randn(n, k) * 3).bfloat16()
    left, a = operand(x, text)
    right, b = operand(y, text)
    run = product.PlanesProduct(left.spec, right.spec, in_bf16=False)
    got = run(left, right, GemmArgs(None, None, torch.float32)).double()
    error = (k + 8) * 2.0**-24 * (a.abs() @ b.abs().t())
    if left.spec.signs is not None:  # what it is compared with was transformed back, in FP32
        error = error + 2.0**-18 * k * a.abs().max() * b.abs().max()
    assert bool(((got - a @ b.t()).abs() <= error).all())
    assert not np.array_equal(got.numpy(), (x.double() @ y.double().t()).numpy())


def test_a_plane_meets_a_matrix_of_any_strides() -> None:
    left, a = operand(integers(20, 64, 3), "mxfp8")  # small integers are codes
    for matrix in (integers(9, 64, 4), integers(9, 130, 4)[:, ::2][:, :64], integers(64, 9, 4).t()):
        spec = hybridq.PlaneSpec.parse("bf16")
        other = Operand([matrix], spec, *matrix.shape)
        got = product.PlanesProduct(left.spec, spec, in_bf16=False)(
            left, other, GemmArgs(None, None, torch.float32)
        )
        assert torch.equal(got.double(), a @ matrix.double().t())


def test_nan_and_infinity_stay_in_their_rows() -> None:
    a, b = integers(9, 32, 3).float(), integers(20, 32, 4).float()
    a[1, 3], a[2, 5], b[7, 9] = float("inf"), float("nan"), float("-inf")
    got = product.multiply_matrices(a, b, GemmArgs(None, None, torch.float32))
    want = a @ b.t()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="must have one K, got 3 and 4"):
        product.multiply_matrices(
            torch.ones(2, 3), torch.ones(2, 4), GemmArgs(None, None, torch.float32)
        )
    with pytest.raises(ValueError, match="elements apart"):
        core.product_of_planes(
            (None, 64, "float32", 3), (None, 64, "float32", 4), 1, 1, 4, 0, 0, "float32", 0, 0, 64,
            "float32", False,
        )  # fmt: skip
