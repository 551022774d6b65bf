"""Rotary positions, applied to queries or keys by themselves."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch

from .. import nn
from .._log import log_once

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]

#: Where `[batch, heads, length, features]` stand in each layout.
_ORDERS: Final = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_BACK: Final = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


class RotaryPositionEmbedding(nn.RotaryPositionEmbedding):
    """`hybridq.RotaryPositionEmbedding` with the speeds of its pairs in a buffer, `inv_freq`.

    Scripts write speeds of their own to it, and Transformer Engine's checkpoints have it.

    Args:
        dim, rotary_percent, rotary_base, interleaved: as for `hybridq.RotaryPositionEmbedding`.
        seq_len_interpolation_factor: positions are divided by it, where
            `pretrained_max_position_embeddings` are given too; those of more than both's product
            are divided by more, so that the last ends where it was trained; None: they are not.
        pretrained_max_position_embeddings: positions that the model was trained with.

    Attributes:
        inv_freq: FP32 `[dim / 2]`, and FP32 whatever dtype the module is converted to.

    Source: names, order and defaults of arguments: Transformer Engine's `attention/rope.py`; of
        interpolation: Chen et al. (arXiv:2306.15595).

    Example:
        >>> import torch, hybridq.te as te
        >>> rotary = te.RotaryPositionEmbedding(64)
        >>> rotary.inv_freq = rotary.inv_freq / 8
        >>> rotary(128).shape
        torch.Size([128, 1, 1, 64])
    """

    inv_freq: torch.Tensor
    #: `inv_freq` is what forwards read.
    _written_options: ClassVar[dict[str, Any]] = dict.fromkeys(("dim", "rotary_base"), nn.settled)

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__(dim, rotary_percent, rotary_base=rotary_base, interleaved=interleaved)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        both = (seq_len_interpolation_factor, pretrained_max_position_embeddings)
        if both.count(None) == 1:
            log_once(
                "te.rope.interpolation",
                "RotaryPositionEmbedding: seq_len_interpolation_factor and "
                "pretrained_max_position_embeddings have an effect only together",
            )
        self.register_buffer("inv_freq", self._initial())

    def forward(self, max_seq_len: int, offset: int = 0, device: object = None) -> torch.Tensor:
        """Return the angles of positions `offset ... offset + max_seq_len - 1`.

        Args:
            max_seq_len: number of positions.
            offset: the first one.
            device: of the result; None: that of `inv_freq`.

        Returns:
            FP32 `[max_seq_len, 1, 1, dim]`, each angle twice, where its pair's features lie.
        """
        speeds = self.inv_freq.to(device=device, dtype=torch.float32)  # type: ignore[call-overload]
        places = torch.arange(max_seq_len, dtype=torch.float32, device=speeds.device) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            places = places / max(factor, max_seq_len / trained)
        each = torch.stack((speeds, speeds), -1 if self.interleaved else 0).flatten()
        return torch.outer(places, each)[:, None, None, :]

    def _initial(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the speeds by the base: the angles of the position 1, each once."""
        first = super().forward(1, 1, device).flatten()
        return first[::2].clone() if self.interleaved else first[: self.dim // 2].clone()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the module; the speeds follow its device alone, and begin anew from meta."""
        kept = self.inv_freq
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        self.inv_freq = self._initial(device) if kept.is_meta else kept.to(device)
        return self


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
