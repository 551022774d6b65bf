"""TensorStorage: the pair of planes, and its one way of being taken apart and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import ref

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction, opposite
from ..errors import PlaneError
from ..formats import BUFFER_NAMES, PlaneSpec
from .plane import Codes, Plane
from .plane_stack import plane_of

__all__ = ["PlaneLayout", "StorageLayout", "TensorStorage"]


@dataclass(frozen=True)
class PlaneLayout:
    """Where a plane's buffers stand in the list of unique buffers.

    Args:
        spec: canonical text.
        direction: of the plane.
        slots: (buffer name, index) pairs; index `-1 - i` is buffer i, transposed view.
        count: of matrices that the plane is of, `Plane.count`.
    """

    spec: str
    direction: Direction
    slots: tuple[tuple[str, int], ...]
    count: int | None = None

    @property
    def plain(self) -> tuple[object, ...]:
        """The fields, for files; the last one only of several matrices."""
        fields = (self.spec, self.direction, self.slots)
        return fields if self.count is None else (*fields, self.count)


#: A storage's planes; with the list of unique buffers and the shape it is the whole storage.
StorageLayout = tuple[PlaneLayout, ...]


class TensorStorage:
    """A quantized matrix: a rowwise plane, a columnwise plane, or both. Treat as frozen.

    Buffers that the planes share are one object; `flatten`, `unflatten` and `map` keep it so. One
    plane has the values: what the matrix decodes to. Transposing takes it along.

    Args:
        rowwise, columnwise: the planes, of one logical matrix.
        leads: direction of the plane that has the values, where both are there.

    Raises:
        PlaneError: both are None.
    """

    __slots__ = ("columnwise", "kin", "leads", "refusal", "rowwise")

    #: Whether the planes' memory is freed and filled again without telling autograd.
    comes_and_goes = False
    #: FP32 `[1]` or `[2]`: amaxes of what the planes were made of, and of what the rowwise plane
    #: decodes to, where delayed scaling wants to know them; None: nobody told.
    amaxes: torch.Tensor | None = None

    @property
    def holds_columns(self) -> bool:
        """Whether the columnwise plane is held beside the rowwise one, or instead of it."""
        return self.columnwise is not None

    def use(self, slot: object) -> None:
        """Have the planes of the forward that a backward belongs to, if others came since.

        Args:
            slot: of the recipe of that forward.
        """

    def check_graph(self) -> str:
        """Return why a graph must not decode the planes, or "".

        Raises:
            RuntimeError: torch.compile is at work, and no graph may hold the buffers.
        """
        return self.refusal

    def check_values(self) -> None:
        """Raise where the planes are no values to compute with, but for one recipe alone.

        Raises:
            RuntimeError: there is a `refusal`.
        """
        if self.refusal:
            raise RuntimeError(self.refusal)

    def __init__(
        self, rowwise: Plane | None, columnwise: Plane | None, leads: Direction = ROWWISE
    ) -> None:
        if rowwise is None and columnwise is None:
            raise PlaneError("TensorStorage: needs at least one plane, got none")
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.leads = leads
        #: Why the planes must not be decoded, or "".
        self.refusal = ""
        #: The memory of all planes of the storages that views share, once one of them has other
        #: planes than the rest; one list for all of them.
        self.kin: list[ref[Codes]] = []

    @property
    def count(self) -> int | None:
        """How many matrices it holds, each encoded by itself; None: one, without a leading axis."""
        return self.first.count

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that exist, rowwise first."""
        return tuple(p for p in (self.rowwise, self.columnwise) if p is not None)

    @property
    def first(self) -> Plane:
        """The plane that has the values: that of `leads`, or the only one."""
        one, other = self.rowwise, self.columnwise
        if self.leads == COLUMNWISE:
            one, other = other, one
        return one if one is not None else other  # type: ignore[return-value]

    @property
    def ordered(self) -> tuple[Plane, ...]:
        """The planes that exist, the one with the values first."""
        return self.planes if self.first is self.planes[0] else self.planes[::-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, a shared one counted once."""
        return sum(b.numel() * b.element_size() for b in self.flatten()[0])

    def spec(self, direction: Direction) -> PlaneSpec | None:
        """Return the spec of the plane that `plane` returns, or None where it would raise."""
        own = self.rowwise if direction == ROWWISE else self.columnwise
        if own is not None:
            return own.spec
        return self.first.spec if self.first.spec.is_derivable else None

    def plane(self, direction: Direction) -> Plane:
        """Return the plane of `direction`; derived from the other one where that is exact.

        Raises:
            PlaneError: there is none, and the other one does not determine it.
        """
        own = self.rowwise if direction == ROWWISE else self.columnwise
        if own is not None:
            return own
        try:
            return self.first.derive()
        except PlaneError as error:
            raise PlaneError(
                f"plane: there is no {direction} plane, and {self.first.spec} cannot be "
                f"transposed exactly; quantize with {direction}=True"
            ) from error

    def mirrored(self) -> TensorStorage:
        """Return the storage of X transposed: the same planes, swapped."""
        made = TensorStorage(
            None if self.columnwise is None else self.columnwise.mirrored(),
            None if self.rowwise is None else self.rowwise.mirrored(),
            opposite(self.first.direction),
        )
        made.kin, made.refusal = self.kin, self.refusal
        return made

    def with_usage(self, rowwise: bool, columnwise: bool) -> TensorStorage:
        """Return the storage with just the planes asked for: dropped, kept or derived.

        Without the plane that has the values, the other one's are those of the tensor.

        Args:
            rowwise, columnwise: whether it has that plane.

        Raises:
            PlaneError: a plane is asked for that is neither there nor derivable.
        """
        made = TensorStorage(
            self.plane(ROWWISE) if rowwise else None,
            self.plane(COLUMNWISE) if columnwise else None,
            self.first.direction,
        )
        made.kin = self.kin
        if made.planes != self.planes:
            self.kin.extend(ref(plane.codes) for plane in {*self.planes, *made.planes})
        return made

    def check_write(self, where: str) -> None:
        """Raise if a write would leave a plane stale that another tensor of this memory has.

        Args:
            where: the function that writes, for the error.

        Raises:
            PlaneError: `with_usage` gave that tensor, or this one, other planes.
        """
        if not self.kin:
            return
        own = [plane.codes for plane in self.planes]
        living = [codes for codes in (one() for one in self.kin) if codes is not None]
        if any(all(codes is not one for one in own) for codes in living):
            have = " and ".join(plane.direction for plane in self.planes)
            raise PlaneError(
                f"{where}: another tensor shares this memory and has a plane that this one lacks "
                f"since update_usage, which the write would leave as it is, got the {have} plane; "
                "write that tensor, give both the same planes, or write a clone of this one"
            )

    def part(self, axis: int, start: int, stop: int) -> TensorStorage | None:
        """Return rows (axis 0) or columns (axis 1) `[start, stop)` of X as views of the buffers.

        A part has the values of its whole: None if the plane that has them cannot be cut there. The
        other plane is left out where its blocks are cut.

        Args:
            axis, start, stop: of the logical matrix X.
        """
        leads = self.first.direction
        row, col = (None if p is None else p.part(axis, start, stop) for p in self._pair)
        if _of(row, col, leads) is None:
            return None
        made = TensorStorage(row, col, leads)
        made.kin = self.kin
        return made

    def is_apart(self, axis: int, part: TensorStorage) -> bool:
        """Return whether `part`, cut out along `axis`, may be written without harm to the rest.

        It may if no plane was left out and no buffer belongs to the whole tensor.
        """
        kept = [plane is not None for plane in part._pair]
        return kept == [plane is not None for plane in self._pair] and all(
            plane.is_apart(axis, own) for plane, own in zip(self.planes, part.planes, strict=True)
        )

    @staticmethod
    def cat(storages: Sequence[TensorStorage], axis: int) -> TensorStorage | None:
        """Return the storage of matrices put together along `axis`, copied.

        A plane that does not follow from the parts' bytes is left out; None if it is the one that
        has the values, or another one in some part.

        Args:
            storages: of matrices that fit together.
            axis: 0: one below the other; 1: side by side.
        """
        copies: dict[int, torch.Tensor] = {}

        def clone(buffer: torch.Tensor) -> torch.Tensor:  # one copy of what both planes share
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            return copies[id(buffer)]

        leads = storages[0].first.direction
        if any(storage.first.direction != leads for storage in storages):
            return None
        made: list[Plane | None] = []
        for planes in zip(*(storage._pair for storage in storages), strict=True):
            present = [plane for plane in planes if plane is not None]
            complete = len(present) == len(planes)
            made.append(Plane.cat(present, axis, clone) if complete else None)
        row, col = made
        if row is not None and col is not None and row.spec.format.is_identity:
            col = row.derive() if row.spec == col.spec else col
        return None if _of(row, col, leads) is None else TensorStorage(row, col, leads)

    @property
    def _pair(self) -> tuple[Plane | None, Plane | None]:
        return self.rowwise, self.columnwise

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return (name, buffer) of the unique buffers, e.g. `_rowwise_data`; views left out."""
        buffers, layout = self.flatten()
        names = [""] * len(buffers)
        for plane in layout:
            for name, slot in plane.slots:
                if slot >= 0 and not names[slot]:
                    names[slot] = f"_{plane.direction}_{name}"
        return list(zip(names, buffers, strict=True))

    def flatten(self) -> tuple[list[torch.Tensor], StorageLayout]:
        """Return the unique buffers and the layout that puts them together again.

        The layout's first plane is the one that has the values.
        """
        buffers: list[torch.Tensor] = []
        index: dict[int, int] = {}
        layout = []
        ordered = self.ordered
        for plane in ordered:
            slots = []
            for name in BUFFER_NAMES:
                buffer = plane.buffers.get(name)
                if buffer is None:
                    continue
                if id(buffer) not in index:
                    view = _transposed_slot(plane, buffer, ordered[0], index)
                    if view is not None:
                        slots.append((name, view))
                        continue
                    index[id(buffer)] = len(buffers)
                    buffers.append(buffer)
                slots.append((name, index[id(buffer)]))
            layout.append(PlaneLayout(plane.spec.text, plane.direction, tuple(slots), plane.count))
        return buffers, tuple(layout)

    @staticmethod
    def unflatten(
        buffers: Sequence[torch.Tensor], layout: StorageLayout, rows: int, cols: int
    ) -> TensorStorage:
        """Return the storage that `flatten` took apart.

        Args:
            buffers: the unique buffers, or others of their shapes.
            layout: where each goes.
            rows, cols: the logical matrix X.
        """
        planes: dict[str, Plane] = {}
        for plane in layout:
            own = {
                name: buffers[slot] if slot >= 0 else buffers[-1 - slot].transpose(-2, -1)
                for name, slot in plane.slots
            }
            spec = PlaneSpec.parse(plane.spec)
            planes[plane.direction] = plane_of(spec, plane.direction, rows, cols, own, plane.count)
        leads: Direction = layout[0].direction if layout else ROWWISE
        return TensorStorage(planes.get(ROWWISE), planes.get(COLUMNWISE), leads)

    @staticmethod
    def stack(storages: Sequence[TensorStorage]) -> TensorStorage:
        """Return one storage of several matrices of one shape, each with its planes, copied.

        Args:
            storages: of each, at least one, with planes of the same specs.
        """
        made = storages[0].stacked(len(storages))
        each = [storage.flatten()[0] for storage in storages]
        for buffer, own in zip(made.flatten()[0], zip(*each, strict=True), strict=True):
            torch.stack(own, out=buffer)
        return made

    def stacked(self, count: int) -> TensorStorage:
        """Return a storage of `count` matrices like this one, with new buffers, not written.

        Args:
            count: at least one.
        """
        buffers, layout = self.flatten()
        made = [buffer.new_empty((count, *buffer.shape)) for buffer in buffers]
        own = tuple(replace(plane, count=count) for plane in layout)
        return TensorStorage.unflatten(made, own, count * self.first.rows, self.first.cols)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TensorStorage:
        """Return the storage whose unique buffers are `function` of these, sharing kept."""
        buffers, layout = self.flatten()
        mapped = [function(buffer) for buffer in buffers]
        return TensorStorage.unflatten(mapped, layout, self.first.rows, self.first.cols)


def _of(row: Plane | None, col: Plane | None, direction: Direction) -> Plane | None:
    return row if direction == ROWWISE else col


def _transposed(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape or the strides of matrices transposed.

    By numbers: an operator on real buffers would be refused while a graph is traced.
    """
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _transposed_slot(
    plane: Plane, buffer: torch.Tensor, before: Plane, index: dict[int, int]
) -> int | None:
    """Return the slot of the second one's data of an identity pair: its twin's, transposed."""
    if plane is before or not (plane.spec.format.is_identity and before.spec == plane.spec):
        return None
    twin = before.data
    if buffer is twin or buffer.dtype != twin.dtype or buffer.shape != _transposed(twin.shape):
        return None
    # _cdata and not data_ptr(): fake tensors have storages without memory.
    is_view = buffer.untyped_storage()._cdata == twin.untyped_storage()._cdata
    same = buffer.stride() == _transposed(twin.stride()) and (
        buffer.storage_offset() == twin.storage_offset()
    )
    return -1 - index[id(twin)] if is_view and same else None
