"""Rotary positions, applied to queries or keys by themselves."""

from __future__ import annotations

from typing import Any, Final

import torch

from .. import nn

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]

RotaryPositionEmbedding = nn.RotaryPositionEmbedding
#: Where `[batch, heads, length, features]` stand in each layout.
_ORDERS: Final = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_BACK: Final = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Any:
    """Return `t` rotated by the angles of its positions, FP32 inside and rounded once.

    Args:
        t: `[length, batch, heads, features]`, or as `tensor_format` says.
        freqs: FP32 `[at least length, 1, 1, at most features]`, of `RotaryPositionEmbedding`.
        tensor_format: `"sbhd"`, `"bshd"` or `"thd"`: `[tokens, heads, features]`.
        start_positions: int `[batch]`, of the first token of each sequence; None: 0.
        interleaved: features 2i and 2i + 1 are a pair; else i and i + d/2.
        fused: has no effect: the way is one.
        cu_seqlens: int `[batch + 1]`, cumulative lengths, for `"thd"`.
        cp_size, cp_rank: 1 and 0.

    Raises:
        NotImplementedError: `cp_size` is not 1.
        ValueError: the format is unknown, or `cu_seqlens` are missing, or there are fewer angles
            than positions.

    Example:
        >>> import torch, hybridq.te as te
        >>> from hybridq.te.attention.rope import apply_rotary_pos_emb
        >>> angles = te.RotaryPositionEmbedding(8)(5)
        >>> apply_rotary_pos_emb(torch.ones(5, 2, 4, 8), angles).shape
        torch.Size([5, 2, 4, 8])
    """
    if cp_size != 1 or cp_rank != 0:
        raise NotImplementedError(
            "apply_rotary_pos_emb: cp_size must be 1, ranks share sequences by "
            f"hybridq.distributed.sequence_parallel, got {cp_size}"
        )
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("apply_rotary_pos_emb: 'thd' needs cu_seqlens, got None")
        places = torch.arange(t.shape[0], dtype=torch.int64, device=t.device)
        starts = cu_seqlens.to(torch.int64)
        last = starts.shape[0] - 2
        own = torch.searchsorted(starts[1:], places, right=True).clamp(max=last)
        places = places - starts[own]
        if start_positions is not None:
            places = places + start_positions.to(torch.int64)[own]
        rows = t.transpose(0, 1)[None]
        return nn.apply_rotary(rows, freqs, interleaved, places[None])[0].transpose(0, 1)
    if tensor_format not in _ORDERS:
        raise ValueError(
            f"apply_rotary_pos_emb: tensor_format must be sbhd, bshd or thd, got {tensor_format!r}"
        )
    x = t.permute(_ORDERS[tensor_format])
    positions = None
    if start_positions is not None:
        first = start_positions.to(torch.int64)[:, None]
        positions = first + torch.arange(x.shape[2], dtype=torch.int64, device=t.device)
    return nn.apply_rotary(x, freqs, interleaved, positions).permute(_BACK[tensor_format])
