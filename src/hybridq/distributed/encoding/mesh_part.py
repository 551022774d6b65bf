"""How a weight that FSDP2 shards is itself a part of a larger one: tensor parallelism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from ..._torch_ranks import process_group
from ...direction import ROWWISE
from ...formats import PlaneSpec
from ...nn.modules.tensor_parallel import COLUMN, Parallel
from ...shards import PlaneShards

__all__ = ["MeshPart", "PartSizes"]

#: Rows or columns that a part must be a multiple of beside its planes' own blocks: the blocks of
#: most formats that the other operands of its products may have.
_LEAST_UNIT: Final = 32


class PartSizes(NamedTuple):
    """How the matrix of a weight is dealt out by tensor parallelism.

    Attributes:
        dim: 0: rows of `[out, in]` are dealt out; 1: columns.
        sizes: rows or columns of each rank, in order.
    """

    dim: int
    sizes: tuple[int, ...]

    def axis(self, direction: str) -> int:
        """Return the axis of a plane's own matrix along which it is dealt out.

        Args:
            direction: of the plane.
        """
        return self.dim if direction == ROWWISE else 1 - self.dim

    def problem(self, planes: Sequence[tuple[PlaneSpec, str]]) -> str | None:
        """Return why planes of a part are not known to be parts of the planes; None: they are.

        The same on all ranks.

        Args:
            planes: that are wanted, with their directions.
        """
        units = [spec.unit(self.axis(direction)) for spec, direction in planes]
        unit = math.lcm(_LEAST_UNIT, *units)
        if len(set(self.sizes)) > 1 or self.sizes[0] % unit:
            what = "rows" if self.dim == 0 else "columns"
            return (
                f"tensor parallelism must give each rank equally many {what}, a multiple of "
                f"{unit}, got {list(self.sizes)}"
            )
        if self.dim == 1 and any(s.row_scaled for s, direction in planes if direction == ROWWISE):
            return "its amaxes are of rows, of which tensor parallelism gave each rank a part"
        return None

    def shares_statistic(self, plane: PlaneShards) -> bool:
        """Return whether the statistic of a plane is that of all parts together.

        Args:
            plane: of a part.
        """
        by_row = plane.spec.row_scaled and self.axis(plane.direction) == 0
        return plane.needs_stat and not by_row


class MeshPart(NamedTuple):
    """Which part of a weight this rank's FSDP2 group has.

    Attributes:
        group: process group of the ranks that have the other parts.
        shape: of the part, `[rows, cols]`.
        cut: how the weight is dealt out; None: each rank has all of it.
        is_on_mesh: the weight is a DTensor, and no parameter that a rank made of its own.
    """

    group: Any
    shape: torch.Size
    cut: PartSizes | None
    is_on_mesh: bool = True

    @staticmethod
    def of(weight: Any, name: str) -> MeshPart:
        """Return the part of a weight that was distributed over a mesh.

        Args:
            weight: a DTensor of two dimensions.
            name: of the weight, for messages.

        Raises:
            RuntimeError: it lies on several dimensions of a mesh, or is a sum.
        """
        mesh, placements = weight.device_mesh, weight.placements
        (first, *others) = placements
        if others or not (first.is_replicate() or first.is_shard()):
            raise RuntimeError(
                f"prepare_fsdp2: {name} must be replicated, or sharded over one dimension of a "
                f"mesh, got {tuple(placements)}; call prepare_fsdp2 after parallelize_module and "
                "before fully_shard"
            )
        cut = None
        if first.is_shard():
            dim = first.dim % 2
            size, world = weight.shape[dim], mesh.size()
            chunk = -(-size // world)
            ends = [min(chunk * rank, size) for rank in range(world + 1)]
            cut = PartSizes(dim, tuple(b - a for a, b in itertools.pairwise(ends)))
        return MeshPart(mesh.get_group(), weight.to_local().shape, cut)

    @staticmethod
    def of_own(weight: torch.Tensor, parallel: Parallel | None) -> MeshPart | None:
        """Return the part of a weight whose module was made for one rank of a group (`tp_group=`).

        Args:
            weight: of two dimensions.
            parallel: how the module's part lies over ranks; None: every rank has it whole.

        Returns:
            The part; None where there is none, or its ranks are not known.
        """
        if parallel is None or not parallel.group:
            return None
        cut = PartSizes(0 if parallel.mode == COLUMN else 1, parallel.sizes)
        return MeshPart(process_group(parallel.group), weight.shape, cut, is_on_mesh=False)
