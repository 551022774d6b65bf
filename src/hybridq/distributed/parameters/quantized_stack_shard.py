"""A parameter of several matrices that is quantized on every rank: how it is gathered and written.

FSDP2 shards it along dim 0, so a rank holds the planes of whole matrices. What it writes it
quantizes by itself: no block and no amax is of two matrices, and nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ...formats import PlaneSpec
from ...nn import WeightOwner
from ...quantizers import Quantizer
from ...recipes import SlotPlan
from ...shards import Shards, StorageShards, UniformShards
from ...storage import Plane, PlaneStack, TensorStorage
from ..agreement import Prepared
from .gather_call import GatherCall, Ranks
from .held_planes import HeldPlanes
from .quantized_rows import QuantizedRows
from .quantized_shard import QuantizedGatherCall, held_specs, reasons_against
from .stacked_parameter import StackedParameter

__all__ = ["QuantizedMatrices", "QuantizedStackShard"]


class QuantizedMatrices(QuantizedRows):
    """The planes of one rank's matrices.

    Args:
        planes: PlaneStacks; empty: there are no matrices, or not yet.
        first: the first matrix.
        rows: how many there are.
        is_transposed: the parameter holds the transpose of each.
    """

    __slots__ = ("is_transposed",)

    def __init__(
        self,
        planes: Sequence[Plane] = (),
        first: int = 0,
        rows: int = 0,
        is_transposed: bool = False,
    ) -> None:
        super().__init__(planes, first, rows)
        self.is_transposed = is_transposed

    def like(self, planes: Sequence[Plane], first: int, rows: int) -> QuantizedRows:
        return QuantizedMatrices(planes, first, rows, self.is_transposed)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what the parameter has of them; None if there are none.

        Args:
            dtype: of the result.
        """
        if not self.planes:
            return None
        first = self.planes[0]
        values = first.dequantize(dtype).view(self.rows, -1, first.cols)
        return values.mT.contiguous() if self.is_transposed else values.contiguous()

    def cut(self, first: int, rows: int, total: int) -> QuantizedRows:
        """Return a copy of some of the matrices.

        Args:
            first, rows: which.
            total: not used.
        """
        del total
        start = first - self.first
        made = self.like([_some(one, start, rows) for one in self.planes], first, rows)
        if self.initial is not None:
            made.initial = self.initial[start : start + rows]
        return made


def _some(plane: Plane, start: int, count: int) -> Plane:
    """Return copies of some of the planes of a stack."""
    height = cast("PlaneStack", plane).height
    own = {name: one[start : start + count].clone() for name, one in plane.buffers.items()}
    return PlaneStack(plane.spec, plane.direction, count * height, plane.cols, own, count)


class _Call(QuantizedGatherCall):
    """One all-gather of such planes.

    Args:
        specs, args: as of a `QuantizedGatherCall`; of one matrix.
        of_all: how many matrices each rank has.
        is_transposed: the parameter holds the transpose of each.
    """

    def __init__(self, specs: Any, *args: Any, of_all: Shards, is_transposed: bool) -> None:
        super().__init__(specs, *args)
        self._of_all, self._is_transposed = of_all, is_transposed

    def plan(self, row: bool, col: bool, name: str) -> Any:
        """Return the plan that gathers these planes, those that there are."""
        return UniformShards(super().plan(row, col, name), self._of_all, self._is_transposed)


class StackCall(GatherCall):
    """How one all-gather of the parameter is done; the same on every rank.

    Args:
        specs: of the planes that are held, rowwise and columnwise; not both None.
        is_transposed: the parameter holds the transpose of each matrix.
        args: as of a `GatherCall`; its slot is None.
    """

    def __init__(self, specs: Any, is_transposed: bool, *args: Any) -> None:
        super().__init__(*args)
        shape = self.shape[1:]
        matrix = torch.Size(shape[::-1] if is_transposed else shape)
        alone, given = Ranks(None, 0, 1), (self.dtype, None, self.expected, self.phase)
        kinds: dict[str, Any] = {"of_all": self.shards, "is_transposed": is_transposed}
        #: Of each of the matrices.
        self.matrix = _Call(specs, alone, matrix, *given, **kinds)
        self.slots = self.expected.slots

    def of(self, number: int) -> GatherCall:
        """Return how one of the matrices is gathered.

        Args:
            number: not used: all of them alike.
        """
        del number
        return self.matrix

    @property
    def derives(self) -> bool:
        """Whether of every matrix one plane is the other one, transposed."""
        return self.matrix.derives

    def plan(self, row: bool, col: bool, name: str) -> Any:
        """Return the plan that gathers these planes, those that there are."""
        return self.matrix.plan(row, col, name)


class QuantizedStackShard(HeldPlanes, StackedParameter):
    """What all tensors of one quantized parameter `[G, rows, cols]` know together.

    Args:
        module, part, name, prepared: as for `GatheredParameter`.
        storage: the planes of all matrices, `[rows, cols]` each whatever the parameter's axes.
        quantizer: of such matrices.
        is_transposed: the parameter is `[G, in, out]`.

    Raises:
        NotImplementedError: ranks cannot quantize their own matrices by this quantizer.
    """

    encodes = False
    #: Written by each rank alone.
    is_own = True

    def __init__(
        self,
        module: WeightOwner,
        part: str,
        name: str,
        storage: TensorStorage,
        quantizer: Quantizer,
        prepared: Prepared,
        is_transposed: bool,
    ) -> None:
        count = storage.count or 1
        super().__init__(module, part, name, prepared, count, is_transposed)
        #: Whether initial values are kept in high precision beside the planes.
        self.keeps_initial = False
        #: Of the planes that are held, rowwise and columnwise.
        self.specs: tuple[PlaneSpec | None, PlaneSpec | None] = held_specs(storage)
        self.holds_columns = storage.columnwise is not None
        self.rows = count
        rows, cols = storage.first.rows // count, storage.first.cols
        #: Shape of what a tensor of the parameter has for each matrix.
        self.tail = (cols, rows) if is_transposed else (rows, cols)
        # A matrix is on one rank: its amax is what this rank finds.
        row, col = self.specs
        own = replace(
            quantizer,
            rowwise=row or quantizer.rowwise,
            columnwise=col or quantizer.columnwise,
            columnwise_source="original" if col is None else quantizer.columnwise_source,
            amax_group=None,
        )
        self._quantizer = own.with_usage(rowwise=row is not None, columnwise=col is not None)
        reasons = reasons_against(self.specs, self._quantizer.columnwise_source)
        if reasons:
            raise NotImplementedError(
                f"fsdp2: {name} {[count, *self.tail]} cannot be held quantized in shards: "
                f"{'; '.join(reasons)}; keep it in high precision"
            )

    def none(self) -> QuantizedRows:
        """Return planes that are not there yet."""
        return QuantizedMatrices(is_transposed=self._is_transposed)

    def whole(self, storage: TensorStorage) -> QuantizedRows:
        """Return all matrices, of the planes that are held.

        Args:
            storage: of all of them.
        """
        pairs = zip(self.specs, (storage.rowwise, storage.columnwise), strict=True)
        planes = [plane for spec, plane in pairs if spec is not None and plane is not None]
        return QuantizedMatrices(planes, 0, self.rows, self._is_transposed)

    def check(self, rows: int) -> None:
        """Accept any number of matrices for each rank.

        Args:
            rows: not used.
        """
        del rows

    # ---- the gather

    def _new_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str
    ) -> GatherCall:
        given = (Ranks.of(group), shape, dtype, None, self._expected(phase), phase)
        return StackCall(self.specs, self._is_transposed, *given)

    def wanted_in(self, phase: str) -> tuple[bool, bool]:
        """Return whether a gather brings the rowwise, and the columnwise plane.

        Args:
            phase: of the call.
        """
        if None in self.agreed(phase).slots:
            return True, True  # without a recipe, what a forward saved is decoded in the backward
        return super().wanted_in(phase)

    def use_matrix_slot(self, number: int, slot: SlotPlan) -> None:
        """Do nothing: what is gathered are the parameter's own planes.

        Args:
            number, slot: not used.
        """
        del number, slot

    @property
    def shown_specs(self) -> tuple[PlaneSpec | None, PlaneSpec | None]:
        """Of the planes that `gathered_planes` returns: as the parameter shows its matrices."""
        return self.specs[::-1] if self._is_transposed else self.specs

    def gathered_planes(self, shard: Any) -> TensorStorage:
        """Return the planes of the whole parameter; every rank that shares it must call it.

        Args:
            shard: this rank's.
        """
        storage = super().gathered_planes(shard)
        return storage.mirrored() if self._is_transposed else storage

    def _plan(self, world: int) -> UniformShards:
        rows, cols = self.tail[::-1] if self._is_transposed else self.tail
        part = StorageShards(*self.specs, "original", Shards.chunks(rows, cols, 1))
        shards = Shards.chunks(self.rows, rows * cols, world)
        return UniformShards(part, shards, self._is_transposed)

    # ---- writes

    def write(self, held: QuantizedRows, values: torch.Tensor) -> None:
        """Quantize this rank's matrices; other ranks need not.

        Args:
            held: where the planes go.
            values: float32, bfloat16 or float16, as many as there are.
        """
        x = values.detach().reshape(-1, *self.tail)
        if not x.shape[0]:
            return
        with torch.no_grad():
            matrices = x.mT if self._is_transposed else x
            storage = self._quantizer.encode_stack(matrices.contiguous())
            made = self.whole(storage)
        made.first, made.rows = held.first, x.shape[0]
        held.take(made)
