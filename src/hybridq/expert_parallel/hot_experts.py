"""Experts that are asked for often: which ranks get copies of them, by loads, and that they do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .._torch_ranks import process_group
from ..distributed.agreement import Fingerprint, compare
from ..moe import Experts
from .copies import CopyPlaces
from .exchange import TokenExchange
from .loads import blocks_of_experts
from .placement import loads_of
from .plans import experts_by_rank

__all__ = ["copy_experts_", "expert_copies"]

_RULE = "every rank must make the same copies"


def expert_copies(
    loads: Any, ranks: int, each: int = 1, least_gain: float = 0.05
) -> dict[int, tuple[int, ...]]:
    """Return which ranks to give copies of which experts, so that the fullest rank has less to do.

    Again and again an expert of the fullest rank, the one with the largest share there first, gets
    a copy on the emptiest rank that has room, as long as that makes the fullest rank emptier.

    Args:
        loads: `[E]`, of each expert: counts of tokens, or any measure.
        ranks: over which experts are dealt out, as `parallelize_experts` does it.
        each: copies that a rank takes at most.
        least_gain: by how much of its load a copy must make the fullest rank emptier, since its
            weights travel in each forward.

    Returns:
        By expert, the ranks that get a copy; `copy_experts_` takes it.

    Raises:
        ValueError: loads are none, a rank would have no expert, `each` is below 1, or `least_gain`
            is not from 0 to 1.

    Source: ours; copies of experts by load: DeepSeek's EPLB (DeepSeek-V3, arXiv:2412.19437, 3.4).

    Example:
        >>> from hybridq.moe import expert_copies
        >>> expert_copies([8, 1, 1], 2)
        {0: (1,)}
    """
    where = "expert_copies"
    given = loads_of(where, loads).tolist()
    if not isinstance(each, int) or isinstance(each, bool) or each < 1:
        raise ValueError(f"{where}: each must be copies of a rank, 1 or more, got {each!r}")
    if not isinstance(least_gain, (int, float)) or not 0 <= least_gain < 1:
        raise ValueError(f"{where}: least_gain must be from 0 to 1, got {least_gain!r}")
    sizes = experts_by_rank(len(given), ranks)
    homes = [[rank] for rank, size in enumerate(sizes) for _ in range(size)]
    room = [each] * ranks
    while True:
        sums = _sums(given, homes, ranks)
        fullest = max(range(ranks), key=lambda one: sums[one])
        own = [one for one in range(len(given)) if fullest in homes[one]]
        best = None
        for expert in sorted(own, key=lambda one: -given[one] / len(homes[one])):
            free = [one for one in range(ranks) if room[one] and one not in homes[expert]]
            if not free:
                continue
            to = min(free, key=lambda one: (sums[one], one))
            homes[expert].append(to)
            now = max(_sums(given, homes, ranks))
            if now < sums[fullest] and now <= (1 - least_gain) * sums[fullest]:
                best = to
                break
            homes[expert].pop()
        if best is None:
            break
        room[best] -= 1
    return {one: tuple(sorted(home[1:])) for one, home in enumerate(homes) if len(home) > 1}


def _sums(loads: list[float], homes: list[list[int]], ranks: int) -> list[float]:
    """Return the load of each rank; an expert's is shared by the ranks that have it."""
    sums = [0.0] * ranks
    for load, home in zip(loads, homes, strict=True):
        for rank in home:
            sums[rank] += load / len(home)
    return sums


def copy_experts_(model: nn.Module, copies: Mapping[str, Mapping[int, Iterable[int]]]) -> None:
    """Let other ranks multiply with copies of experts, from the next forward on.

    In each forward the weights of these experts travel to the ranks of their copies, and their rows
    are dealt among all of them in turn; in the backward gradients of copies travel back and are
    summed in FP32. Parameters, `state_dict` and optimizer are as without copies, and what is
    computed is the same, but for the order in which gradients of weights are summed, and for scales
    along tokens or of whole tensors, which are of a copy's own rows. All ranks must call it,
    between steps; it may be called again with others.

    Args:
        model: after `parallelize_experts`.
        copies: by the name of a module of experts, and by expert, the ranks, of the mesh of
            experts, that get a copy, as `expert_copies` returns them; `{}`: that module has none.
            Modules that are not named stay as they are.

    Raises:
        TypeError: `model` is no module, or `copies` no mapping of such.
        ValueError: on every rank: no such module, experts that are not over ranks, an expert or a
            rank that does not exist, or a rank that has the expert.
        RuntimeError: ranks differ, on every rank.
        NotImplementedError: in the forward, on every rank: delayed scaling, or quantized weights.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from hybridq.moe import ExpertsLayout, copy_experts_, parallelize_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32))
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> plan = {"experts": ExpertsLayout("up", "down", has_gate=False)}
        >>> model = parallelize_experts(torch.nn.ModuleDict({"experts": Own()}), plan=plan)
        >>> copy_experts_(model, {"experts": {}})  # of one rank: nobody to give a copy to
        >>> dist.destroy_process_group()
    """
    where = "copy_experts_"
    given: object = model
    if not isinstance(given, nn.Module) or not isinstance(copies, Mapping):
        raise TypeError(
            f"{where}: takes an nn.Module and copies by name, got {type(given).__name__} and "
            f"{type(copies).__name__}"
        )
    found = {
        name: module
        for name, module, _ in blocks_of_experts(model)
        if isinstance(module.exchange, TokenExchange)
    }
    if not found:
        raise ValueError(
            f"{where}: experts must lie over ranks, got {type(model).__name__} without any; call "
            "parallelize_experts before"
        )
    problem: Exception | None = None
    made: dict[str, tuple[tuple[int, ...], ...]] = {}
    try:
        for name, of_experts in copies.items():
            if name not in found:
                raise ValueError(
                    f"{where}: copies name modules of experts, {', '.join(found)}, got {name!r}"
                )
            made[name] = _by_rank(
                f"{where}: {name}".rstrip(": "), _exchange(found[name]), of_experts
            )
    except (TypeError, ValueError) as error:
        problem = error
    lines = [("whether it can be done", "yes" if problem is None else f"{problem}")]
    lines += [(f"the copies of {name}", str(one)) for name, one in sorted(made.items())]
    groups = {_exchange(module).name for module in found.values()}
    try:
        for group in sorted(groups):
            compare(Fingerprint(tuple(lines)), process_group(group), where, _RULE)
    except RuntimeError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    for name, copied in made.items():
        module, exchange = found[name], _exchange(found[name])
        own = CopyPlaces(exchange.name, exchange.rank, exchange.sizes, copied)
        module.exchange = replace(exchange, copies=own if any(copied) else None)
        module.copied_matrices = copied[exchange.rank]


def _exchange(module: Experts) -> TokenExchange:
    exchange: Any = module.exchange
    return exchange


def _by_rank(where: str, exchange: TokenExchange, given: Any) -> tuple[tuple[int, ...], ...]:
    """Return of each rank the experts that it gets copies of."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{where}: copies must be ranks by expert, as expert_copies returns them, got "
            f"{type(given).__name__}"
        )
    world, count = len(exchange.sizes), sum(exchange.sizes)
    owners = [rank for rank, size in enumerate(exchange.sizes) for _ in range(size)]
    found: list[set[int]] = [set() for _ in range(world)]
    for expert, ranks in given.items():
        if not isinstance(expert, int) or not 0 <= expert < count:
            raise ValueError(f"{where}: experts must be 0 to {count - 1}, got {expert!r}")
        if not isinstance(ranks, Iterable) or isinstance(ranks, str):
            raise TypeError(f"{where}: expert {expert} must have ranks, got {ranks!r}")
        for rank in ranks:
            if not isinstance(rank, int) or not 0 <= rank < world:
                raise ValueError(f"{where}: ranks must be 0 to {world - 1}, got {rank!r}")
            if rank == owners[expert] or expert in found[rank]:
                raise ValueError(
                    f"{where}: copies must be on ranks that have not got the expert, got expert "
                    f"{expert} on rank {rank} twice"
                )
            found[rank].add(expert)
    return tuple(tuple(sorted(one)) for one in found)
