"""Ragged tensors: tokens sorted by group, and how the columnwise planes of such tensors lie.

`offsets` is int32 `[G]` on the tensor's device: where each group ends, as torch's grouped products
take it. Nothing here reads it on the host.

In the GEMM for a weight's gradient the contraction runs over the tokens of each group, so blocks
must not straddle groups, and a group should begin where 16-byte loads can begin. Therefore a
columnwise plane of a ragged tensor is the columnwise plane of `pad_tokens(x, offsets)`: each group
begins at a multiple of 128 tokens, and what lies between groups is encoded zeros. Every block
length (16, 32, 128) divides 128. Encode and decode need to know nothing of groups.

Source: ours.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["TOKEN_PAD", "capacity", "pad_tokens", "padded_offsets"]

#: A group of a padded plane begins at a multiple of so many tokens.
TOKEN_PAD: Final = 128


def capacity(tokens: int, groups: int) -> int:
    """Return how many tokens a padded plane holds: enough for any split into `groups`."""
    # Each group that is not empty adds at most 127; with all rounded up the sum is a multiple.
    return (tokens + (TOKEN_PAD - 1) * groups) // TOKEN_PAD * TOKEN_PAD


def padded_offsets(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return where each group begins in a padded plane, and where the last ends.

    Args:
        offsets: int32 `[G]`, ends of the groups.
        tokens: how many tokens there are; ends beyond it count as it.

    Returns:
        int32 `[G + 1]`, multiples of 128, on the device of `offsets`.
    """
    ends = offsets.clamp(0, tokens)
    sizes = (ends - torch.nn.functional.pad(ends[:-1], (1, 0))).clamp(min=0)
    rounded = (sizes + (TOKEN_PAD - 1)) // TOKEN_PAD * TOKEN_PAD
    return torch.nn.functional.pad(rounded.cumsum(0, dtype=torch.int32), (1, 0))


def pad_tokens(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return x with each group's rows moved to its padded offset, and zeros between.

    Args:
        x: `[T, C]`; rows past the last end are left out.
        offsets: int32 `[G]`, ends of the groups, on the device of x.

    Returns:
        `[capacity(T, G), C]` of x's dtype.

    Example:
        >>> import torch
        >>> x = torch.ones(5, 2)
        >>> pad_tokens(x, torch.tensor([2, 5], dtype=torch.int32)).sum(1)[[0, 1, 2, 128, 130, 131]]
        tensor([2., 2., 0., 2., 2., 0.])
    """
    tokens, groups = x.shape[0], offsets.shape[0]
    size = capacity(tokens, groups)
    out = x.new_zeros((size + 1, x.shape[1]))  # the last row takes what belongs to no group
    if tokens and groups:
        starts = padded_offsets(offsets, tokens)
        row = torch.arange(tokens, device=x.device, dtype=offsets.dtype)
        group = torch.searchsorted(offsets, row, right=True)
        begins = torch.nn.functional.pad(offsets, (1, 0))
        place = torch.where(row < offsets[-1], starts[group] + row - begins[group], size)
        out.index_copy_(0, place.long(), x)
    return out[:size]
