"""Philox4x32 with 7 rounds, and the byte that each element of a plane draws from it.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); constants of Random123.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32_7(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four 32-bit words of one counter, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        product0, product1 = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_halves(seed: int, rows: int, k: int, row0: int, k0: int, stream: int) -> np.ndarray:
    """uint16 [rows, k]: 16 random bits per element, from counter (k / 8, row, stream, 0).

    In plain integers: half k % 8 of the eight, the low half of the first word first.
    """
    seed %= 1 << 64
    key = (seed & _MASK, seed >> 32)
    out = np.zeros((rows, k), dtype=np.uint16)
    for row in range(rows):
        for i in range(k):
            words = philox4x32_7(((k0 + i) // 8, row0 + row, stream, 0), key)
            half = (k0 + i) % 8
            out[row, i] = words[half // 2] >> 16 * (half % 2) & 0xFFFF
    return out


def random_bytes(seed: int, rows: int, k: int, row0: int, k0: int, stream: int) -> np.ndarray:
    """uint8 [rows, k]: the random byte of every element of a plane.

    Element (row, k) of the whole tensor's plane reads counter (k / 16, row, stream, 0) and takes
    byte k % 16 of the sixteen (lowest byte of the first word first).
    """
    seed %= 1 << 64
    key = (seed & _MASK, seed >> 32)
    first_group, last_group = k0 // 16, (k0 + max(k, 1) - 1) // 16
    groups = range(first_group, last_group + 1)
    # The same rounds as above, over arrays: uint64 holds the 64-bit products exactly.
    row_index = np.arange(row0, row0 + rows, dtype=np.uint64)[:, None]
    shape = (rows, len(groups))
    c0 = np.broadcast_to(np.array(groups, dtype=np.uint64)[None, :], shape)
    c1 = np.broadcast_to(row_index, shape)
    c2 = np.full(shape, stream, dtype=np.uint64)
    c3 = np.zeros(shape, dtype=np.uint64)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    for index in range(7):
        k_0 = np.uint64((key[0] + index * _WEYL[0]) & _MASK)
        k_1 = np.uint64((key[1] + index * _WEYL[1]) & _MASK)
        product0, product1 = c0 * np.uint64(_MULTIPLIER[0]), c2 * np.uint64(_MULTIPLIER[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k_0,
            product1 & mask,
            (product0 >> shift) ^ c3 ^ k_1,
            product0 & mask,
        )
    words = np.stack([c0, c1, c2, c3], axis=-1).astype("<u4")
    flat = np.ascontiguousarray(words).view(np.uint8).reshape(rows, 16 * len(groups))
    start = k0 - 16 * first_group
    return flat[:, start : start + k]
