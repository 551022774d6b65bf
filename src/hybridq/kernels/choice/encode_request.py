"""EncodeRequest: what is encoded of a matrix, one value from the modules to the backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch

__all__ = ["DECODED", "ORIGINAL", "EncodeRequest", "encode_decoded", "given_scale"]

#: What a columnwise plane is made of: the matrix, or what its rowwise plane decodes to.
ORIGINAL: Final = "original"
DECODED: Final = "rowwise_dequantized"

_Source = TypeVar("_Source")
_Made = TypeVar("_Made")


def given_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return the statistic that says that values are multiplied by `scale`, whatever their amax.

    A statistic that is not negative is an amax; operators and kernels take a multiplier negated.

    Args:
        scale: FP32, positive.
    """
    return -scale


class EncodeRequest(NamedTuple):
    """The planes that are made of a matrix `[rows, cols]`, their statistics, and random bits.

    The fields are the arguments of the operators that encode, in their order, so that a request is
    made of an operator's arguments by `EncodeRequest(*planes, **options)`, and an operator is
    called by `operator(x, *request.planes(), **request.options())`.

    Args:
        row, col: spec strings of the planes; `""`: there is none.
        row_stat, col_stat: FP32, what each plane is scaled by: an amax, or, of one scale per
            tensor, a `given_scale`; None: the matrix's own amax. `[1]`; of a
            row-scaled plane `[plane rows]`; of many matrices `[N]`; by group `[G, *shape]`.
        seed: int64 `[1]` (`[N]`, `[G]`) where a plane is rounded stochastically, or None.
        col_source: what the columnwise plane is made of, ORIGINAL or DECODED.
        keep_row: whether the rowwise plane is returned; it may be only what the other is made of.
        row0, col0: where the matrix lies in a larger tensor, for random bits.
        row_stream, col_stream: random streams of the planes.
        by_group: every group of tokens is a tensor of its own (`encode_ragged`).
        row_index: int64 `[rows]`: the row of what is given that each row of the matrix is, or None:
            the matrix is given (`encode_ragged`).
    """

    row: str = ""
    col: str = ""
    row_stat: torch.Tensor | None = None
    col_stat: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    col_source: str = ORIGINAL
    keep_row: bool = True
    row0: int = 0
    col0: int = 0
    row_stream: int = 0
    col_stream: int = 1
    by_group: bool = False
    row_index: torch.Tensor | None = None

    def is_decoded(self) -> bool:
        """Return whether the columnwise plane is made of what the rowwise plane decodes to."""
        return self.col_source != ORIGINAL and self.row != "" and self.col != ""

    def planes(self) -> tuple[Any, ...]:
        """Return what operators take by position, after the matrix."""
        return self.row, self.col, self.row_stat, self.col_stat, self.seed

    def options(self) -> dict[str, Any]:
        """Return what operators take by name; where the matrix lies is `encode`'s alone."""
        return {
            "col_source": self.col_source,
            "keep_row": self.keep_row,
            "row_stream": self.row_stream,
            "col_stream": self.col_stream,
        }

    def row_alone(self) -> EncodeRequest:
        """Return the request of the rowwise plane, which is returned."""
        return self._replace(col="", col_stat=None, col_source=ORIGINAL, keep_row=True)

    def col_alone(self) -> EncodeRequest:
        """Return the request of the columnwise plane of a matrix that is there."""
        return self._replace(row="", row_stat=None, col_source=ORIGINAL)

    def of_group(self, g: int) -> EncodeRequest:
        """Return the request of group g, or of matrix g of several, alone."""
        row_stat, col_stat, seed = self.row_stat, self.col_stat, self.seed
        return self._replace(
            row_stat=None if row_stat is None else row_stat[g : g + 1],
            col_stat=None if col_stat is None else col_stat[g : g + 1],
            seed=None if seed is None else seed[g : g + 1],
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors of the request, without `row_index`."""
        return self.row_stat, self.col_stat, self.seed


def encode_decoded(
    request: EncodeRequest,
    encode: Callable[[_Source, EncodeRequest], list[_Made]],
    decode: Callable[[list[_Made]], _Source],
    x: _Source,
) -> list[_Made]:
    """Return both planes of x, the columnwise one of what the rowwise one decodes to.

    Args:
        request: `is_decoded`.
        encode: makes one plane of x, or of what `decode` returns.
        decode: returns what the rowwise plane's buffers decode to, in x's place.
        x: what is encoded: a matrix, or whatever `encode` takes.
    """
    rows = encode(x, request.row_alone())
    cols = encode(decode(rows), request.col_alone())
    return [*(rows if request.keep_row else []), *cols]
