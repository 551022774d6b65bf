"""sum_rows and spread_rows: weighted sums over the rows of tokens, and their gradient."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import reference
from kernel_cases import same_values
from token_row_cases import DTYPES, cases

ops = torch.ops.hybridq
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]


@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_backends_have_the_bits_of_the_reference(dtype: torch.dtype, other: torch.dtype) -> None:
    for case in cases(dtype, other):
        rows, weights, inverse, order, grad, label = case
        for own in (weights, None):
            want = reference.sum_rows(rows, own, inverse, other)
            same_values(ops.sum_rows(rows, own, inverse, other), want, label)
        for read in (rows, None):
            expected = reference.spread_rows(grad, read, weights, order, dtype)
            got = ops.spread_rows(grad, read, weights, order, dtype)
            for one, want in zip(got, expected, strict=True):
                same_values(one, want, label)


def test_sums_are_those_of_fp64() -> None:
    """Against the definition in FP64, to the rounding of k products and sums of FP32."""
    for rows, weights, inverse, order, grad, label in cases(torch.float32, torch.float32):
        if (inverse >= rows.shape[0]).any() or rows.isnan().any() or not rows.numel():
            continue
        wide = rows.double()[inverse] * weights.double()[..., None]
        got = ops.sum_rows(rows, weights, inverse, torch.float32)
        bound = wide.abs().sum(1) * 2.0**-24 * (inverse.shape[1] + 1)
        assert ((got.double() - wide.sum(1)).abs() <= bound).all(), label
        d_rows, d_weights = ops.spread_rows(grad, rows, weights, order, torch.float32)
        token = order // weights.shape[1]
        moved = grad.double()[token]
        want = moved * weights.double().flatten()[order][:, None]
        assert ((d_rows.double() - want).abs() <= want.abs() * 2.0**-24).all(), label
        dots = torch.zeros(order.shape[0], dtype=torch.float64)
        dots[order] = (moved * rows.double()).sum(1)
        size = torch.zeros_like(dots)
        size[order] = (moved * rows.double()).abs().sum(1)
        error = (d_weights.flatten().double() - dots).abs()
        assert (error <= size * 2.0**-24 * (rows.shape[1] // 256 + 10)).all(), label


def test_threads_change_no_bit() -> None:
    rows, weights, inverse, order, grad, _ = list(cases(torch.bfloat16, torch.bfloat16))[1]
    big = rows.repeat(1, 40)
    once = ops.sum_rows(big, weights, inverse, torch.bfloat16)
    spread = ops.spread_rows(grad.repeat(1, 40), big, weights, order, torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(ops.sum_rows(big, weights, inverse, torch.bfloat16), once)
        again = ops.spread_rows(grad.repeat(1, 40), big, weights, order, torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(again, spread, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_strides_of_any_kind_and_weights_of_any_dtype() -> None:
    rows, weights, inverse, order, grad, _ = next(iter(cases(torch.float32, torch.float32)))
    want = ops.sum_rows(rows, weights, inverse, torch.float32)
    transposed = rows.t().contiguous().t()
    places = inverse.t().contiguous().t()
    assert torch.equal(ops.sum_rows(transposed, weights.double(), places, torch.float32), want)
    spread = ops.spread_rows(grad, rows, weights, order, torch.float32)
    again = ops.spread_rows(grad.t().contiguous().t(), transposed, weights, order, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again, spread, strict=True))


def test_opcheck() -> None:
    rows, weights, inverse, order, grad, _ = next(iter(cases(torch.bfloat16, torch.bfloat16)))
    torch.library.opcheck(ops.sum_rows.default, (rows, weights, inverse, torch.float32))
    torch.library.opcheck(ops.sum_rows.default, (rows, None, inverse, torch.bfloat16))
    given = (grad, rows, weights, order, torch.bfloat16)
    torch.library.opcheck(ops.spread_rows.default, given)
    torch.library.opcheck(ops.spread_rows.default, (grad, None, *given[2:]))


def test_what_does_not_fit_is_refused() -> None:
    rows, weights, inverse, order, grad, _ = next(iter(cases(torch.float32, torch.float32)))
    half = torch.bfloat16
    for function, text in (
        (lambda: ops.sum_rows(rows.double(), weights, inverse, half), "float64"),
        (lambda: ops.sum_rows(rows, weights, inverse.int(), half), "inverse must be int64"),
        (lambda: ops.sum_rows(rows, weights[:1], inverse, half), "weights must be"),
        (lambda: ops.sum_rows(rows, weights.long(), inverse, half), "floating-point"),
        (lambda: ops.sum_rows(rows, None, inverse, torch.int8), "dtype must be"),
        (lambda: ops.spread_rows(grad, rows, weights, order[:-1], torch.float32), "rows must be"),
        (lambda: ops.spread_rows(grad, rows, weights, order, half), "rows must be"),
        (lambda: ops.spread_rows(grad, None, weights[:2], order, half), "of the 5 tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            function()
    for forced in ("cpu", "reference"):
        with hybridq.backend(forced):
            assert ops.sum_rows(rows, weights, inverse, half).dtype == half
