"""round_stochastic: FP32 to BF16 and FP16 with 16 random bits, every backend against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import random_halves, round_stochastic
from oracle.bridge import assert_bits_equal, values_of
from oracle.samples import ALL_KINDS, sample

TARGETS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
run = torch.ops.hybridq.round_stochastic


def seed_of(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def check(x: torch.Tensor, target: str, seed: int, stream: int = 0, row0: int = 0, col0: int = 0):
    got = run(x, seed_of(seed), TARGETS[target], stream, row0, col0)
    assert got.dtype == TARGETS[target] and got.shape == x.shape and got.is_contiguous()
    random = random_halves(seed, *x.shape, row0, col0, stream)
    assert_bits_equal(got, round_stochastic(values_of(x), target, random), f"{target} {seed}")
    return got


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_backend_equals_oracle(backend, target, kind, seed):
    shapes = ((13, 27), (1, 1), (1, 40), (40, 1), (0, 5), (5, 0))
    for index, shape in enumerate(shapes):
        x = sample(kind, shape, "float32", seed + index)
        check(x, target, seed - 2**31, stream=index, row0=3 * index, col0=5 * index)
    check(sample(kind, (27, 30), "float32", seed).t()[::2, 1:], target, -1, 5, 2**31, 9)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_representable_never_moves(backend, target):
    """All 65,536 values of the target, infinities and NaN included."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TARGETS[target])
    x = values.view(256, 256).float()
    for seed in (0, 1, -7):
        assert_bits_equal(run(x, seed_of(seed), TARGETS[target]), x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_beyond_the_maximum_saturates_and_infinity_stays(backend, target):
    largest = torch.finfo(TARGETS[target]).max
    x = torch.tensor([[largest * 1.0001, -3.4e38, float("inf"), float("-inf"), float("nan")]])
    got = check(x, target, 3)
    assert got[0, :4].tolist() == [largest, -largest, float("inf"), float("-inf")]
    assert got[0, 4].isnan()


@pytest.mark.parametrize("target", TARGETS)
def test_small_updates_are_not_lost(backend, target):
    """2^20 draws of 1 + gap / 1000: the mean is right within 5 sigma, where nearest even gives 1.

    The variance of one draw is p (1 - p) gap^2 < gap^2 / 1000; with 8 random bits p would be 0.
    """
    gap = torch.finfo(TARGETS[target]).eps
    x = torch.full((1024, 1024), 1 + gap / 1000)
    mean = run(x, seed_of(11), TARGETS[target]).double().mean().item()
    quantum = gap / 65536  # 16 random bits know p to half of 2^-16
    assert abs(mean - x[0, 0].item()) <= 5 * gap * (1e-3 / 2**20) ** 0.5 + quantum
    assert mean > 1


@pytest.mark.parametrize("target,gap", [("bfloat16", 2.0**-7), ("float16", 2.0**-24)])
def test_the_threshold_is_exact(backend, target, gap):
    """Values made for their own random bits: q + r of 65536 takes the farther, 65535 does not."""
    r = torch.from_numpy(random_halves(5, 12, 40, 0, 0, 0).astype(np.float64)).clamp(min=1)
    base = 1.0 if target == "bfloat16" else gap  # FP16's subnormals leave FP32 bits to spare
    for missing, step in ((0, 1), (1, 0)):
        x = base + gap * (65536 - r - missing) / 65536
        assert torch.equal(x.float().double(), x)
        got = run(x.float(), seed_of(5), TARGETS[target])
        assert (got.double() == base + gap * step).all()


@pytest.mark.parametrize("target", TARGETS)
def test_shards_tile_the_whole(backend, target, seed):
    x = sample("normal", (21, 45), "float32", seed)
    whole = run(x, seed_of(seed), TARGETS[target], 4)
    for row0, col0 in ((0, 0), (5, 7), (11, 16), (20, 44)):
        part = run(x[row0:, col0:], seed_of(seed), TARGETS[target], 4, row0, col0)
        assert torch.equal(part, whole[row0:, col0:])


def test_halves_are_the_philox_words_in_order():
    """Known answer of counter 0, key 0: 5f6fb709 0d893f64 4f121f81 4f730a48."""
    drawn = random_halves(0, 1, 8, 0, 0, 0)[0]
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    want = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    assert np.array_equal(drawn, np.array(want, dtype=np.uint16))
