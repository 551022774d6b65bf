"""What one call of attention is told beside queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_masks import MASKS, Lengths, check_mask_type

__all__ = ["AttentionCall", "Mask"]

#: One that hides keys; or a pair, of the queries' padding and of the keys'.
Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]


class AttentionCall(NamedTuple):
    """What one call of attention is told beside queries, keys and values.

    Attributes:
        mask_type, window, mask: as `visible` takes them.
        lengths: of each sequence of a padded batch, or None.
        at_end: the last query stands at the last key; None: as the mask type says.
        bias_type, bias, slopes: as `added_bias` takes them.
        counts: of each sequence, how many queries and keys masks show; None: nothing ends there.
        logits: where the largest scores go, FP32 `[heads]` of each product; None: nowhere.
    """

    mask_type: str
    window: tuple[int, int] | None = None
    mask: torch.Tensor | None = None
    lengths: Lengths | None = None
    at_end: bool | None = None
    bias_type: str = "no_bias"
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    counts: Lengths | None = None
    logits: list[torch.Tensor] | None = None

    @staticmethod
    def of(
        kind: str,
        window: tuple[int, int] | None,
        given: Mask | None,
        at_end: bool | None,
        bias_type: str,
        bias: torch.Tensor | None,
        slopes: torch.Tensor | None,
        logits: list[torch.Tensor] | None = None,
    ) -> AttentionCall:
        """Return the call, of one mask or of a pair.

        Of a pair the second hides keys. Where diagonals end at the last query and key, they end at
        the last of each sequence that the pair shows.

        Args:
            kind, window, given, at_end, bias_type, bias, slopes, logits: as of the attributes; each
                of a pair is `[batch, 1, 1, length]`, True where padding is.

        Raises:
            ValueError: a mask type or window that there is not, or no pair.

        Source: Transformer Engine's `get_full_mask`.
        """
        check_mask_type(kind, window)
        of = (bias_type, bias, slopes)
        if not isinstance(given, tuple | list):
            return AttentionCall(kind, window, given, None, at_end, *of, None, logits)
        if len(given) != 2 or not all(_is_padding(one) for one in given):
            got = [tuple(getattr(one, "shape", ())) for one in given]
            raise ValueError(
                "attention: a pair of masks must be of the queries' padding and of the keys', bool "
                f"[batch, 1, 1, length] each, got shapes {got}"
            )
        ends = MASKS[kind].is_at_end if at_end is None else at_end
        queries, keys = ((~one).flatten(1).sum(1) for one in given)
        counts = Lengths(queries, keys) if ends and "padding" in kind else None
        return AttentionCall(kind, window, given[1], None, at_end, *of, counts, logits)

    @property
    def ends(self) -> Lengths | None:
        """Where diagonals of each sequence end, if its lengths or masks say so."""
        return self.lengths if self.counts is None else self.counts


def _is_padding(mask: object) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return False
    return mask.dim() == 4 and tuple(mask.shape[1:3]) == (1, 1)
