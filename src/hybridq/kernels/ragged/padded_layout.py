"""Ragged tensors: tokens sorted by group, and how the columnwise planes of such tensors lie.

`offsets` is int32 `[G]` on the tensor's device: where each group ends, as torch's grouped products
take it. Nothing here reads it on the host.

In the GEMM for a weight's gradient the contraction runs over the tokens of each group, so blocks
must not straddle groups, and a group should begin where 16-byte loads can begin. Therefore a
columnwise plane of a ragged tensor is the columnwise plane of `pad_tokens(x, offsets)`: each group
begins at a multiple of 128 tokens and has at least 128, and what lies between groups is encoded
zeros. Every block length (16, 32, 128) divides 128. Encode and decode need to know nothing of
groups. A group without tokens is 128 zeros, since grouped products of tensor cores leave the
result of a contraction over nothing unwritten, or refuse it.

Source: ours.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["TOKEN_PAD", "capacity", "group_ends", "pad_tokens", "padded_offsets"]

#: A group of a padded plane begins at a multiple of so many tokens, and has at least so many.
TOKEN_PAD: Final = 128


def capacity(tokens: int, groups: int) -> int:
    """Return how many tokens a padded plane holds: enough for any split into `groups`."""
    # No group takes more than 128 beyond its tokens, and their sum is a multiple of 128.
    return (tokens // TOKEN_PAD + groups) * TOKEN_PAD


def group_ends(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the ends of the groups, never beyond the tokens and never before an earlier one.

    Args:
        offsets: int32 `[G]`, what should be the ends; a kernel cannot raise if they are not.
        tokens: how many tokens there are.
    """
    return torch.cummax(offsets.clamp(0, tokens), 0).values


def padded_offsets(offsets: torch.Tensor, tokens: int, least: int = TOKEN_PAD) -> torch.Tensor:
    """Return where each group begins in a padded plane, and where the last ends.

    Args:
        offsets: int32 `[G]`, ends of the groups; wrong ones count as `group_ends` says.
        tokens: how many tokens there are.
        least: what a group takes at least, 128 or 0.

    Returns:
        int32 `[G + 1]`, multiples of 128, on the device of `offsets`.
    """
    ends = group_ends(offsets, tokens)
    sizes = ends - torch.nn.functional.pad(ends[:-1], (1, 0))
    rounded = (sizes + (TOKEN_PAD - 1)) // TOKEN_PAD * TOKEN_PAD
    if least:
        rounded = rounded.clamp(min=least)
    return torch.nn.functional.pad(rounded.cumsum(0, dtype=torch.int32), (1, 0))


def pad_tokens(x: torch.Tensor, offsets: torch.Tensor, least: int = TOKEN_PAD) -> torch.Tensor:
    """Return x with each group's rows moved to its padded offset, and zeros between.

    Args:
        x: `[T, C]`; rows past the last end are left out.
        offsets: int32 `[G]`, ends of the groups, on the device of x.
        least: as in `padded_offsets`.

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
        ends, starts = group_ends(offsets, tokens), padded_offsets(offsets, tokens, least)
        row = torch.arange(tokens, device=x.device, dtype=ends.dtype)
        group = torch.searchsorted(ends, row, right=True)
        begins = torch.nn.functional.pad(ends, (1, 0))
        place = torch.where(row < ends[-1], starts[group] + row - begins[group], size)
        out.index_copy_(0, place.long(), x)
    return out[:size]
