"""Planes of a matrix, tile by tile: the same bits as of the matrix in one piece.

What a block cannot know of the rest, the amax of the tensor or of a row, is found in passes of its
own over the tiles before any tile is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..storage import Plane, PlanePair, encode_pair
from .record import Record
from .tiles import Tile

__all__ = ["AMAX", "DECODED", "ENCODE", "PLAIN", "MatrixEncoder", "passes_of"]

#: The passes over a matrix: its statistics, those of what its rowwise plane decodes to, its planes.
AMAX: Final = "amax"
DECODED: Final = "decoded"
ENCODE: Final = "encode"

#: A plane without a transform, of one amax for the tensor.
PLAIN: Final = PlaneSpec.parse("fp8_e4m3").text
_FP32_MAX: Final = torch.finfo(torch.float32).max
_PIECE: Final = 1 << 20


@dataclass
class _Stat:
    """The statistic that a plane needs before it is encoded, as far as it is known.

    Args:
        spec, direction: of the plane.
        value: FP32 `[1]`, or one per row of the plane.
        is_given: it was found of several tensors together, of which this is one.
    """

    spec: PlaneSpec
    direction: Direction
    value: torch.Tensor
    is_given: bool = False

    def add(self, tile: Tile, x: torch.Tensor, plain: torch.Tensor | None) -> None:
        """Take in a tile: its values, and the amax of these if it is known."""
        if self.is_given:
            return
        if plain is None or self.spec.signs is not None or self.spec.row_scaled:
            plain = torch.ops.hybridq.amax(x, self.spec.text, self.direction)
        value = self.of(tile)
        value.copy_(torch.maximum(value, plain))  # NaN stays

    def of(self, tile: Tile) -> torch.Tensor:
        """Return the part that a tile's plane needs, as a view."""
        if not self.spec.row_scaled:
            return self.value
        is_rowwise = self.direction == ROWWISE
        first, count = (tile.row, tile.rows) if is_rowwise else (tile.col, tile.cols)
        return self.value.narrow(0, first, count)


def passes_of(record: Record, is_whole: bool, is_given: bool = False) -> tuple[str, ...]:
    """Return the passes over the tiles of a matrix.

    Args:
        record: of the tensor.
        is_whole: there is one tile: it finds its own statistics.
        is_given: the statistic of its rowwise plane, its only one, is known.
    """
    if is_whole or is_given:
        return (ENCODE,)
    row, col = _source_row(record), record.col
    is_decoded = _is_decoded(record)
    direct = (row, None if is_decoded else col)
    has_stats = any(spec is not None and spec.needs_amax for spec in direct)
    turns = is_decoded and col is not None and col.needs_amax
    return (*((AMAX,) if has_stats else ()), *((DECODED,) if turns else ()), ENCODE)


def _is_decoded(record: Record) -> bool:
    """Return whether the columnwise plane is made of what the rowwise one decodes to."""
    return record.col is not None and record.quantizer.columnwise_source != "original"


def _source_row(record: Record) -> PlaneSpec | None:
    """Return the spec of the rowwise plane that is made, be it only as a source."""
    own = record.quantizer.rowwise
    return own.resolve(record.dtype) if _is_decoded(record) and own is not None else record.row


class MatrixEncoder:
    """Encodes one matrix of a tensor.

    Args:
        record: of the tensor.
        stat: FP32 `[1]`, the amax that the rowwise plane is encoded by; None: the tensor's own.

    Attributes:
        amax: FP32 `[1]`, of what has been seen: NaN if there was one.
        num_nonfinite: how many values so far are NaN or infinite.
    """

    def __init__(self, record: Record, stat: torch.Tensor | None = None) -> None:
        self._record = record
        self._is_given = stat is not None
        self._is_decoded = _is_decoded(record)
        self._row = _source_row(record)
        self._col = None if record.is_derived else record.col
        self._row_stat = self._stat(self._row, ROWWISE)
        self._col_stat = self._stat(self._col, COLUMNWISE)
        if stat is not None and self._row_stat is not None:
            self._row_stat.value, self._row_stat.is_given = stat, True
        self.amax = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.num_nonfinite = 0

    def _stat(self, spec: PlaneSpec | None, direction: Direction) -> _Stat | None:
        if spec is None or not spec.needs_amax:
            return None
        rows = self._record.matrix[0 if direction == ROWWISE else 1]
        zeros = torch.zeros(spec.stat_shape(rows), dtype=torch.float32, device="cpu")
        return _Stat(spec, direction, zeros)

    def observe(self, which: str, tile: Tile, x: torch.Tensor) -> None:
        """Take a tile into the statistics of the pass `which`.

        Args:
            which: `AMAX` or `DECODED`.
            tile: of the matrix.
            x: its values.
        """
        if which == AMAX:
            self.look(tile, x)
        elif self._col_stat is not None:
            self._col_stat.add(tile, self._decoded(tile, x), None)

    def look(self, tile: Tile, x: torch.Tensor) -> None:
        """Take a tile into the amaxes and the count of values that are not finite.

        Args:
            tile: of the matrix.
            x: its values.
        """
        plain = torch.ops.hybridq.amax(x, PLAIN, ROWWISE)
        self.amax = torch.maximum(self.amax, plain)
        if not bool(plain < _FP32_MAX):  # NaN, or an infinity, or the very largest value
            flat = x.reshape(-1)
            for start in range(0, flat.shape[0], _PIECE):
                piece = flat[start : start + _PIECE]
                self.num_nonfinite += int((~torch.isfinite(piece)).sum())
        for stat in (self._row_stat, None if self._is_decoded else self._col_stat):
            if stat is not None:
                stat.add(tile, x, plain)

    def _decoded(self, tile: Tile, x: torch.Tensor) -> torch.Tensor:
        """Return what the rowwise plane of a tile decodes to."""
        row = self._row
        if row is None or row.plain_text(x.dtype).is_plain:
            return x
        stat = None if self._row_stat is None else self._row_stat.of(tile)
        buffers = torch.ops.hybridq.encode(x, row.text, "", stat)
        return torch.ops.hybridq.decode(buffers, row.text, *x.shape, x.dtype)

    def encode(self, tile: Tile, x: torch.Tensor) -> list[Plane]:
        """Return the planes of a tile that are stored; all passes before must have seen all tiles.

        Args:
            tile: of the matrix.
            x: its values.
        """
        passes = passes_of(self._record, tile.is_whole, self._is_given)
        if AMAX not in passes:
            self.look(tile, x)
        row_stat = None if self._row_stat is None else self._row_stat.of(tile)
        col_stat = None if self._col_stat is None else self._col_stat.of(tile)
        if self._is_decoded and DECODED not in passes:
            col_stat = None  # the operation finds that of the decoded values itself
        row, col = (None if s is None else s.plain_text(x.dtype) for s in (self._row, self._col))
        source = "rowwise_dequantized" if self._is_decoded else "original"
        pair = PlanePair.of(row, col, source, self._record.row is not None)
        found = encode_pair(x, pair, EncodeRequest(row_stat=row_stat, col_stat=col_stat))
        planes = []
        for spec, direction, buffers in (
            (self._record.row, ROWWISE, found[0]),
            (self._col, COLUMNWISE, found[1]),
        ):
            if spec is not None:
                names = (buffer.name for buffer in spec.buffers(1, 1))
                named = dict(zip(names, buffers, strict=True))
                planes.append(Plane(spec, direction, tile.rows, tile.cols, named))
        return planes
