"""torch's private names about ranks, each with what it is for: the one place for them.

torch.distributed is not loaded before it is needed, and not every build of torch has it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from ._torch_private import taken

__all__ = [
    "RingAttention",
    "all_gather",
    "check_pipeline_stage",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_all_to_all",
    "functional_scatter",
    "group_timeout",
    "is_fsdp2_shard",
    "leave_out_of_ddp",
    "local_shape_and_offset",
    "param_groups",
    "process_group",
    "register_event",
    "ring_attention",
    "sharded_of",
    "split_backward",
    "symmetric_backend",
    "symmetric_buffer",
    "symmetric_handle",
    "wait_tensor",
    "watch_reduced",
]


def check_pipeline_stage() -> None:
    """Raise ImportError where torch's stages of pipelines do not have the methods of ours."""
    where = "torch.distributed.pipelining.PipelineStage"
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        taken(f"{where}.{name}", "keep the search for shapes out of histories")
    for name in ("get_fwd_send_ops", "get_fwd_recv_ops", "get_bwd_send_ops", "get_bwd_recv_ops"):
        taken(f"{where}.{name}", "send planes between stages")
    for name in ("forward_one_chunk", "backward_one_chunk"):
        taken(f"{where}.{name}", "decode what stages receive")
    taken(f"{where}.backward_weight_one_chunk", "leave out what a whole backward has done")
    for name in ("set_local_fwd_input", "set_local_bwd_input"):
        taken(f"{where}.{name}", "quantize what stages of one rank hand over")


def split_backward() -> tuple[Any, Any]:
    """Return torch's backward of a stage's inputs, and its backward of the stage's weights."""
    where, use = "torch.distributed.pipelining._backward", "see that split backwards are right"
    inputs = taken(f"{where}.stage_backward_input", use)
    return inputs, taken(f"{where}.stage_backward_weight", use)


def functional_all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Return x reduced over a group, as operations that a compiler sees.

    Args:
        x: of any shape.
        op: `"max"`, ...
        group: the process group's name.
    """
    path = "torch.ops._c10d_functional"
    functional = taken(path, "reduce amaxes in compiled code")
    return functional.wait_tensor(functional.all_reduce(x, op, group))


def all_gather(found: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Fill a tensor with what all ranks have, one behind the other.

    torch calls it `all_gather_single` from 2.13 on, and `all_gather_into_tensor` before.

    Args:
        found: of as many elements as all ranks have.
        own: of as many on every rank.
        group: the process group.
    """
    path, use = "torch.distributed", "gather bytes"
    name = "all_gather_single" if hasattr(taken(path, use), "all_gather_single") else ""
    taken(f"{path}.{name or 'all_gather_into_tensor'}", use)(found, own, group)


def _functional(name: str, use: str) -> Any:
    taken("torch.distributed._functional_collectives", use)  # registers the operations
    return taken(f"torch.ops._c10d_functional.{name}", use)


def functional_all_gather(x: torch.Tensor, world: int, name: str) -> torch.Tensor:
    """Return what the ranks' x are, one after the other along dimension 0, once it was waited for.

    Args:
        x: contiguous, of the same shape on all ranks.
        world: number of ranks.
        name: of their group.
    """
    use = "gather in compiled code"
    made: torch.Tensor = _functional("all_gather_into_tensor", use)(x, world, name)
    return made


def functional_all_to_all(
    x: torch.Tensor, received: list[int], sent: list[int], name: str
) -> torch.Tensor:
    """Return what the ranks send to this one, along dimension 0, once it was waited for.

    Args:
        x: contiguous.
        received: how much of dimension 0 comes from each rank.
        sent: how much of it goes to each.
        name: of the group.
    """
    use = "exchange in compiled code"
    made: torch.Tensor = _functional("all_to_all_single", use)(x, received, sent, name)
    return made


def functional_scatter(x: torch.Tensor, world: int, name: str) -> torch.Tensor:
    """Return this rank's part, along dimension 0, of the ranks' sum, once it was waited for.

    Args:
        x: contiguous, of the same shape on all ranks.
        world: number of ranks, which divide its dimension 0.
        name: of their group.
    """
    call = _functional("reduce_scatter_tensor", "sum parts in compiled code")
    made: torch.Tensor = call(x, "sum", world, name)
    return made


def wait_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return x, the result of a functional collective, when it has come.

    Args:
        x: of `functional_all_gather`, `functional_all_to_all` or `functional_scatter`.
    """
    made: torch.Tensor = _functional("wait_tensor", "wait for a collective")(x)
    return made


def leave_out_of_ddp(model: Any, names: list[str]) -> None:
    """Let DistributedDataParallel neither broadcast nor reduce some of a model's parameters.

    Args:
        model: that will be wrapped.
        names: of the parameters in it.
    """
    where = "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
    leave = taken(where, "leave experts out of DDP")
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    leave(model, [*known, *names])


def process_group(name: str) -> Any:
    """Return the process group of a name.

    Args:
        name: of it.
    """
    path = "torch.distributed.distributed_c10d._resolve_process_group"
    return taken(path, "find a process group by its name")(name)


def group_timeout(group: Any, device: torch.device) -> float:
    """Return how long the messages of a process group are waited for, in seconds.

    Args:
        group: the process group.
        device: of the messages.
    """
    get = taken("torch.distributed.ProcessGroup._get_backend", "wait no longer than a group does")
    timeout: float = get(group, device).options._timeout.total_seconds()
    return timeout


_SYMMETRIC: Final = "torch.distributed._symmetric_memory"


def symmetric_backend(device: torch.device) -> str | None:
    """Return the name of torch's symmetric memory on a device; None: it has none there.

    Args:
        device: of any type.
    """
    name: str | None = taken(f"{_SYMMETRIC}.get_backend", "ask for symmetric memory")(device)
    return name


def symmetric_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return new memory that other ranks may map, uint8 `[nbytes]`.

    Args:
        nbytes: of it.
        device: where it lies.
    """
    kind = taken("torch._C._distributed_c10d._SymmetricMemory", "have symmetric memory")
    made: torch.Tensor = kind.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    return made


def symmetric_handle(buffer: torch.Tensor, name: str) -> Any:
    """Return the handle of the memory of all ranks; each of them must call it.

    It has `get_buffer(rank, sizes, dtype, storage_offset)` and `barrier(channel, timeout_ms)`,
    which waits on the device.

    Args:
        buffer: of `symmetric_buffer`, as large on all ranks.
        name: of the group.
    """
    return taken(f"{_SYMMETRIC}.rendezvous", "map the memory of other ranks")(buffer, name)


def register_event(x: torch.Tensor) -> None:
    """Let `wait_tensor` wait for what the current stream of x's device has to do by now.

    Args:
        x: on a GPU.
    """
    use = "wait for copies between ranks"
    work = taken(f"{_SYMMETRIC}.Work", use)()
    taken("torch._C._distributed_c10d._register_work", use)(x, work)


def local_shape_and_offset(parameter: Any) -> tuple[Any, Any]:
    """Return the shape of this rank's part of a DTensor, and where it begins in the whole.

    Args:
        parameter: a DTensor.
    """
    path = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
    found = taken(path, "draw the random bits of the whole parameter")
    return found(parameter.shape, parameter.device_mesh, parameter.placements)


def sharded_of(gathered: torch.Tensor) -> Any:
    """Return what FSDP2 knows of a parameter that it has gathered for a module; None: it has not.

    It has `sharded_param`, a DTensor, which is the same for the whole run.

    Args:
        gathered: the parameter as its module finds it in a forward.
    """
    for one in _fsdp_params():
        if getattr(one, "_unsharded_param", None) is gathered:
            return one
    return None


def is_fsdp2_shard(parameter: torch.Tensor) -> bool:
    """Return whether `fully_shard` made a parameter, which is a DTensor as others are.

    Args:
        parameter: as its module holds it between two steps.
    """
    return any(getattr(one, "sharded_param", None) is parameter for one in _fsdp_params())


def _fsdp_params() -> Iterator[Any]:
    """Yield what FSDP2 knows of each parameter of the process that it has sharded."""
    found = sys.modules.get("torch.distributed._composable_state")  # that of FSDP2, once in use
    states = () if found is None else list(found._module_state_mapping.values())
    for reference in states:
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = (getattr(state, "_fsdp_param_group", None),)
        for group in groups:
            yield from () if group is None else group.fsdp_params


def param_groups(unit: Any) -> tuple[Any, ...]:
    """Return the groups of parameters of a module that `fully_shard` was called for.

    Each has `fsdp_params`, whose `sharded_param` is a DTensor, `mesh_info` and
    `post_forward_mesh_info`.

    Args:
        unit: an FSDPModule.

    Raises:
        RuntimeError: torch keeps them elsewhere.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        if not hasattr(state, "_fsdp_param_group"):
            raise RuntimeError(
                f"fsdp2: torch {torch.__version__} must keep a unit's parameters in "
                "_fsdp_param_groups, and does not; use a torch that hybridq was tested with"
            )
        groups = (state._fsdp_param_group,)
    return tuple(group for group in groups if group is not None)


def watch_reduced(unit: Any, told: Callable[[tuple[tuple[int, int], ...]], None]) -> None:
    """Have a function told which parameters' gradients FSDP2 is about to reduce, each time.

    They are those that have one: a branch that a forward did not take has none.

    Args:
        unit: an FSDPModule.
        told: is called in the backward, before the reduction, with the number of each parameter
            among the unit's, and how many values of its gradient each rank gets, padding included.
    """
    for group in param_groups(unit):
        group.post_backward = functools.partial(_post_backward, group, group.post_backward, told)


def _post_backward(group: Any, own: Callable[..., None], told: Any, *unused: Any) -> None:
    takes_all = getattr(group, "reduce_scatter_unused_params", False)
    found = []
    for number, one in enumerate(group.fsdp_params):
        gathered = getattr(one, "_unsharded_param", None)
        if gathered is not None and (
            gathered.grad is not None
            or one.unsharded_accumulated_grad is not None
            or (takes_all and gathered.requires_grad)
        ):
            found.append((number, one.padded_sharded_param_size.numel()))
    told(tuple(found))
    own(*unused)


class RingAttention(NamedTuple):
    """Of torch's context parallelism.

    Attributes:
        operators: by operator of attention, what answers a call of it with DTensors.
        forward: attention of this rank's queries over the ranks' keys and values, by any operator
            that returns the logarithm of the sum too.
        backward: its gradients, by that operator's backward.
        options: of which `enable_load_balance` is one.
        cpu_flash, cpu_flash_backward: the CPU's operators of attention.
    """

    operators: dict[Any, Any]
    forward: Any
    backward: Any
    options: Any
    cpu_flash: Any
    cpu_flash_backward: Any


def ring_attention() -> RingAttention:
    """Return what torch's context parallelism is made of."""
    room = "torch.distributed.tensor.experimental._context_parallel._attention"
    names = ("custom_ops", "_templated_ring_attention", "_templated_ring_attention_backward")
    use = "attend over several ranks on a CPU"
    flash = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
    paths = [f"{room}.{name}" for name in (*names, "_cp_options")]
    return RingAttention(*[taken(path, use) for path in (*paths, flash, f"{flash}_backward")])
