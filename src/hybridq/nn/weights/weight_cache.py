"""Quantized weights that modules keep between the microbatches of one optimizer step.

Whether a weight still holds the values that it was quantized from cannot be seen: a write through
`.data` raises no version. So a weight is kept only where the caller says that it does not change
(`is_first_microbatch`). What can be seen is checked all the same: with other memory, another
version, shape, dtype or recipe, or after a step of any optimizer of torch, it is quantized again.
The last needs a hook of its own: torch's fused optimizers raise no version either.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._torch_private import graph_task_id
from ...direction import COLUMNWISE, ROWWISE, Direction
from ...formats import PlaneSpec, PlaneText
from ...kernels import OperandCache
from ...kernels.inputs import begins_at, can_bypass_dispatcher, can_cache, is_plain, stream_of
from ...recipes import SlotPlan
from ...storage import Plane, TensorStorage

__all__ = [
    "Buffers",
    "CachedWeight",
    "PrequantizedWeight",
    "cached_weight",
    "prequantized_weight",
    "versions_of",
]

Buffers = list[torch.Tensor]


class _Steps:
    """Counts the steps of all optimizers of the process, from the first weight on that is kept."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._is_counting = False

    def start(self) -> None:
        """Begin to count; later calls do nothing."""
        with self._lock:
            if not self._is_counting:
                register_optimizer_step_post_hook(self._add)
                self._is_counting = True

    def _add(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled step raises versions, and must not guard a number that grows
        with self._lock:
            self.count += 1  # never goes back, whichever threads step at once


_steps = _Steps()


class CachedWeight:
    """The planes of a weight, and what GEMMs make of them. Copies and pickles are empty.

    Args:
        key: what they are made of; equal for the same memory, version, shape, plan and stream.
        storage: the weight's memory, without holding it: its address is not given away again.

    Attributes:
        row, col: buffers of the planes; empty before the first forward, and where not needed.
        row_kept, col_kept: the operands made of them.
    """

    __slots__ = ("col", "col_kept", "key", "row", "row_kept", "storage")

    def __init__(self, key: tuple[Any, ...], storage: StorageWeakRef) -> None:
        self.key = key
        self.storage = storage
        self.row: Buffers = []
        self.col: Buffers = []
        self.row_kept = OperandCache(at_once=True)
        self.col_kept = OperandCache(at_once=True)

    def has(self, with_col: bool) -> bool:
        """Return whether the rowwise plane is there and, if it is wanted, the columnwise one."""
        return len(self.row) > 0 and (len(self.col) > 0 or not with_col)

    def fill(self, row: Buffers, col: Buffers) -> None:
        """Keep these planes; a columnwise plane that is not wanted now stays what it was."""
        self.row = row
        self.col = col or self.col

    @property
    def tensors(self) -> Buffers:
        """The planes' buffers and the tensors that are made of them."""
        return [*self.row, *self.col, *self.row_kept.tensors, *self.col_kept.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of the planes and of what is made of them."""
        planes = sum(buffer.numel() * buffer.element_size() for buffer in (*self.row, *self.col))
        return planes + self.row_kept.nbytes + self.col_kept.nbytes


@lru_cache(maxsize=1024)
def _keeps(slot: SlotPlan) -> bool:
    """Return whether a weight may be kept that is quantized so.

    A forward that takes the weight itself has nothing to keep. A plane that is rounded
    stochastically would be drawn anew in every forward. One whose amax comes from a group is asked
    for by all its ranks in every forward: if one of them still had it, the others would wait.
    """
    is_drawn = any(PlaneSpec.parse(plane.spec).stochastic for plane in (slot.row, slot.col))
    return not (slot.amax_group or slot.row.is_plain or is_drawn)


def versions_of(parameters: Mapping[str, torch.Tensor | None]) -> tuple[int, ...]:
    """Return the versions of the DTensors among a module's parameters.

    Args:
        parameters: of one module, by name.
    """
    return tuple([_version(one) for one in parameters.values() if hasattr(one, "device_mesh")])


def cached_weight(
    known: CachedWeight | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    slot: SlotPlan,
    is_first_microbatch: bool,
    scale_age: int = 0,
    is_checked: bool = False,
    versions: tuple[int, ...] = (),
) -> CachedWeight | None:
    """Return where the planes of `weight` are kept, or None where they may not be.

    Args:
        known: what the module keeps.
        weight: its weight.
        dtype: that the weight is quantized in (`torch.autocast` casts it first).
        slot: how it is quantized.
        is_first_microbatch: True: its values are new. In a backward they are not: it recomputes.
        scale_age: another number where delayed scaling gives the weight another scale.
        is_checked: the caller knows that the weight is plain and the dispatcher may be bypassed.
        versions: of DTensors that the weight may be a part of: a write to one raises none of its
            part's.

    Returns:
        `known`, if it still holds; else a new one, to be filled.
    """
    if not ((is_checked or (can_bypass_dispatcher() and is_plain(weight))) and can_cache(weight)):
        return None
    storage = weight.untyped_storage()
    where = (storage._cdata, begins_at(weight), weight.shape, weight.stride())
    # Another stream could read planes before they are written.
    stream = stream_of(weight.device)
    key = (where, weight._version, versions, _steps.count, dtype, slot, scale_age, stream)
    is_new = is_first_microbatch and graph_task_id() == -1
    if known is not None and not is_new and known.key == key:
        return known
    if not _keeps(slot):
        return None
    _steps.start()
    return CachedWeight(key, StorageWeakRef(storage))


class PrequantizedWeight:
    """The planes of a weight that is quantized already: a parameter in low precision, or gathered.

    Args:
        storage: of the weight.
        whole: of the tensor that the weight is a part of. Views that are made below autograd do not
            share its versions: a write to the whole is not seen in the part's own.
        tensor: the weight, or None. Of what compiled code writes it alone has the version.
    """

    __slots__ = ("_col", "_row", "_storage", "_tensor", "_versions", "_whole")

    def __init__(
        self,
        storage: TensorStorage,
        whole: TensorStorage | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        self._storage, self._tensor = storage, tensor
        self._whole = storage if whole is None or whole.comes_and_goes else whole
        self._row: Plane | None = storage.rowwise
        self._col: Plane | None = storage.columnwise
        self._versions = () if storage.comes_and_goes else self._now()

    @property
    def is_late(self) -> bool:
        """Whether the backward must ask for the columnwise plane, instead of having it saved.

        Memory that comes and goes may be freed in between, and the plane not even be there yet.
        One that is made of the rowwise plane would take memory from the forward on.
        """
        return self._storage.comes_and_goes or self._col is None

    def lacks_columns(self, slot: SlotPlan) -> bool:
        """Return whether the backward encodes the columnwise plane of what the rowwise one holds.

        Args:
            slot: of the weight.
        """
        return _lacks_columns(self._storage, slot)

    def check_unwritten(self) -> None:
        """Raise where the weight was written since the forward.

        Raises:
            RuntimeError: it was.
        """
        if not self._storage.comes_and_goes and self._versions != self._now():
            raise RuntimeError(
                "backward: a quantized weight was modified by an inplace operation after the "
                "forward that needs it; step the optimizer after all backwards"
            )

    def check_saved(self, saved: Sequence[torch.Tensor]) -> None:
        """Raise where what was saved is memory of the weight that was written since the forward.

        Autograd asks that itself, but where hooks took what was saved (`saved_tensors_hooks`,
        `allow_mutation_on_saved_tensors`). Copies that hooks made are as they were.

        Args:
            saved: of the weight, as the backward gets it.

        Raises:
            RuntimeError: it is.
        """
        if self._storage.comes_and_goes or self._versions == self._now():
            return
        planes = (one for one in (self._row, self._col) if one is not None)
        own = {begins_at(buffer) for plane in planes for buffer in plane.tensors}
        if any(one.numel() and begins_at(one) in own for one in saved):
            self.check_unwritten()

    def _now(self) -> tuple[int, ...]:
        return tuple(map(_version, (self._tensor, *self._whole.first.tensors)))

    def has(self, with_col: bool) -> bool:
        """Return True: what is not there is derived or gathered."""
        return True

    def _plane(self, direction: Direction) -> Plane:
        own = self._row if direction == ROWWISE else self._col
        if own is None or self._storage.comes_and_goes:
            own = self._storage.plane(direction)
        return own

    @property
    def amaxes(self) -> torch.Tensor | None:
        """What delayed scaling records of the weight; None: nothing."""
        return self._storage.amaxes

    @property
    def row(self) -> Buffers:
        """Buffers of the rowwise plane."""
        return self._plane(ROWWISE).tensors

    @property
    def row_kept(self) -> OperandCache | None:
        """Where operands that are made of it are kept; None: nowhere."""
        return _ready(self._plane(ROWWISE))

    @property
    def col(self) -> Buffers:
        """Buffers of the columnwise plane."""
        return self._plane(COLUMNWISE).tensors

    @property
    def col_kept(self) -> OperandCache | None:
        """Where operands that are made of it are kept; None: nowhere."""
        return _ready(self._plane(COLUMNWISE))

    def saved(self, slot: SlotPlan) -> tuple[Buffers, OperandCache | None]:
        """Return what a backward is given that asks late: see `SlotEncoder.operand`.

        Args:
            slot: of the weight.

        Raises:
            RuntimeError: the weight was written since the forward.
        """
        self.check_unwritten()
        if self._storage.comes_and_goes:
            self._storage.use(slot)
        if slot.saves_row:
            return self.row, None
        col = self._plane(COLUMNWISE)
        return (_matrix(col) if slot.col.is_plain else col.tensors), _ready(col)

    def matrix(self) -> Buffers:
        """Return the matrix that an identity columnwise plane holds, as rows."""
        return _matrix(self._plane(COLUMNWISE))


def _ready(plane: Plane) -> OperandCache | None:
    return plane.ready if can_cache(plane.data) else None


def _matrix(col: Plane) -> Buffers:
    return [col.data.t()]


def _version(tensor: torch.Tensor | None) -> int:
    """Return the version of a tensor; those of inference mode have none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _lacks_columns(storage: TensorStorage, slot: SlotPlan) -> bool:
    """Return whether a storage has the rowwise plane alone, and the other is encoded late."""
    if storage.holds_columns or not slot.can_encode_late:
        return False
    derived = storage.spec(COLUMNWISE)
    return derived is None or derived != PlaneSpec.parse(slot.col.spec)


def prequantized_weight(
    storage: TensorStorage,
    slot: SlotPlan,
    dtype: torch.dtype,
    whole: TensorStorage | None = None,
    tensor: torch.Tensor | None = None,
) -> PrequantizedWeight | None:
    """Return the planes of a quantized weight, or None where `slot` wants others.

    Args:
        storage: of the weight.
        slot: how the recipe quantizes it.
        dtype: that it is wanted in: of a plane that is not quantized.
        whole: of the stack that the weight is a matrix of; None: it is none.
        tensor: the weight, where a backward must see whether it was written.
    """
    wanted: list[tuple[Direction, PlaneText]] = [(ROWWISE, slot.row)]
    if not (slot.saves_row or _lacks_columns(storage, slot)):
        wanted.append((COLUMNWISE, slot.col))
    for direction, text in wanted:
        spec = storage.spec(direction)
        if spec is None or spec != PlaneSpec.parse(text.spec).resolve(dtype):
            return None
    return PrequantizedWeight(storage, whole, tensor)
