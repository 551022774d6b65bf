"""From a plain matrix to buffers and storages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..direction import COLUMNWISE, ROWWISE
from ..formats import PlaneSpec, PlaneText
from ..kernels.encode import encode_plan
from ..kernels.ops import encode
from ..kernels.ops_delayed import encode_recording
from .plane import Plane
from .storage import TensorStorage

__all__ = [
    "StoragePlan",
    "build_storage",
    "build_storages",
    "encode_pair",
    "named_buffers",
    "owned",
]


def _texts(
    row: PlaneText | None, col: PlaneText | None, col_source: str, keep_row: bool
) -> tuple[str, str, bool, bool]:
    """Return what encode has to make: both texts, and whether it keeps the row and decodes it."""
    # What a plain rowwise plane decodes to is the original.
    from_row = col_source != "original" and row is not None and not row.is_plain
    row_text = row.spec if row is not None and not row.is_plain else ""
    col_text = col.spec if col is not None and (from_row or not col.is_plain) else ""
    keeps = keep_row and row_text != ""
    from_row = from_row and col_text != ""
    return row_text if keeps or from_row else "", col_text, keeps, from_row


def encode_pair(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    *,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
    direct: bool = False,
    amaxes: torch.Tensor | None = None,
    at: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the buffers of the rowwise and of the columnwise plane of x, `[]` where not wanted.

    Unlike the operation, a plain plane is x itself and its columnwise twin a transposed view.

    Args:
        x: `[rows, cols]`.
        row, col: the planes, or None; the first is also the source of a columnwise plane with
            `col_source="rowwise_dequantized"`, then `keep_row` says whether it is returned.
        row_stat, col_stat: FP32 `[1]` amax given from outside.
        seed: int64 `[1]` where a spec is stochastic.
        col_source: `"original"` or `"rowwise_dequantized"`.
        row_stream, col_stream: random streams.
        direct: the caller has checked x and the seed, and that nothing watches them.
        amaxes, at: FP32 `[n]`, of which those numbered `at` are raised to max|x|; or None.
    """
    row_text, col_text, keeps_row, from_row = _texts(row, col, col_source, keep_row)
    row_buffers = [x] if row is not None and row.is_plain and keep_row else []
    col_buffers = [x.t()] if col is not None and col_text == "" else []
    if not row_text and not col_text:
        return row_buffers, col_buffers
    args = (x, row_text, col_text, row_stat, col_stat, seed, from_row, keeps_row)
    if amaxes is None or not at:
        buffers = encode(*args, row_stream, col_stream, direct)
    else:
        buffers = encode_recording(*args, (row_stream, col_stream), direct, amaxes, at)
    split = row.num_buffers if keeps_row and row is not None else 0
    return row_buffers or buffers[:split], col_buffers or buffers[split:]


class StoragePlan:
    """How storages of some planes of tensors of one dtype are made.

    Args:
        row, col: specs of the planes, or None; an identity's open dtype becomes `dtype`.
        dtype: of the tensors.
        col_source, keep_row: as `encode_pair` takes them.

    Attributes:
        row, col: the planes with their dtypes fixed.
        row_text, col_text: the same as PlaneText.
        is_one_identity: both planes are the tensor, one a view of the other.
    """

    __slots__ = (
        "_col_names",
        "_col_source",
        "_keeps_row",
        "_owns_col",
        "_owns_row",
        "_row_names",
        "_shared",
        "_texts",
        "col",
        "col_text",
        "is_one_identity",
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
        self._col_source, self._keeps_row = col_source, keep_row
        self._row_names, self._col_names = _names(row), _names(col)
        self.is_one_identity = row is not None and row == col and row.format.is_identity
        self._owns_row = self.row_text is not None and self.row_text.is_plain
        is_decoded = col_source != "original" and row is not None and not self._owns_row
        self._owns_col = self.col_text is not None and self.col_text.is_plain and not is_decoded
        #: The operation's texts where one step makes all planes of x, or None.
        self._texts: tuple[str, str] | None = None
        if keep_row and not (is_decoded or self._owns_row or self._owns_col):
            self._texts = ("" if row is None else row.text, "" if col is None else col.text)
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
        row_stat: torch.Tensor | None = None,
        col_stat: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
        *,
        direct: bool = False,
        amaxes: torch.Tensor | None = None,
    ) -> TensorStorage:
        """Return the storage of x; buffers that both planes hold alike are shared.

        The storage owns its memory: an identity plane is a copy, so that no later write to x or to
        the storage reaches the other.

        Args:
            x: `[rows, cols]`.
            row_stat, col_stat, seed, direct: as `encode_pair` takes them.
            amaxes: FP32 `[1]`, raised to max|x|; or None.
        """
        if self.is_one_identity:
            return self.plain(x)
        made = None
        if direct and self._texts is not None and row_stat is None and col_stat is None:
            plan = encode_plan(*self._texts, x.dtype, "cpu" if x.is_cpu else x.device.type)
            if plan.at_once is not None:
                made = plan.at_once(x, None, None, seed, 0, 0, 0, 1)
        if made is None:
            made = self._encode(x, row_stat, col_stat, seed, direct, amaxes)
        return self.assemble(x, made)

    def plain(self, x: torch.Tensor) -> TensorStorage:
        """Return the storage of two identity planes: one is a view of the other.

        Args:
            x: `[rows, cols]`.
        """
        dtype = x.dtype if self.row is None else self.row.format.storage_dtype or x.dtype
        first = Plane.of(x.to(dtype, copy=True, memory_format=torch.contiguous_format))
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

    def _encode(
        self,
        x: torch.Tensor,
        row_stat: torch.Tensor | None,
        col_stat: torch.Tensor | None,
        seed: torch.Tensor | None,
        direct: bool,
        amaxes: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return the buffers of the rowwise and then of the columnwise plane; none is x's own."""
        row_buffers, col_buffers = encode_pair(
            x,
            self.row_text,
            self.col_text,
            row_stat=row_stat,
            col_stat=col_stat,
            seed=seed,
            col_source=self._col_source,
            keep_row=self._keeps_row,
            direct=direct,
            amaxes=amaxes,
            at=(0,),
        )
        if self._owns_row and row_buffers:  # x itself
            row_buffers = [_copy(x)]
        if self._owns_col:  # a view of x
            col_buffers = [_copy(x.t())]
        return row_buffers + col_buffers


def _encode_each(
    xs: Sequence[torch.Tensor],
    row: PlaneText | None,
    col: PlaneText | None,
    seeds: torch.Tensor | None,
    col_source: str,
    keep_row: bool,
) -> list[list[torch.Tensor]]:
    """Return both planes' buffers of each of xs, by one operation; a plain plane is a copy."""
    row_text, col_text, keeps_row, from_row = _texts(row, col, col_source, keep_row)
    split = row.num_buffers if keeps_row and row is not None else 0
    flat: Sequence[torch.Tensor] = []
    if row_text or col_text:
        flat = torch.ops.hybridq.encode_many(
            xs,
            row_text,
            col_text,
            None,
            None,
            seeds,
            col_source="rowwise_dequantized" if from_row else "original",
            keep_row=keeps_row,
        )
    size = len(flat) // len(xs)
    every = []
    for i, x in enumerate(xs):
        own = list(flat[i * size : (i + 1) * size])
        plain_row = [_copy(x)] if row is not None and row.is_plain and keep_row else []
        plain_col = [_copy(x.t())] if col is not None and col_text == "" else []
        every.append((plain_row or own[:split]) + (plain_col or own[split:]))
    return every


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
    return plan.build(x, row_stat, col_stat, seed)


def build_storages(
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    *,
    seeds: torch.Tensor | None = None,
    col_source: str = "original",
    keep_row: bool = True,
) -> list[TensorStorage]:
    """Return what `build_storage` does of each of xs, by one operation.

    Args:
        xs: matrices `[rows, cols]` of one dtype and device, each of its own size.
        row, col: specs of the planes, or None.
        seeds: int64 `[N]` where a spec is stochastic.
        col_source, keep_row: as `encode_pair` takes them.
    """
    if not xs:
        return []
    plan = StoragePlan(row, col, xs[0].dtype, col_source, keep_row)
    if plan.is_one_identity:
        return [plan.plain(x) for x in xs]
    made = _encode_each(xs, plan.row_text, plan.col_text, seeds, col_source, keep_row)
    return [plan.assemble(x, buffers) for x, buffers in zip(xs, made, strict=True)]


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _names(spec: PlaneSpec | None) -> tuple[str, ...]:
    return () if spec is None else tuple(buffer.name for buffer in spec.buffers(1, 1))


def owned(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """Return the data of a plain plane of x: a contiguous copy in the plane's dtype."""
    dtype = spec.format.storage_dtype or x.dtype
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def named_buffers(spec: PlaneSpec, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers of a plane of `spec` by their names."""
    names = [buffer.name for buffer in spec.buffers(1, 1)]
    return dict(zip(names, buffers, strict=True))
