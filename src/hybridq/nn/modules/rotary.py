"""Rotary positions: pairs of a head's features rotated by an angle proportional to the position."""

from __future__ import annotations

import torch

from .constructor_arguments import checked
from .written_options import WrittenOptions

__all__ = ["RotaryPositionEmbedding", "apply_rotary"]


class RotaryPositionEmbedding(WrittenOptions):
    """The angles that turn queries and keys, for `rotary_pos_emb` of attention modules.

    Pair i of d/2 pairs turns by `position * rotary_base ** (-2i/d)`.

    Args:
        dim: features of a head.
        rotary_percent: share of them that is rotated, the first ones; in (0, 1].
        rotary_base: base of the angles' speeds.
        interleaved: features 2i and 2i + 1 are a pair; else i and i + d/2.

    Raises:
        ValueError: the number of rotated features is not even and at least 2.

    Source: Su et al., RoFormer (arXiv:2104.09864); names are those of Transformer Engine.

    Example:
        >>> import hybridq
        >>> hybridq.RotaryPositionEmbedding(64)(128).shape
        torch.Size([128, 1, 1, 64])
    """

    @checked
    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        *,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        rotated = int(dim * rotary_percent)
        if not 0.0 < rotary_percent <= 1.0 or rotated < 2 or rotated % 2:
            raise ValueError(
                "RotaryPositionEmbedding: dim * rotary_percent must be even and at least 2, got "
                f"{dim} * {rotary_percent}"
            )
        self.dim, self.rotary_base, self.interleaved = (
            rotated,
            float(rotary_base),
            bool(interleaved),
        )

    def forward(self, max_seq_len: int, offset: int = 0, device: object = None) -> torch.Tensor:
        """Return the angles of positions `offset ... offset + max_seq_len - 1`.

        Args:
            max_seq_len: number of positions.
            offset: the first one.
            device: of the result; None: the current default.

        Returns:
            FP32 `[max_seq_len, 1, 1, dim]`, each angle twice, where its pair's features lie.
        """
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)  # type: ignore[call-overload]
        speed = self.rotary_base ** (-pairs / self.dim)
        position = torch.arange(max_seq_len, dtype=torch.float32, device=speed.device) + offset
        angle = torch.outer(position, speed)
        both = torch.stack((angle, angle), -1 if self.interleaved else -2)
        return both.flatten(-2)[:, None, None, :]


def apply_rotary(
    x: torch.Tensor,
    angles: torch.Tensor,
    interleaved: bool,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x with its first features rotated; FP32 inside, rounded once.

    Args:
        x: `[batch, heads, length, features]`.
        angles: FP32 `[at least length, 1, 1, at most features]`, each twice.
        interleaved: features 2i and 2i + 1 are a pair; else i and i + d/2.
        positions: int64 `[1 or batch, length]`, all less than the number of angles; None: 0, 1, ...

    Raises:
        ValueError: there are fewer angles than positions, or more than features.
    """
    length, features = x.shape[-2:]
    rotated = angles.shape[-1]
    needed = length if positions is None else 1
    if angles.dim() != 4 or angles.shape[0] < needed or rotated > features or rotated % 2:
        raise ValueError(
            f"rotary_pos_emb: must be [at least {needed}, 1, 1, at most {features}], got "
            f"{tuple(angles.shape)}"
        )
    if positions is None:
        angle = angles[:length, 0, 0].to(torch.float32)
    else:
        angle = angles[:, 0, 0].to(torch.float32)[positions].unsqueeze(1)
    first = x[..., :rotated].to(torch.float32)
    if interleaved:
        pairs = first.unflatten(-1, (-1, 2))
        other = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    else:
        low, high = first.chunk(2, -1)
        other = torch.cat((-high, low), -1)
    made = (first * angle.cos() + other * angle.sin()).to(x.dtype)
    return made if rotated == features else torch.cat((made, x[..., rotated:]), -1)
