"""ExpertRanks: who has which experts, and who has which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from torch import nn

from .._torch_ranks import process_group
from ..distributed.collectives.groups import name_of, place
from ..errors import must_be_one_of
from .lanes import Lanes

__all__ = ["ExpertRanks", "Ranks", "ranks_of"]

_TOKENS: Final = ("replicated", "sequence")


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that `parallelize_experts` deals experts out over, and those beside them.

    Args:
        experts: a DeviceMesh of one dimension, over which experts are dealt out; None: all ranks.
        replicas: the ranks that have the same experts: a ProcessGroup, its name, or a 1-D
            DeviceMesh. Delayed scaling reduces amaxes of experts over them, whatever group the
            recipe names. None: none has where `experts` are all ranks, else unknown.
        tensor_parallel: the ranks that compute one batch, and one loss, together: those of tensor
            parallelism; a ProcessGroup, its name, or a 1-D DeviceMesh. They may be the ranks of
            `experts` too, some of them, or others. None: each rank has a batch of its own.
        tokens: of those ranks, what a block of experts is given. `"replicated"`: all of them have
            the same tokens; each sends an equal share of them to the experts, and what comes back
            is gathered. `"sequence"`: each has tokens of its own, as under sequence parallelism.
            DTensors say it by their placement, and are not asked about.

    Raises:
        ValueError: `tokens` is neither.

    Source: ours; other ranks for experts than for tensor parallelism: Megatron-Core's parallel
        folding (Liu et al., arXiv:2504.14960).

    Example:
        >>> from hybridq.moe import ExpertRanks
        >>> def of(mesh):  # of two dimensions, "replicas" and "experts"
        ...     return ExpertRanks(mesh["experts"], replicas=mesh["replicas"])
        >>> def folded(mesh):  # of one, over which dense layers are split, and experts dealt out
        ...     return ExpertRanks(mesh, tensor_parallel=mesh)
    """

    experts: Any = None
    replicas: Any = None
    tensor_parallel: Any = None
    tokens: Literal["replicated", "sequence"] = "replicated"

    def __post_init__(self) -> None:
        if self.tokens not in _TOKENS:
            raise ValueError(f"ExpertRanks: tokens {must_be_one_of(_TOKENS, self.tokens)}")


class Ranks(NamedTuple):
    """What `ExpertRanks` come to.

    Attributes:
        mesh: over which experts are dealt out.
        replicas: name of the group of those with the same experts; empty: there are no others;
            None: not known.
        batch: the ranks that compute one batch together; None: each rank has its own.
        has_same_tokens: those ranks have all tokens each.
    """

    mesh: Any
    replicas: str | None
    batch: Lanes | None
    has_same_tokens: bool

    @property
    def batch_is_apart(self) -> bool:
        """Whether ranks that compute one batch have other ranks of experts."""
        if self.batch is None:
            return False
        import torch.distributed as dist  # not every build of torch has it

        experts = set(dist.get_process_group_ranks(self.mesh.get_group()))
        return not experts.issuperset(dist.get_process_group_ranks(process_group(self.batch.group)))

    @property
    def losses(self) -> float:
        """What gradients of experts are sums of: losses of batches, for each rank of experts."""
        return self.mesh.size() / (1 if self.batch is None else self.batch.world)

    @property
    def told(self) -> str:
        """Who has which tokens, for comparisons."""
        if self.batch is None:
            return "each rank its own"
        kind = "the same" if self.has_same_tokens else "parts of a sequence"
        return f"{self.batch.world} ranks {kind}"


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
    batch = None
    if asked.tensor_parallel is not None:
        name = name_of(f"{where}: tensor_parallel", asked.tensor_parallel)
        made = Lanes(name, *place(f"{where}: tensor_parallel", name))
        batch = made if made.world > 1 else None
    rest = (batch, asked.tokens == "replicated")
    if asked.replicas is None:
        return Ranks(mesh, "" if spans_all else None, *rest)
    name = name_of(f"{where}: replicas", asked.replicas)
    _, count = place(f"{where}: replicas", name)
    if count * mesh.size() > dist.get_world_size():
        raise ValueError(
            f"{where}: replicas must be ranks of other meshes of experts, got {count} of them, "
            f"experts on {mesh.size()} ranks, and {dist.get_world_size()} ranks in all"
        )
    return Ranks(mesh, name if count > 1 else "", *rest)


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
