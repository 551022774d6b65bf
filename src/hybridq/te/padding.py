"""Groups of tokens padded to multiples, and without the padding again, and losses of tokens.

No module here needs the padding; scripts that pad keep their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .quantization import FP8GlobalStateManager, get_align_size_for_quantization

__all__ = ["Fp8Padding", "Fp8Unpadding", "parallel_cross_entropy"]


class _Groups(nn.Module):
    """Knows how many rows each group has with its padding."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"{type(self).__name__}: m_splits must have {self.num_gemms} sizes, got "
                f"{len(m_splits)}"
            )
        size = self.align_size
        if size is None:
            size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        return [-(-rows // size) * size for rows in m_splits]


class Fp8Padding(_Groups):
    """Appends rows of zeros to each group until it has a multiple of `align_size`.

    Args:
        num_gemms: number of groups.
        align_size: None: that of the recipe in force.

    Example:
        >>> import torch, hybridq.te as te
        >>> padded, splits = te.Fp8Padding(2, 4)(torch.ones(5, 8), [2, 3])
        >>> padded.shape, splits
        (torch.Size([8, 8]), [4, 4])
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the padded tokens, and the sizes of their groups.

        Args:
            inp: `[T, features]`, tokens of group 0 first.
            m_splits: the tokens of each group.

        Raises:
            ValueError: there is another number of groups.
        """
        padded = self._padded(m_splits)
        pieces = []
        for rows, size in zip(inp.split(list(m_splits)), padded, strict=True):
            pieces += [rows, rows.new_zeros(size - rows.shape[0], *rows.shape[1:])]
        return torch.cat(pieces), padded


class Fp8Unpadding(_Groups):
    """Takes away the rows that `Fp8Padding` appended.

    Args:
        num_gemms, align_size: as there.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Return the tokens without the padding.

        Args:
            inp: as `Fp8Padding` returned it, with any number of features.
            m_splits: the tokens of each group, without padding.

        Raises:
            ValueError: there is another number of groups.
        """
        pieces = inp.split(self._padded(m_splits))
        return torch.cat([rows[:size] for rows, size in zip(pieces, m_splits, strict=True)])


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each token in FP32, by torch's function.

    Args:
        inp: logits `[.., .., V]`.
        target: int64 `[.., ..]`.
        label_smoothing: as `torch.nn.functional.cross_entropy` takes it.
        reduce_loss: return the mean over the tokens that count.
        dist_process_group: None: the vocabulary is whole.
        ignore_idx: targets of this value do not count.
        is_cg_capturable: has no effect.

    Raises:
        NotImplementedError: a process group is given.
    """
    if dist_process_group is not None:
        raise NotImplementedError(
            "parallel_cross_entropy: dist_process_group must be None, since a vocabulary that is "
            "dealt out over ranks has no loss here; gather the logits, or use DTensor's "
            "loss_parallel()"
        )
    loss = nn.functional.cross_entropy(
        inp.flatten(0, -2).float(),
        target.flatten(),
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )
    return loss if reduce_loss else loss.view(target.shape)
