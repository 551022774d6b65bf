"""A parameter that is quantized on every rank: how it is gathered, written and read."""

from __future__ import annotations

from typing import Any

import torch

from ...direction import ROWWISE, Direction
from ...formats import PlaneSpec
from ...nn import WeightOwner
from ...quantizers import Quantizer
from ...recipes import SlotPlan
from ...shards import Shards, StorageShards
from ...storage import TensorStorage
from ..agreement import Prepared
from ..encoding import ShardWork
from .gather_call import GatherCall, Ranks
from .gathered_parameter import GatheredParameter
from .held_planes import HeldPlanes
from .quantized_rows import QuantizedRows

__all__ = [
    "QuantizedGatherCall",
    "QuantizedShard",
    "held_specs",
    "reasons_against",
]


def held_specs(storage: TensorStorage) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    """Return the specs of the planes that shards hold, rowwise and columnwise; None: not held.

    Args:
        storage: of the whole parameter.
    """
    row, col = (None if p is None else p.spec for p in (storage.rowwise, storage.columnwise))
    if row is not None and row == col and row.is_derivable:
        col = None  # one of them is enough
    return row, col


def reasons_against(specs: tuple[PlaneSpec | None, PlaneSpec | None], source: str) -> list[str]:
    """Return why shards cannot hold such planes; empty: they can.

    Args:
        specs: of the planes that are held.
        source: what the columnwise plane is made of.
    """
    reasons = []
    if any(spec is not None and spec.stochastic for spec in specs):
        reasons.append("stochastic rounding draws for the whole weight")
    if source != "original" and specs[0] is None:
        reasons.append("the columnwise plane is made of a rowwise one that is not held")
    return reasons


class QuantizedGatherCall(GatherCall):
    """One all-gather of planes that are there already, whatever the recipe.

    Args:
        specs: of the planes that are held, rowwise and columnwise; not both None.
        args: as of a `GatherCall`.
    """

    def __init__(self, specs: tuple[PlaneSpec | None, PlaneSpec | None], *args: Any) -> None:
        super().__init__(*args)
        self._specs = specs

    def plan(self, row: bool, col: bool, name: str) -> StorageShards:
        """Return the plan that gathers these planes, those that there are."""
        del name
        own_row, own_col = self._specs
        if own_row is None or own_col is None:
            return StorageShards(own_row, own_col, "original", self.shards)
        chosen = (own_row if row else None, own_col if col else None)
        return StorageShards(*chosen, "original", self.shards)

    def spec(self, direction: Direction) -> PlaneSpec | None:
        """Return the spec of the plane of `direction`, held or derived; None: there is none."""
        row, col = self._specs
        own, other = (row, col) if direction == ROWWISE else (col, row)
        if own is None and other is not None and other.is_derivable:
            return other
        return own

    @property
    def derives(self) -> bool:
        """Whether the plane that is missing is the other one, transposed."""
        return None in self._specs


class QuantizedShard(HeldPlanes, GatheredParameter):
    """What all tensors of one quantized parameter (its shard, views of it) know together.

    Args:
        module: that it belongs to.
        part: of the module's parts.
        name: for messages.
        storage: the planes of the whole parameter.
        quantizer: of the whole parameter.
        prepared: the call of `prepare_fsdp2`.

    Raises:
        NotImplementedError: ranks cannot quantize their own rows by this quantizer.
    """

    is_encoded = False

    def __init__(
        self,
        module: WeightOwner,
        part: str,
        name: str,
        storage: TensorStorage,
        quantizer: Quantizer,
        prepared: Prepared,
    ) -> None:
        super().__init__(module, part, name, prepared)
        #: Whether initial values are kept in high precision beside the planes.
        self.keeps_initial = False
        #: Of the planes that are held, rowwise and columnwise.
        self.specs = held_specs(storage)
        self.holds_columns = storage.columnwise is not None
        self._source = quantizer.columnwise_source if self.specs[1] is not None else "original"
        self._matrix = (storage.first.rows, storage.first.cols)
        reasons = reasons_against(self.specs, self._source)
        if reasons:
            raise NotImplementedError(
                f"fsdp2: {name} {list(self._matrix)} cannot be held quantized in shards: "
                f"{'; '.join(reasons)}; keep it in high precision"
            )

    @property
    def source(self) -> str:
        """What the columnwise plane is made of."""
        return self._source

    def derives_from(self, plan: StorageShards) -> bool:
        """Return whether the columnwise plane is what a gather brings, transposed.

        Args:
            plan: of the gather.
        """
        row, col = self.specs
        return col is None and row is not None and row.is_derivable and not row.format.is_identity

    @property
    def rows(self) -> int:
        """Rows of the whole parameter."""
        return self._matrix[0]

    @property
    def cols(self) -> int:
        """Its columns."""
        return self._matrix[1]

    @property
    def tail(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self._matrix[1:]

    def none(self) -> QuantizedRows:
        """Return planes that are not there yet."""
        return QuantizedRows()

    def whole(self, storage: TensorStorage) -> QuantizedRows:
        """Return all rows, of the planes that are held."""
        pairs = zip(self.specs, (storage.rowwise, storage.columnwise), strict=True)
        planes = [plane for spec, plane in pairs if spec is not None and plane is not None]
        return QuantizedRows(planes, 0, self._matrix[0])

    def _plan(self, world: int) -> StorageShards:
        shards = Shards.chunks(*self._matrix, world)
        return StorageShards(*self.specs, self._source, shards)

    def check(self, rows: int) -> None:
        """Raise unless ranks can quantize their own rows.

        Args:
            rows: of each rank but the last.

        Raises:
            NotImplementedError: they cannot.
        """
        plan = self._plan(-(-self._matrix[0] // max(rows, 1)))
        if plan.problem is None:
            return
        advice = "take another format, or high precision"
        if not any(one.spec.format.is_python for one in plan.planes):
            unit = max(plane.unit for plane in plan.planes)
            advice = f"multiples of {unit} rows would do, or high precision"
        raise NotImplementedError(
            f"fsdp2: {self.name} {list(self._matrix)} cannot be held quantized in shards of {rows} "
            f"rows: {plan.problem}; {advice}"
        )

    # ---- the gather

    def _new_call(
        self, group: Any, shape: torch.Size, dtype: torch.dtype, phase: str
    ) -> GatherCall:
        expected = self._expected(phase)
        given = (Ranks.of(group), shape, dtype, None, expected, phase)
        return QuantizedGatherCall(self.specs, *given)

    def wanted_in(self, phase: str) -> tuple[bool, bool]:
        """Return whether a gather brings the rowwise, and the columnwise plane.

        Args:
            phase: of the call.
        """
        if self.agreed(phase).slot is None:
            # Torch's own linear saves the parameter with the planes that it has in the forward.
            return True, True
        return super().wanted_in(phase)

    def use_slot(self, slot: SlotPlan) -> None:
        """Do nothing: what is gathered are the parameter's own planes.

        Args:
            slot: not used.
        """
        del slot

    # ---- writes

    def work_of(self, values: Any) -> ShardWork:
        """Return this rank's part of quantizing `values`.

        Args:
            values: this rank's rows, float32, bfloat16 or float16.
        """
        _, rank, world = self._mesh()
        x = values.detach().reshape(values.shape[0], self._matrix[1])
        return ShardWork(self._plan(world), x, rank, x.device)

    def group(self) -> Any:
        """Return the process group whose ranks share the parameter."""
        return self._mesh()[0]

    def took(self, held: QuantizedRows, work: ShardWork) -> None:
        """Hold what `work`, that is run, has made.

        Args:
            held: where the planes go.
            work: that `work` returned.
        """
        if work.made:
            _, rank, _ = self._mesh()
            first, last = work.plan.shards.range(rank)
            held.take(QuantizedRows(work.made, first, last - first))
