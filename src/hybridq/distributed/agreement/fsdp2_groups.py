"""The groups of parameters that FSDP2 gathers together, and what it keeps after a forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._log import log_once
from ..._torch_ranks import param_groups

__all__ = ["prepared_groups", "reshard_wholly"]


def reshard_wholly(model: nn.Module) -> None:
    """Reshard units with prepared weights over all ranks, where fewer were asked for.

    `fully_shard(reshard_after_forward=2)` keeps what a forward gathered on two ranks at a time, and
    gathers that for the backward. A forward gathers other planes than a backward takes, so there is
    nothing to keep.

    Args:
        model: any module.
    """
    for path, unit, group in _groups(model):
        mesh = group.post_forward_mesh_info
        if mesh in (None, group.mesh_info) or not _prepared_in(group):
            continue
        log_once(
            f"fsdp2.reshard:{path}",
            f"fsdp2: {path or 'the model'} is resharded over all ranks after its forward, as "
            f"with reshard_after_forward=True, got {mesh.shard_mesh_size}: the planes that its "
            "backward takes are others",
        )
        unit.set_reshard_after_forward(True, recurse=False)


def prepared_groups(model: nn.Module) -> list[list[Any]]:
    """Return the prepared parameters of each group that FSDP2 gathers together, in its order.

    Args:
        model: any module.
    """
    return [_prepared_in(group) for _, _, group in _groups(model)]


def _groups(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the groups of parameters of all units, with their unit and its path."""
    from torch.distributed.fsdp import FSDPModule  # not every build of torch has it

    for path, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            for group in param_groups(unit):
                yield path, unit, group


def _prepared_in(group: Any) -> list[Any]:
    """Return what the prepared parameters of a group know."""
    locals_: Any = [getattr(one.sharded_param, "_local_tensor", None) for one in group.fsdp_params]
    return [one._about for one in locals_ if hasattr(one, "_about")]
