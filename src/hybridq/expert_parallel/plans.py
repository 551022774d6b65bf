"""RoutePlan: which rows each rank sends to which, by one exchange of counts."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from .._torch_private import assert_async
from .._torch_ranks import functional_all_to_all, wait_tensor
from ..distributed.collectives.groups import name_of, place
from ..distributed.collectives.symmetric import is_symmetric
from ..moe import Routes
from ..shards import agree
from .padding import Padding, padded

__all__ = [
    "RoutePlan",
    "Told",
    "capacity_of",
    "check_capacity",
    "experts_by_rank",
    "planned",
    "route_plan",
]


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
        padding: where ranks send as many rows to each as the capacity says: which of them are
            rows of this rank. The others are zero, of no expert, and arrive behind. None: nothing
            else is sent.
        table: rows from each rank to each, by sender and by receiver, where they travel by
            symmetric memory; empty: by the process group's all-to-all.
    """

    group: str
    rows: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrived: Routes
    padding: Padding | None = None
    table: tuple[tuple[int, ...], ...] = ()

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends; those behind are of no expert."""
        return sum(self.sent)

    @property
    def num_received(self) -> int:
        """Rows that arrive."""
        return sum(self.received)


class Told(NamedTuple):
    """What the ranks told each other beside their counts.

    Attributes:
        notes: int64 `[world]`.
        most: int64 `[world]`, the rows that each rank has for one rank at most; None: there is no
            capacity.
    """

    notes: torch.Tensor
    most: torch.Tensor | None


def planned(
    name: str,
    rank: int,
    sizes: tuple[int, ...],
    offsets: torch.Tensor,
    rows: int,
    note: int = 0,
    capacity: int | None = None,
    is_symmetric: bool = False,
) -> tuple[RoutePlan, Told]:
    """Return the plan, and what all ranks told each other.

    One exchange of counts. Without a capacity the host waits for the device, this once.

    Args:
        name: of the process group.
        rank: of this process in it.
        sizes: experts of each rank.
        offsets: int32 `[experts]`, where each expert's rows end, of this rank's.
        rows: how many this rank has.
        note: a number that all ranks are told.
        capacity: rows that each rank sends to each; None: as many as it has.
        is_symmetric: rows travel by symmetric memory, so each rank is told what all others send.
    """
    world, own = len(sizes), sizes[rank]
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    mine = torch.stack([part.sum() for part in counts.split([*sizes])])
    told = counts.new_full((1,), note)
    if capacity is not None:
        told = torch.cat([told, mine.max().view(1)])
    elif is_symmetric:
        told = torch.cat([told, mine])
    more = told.shape[0]
    pieces = [piece for part in counts.split([*sizes]) for piece in (part, told)]
    arrive, leave = [own + more] * world, [size + more for size in sizes]
    got = wait_tensor(functional_all_to_all(torch.cat(pieces), arrive, leave, name))
    table = got.view(world, own + more)
    theirs = table[:, :own]
    if capacity is not None:
        arrived, padding = padded(mine, theirs, rows, capacity)
        each = (capacity,) * world
        every = (each,) * world if is_symmetric else ()
        plan = RoutePlan(name, rows, each, each, arrived, padding, every)
        return plan, Told(table[:, own], table[:, own + 1])
    # The host waits here, once.
    values = torch.cat([mine, theirs.sum(1), table[:, own:].t().flatten()]).tolist()
    sent, received, notes, *to = (values[k : k + world] for k in range(0, len(values), world))
    # The expert of each row that arrives: by sender, then by expert.
    numbers = torch.arange(own, dtype=torch.int64, device=offsets.device).repeat(world)
    experts = torch.repeat_interleave(numbers, theirs.flatten(), output_size=sum(received))
    arrived = Routes.of(experts[:, None], own)
    every = tuple(zip(*to, strict=True))
    plan = RoutePlan(name, rows, tuple(sent), tuple(received), arrived, None, every)
    return plan, Told(torch.tensor(notes, dtype=torch.int64, device="cpu"), None)


def capacity_of(where: str, given: Any) -> int | None:
    """Return a capacity that is one.

    Args:
        where: the function, for errors.
        given: rows, or None.

    Raises:
        ValueError: it is neither.
    """
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{where}: capacity must be rows, 1 or more, or None, got {given!r}")
    return given


def check_capacity(where: str, most: torch.Tensor | None, capacity: int | None) -> None:
    """Raise on every rank where one of them has more rows for a rank than the capacity takes.

    On a device nothing waits: the device stops there, and later calls raise.

    Args:
        where: whose rows they are, for errors.
        most: as `Told` has it.
        capacity: None: there is none.
    """
    if most is None or capacity is None:
        return
    fix = "give more, up to tokens * min(k, experts of a rank), or none"
    if most.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(most.max()) > capacity:
            raise RuntimeError(
                f"{where}: capacity must be the rows that a rank has for one rank, at least, got "
                f"{capacity} for {int(most.max())}; {fix}"
            )
        return
    assert_async((most <= capacity).all(), f"{where}: more rows than the capacity takes; {fix}")


def route_plan(
    indices: torch.Tensor,
    num_experts: int,
    group: Any = None,
    *,
    capacity: int | None = None,
    transport: Literal["group", "symmetric"] = "group",
) -> tuple[Routes, RoutePlan]:
    """Return where each token's rows go: on this rank, and to which ranks.

    All ranks of the group must call it. Experts are dealt out in order, as many to each rank as
    `torch.chunk` would.

    Args:
        indices: integers `[T, k]`: the experts of each token, of all ranks together; `num_experts`
            or more: of none.
        num_experts: of all ranks.
        group: a ProcessGroup, its name, a 1-D DeviceMesh, `(mesh, dimension)`; None: all ranks.
        capacity: rows that each rank sends to each, the same on all ranks: what it has less is
            filled with zeros. Then all sizes are known beforehand, and the host waits for nothing.
            `T * min(k, experts of a rank)` takes whatever the router says. None: as many rows as
            there are.
        transport: how rows travel, as `parallelize_experts` takes it.

    Returns:
        The routes of this rank's tokens (`permute`, `unpermute`), and the plan (`dispatch`,
        `combine`).

    Raises:
        ValueError: a rank would have no expert, `indices` is no matrix, or the capacity or the
            transport is none.
        RuntimeError: torch.distributed is not initialized; ranks differ in the number of experts,
            the capacity or the transport, on every rank; a rank has more rows for one rank than
            the capacity, on every rank (on a device: later, from the device).

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
    capacity = capacity_of(where, capacity)
    by_copies = is_symmetric(where, transport)
    rank, world = place(where, name)
    sizes = experts_by_rank(num_experts, world)
    told_first = (f"capacity {capacity}", f"transport {transport}")
    agree(name, (where, (), "", (), 0, (num_experts,), told_first))
    routes = Routes.of(indices, num_experts)
    given = (routes.offsets, indices.numel())
    plan, told = planned(name, rank, sizes, *given, capacity=capacity, is_symmetric=by_copies)
    check_capacity(where, told.most, capacity)
    return routes, plan
