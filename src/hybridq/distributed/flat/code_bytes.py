"""Codes in a flat buffer: whole bytes each, or two to a byte."""

from __future__ import annotations

import torch

__all__ = ["read_codes", "write_codes"]


def write_codes(buffer: torch.Tensor, bits: int, start: int, codes: torch.Tensor) -> None:
    """Write codes into a flat buffer; of a byte that is shared, the other code stays.

    Args:
        buffer: uint8 `[numel * bits / 8]`.
        bits: of a code: 4, or a multiple of 8.
        start: where the first code belongs, counted in codes.
        codes: `[n]`: uint8, one 4-bit code per byte; else of `bits` each.
    """
    if bits >= 8:
        nbytes = bits // 8
        raw = codes.contiguous().view(torch.uint8)
        buffer[start * nbytes : start * nbytes + raw.numel()].copy_(raw)
        return
    if start % 2 and codes.numel():
        byte = buffer[start // 2 : start // 2 + 1]
        byte.copy_((byte & 0x0F) | (codes[:1] << 4))
        start, codes = start + 1, codes[1:]
    pairs = codes.numel() // 2
    even = codes[: 2 * pairs].view(pairs, 2)
    buffer[start // 2 : start // 2 + pairs].copy_(even[:, 0] | (even[:, 1] << 4))
    if codes.numel() % 2:
        byte = buffer[start // 2 + pairs : start // 2 + pairs + 1]
        byte.copy_((byte & 0xF0) | codes[-1:])


def read_codes(buffer: torch.Tensor, bits: int, start: int, count: int) -> torch.Tensor:
    """Return codes of a flat buffer; inverts `write_codes`.

    Args:
        buffer, bits, start: as `write_codes` takes them.
        count: how many.

    Returns:
        uint8 `[count]`, one 4-bit code per byte; else the bytes, `[count * bits / 8]`.
    """
    if bits >= 8:
        nbytes = bits // 8
        return buffer[start * nbytes : (start + count) * nbytes]
    held = buffer[start // 2 : -(-(start + count) // 2)]
    both = torch.stack((held & 15, held >> 4), dim=-1).view(-1)
    return both[start % 2 :][:count]
