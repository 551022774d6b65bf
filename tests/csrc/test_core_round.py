"""Stochastic rounding to BF16 and FP16 in the core, against exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_tools import sample, using_variant
from hybridq import _core

SEED = 0xFEDCBA9876543210
TARGETS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
VARIANTS = _core.build_info()["tables"]


@pytest.fixture(params=TARGETS, ids=TARGETS.values())
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=VARIANTS)
def variant(request):
    with using_variant(request.param):
        yield request.param


def rounded(x, dtype, *, seed=SEED, row0=0, col0=0, stream=0, threads=1):
    out = torch.full(x.shape, -1, dtype=torch.int16)
    _core.round_stochastic(
        x.data_ptr(),
        *x.shape,
        *x.stride(),
        TARGETS[dtype],
        seed,
        row0,
        col0,
        stream,
        out.data_ptr(),
        threads,
    )
    return out.view(dtype)


def random_bits(rows: int, cols: int, row0: int, col0: int, stream: int) -> np.ndarray:
    bits = np.zeros((rows, cols), np.int64)
    for r, c in np.ndindex(rows, cols):
        k = col0 + c
        word = _core.philox(SEED, k // 8, row0 + r, stream)[k % 8 // 2]
        bits[r, c] = word >> 16 * (k % 2) & 0xFFFF
    return bits


def model(x: torch.Tensor, dtype: torch.dtype, bits: np.ndarray) -> torch.Tensor:
    """Steps of the target's spacing at |x|, in float64: exact but for the RN of the fraction."""
    info = torch.finfo(dtype)
    mantissa = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    value = x.double().numpy()
    finite = np.isfinite(value)
    a = np.minimum(np.where(finite, np.abs(value), 0.0), info.max)
    exponent = np.maximum(np.frexp(a)[1] - 1, int(np.log2(info.smallest_normal)))
    steps = np.ldexp(a, mantissa - exponent)
    low = np.floor(steps)
    up = np.rint((steps - low) * 65536.0) + bits >= 65536
    made = np.copysign(np.ldexp(low + up, exponent - mantissa), value)
    return torch.from_numpy(np.where(finite, made, value)).to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    want = want.masked_fill(want.isnan(), float("nan"))
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def numbers(rows: int, cols: int) -> torch.Tensor:
    """Any FP32 bits in the first half, every magnitude around FP16's range in the second."""
    rng = np.random.default_rng(rows * cols)
    x = rng.integers(0, 1 << 32, (rows, cols), dtype=np.uint64).astype(np.uint32).view(np.float32)
    wide = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-44, 18, (rows, cols)))
    return torch.from_numpy(np.where(np.arange(cols) % 2, x, wide).astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (2, 1100), (40, 33)])
def test_rounding_equals_the_model(shape, dtype, variant):
    x = numbers(*shape)
    for offsets in ({}, {"row0": 3, "col0": 5}, {"row0": 1, "col0": 16, "stream": 2}):
        place = {"row0": 0, "col0": 0, "stream": 0} | offsets
        want = model(x, dtype, random_bits(*shape, **place))
        assert_same(rounded(x, dtype, **place), want)


def test_edges(dtype, variant):
    info = torch.finfo(dtype)
    top = float(info.max)
    kept = [0.0, -0.0, top, -top, info.smallest_normal, info.tiny, float("inf"), -float("inf")]
    x = torch.tensor([kept * 50])
    assert_same(rounded(x, dtype), x.to(dtype))  # what is representable never moves
    beyond = np.nextafter(np.float32(top), np.float32(np.inf))
    x = torch.tensor([[float(beyond), -float(beyond), 3.4e38, -3.4e38] * 50])
    assert bool((rounded(x, dtype).abs() == top).all())  # finite stays finite
    x = torch.tensor([[float("nan"), -float("nan")]])
    assert rounded(x, dtype).isnan().all()
    assert rounded(x, dtype).view(torch.int16).unique().numel() == 1  # without a sign


def test_every_fraction_of_a_subnormal_step():
    """FP16's smallest steps: halves of 2^-16 of a step round to even, the smallest FP32 to zero."""
    counts = np.arange(0, 1 << 18, 97, dtype=np.float64)
    values = np.concatenate([counts * 2.0**-40, (counts + 0.5) * 2.0**-40, [1e-45, 2.0**-41]])
    x = torch.from_numpy(values.astype(np.float32)).reshape(1, -1)
    bits = random_bits(1, x.shape[1], 0, 0, 0)
    assert_same(rounded(x, torch.float16), model(x, torch.float16, bits))


def test_views_threads_and_shards(dtype):
    x = sample(70, 2100, special=False)
    want = rounded(x, dtype)
    assert torch.equal(rounded(x, dtype, threads=3), want)
    assert torch.equal(rounded(x.T.contiguous().T, dtype), want)
    assert torch.equal(rounded(x[3:50, 101:1500], dtype, row0=3, col0=101), want[3:50, 101:1500])
    assert not torch.equal(rounded(x, dtype, stream=1), want)
    assert not torch.equal(rounded(x, dtype, seed=SEED + (1 << 40)), want)
    for shape in ((0, 5), (5, 0)):
        assert rounded(torch.empty(shape), dtype).shape == shape


def test_small_updates_move_on_average():
    """1 + 2^-14 is 1/128 of BF16's step above 1 and becomes 1 always under round to nearest."""
    x = torch.full((64, 4096), 1 + 2**-14)
    assert abs(rounded(x, torch.bfloat16).double().mean() - (1 + 2**-14)) < 2**-18
