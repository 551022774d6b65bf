"""Philox4x32-7: the counter-based random bytes of stochastic rounding.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

__all__ = ["philox", "random_bits", "random_bytes"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of `value * factor`, all held in int64.

    A 32x32-bit product overflows int64's sign, so `value` is split into halves of 16 bits.
    """
    low = (value & 0xFFFF) * factor
    high = (value >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four 32-bit words of Philox4x32-7 for counter (c0, c1, c2, c3).

    Args:
        c0, c1, c2, c3: int64 tensors of one broadcastable shape, values below 2^32.
        seed: int64 `[1]`; its low and high 32 bits are the key.

    Returns:
        Four int64 tensors with values below 2^32.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bytes(
    rows: int, cols: int, seed: torch.Tensor, stream: int, row0: int = 0, col0: int = 0
) -> torch.Tensor:
    """Return one random byte per element of a plane, uint8 `[rows, cols]`.

    Element (row, k) of the whole tensor's plane takes byte `k % 16` of the draw at counter
    `(k // 16, row, stream, 0)`; byte i is `(word[i // 4] >> 8 * (i % 4)) & 255`.

    Args:
        rows, cols, seed, stream, row0, col0: as `random_bits` takes them.
    """
    return random_bits(rows, cols, seed, stream, row0, col0, bits=8).to(torch.uint8)


def random_bits(
    rows: int,
    cols: int,
    seed: torch.Tensor,
    stream: int,
    row0: int = 0,
    col0: int = 0,
    *,
    bits: int,
) -> torch.Tensor:
    """Return `bits` random bits per element, int64 `[rows, cols]`.

    A draw of 128 bits serves `n = 128 / bits` elements: element (row, k) takes the bits from
    `bits * (k % n)` on, lowest first, of the draw at counter `(k // n, row, stream, 0)`.

    Args:
        rows, cols: the plane's own matrix.
        seed: int64 `[1]`.
        stream: keeps the two planes of a tensor, and the tensors of a module, apart.
        row0, col0: offset of this shard in the whole tensor's plane.
        bits: 8 or 16.
    """
    device = seed.device
    per_draw = 128 // bits
    first = col0 // per_draw
    groups = -(-(col0 + cols) // per_draw) - first
    group = torch.arange(first, first + groups, device=device, dtype=torch.int64)
    row = torch.arange(row0, row0 + rows, device=device, dtype=torch.int64)
    c0 = group[None, :].expand(rows, groups) & _MASK
    c1 = row[:, None].expand(rows, groups) & _MASK
    zero = torch.zeros_like(c0)
    words = torch.stack(philox(c0, c1, zero + stream, zero, seed), dim=-1)
    shifts = torch.arange(0, 32, bits, device=device, dtype=torch.int64)
    drawn = (words[..., None] >> shifts) & ((1 << bits) - 1)
    start = col0 - per_draw * first
    return drawn.reshape(rows, groups * per_draw)[:, start : start + cols]
