"""Lanes: ranks that have the same tokens, of which each sends its share to the experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._torch_ranks import functional_all_gather, wait_tensor
from ..distributed.collectives import all_gather
from ..kernels.inputs import wide
from ..kernels.operators import StatedFunction

__all__ = ["Lanes"]

#: Of the sum of absolute values: what sums of the same tokens may differ by between ranks.
_NEAR = 1e-3


class Lanes(NamedTuple):
    """Ranks that have the same tokens: those of tensor parallelism.

    Attributes:
        group: the process group's name.
        rank: of this process in it.
        world: how many ranks there are.
    """

    group: str
    rank: int
    world: int

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each rank: as `torch.chunk` deals them out.

        Args:
            rows: of all ranks, which each of them has.
        """
        size = -(-rows // self.world)
        return tuple(max(0, min(size, rows - rank * size)) for rank in range(self.world))

    def first(self, rows: int) -> int:
        """Return this rank's first row.

        Args:
            rows: as for `sizes`.
        """
        return min(rows, self.rank * -(-rows // self.world))

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of what each rank has; its gradient is gathered.

        Args:
            x: `[rows, ...]`, the same on all ranks.
        """
        part: torch.Tensor = _Own.apply(x, self)
        return part

    def all(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the rows of all ranks; each rank's gradient is its part.

        The gradient of the result must be the same on all ranks, as the result is.

        Args:
            part: `[own rows, K]`.
            rows: of all ranks.
        """
        whole: torch.Tensor = _All.apply(part, self, rows)
        return whole

    def problem(self, where: str, x: torch.Tensor) -> str:
        """Return what is wrong, on every rank, if tokens are not the same on all; one exchange.

        Args:
            where: for the text.
            x: `[rows, K]`.
        """
        values = wide(x.detach())
        count = values.new_tensor(x.shape[0])
        own = torch.stack([values.sum(), values.abs().sum(), count]).float().to(x.device)
        told = wait_tensor(functional_all_gather(own, self.world, self.group)).view(-1, 3)
        (sums, sizes, counts), world = told.t(), self.world
        # What is not finite is no sign of other tokens.
        is_other = (sums.max() - sums.min() > _NEAR * sizes.max()) | (counts.max() != counts.min())
        if not bool(is_other):
            return ""
        has = [f"{int(counts[k])} of sum {float(sums[k]):.6g}" for k in range(world)]
        return (
            f"{where}: tokens must be the same on all ranks of tensor_parallel, got "
            f"{', '.join(has)}; where each rank has tokens of its own, give "
            "ExpertRanks(..., tokens='sequence')"
        )


class _Own(StatedFunction):
    """This rank's rows."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        ctx.lanes, ctx.rows = lanes, x.shape[0]
        start = lanes.first(x.shape[0])
        return x.narrow(0, start, lanes.sizes(x.shape[0])[lanes.rank]).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _All.apply(grad, ctx.lanes, ctx.rows), None


class _All(StatedFunction):
    """The rows of all ranks."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, lanes: Lanes, rows: int) -> torch.Tensor:
        ctx.lanes = lanes
        made: torch.Tensor = all_gather(
            part.contiguous(), None, lanes.group, 0, sizes=lanes.sizes(rows)
        )
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Own.apply(grad, ctx.lanes), None, None
