"""What FSDP2 keeps of a unit after its forward, where weights travel as planes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import warn_once

__all__ = ["reshard_wholly"]


def reshard_wholly(model: nn.Module) -> None:
    """Reshard units with prepared weights over all ranks, where fewer were asked for.

    `fully_shard(reshard_after_forward=2)` keeps what a forward gathered on two ranks at a time, and
    gathers that for the backward. A forward gathers other planes than a backward takes, so there is
    nothing to keep.

    Args:
        model: any module.
    """
    from torch.distributed.fsdp import FSDPModule  # not every build of torch has it

    for path, unit in model.named_modules():
        if not isinstance(unit, FSDPModule):
            continue
        groups: Any = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", ())
        for group in groups:
            mesh = group.post_forward_mesh_info
            locals_ = [
                getattr(one.sharded_param, "_local_tensor", None) for one in group.fsdp_params
            ]
            if mesh in (None, group.mesh_info) or not any(hasattr(p, "_about") for p in locals_):
                continue
            warn_once(
                f"fsdp2.reshard:{path}",
                f"fsdp2: {path or 'the model'} is resharded over all ranks after its forward, as "
                f"with reshard_after_forward=True, got {mesh.shard_mesh_size}: the planes that its "
                "backward takes are others",
            )
            unit.set_reshard_after_forward(True, recurse=False)
