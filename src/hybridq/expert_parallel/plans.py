"""RoutePlan: which rows each rank sends to which, by one exchange of counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._torch_private import functional_all_to_all, wait_tensor
from ..distributed.collectives.groups import name_of, place
from ..moe import Routes

__all__ = ["RoutePlan", "experts_by_rank", "planned", "route_plan"]


def experts_by_rank(experts: int, world: int) -> tuple[int, ...]:
    """Return how many experts each rank has: as `torch.chunk` and DTensor deal them out.

    Args:
        experts: of all ranks.
        world: number of ranks.

    Raises:
        ValueError: a rank would have none.
    """
    size = -(-experts // world)
    sizes = tuple(max(0, min(size, experts - rank * size)) for rank in range(world))
    if not sizes[-1]:
        raise ValueError(
            f"experts: every rank must have one at least, got {experts} experts on {world} ranks, "
            f"dealt out as {list(sizes)}; take fewer ranks"
        )
    return sizes


class RoutePlan(NamedTuple):
    """Where the rows of one block of experts go, and in which order they arrive.

    A rank sends its rows sorted by expert. What arrives at a rank stands by the rank that sent it,
    then by expert, and rows of one expert in the sender's order: sorted by expert, those of all
    ranks one after the other, as one process has them.

    Attributes:
        group: the process group's name.
        rows: of this rank, those of no expert behind the others.
        sent: rows for each rank.
        received: rows from each.
        arrived: of the rows that arrive, one expert each: their order by own expert, and where
            each own expert's rows end.
    """

    group: str
    rows: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrived: Routes

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends; those behind are of no expert."""
        return sum(self.sent)

    @property
    def num_received(self) -> int:
        """Rows that arrive."""
        return sum(self.received)


def planned(
    name: str, rank: int, sizes: tuple[int, ...], offsets: torch.Tensor, rows: int, note: int = 0
) -> tuple[RoutePlan, list[int]]:
    """Return the plan, and the notes of all ranks.

    One exchange, and the one moment in which the host waits for the device.

    Args:
        name: of the process group.
        rank: of this process in it.
        sizes: experts of each rank.
        offsets: int32 `[experts]`, where each expert's rows end, of this rank's.
        rows: how many this rank has.
        note: a number that all ranks are told.
    """
    world, own = len(sizes), sizes[rank]
    counts = torch.diff(offsets.long(), prepend=offsets.new_zeros(1).long())
    told = counts.new_full((1,), note)
    pieces = [piece for part in counts.split(list(sizes)) for piece in (part, told)]
    sent_sizes = [size + 1 for size in sizes]
    got = functional_all_to_all(torch.cat(pieces), [own + 1] * world, sent_sizes, name)
    both = torch.cat([wait_tensor(got), counts])
    values = both.tolist()  # the host waits here, once
    table, mine = values[: world * (own + 1)], values[world * (own + 1) :]
    by_sender = [table[k * (own + 1) : (k + 1) * (own + 1)] for k in range(world)]
    sent, at = [], 0
    for size in sizes:
        sent.append(sum(mine[at : at + size]))
        at += size
    received = [sum(one[:own]) for one in by_sender]
    # The expert of each row that arrives: by sender, then by expert.
    numbers = torch.arange(own, dtype=torch.int64, device=offsets.device).repeat(world)
    repeats = both[: world * (own + 1)].view(world, own + 1)[:, :own].flatten()
    experts = torch.repeat_interleave(numbers, repeats, output_size=sum(received))
    arrived = Routes.of(experts[:, None], own)
    plan = RoutePlan(name, rows, tuple(sent), tuple(received), arrived)
    return plan, [one[own] for one in by_sender]


def route_plan(
    indices: torch.Tensor, num_experts: int, group: Any = None
) -> tuple[Routes, RoutePlan]:
    """Return where each token's rows go: on this rank, and to which ranks.

    All ranks of the group must call it. Experts are dealt out in order, as many to each rank as
    `torch.chunk` would.

    Args:
        indices: integers `[T, k]`: the experts of each token, of all ranks together; `num_experts`
            or more: of none.
        num_experts: of all ranks.
        group: a ProcessGroup, its name, a 1-D DeviceMesh, `(mesh, dimension)`; None: all ranks.

    Returns:
        The routes of this rank's tokens (`permute`, `unpermute`), and the plan (`dispatch`,
        `combine`).

    Raises:
        ValueError: a rank would have no expert, or `indices` is no matrix.
        RuntimeError: torch.distributed is not initialized.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from hybridq.moe import combine, dispatch, permute, route_plan, unpermute
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, best = torch.randn(10, 32), torch.rand(10, 4).softmax(-1).topk(2)
        >>> routes, plan = route_plan(best.indices, 4)
        >>> rows = dispatch(permute(x, routes), plan)  # by expert: plan.arrived.rows
        >>> y = unpermute(combine(rows, plan), best.values, routes, x.dtype)
        >>> torch.allclose(y, x * best.values.sum(1, keepdim=True), atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    where = "route_plan"
    given: object = indices
    if not isinstance(given, torch.Tensor) or indices.dim() != 2 or indices.is_floating_point():
        raise ValueError(f"{where}: indices must be integers [tokens, k], got {given!r:.60}")
    name = name_of(where, group)
    rank, world = place(where, name)
    sizes = experts_by_rank(num_experts, world)
    routes = Routes.of(indices, num_experts)
    plan, _ = planned(name, rank, sizes, routes.offsets, indices.numel())
    return routes, plan
