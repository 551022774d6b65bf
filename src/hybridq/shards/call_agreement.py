"""Ranks compare what they are about to call, when a group sees a call of that kind first.

The comparison goes through the group's store and not by a collective: a rank whose peers compare
nothing (for them the call is no new one) must meet no message of theirs. It then waits for the
store's timeout and raises; later calls of a known kind cost one look into a set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._torch_ranks import process_group
from ..tensor.in_graph import runs_at_once

__all__ = ["Facts", "agree", "compare", "named_ranks", "refuse"]


class Facts(NamedTuple):
    """What must be the same on all ranks of a call.

    Attributes:
        where: the function.
        formats: spec strings of the messages forth and back.
        dtype: of the tensor, and of what comes out.
        shape: of the tensor, -1 where ranks may differ; empty in compiled code.
        dim, sizes, options: as the call has them; sizes that differ between ranks are empty.
    """

    where: str
    formats: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    options: tuple[str, ...]


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the text of a set of ranks, such as `"ranks 0-2, 5"`.

    Args:
        ranks: any order; at least one.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


class _Known:
    """What the ranks of a group have compared."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.facts: set[tuple[Any, ...]] = set()
        self.count = 0

    def next_key(self) -> str:
        self.count += 1
        return f"hybridq/collectives/{self.count}"


#: By the name of a group.
_known: dict[str, _Known] = {}


def _of(name: str) -> _Known:
    group = process_group(name)
    known = _known.get(name)
    if known is None or known.group is not group:  # a name may be that of an earlier group
        known = _known[name] = _Known(group)
    return known


@runs_at_once
def agree(
    name: str,
    given: tuple[Any, ...],
    splits: tuple[tuple[int, ...], ...] = (),
    traced: tuple[int, ...] = (),
) -> None:
    """Raise on every rank unless all of them are about to do the same; at the first such call.

    Args:
        name: of the group.
        given: the fields of Facts, as a plain tuple, which compiled code can pass.
        splits: how many rows this rank sends to each and expects of each, or nothing.
        traced: sizes of the tensor that a graph is made for, -1 where they may differ; or nothing.
            They make no new kind of call: ranks need not make their graphs anew at the same time.

    Raises:
        RuntimeError: ranks differ, one of them refused its arguments, or one did not come.
    """
    known = _of(name)
    if given in known.facts:
        return
    facts = Facts(*given)
    _compare(known, facts.where, {"facts": facts._asdict(), "splits": splits, "traced": traced})
    known.facts.add(given)


def compare(name: str, facts: Facts) -> None:
    """Raise on every rank unless all of them have the same facts; each time it is called.

    Args:
        name: of the group.
        facts: of this rank.

    Raises:
        RuntimeError: ranks differ, or one did not come within the timeout of the group's store.
    """
    _compare(_of(name), facts.where, {"facts": facts._asdict(), "splits": (), "traced": ()})


def refuse(name: str, where: str, error: Exception) -> None:
    """Tell the other ranks, if they compare, that this one has refused its arguments.

    Args:
        name: of the group.
        where: the function.
        error: which this rank raises.
    """
    known = _of(name)
    rank, world, store = _place(known.group)
    if world > 1:
        key = known.next_key()
        store.set(f"{key}/{rank}", json.dumps({"refused": str(error)}))
        if rank == 0:
            store.set(f"{key}/verdict", f"{where}: {_global(known.group, 0)} refused: {error}")


def _place(group: Any) -> tuple[int, int, Any]:
    import torch.distributed as dist  # not every build of torch has it

    return dist.get_rank(group), dist.get_world_size(group), group.get_group_store()


def _global(group: Any, *ranks: int) -> str:
    import torch.distributed as dist  # not every build of torch has it

    return named_ranks([dist.get_global_rank(group, rank) for rank in ranks])


def _compare(known: _Known, where: str, own: dict[str, Any]) -> None:
    rank, world, store = _place(known.group)
    if world == 1:
        return
    key = known.next_key()
    store.set(f"{key}/{rank}", json.dumps(own))
    waits_for = 0
    try:
        if rank == 0:
            told = []
            for waits_for in range(world):
                told.append(json.loads(store.get(f"{key}/{waits_for}")))
            store.set(f"{key}/verdict", _verdict(known.group, where, told))
        verdict = store.get(f"{key}/verdict").decode()
    except RuntimeError as error:
        raise RuntimeError(
            f"{where}: every rank of the group must make the same calls in the same order, got a "
            f"call that is new on {_global(known.group, rank)} and that "
            f"{_global(known.group, waits_for)} did not come to"
        ) from error
    if verdict:
        raise RuntimeError(verdict)


def _verdict(group: Any, where: str, told: list[dict[str, Any]]) -> str:
    """Return what is wrong, or nothing.

    Args:
        group: of ranks.
        where: the function.
        told: by rank.
    """
    for rank, one in enumerate(told):
        if "refused" in one:
            return f"{where}: {_global(group, rank)} refused: {one['refused']}"
    for what in Facts._fields:
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            values.setdefault(str(one["facts"][what]), []).append(rank)
        if len(values) > 1:
            has = "; ".join(f"{value} on {_global(group, *at)}" for value, at in values.items())
            hint = "; give sizes=, by rank" if what == "shape" and where == "all_gather" else ""
            return f"{where}: {what} must be the same on all ranks, got {has}{hint}"
    by_dimension = list(zip(*(one["traced"] for one in told), strict=True))
    if any(len({size for size in sizes if size >= 0}) > 1 for sizes in by_dimension):
        has = "; ".join(f"{one['traced']} on {_global(group, n)}" for n, one in enumerate(told))
        return f"{where}: shape must be the same on all ranks, got graphs for {has}"
    for i, sender in enumerate(told):
        for j, receiver in enumerate(told):
            if sender["splits"] and sender["splits"][0][j] != receiver["splits"][1][i]:
                return (
                    f"{where}: a rank must expect what another sends it, got "
                    f"{sender['splits'][0][j]} rows from {_global(group, i)} to "
                    f"{_global(group, j)}, which expects {receiver['splits'][1][i]}"
                )
    return ""
