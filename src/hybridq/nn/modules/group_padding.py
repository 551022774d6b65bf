"""Rows of zeros behind each group of tokens, for kernels that want sizes of a multiple."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import settings
from ...recipes import get_align_size_for_quantization
from .constructor_arguments import checked
from .group_sizes import host_splits

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _Sizes(nn.Module):
    """What both have: the number of groups, and of what the sizes are multiples."""

    @checked
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if isinstance(num_gemms, bool) or not isinstance(num_gemms, int) or num_gemms < 1:
            raise ValueError(
                f"{type(self).__name__}: num_gemms must be a positive int, got {num_gemms!r}"
            )
        if align_size is not None and (not isinstance(align_size, int) or align_size < 1):
            raise ValueError(
                f"{type(self).__name__}: align_size must be a positive int, got {align_size!r}"
            )
        self.num_gemms, self.align_size = num_gemms, align_size

    def _error(self, kind: type[Exception], text: str) -> Exception:
        return kind(f"{type(self).__name__}: {text}")

    def _padded(self, sizes: list[int]) -> list[int]:
        """Return the sizes of the groups with their padding."""
        unit = self.align_size
        if unit is None:
            recipe: Any = settings.current().recipe
            unit = 1 if recipe is None else get_align_size_for_quantization(recipe)
        return [-(-size // unit) * unit for size in sizes]

    def _splits(self, m_splits: list[int], inp: torch.Tensor) -> list[int]:
        sizes = host_splits(m_splits, self.num_gemms, inp, self._error)
        if sizes is None:
            raise self._error(TypeError, "m_splits must be a list of ints, got a tensor")
        return sizes

    def extra_repr(self) -> str:
        """Return what `repr` says of the module."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


def _kept_rows(sizes: list[int], padded: list[int], device: torch.device) -> torch.Tensor:
    """Return the padded row of each token, int64 `[tokens]`."""
    rows, begin = [], 0
    for size, wide in zip(sizes, padded, strict=True):
        rows.append(torch.arange(begin, begin + size, dtype=torch.int64, device=device))
        begin += wide
    return torch.cat(rows)


class Fp8Padding(_Sizes):
    """Tokens with rows of zeros behind each group, so that every group has a multiple of rows.

    `GroupedLinear` takes any sizes: this is for other kernels, and for scripts that pad.

    Args:
        num_gemms: how many groups there are.
        align_size: of what their sizes become multiples; None: of what the recipe of
            `hybridq.autocast` needs (`hybridq.recipes.get_align_size_for_quantization`), which is
            1: nothing is padded.

    Raises:
        ValueError: a number is not positive.

    Source: Transformer Engine's Fp8Padding.

    Example:
        >>> import torch, hybridq
        >>> pad, unpad = hybridq.nn.Fp8Padding(2, 4), hybridq.nn.Fp8Unpadding(2, 4)
        >>> x = torch.ones(8, 3)
        >>> padded, sizes = pad(x, [3, 5])
        >>> padded[:, 0].tolist(), sizes
        ([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [4, 8])
        >>> torch.equal(unpad(padded, [3, 5]), x)
        True
    """

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the padded tokens, and their sizes.

        Args:
            inp: `[tokens, ...]`, the tokens of group 0 first.
            m_splits: how many tokens each group has.

        Raises:
            ValueError: the splits are not one for each group, negative, or of another sum.
            TypeError: they are no ints.
        """
        sizes = self._splits(m_splits, inp)
        padded = self._padded(sizes)
        if padded == sizes:
            return inp, sizes
        rows = _kept_rows(sizes, padded, inp.device)
        made = inp.new_zeros(sum(padded), *inp.shape[1:])
        return made.index_copy(0, rows, inp), padded


class Fp8Unpadding(_Sizes):
    """Tokens without the rows that `Fp8Padding` has added.

    Args:
        num_gemms, align_size: as for `Fp8Padding`.

    Raises:
        ValueError: a number is not positive.

    Source: Transformer Engine's Fp8Unpadding.

    Example: as of `Fp8Padding`.
    """

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """Return the tokens, `[sum of m_splits, ...]`.

        Args:
            inp: padded, `[rows, ...]`.
            m_splits: how many tokens each group has without padding.

        Raises:
            ValueError: the splits are not one for each group, negative, or of another padded sum.
            TypeError: they are no ints.
        """
        given: object = m_splits
        if not isinstance(given, list | tuple) or len(given) != self.num_gemms:
            raise self._error(
                ValueError, f"m_splits must be {self.num_gemms} ints in a list, got {given!r}"
            )
        padded = self._padded(list(m_splits))
        self._splits(padded, inp)
        if padded == list(m_splits):
            return inp
        return inp.index_select(0, _kept_rows(list(m_splits), padded, inp.device))
