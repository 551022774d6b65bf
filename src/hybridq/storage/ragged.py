"""RaggedTensor: quantized tokens sorted by group, as the products of experts take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import PlaneError
from ..formats import PlaneSpec
from ..kernels.choice import EncodeRequest
from ..kernels.ragged import capacity
from .build import named_buffers, owned
from .plane import Plane

__all__ = ["RaggedTensor", "build_ragged"]


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """Tokens X `[T, C]` sorted by group: their planes, and where the groups end.

    The two planes are not of one matrix, so this is no TensorStorage: the rowwise plane is that of
    X; a quantized columnwise plane is that of X with each group padded with zeros, so that no block
    lies in two groups (`kernels.ragged`). `hybridq.grouped_gemm` takes it as it is.

    Args:
        rowwise: plane of X, or None.
        columnwise: plane whose own matrix is `[C, capacity]`, or `[C, T]` of a plain one; or None.
        offsets: int32 `[G]` on the planes' device: where each group ends. Tokens behind the last
            end belong to no group.
        tokens: T.
        dtype: nominal dtype, that of X.

    Raises:
        PlaneError: there is no plane, or one is not of these tokens.
    """

    rowwise: Plane | None
    columnwise: Plane | None
    offsets: torch.Tensor
    tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.rowwise is None and self.columnwise is None:
            raise PlaneError("RaggedTensor: needs at least one plane, got none")
        for plane, direction in ((self.rowwise, ROWWISE), (self.columnwise, COLUMNWISE)):
            if plane is None:
                continue
            wanted = self.tokens
            if direction == COLUMNWISE and not plane.spec.format.is_identity:
                wanted = capacity(self.tokens, self.groups)
            if plane.direction != direction or plane.rows != wanted:
                raise PlaneError(
                    f"RaggedTensor: the {direction} plane of {self.tokens} tokens in "
                    f"{self.groups} groups must have {wanted} rows of X, got {plane!r}"
                )

    @property
    def groups(self) -> int:
        """How many groups there are, empty ones included."""
        return self.offsets.shape[0]

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that exist, rowwise first."""
        return tuple(p for p in (self.rowwise, self.columnwise) if p is not None)

    @property
    def cols(self) -> int:
        """C, the width of a token."""
        return self.planes[0].cols

    @property
    def device(self) -> torch.device:
        """Device of the planes and of the offsets."""
        return self.offsets.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, shared memory counted once, without the offsets."""
        # _cdata and not data_ptr(): fake tensors have storages without memory.
        buffers = {b.untyped_storage()._cdata: b for plane in self.planes for b in plane.tensors}
        return sum(b.numel() * b.element_size() for b in buffers.values())

    def plane(self, direction: Direction) -> Plane:
        """Return the plane of `direction`.

        Raises:
            PlaneError: there is none. None follows from the other one: they have other blocks.
        """
        found = self.rowwise if direction == ROWWISE else self.columnwise
        if found is None:
            raise PlaneError(
                f"RaggedTensor: there is no {direction} plane; quantize_grouped makes it of a "
                f"quantizer with {direction}=True"
            )
        return found

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RaggedTensor:
        """Return the ragged tensor whose buffers and offsets are `function` of these."""
        row = None if self.rowwise is None else self.rowwise.map(function)
        if row is not None and self.columnwise is not None and _is_plain_pair(self):
            col: Plane | None = row.derive()  # the same memory
        else:
            col = None if self.columnwise is None else self.columnwise.map(function)
        return RaggedTensor(row, col, function(self.offsets), self.tokens, self.dtype)

    def __repr__(self) -> str:
        planes = ", ".join(map(repr, self.planes))
        return f"RaggedTensor({self.tokens} tokens in {self.groups} groups, {planes})"


def _is_plain_pair(ragged: RaggedTensor) -> bool:
    first, second = ragged.planes
    return first.spec.format.is_identity and first.spec == second.spec


def build_ragged(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> RaggedTensor:
    """Return x `[T, C]`, its rows sorted by group, with the planes of these specs.

    Args:
        x: float32, bfloat16 or float16; the result owns its memory.
        offsets: int32 `[G]`, ends of the groups.
        row, col: specs of the planes, or None.
        request: statistics, random bits, and what the columnwise plane is made of; its own specs
            are not read.
    """
    keep_row = request.keep_row
    row = None if row is None else row.resolve(x.dtype)
    col = None if col is None else col.resolve(x.dtype)
    tokens, cols = x.shape
    if row is not None and row == col and row.format.is_identity:
        plain = Plane(row, ROWWISE, tokens, cols, {"data": owned(x, row)})
        return RaggedTensor(plain if keep_row else None, plain.derive(), offsets, tokens, x.dtype)
    row_text, col_text = ("" if one is None else one.text for one in (row, col))
    request = request._replace(row=row_text, col=col_text)
    buffers = torch.ops.hybridq.encode_ragged(x, offsets, *request.planes(), **request.options())
    split = len(row.buffers(1, 1)) if row is not None and keep_row else 0
    first = second = None
    if row is not None and keep_row:
        first = Plane(row, ROWWISE, tokens, cols, named_buffers(row, buffers[:split]))
    if col is not None:
        rows = tokens if col.format.is_identity else capacity(tokens, offsets.shape[0])
        second = Plane(col, COLUMNWISE, rows, cols, named_buffers(col, buffers[split:]))
    return RaggedTensor(first, second, offsets, tokens, x.dtype)
