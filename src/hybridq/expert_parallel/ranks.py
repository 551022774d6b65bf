"""ExpertRanks: which ranks have the experts of one another, and which have the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..distributed.collectives.groups import name_of, place

__all__ = ["ExpertRanks", "Ranks", "ranks_of"]


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that `parallelize_experts` deals experts out over, and those beside them.

    Args:
        experts: a DeviceMesh of one dimension, over which experts are dealt out; None: all ranks.
        replicas: the ranks that have the same experts: a ProcessGroup, its name, or a 1-D
            DeviceMesh. Delayed scaling reduces amaxes of experts over them, whatever group the
            recipe names. None: none has where `experts` are all ranks, else unknown.

    Source: ours.

    Example:
        >>> from hybridq.moe import ExpertRanks
        >>> def of(mesh):  # of two dimensions, "replicas" and "experts"
        ...     return ExpertRanks(mesh["experts"], replicas=mesh["replicas"])
    """

    experts: Any = None
    replicas: Any = None


class Ranks(NamedTuple):
    """What `ExpertRanks` come to.

    Attributes:
        mesh: over which experts are dealt out.
        replicas: name of the group of those with the same experts; empty: there are no others;
            None: not known.
    """

    mesh: Any
    replicas: str | None


def ranks_of(where: str, given: Any, model: nn.Module) -> Ranks:
    """Return the ranks that experts are dealt out over, and those beside them.

    Args:
        where: the function, for errors.
        given: ExpertRanks, a mesh, or None.
        model: whose experts they are.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: a mesh or group is none.
        ValueError: the mesh has several dimensions, or ranks cannot be replicas.
    """
    asked = given if isinstance(given, ExpertRanks) else ExpertRanks(given)
    mesh = _mesh(where, asked.experts, model)
    import torch.distributed as dist  # not every build of torch has it

    spans_all = mesh.size() == dist.get_world_size()
    if asked.replicas is None:
        return Ranks(mesh, "" if spans_all else None)
    name = name_of(f"{where}: replicas", asked.replicas)
    _, count = place(f"{where}: replicas", name)
    if count * mesh.size() > dist.get_world_size():
        raise ValueError(
            f"{where}: replicas must be ranks of other meshes of experts, got {count} of them, "
            f"experts on {mesh.size()} ranks, and {dist.get_world_size()} ranks in all"
        )
    return Ranks(mesh, name if count > 1 else "")


def _mesh(where: str, mesh: Any, model: nn.Module) -> Any:
    """Return the mesh of one dimension over which experts are dealt out."""
    import torch.distributed as dist  # not every build of torch has it

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{where}: torch.distributed must be initialized, got no group")
    if mesh is None:
        from torch.distributed.device_mesh import init_device_mesh

        device = next((p.device.type for p in model.parameters()), "cpu")
        kind = "cpu" if device == "meta" else device
        return init_device_mesh(kind, (dist.get_world_size(),))
    if not (hasattr(mesh, "get_local_rank") and hasattr(mesh, "ndim")):
        raise TypeError(
            f"{where}: mesh must be a DeviceMesh, ExpertRanks or None, got {type(mesh).__name__}; "
            "make one by DeviceMesh.from_group"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{where}: the mesh must have one dimension, got {mesh.ndim}; give the one over which "
            "experts are dealt out, as mesh['ep']"
        )
    return mesh
