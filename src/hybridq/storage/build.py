"""From a plain matrix to buffers and storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec, PlaneText
from ..kernels.choice import DECODED, ORIGINAL, EncodeRequest
from ..kernels.operators import contiguous_copy, encode, encode_plan, encode_recording
from .plane import Plane
from .storage import TensorStorage

__all__ = [
    "PlanePair",
    "StoragePlan",
    "build_storage",
    "build_storages",
    "encode_pair",
    "named_buffers",
    "owned",
]


class PlanePair(NamedTuple):
    """Which planes of a matrix are wanted, and which of them an operator makes.

    Args:
        made: the request of the planes that the operator makes, without statistics and seed.
        is_plain_row, is_plain_col: the plane is the matrix itself, or its transposed view.
        split: how many buffers the rowwise plane has that the operator returns.
    """

    made: EncodeRequest
    is_plain_row: bool
    is_plain_col: bool
    split: int

    @staticmethod
    def of(
        row: PlaneText | None,
        col: PlaneText | None,
        col_source: str = ORIGINAL,
        keep_row: bool = True,
    ) -> PlanePair:
        """Return the pair of these planes.

        Args:
            row, col: the planes, or None; the first is also the source of a columnwise plane with
                `col_source=DECODED`, then `keep_row` says whether it is wanted itself.
            col_source: what the columnwise plane is made of.
            keep_row: whether the rowwise plane is wanted.
        """
        is_plain_row = row is not None and row.is_plain
        # What a plain rowwise plane decodes to is the original.
        is_decoded = col_source != ORIGINAL and row is not None and not is_plain_row
        is_plain_col = col is not None and col.is_plain and not is_decoded
        row_text = "" if row is None or is_plain_row else row.spec
        col_text = "" if col is None or is_plain_col else col.spec
        keeps = keep_row and row_text != ""
        is_decoded = is_decoded and col_text != ""
        row_text = row_text if keeps or is_decoded else ""
        source = DECODED if is_decoded else ORIGINAL
        return PlanePair(
            EncodeRequest(row_text, col_text, None, None, None, source, keeps),
            is_plain_row and keep_row,
            is_plain_col,
            row.num_buffers if keeps and row is not None else 0,
        )

    def is_plain(self) -> bool:
        """Return whether an operator has nothing to make."""
        return not (self.made.row or self.made.col)

    def request(self, rest: EncodeRequest) -> EncodeRequest:
        """Return the request of these planes with the statistics, seed and streams of `rest`."""
        made = self.made
        stats = (rest.row_stat, rest.col_stat, rest.seed)
        own = (made.row, made.col, *stats, made.col_source, made.keep_row)
        return EncodeRequest(*own, 0, 0, rest.row_stream, rest.col_stream)

    def planes(
        self, x: torch.Tensor, made: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the buffers of both planes of x, `[]` where not wanted.

        Args:
            x: the matrix.
            made: what the operator returned, or nothing.
        """
        row = [x] if self.is_plain_row else list(made[: self.split])
        return row, [x.t()] if self.is_plain_col else list(made[self.split :])


def encode_pair(
    x: torch.Tensor,
    pair: PlanePair,
    rest: EncodeRequest,
    *,
    direct: bool = False,
    amaxes: torch.Tensor | None = None,
    at: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the buffers of the rowwise and of the columnwise plane of x, `[]` where not wanted.

    Unlike the operation, a plain plane is x itself and its columnwise twin a transposed view.

    Args:
        x: `[rows, cols]`.
        pair: which planes.
        rest: statistics, seed and streams.
        direct: the caller has checked x and the seed, and that the dispatcher can be bypassed.
        amaxes, at: FP32 `[n]`, of which those numbered `at` are updated to max|x|; or None.
    """
    if pair.is_plain():
        return pair.planes(x, ())
    request = pair.request(rest)
    if amaxes is None or not at:
        return pair.planes(x, encode(x, request, direct))
    return pair.planes(x, encode_recording(x, request, direct, amaxes, at))


class StoragePlan:
    """How storages of some planes of tensors of one dtype are made.

    Args:
        row, col: specs of the planes, or None; an identity's open dtype becomes `dtype`.
        dtype: of the tensors.
        col_source, keep_row: as `encode_pair` takes them.

    Attributes:
        row, col: the planes with their dtypes fixed.
        row_text, col_text: the same as PlaneText.
        pair: which of them an operator makes.
        is_one_identity: both planes are the tensor, one a view of the other.
    """

    __slots__ = (
        "_col_names",
        "_keeps_row",
        "_row_names",
        "_shared",
        "_texts",
        "col",
        "col_text",
        "is_one_identity",
        "pair",
        "row",
        "row_text",
    )

    def __init__(
        self,
        row: PlaneSpec | None,
        col: PlaneSpec | None,
        dtype: torch.dtype,
        col_source: str = "original",
        keep_row: bool = True,
    ) -> None:
        self.row = row = None if row is None else row.resolve(dtype)
        self.col = col = None if col is None else col.resolve(dtype)
        self.row_text = None if row is None else row.plain_text(dtype)
        self.col_text = None if col is None else col.plain_text(dtype)
        self.pair = pair = PlanePair.of(self.row_text, self.col_text, col_source, keep_row)
        self._keeps_row = keep_row
        self._row_names, self._col_names = _names(row), _names(col)
        self.is_one_identity = row is not None and row == col and row.format.is_identity
        #: The operation's texts where one step makes all planes of x, or None.
        self._texts: tuple[str, str] | None = None
        if keep_row and not (pair.made.is_decoded() or pair.is_plain_row or pair.is_plain_col):
            self._texts = pair.made.planes()[:2]
        #: Buffer with one value for the whole tensor: the same in both planes of the same values,
        #: and so one object.
        self._shared = ""
        is_same = col_source == "original" and row is not None and row == col and row.is_derivable
        if keep_row and is_same and row is not None:
            shared = "scale" if row.format.is_tensor_scaled else "amax"
            self._shared = shared if shared in self._col_names else ""

    def build(
        self,
        x: torch.Tensor,
        rest: EncodeRequest,
        *,
        direct: bool = False,
        amaxes: torch.Tensor | None = None,
    ) -> TensorStorage:
        """Return the storage of x; buffers that both planes hold alike are shared.

        The storage owns its memory: an identity plane is a copy, so that no later write to x or to
        the storage reaches the other.

        Args:
            x: `[rows, cols]`.
            rest, direct: as `encode_pair` takes them.
            amaxes: FP32 `[1]`, updated to max|x|; or None.
        """
        if self.is_one_identity:
            return self.plain(x)
        made = None
        if direct and self._texts is not None and rest.row_stat is None is rest.col_stat:
            plan = encode_plan(*self._texts, x.dtype, "cpu" if x.is_cpu else x.device.type)
            if plan.at_once is not None:
                made = plan.at_once(x, rest)
        if made is None:
            planes = encode_pair(x, self.pair, rest, direct=direct, amaxes=amaxes, at=(0,))
            made = self._owned(x, planes)
        return self.assemble(x, made)

    def plain(self, x: torch.Tensor) -> TensorStorage:
        """Return the storage of two identity planes: one is a view of the other.

        Args:
            x: `[rows, cols]`.
        """
        dtype = None if self.row is None else self.row.format.storage_dtype
        first = Plane.of(contiguous_copy(x, dtype))
        return TensorStorage(first if self._keeps_row else None, first.derive())

    def assemble(self, x: torch.Tensor, made: list[torch.Tensor]) -> TensorStorage:
        """Return the storage of x whose planes have these buffers.

        Args:
            x: `[rows, cols]`.
            made: the rowwise plane's buffers, if it is kept, and then the columnwise one's.
        """
        row, col = self.row, self.col
        rows, cols = x.shape
        first = second = None
        if row is not None and self._keeps_row:
            names = self._row_names
            first = Plane(row, ROWWISE, rows, cols, zip(names, made, strict=False))
            made = made[len(names) :]
        if col is not None:
            named = zip(self._col_names, made, strict=True)
            second = Plane(col, COLUMNWISE, rows, cols, named)
            if self._shared and first is not None:
                second.buffers[self._shared] = first.buffers[self._shared]
        return TensorStorage(first, second)

    def _owned(
        self, x: torch.Tensor, planes: tuple[list[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the buffers of both planes, of which none is x's own."""
        row, col = planes
        if self.pair.is_plain_row:
            row = [contiguous_copy(x)]
        if self.pair.is_plain_col:
            col = [contiguous_copy(x.t())]
        return row + col

    def build_each(self, xs: Sequence[torch.Tensor], rest: EncodeRequest) -> list[TensorStorage]:
        """Return the storage of each of xs, by one operation.

        Args:
            xs: matrices `[rows, cols]` of one dtype and device, each of its own size.
            rest: statistics and seeds `[N]`, and streams.
        """
        if self.is_one_identity:
            return [self.plain(x) for x in xs]
        pair, flat = self.pair, ()
        if not pair.is_plain():
            request = pair.request(rest)
            flat = torch.ops.hybridq.encode_many(xs, *request.planes(), **request.options())
        size = len(flat) // len(xs)
        made = (pair.planes(x, flat[i * size : (i + 1) * size]) for i, x in enumerate(xs))
        return [self.assemble(x, self._owned(x, own)) for x, own in zip(xs, made, strict=True)]


def build_storage(
    x: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
) -> TensorStorage:
    """Return the storage of x `[rows, cols]` with these planes: `StoragePlan.build`, once.

    Args:
        x: `[rows, cols]`.
        row, col: specs of the planes, or None.
        row_stat, col_stat, seed, col_source, keep_row: as `encode_pair` takes them.
    """
    plan = StoragePlan(row, col, x.dtype, col_source, keep_row)
    return plan.build(x, EncodeRequest(row_stat=row_stat, col_stat=col_stat, seed=seed))


def build_storages(
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    seeds: torch.Tensor | None = None,
    **options: Any,
) -> list[TensorStorage]:
    """Return what `build_storage` does of each of xs, by one operation.

    Args:
        xs: matrices `[rows, cols]` of one dtype and device, each of its own size.
        row, col: specs of the planes, or None.
        seeds: int64 `[N]` where a spec is stochastic.
        options: col_source and keep_row, as `build_storage` takes them.
    """
    if not xs:
        return []
    plan = StoragePlan(row, col, xs[0].dtype, **options)
    return plan.build_each(xs, EncodeRequest(seed=seeds))


def _names(spec: PlaneSpec | None) -> tuple[str, ...]:
    return () if spec is None else tuple(buffer.name for buffer in spec.buffers(1, 1))


def owned(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """Return the data of a plain plane of x: a contiguous copy in the plane's dtype."""
    return contiguous_copy(x, spec.format.storage_dtype)


def named_buffers(spec: PlaneSpec, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers of a plane of `spec` by their names."""
    names = [buffer.name for buffer in spec.buffers(1, 1)]
    return dict(zip(names, buffers, strict=True))
