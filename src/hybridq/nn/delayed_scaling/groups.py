"""Over which ranks amaxes are reduced where a recipe does not say, and whether these agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..._torch_ranks import functional_all_reduce
from ...recipes import Plan
from .places import places_of

__all__ = [
    "agree",
    "check_even",
    "default_group",
    "group_of",
    "has_own_group",
    "reduce_over",
]

#: Of a module: the name of its own group; empty: its rank is alone.
_ATTRIBUTE: Final = "amax_ranks"
#: The same of a module for which nothing else decides, the group that a recipe names neither.
_OWN: Final = "own_amax_ranks"


def default_group() -> str | None:
    """Return the name of torch.distributed's default group, if there is one of several ranks."""
    import torch.distributed as dist  # not every build of torch has it

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    name: str = dist.distributed_c10d._get_default_group().group_name
    return name


def reduce_over(module: nn.Module, group: str, *, is_own: bool = False) -> None:
    """Have the histories of a module's parts be reduced over a group where a recipe names none.

    Args:
        module: whose modules.
        group: name of the process group of the ranks that hold the same module; empty: no others
            do.
        is_own: the ranks of any other group hold other weights under the module's name, as those
            of experts that are dealt out: a recipe's group is not asked for.
    """
    for one in module.modules():
        if hasattr(one, "scaled_weights"):
            one.__dict__[_OWN if is_own else _ATTRIBUTE] = group


def has_own_group(module: Any) -> bool:
    """Return whether a module's ranks are known, whatever a recipe names.

    Args:
        module: or None.
    """
    return hasattr(module, _OWN)


def group_of(module: Any, default: str | None, named: str = "") -> str | None:
    """Return the group of a module; None or empty: its rank is alone.

    Args:
        module: or None.
        default: of modules that have none of their own.
        named: the one that a recipe names; empty: it names none.
    """
    own: str | None = getattr(module, _OWN, None)
    found: str | None = getattr(module, _ATTRIBUTE, default)
    return own if own is not None else named or found


def agree(labels: Iterable[Sequence[str]], group: str, device: torch.device) -> None:
    """Raise on every rank of a group whose ranks would reduce amaxes of other places together.

    Every rank must call it: it is one reduction of two numbers.

    Args:
        labels: of this rank's places, in the order of the reduction.
        group: its name.
        device: of the amaxes.

    Raises:
        RuntimeError: ranks differ in the number of the places, or in their names.
    """
    own = [" ".join(one) for one in labels]
    digest = hashlib.blake2b(repr(own).encode(), digest_size=7).digest()
    value = int.from_bytes(digest, "little")
    sides = torch.tensor([value, -value], dtype=torch.int64, device=device)
    largest = functional_all_reduce(sides, "max", group)
    if int(largest.sum()) != 0:  # the largest digest is not the smallest
        raise RuntimeError(
            "delayed scaling: all ranks of the group over which amaxes are reduced must step the "
            f"same modules, got {len(own)} histories here, {own[0] if own else 'none'} the first, "
            "and others on other ranks; stages of a pipeline are made by "
            "hybridq.distributed.pipeline_stage, and other ranks that hold other modules need "
            "reduce_amax=False or an amax_reduction_group= of those that hold the same"
        )


def check_even(plan: Plan) -> None:
    """Raise where a forward runs under torch's Join, and its amaxes are reduced over ranks.

    Ranks whose data has ended stand in for DistributedDataParallel's reductions, and know of no
    others.

    Args:
        plan: of a module's part, with histories.

    Raises:
        RuntimeError: it is so.
    """
    ddp: Any = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or not ddp._join_config.enable or default_group() is None:
        return
    if any(place.request.reduce_amax for place in places_of(plan)):
        raise RuntimeError(
            "delayed scaling: all ranks reduce amaxes in each step, which ranks whose data has "
            "ended do not, got a forward under torch's Join; take a recipe with reduce_amax=False, "
            "or one without histories"
        )
