"""torch's private names that hybridq stands on, each with what it is for: the one place for them.

Where torch has moved one, importing this file says which, and a test tries them all. Tensors' own
protocol (`_make_wrapper_subclass`, `_version`, `_base`, a DTensor's `_local_tensor`) is used where
it is needed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "RingAttention",
    "TorchDispatchMode",
    "after_autograd",
    "all_gather",
    "any_requires_grad",
    "assert_async",
    "below_autograd",
    "check_graph_capture",
    "check_pipeline_stage",
    "copy_each",
    "cuda_stream",
    "dispatch_keys",
    "forward_ad",
    "fp32_matmul_precision",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_all_to_all",
    "functional_scatter",
    "graph_task_id",
    "group_timeout",
    "has_compiled",
    "has_kernel",
    "interpreter",
    "is_old_batched",
    "is_profiling",
    "is_wrapper_subclass",
    "leave_frame_alone",
    "leave_out_of_ddp",
    "local_shape_and_offset",
    "neg_view",
    "no_torch_function",
    "num_dispatch_modes",
    "num_function_modes",
    "param_groups",
    "part_of",
    "preserve_versions",
    "process_group",
    "refuse_memory",
    "register_event",
    "ring_attention",
    "sharded_of",
    "split_backward",
    "symmetric_backend",
    "symmetric_buffer",
    "symmetric_handle",
    "tracing_context",
    "tracing_state",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "wait_tensor",
    "without_modes",
    "zero_each",
]


def _taken(path: str, use: str) -> Any:
    """Return a name of torch.

    Args:
        path: of it.
        use: what it is needed for.

    Raises:
        ImportError: it is not there.
    """
    found: Any = torch
    for place, name in enumerate(path.split(".")[1:], 2):
        found = getattr(found, name, None)
        if found is None:
            try:
                found = import_module(".".join(path.split(".")[:place]))
            except ImportError:
                raise ImportError(
                    f"hybridq: torch {torch.__version__} must have {path}, which is "
                    f"needed to {use}, and has moved it; use a torch that hybridq was tested with"
                ) from None
    return found


# ---- what watches a call
DispatchKey: Final = _taken("torch._C.DispatchKey", "know a plain tensor by its keys")
DispatchKeySet: Final = _taken("torch._C.DispatchKeySet", "know a plain tensor by its keys")
#: The set of dispatch keys of a tensor.
dispatch_keys: Final = _taken("torch._C._dispatch_keys", "know a plain tensor by its keys")
num_dispatch_modes: Final = _taken("torch._C._len_torch_dispatch_stack", "see dispatch modes")
num_function_modes: Final = _taken("torch._C._len_torch_function_stack", "see function modes")
#: The innermost of functorch's transforms, or None.
interpreter: Final = _taken("torch._C._functorch.peek_interpreter_stack", "see vmap and grad")
is_old_batched: Final = _taken("torch._C._functorch.is_legacy_batchedtensor", "see old vmap")
#: What torch.jit.trace records into, or None.
tracing_state: Final = _taken("torch._C._get_tracing_state", "see torch.jit.trace")
is_profiling: Final = _taken("torch.autograd._profiler_enabled", "see a profiler")
_taken("torch.autograd.forward_ad._current_level", "see forward-mode differentiation")
#: A module, whose `_current_level` is -1 outside of forward-mode differentiation.
forward_ad: Final = _taken("torch.autograd.forward_ad", "see forward-mode differentiation")
#: Stops a device where a value is false, without waiting for it.
assert_async: Final = _taken("torch._assert_async", "check values on a device")
is_wrapper_subclass: Final = _taken(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "look into subclasses"
)
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _taken("torch.utils._python_dispatch.TorchDispatchMode", "count traffic")


def check_graph_capture(optimizer: Any) -> None:
    """Let an optimizer of torch warn of a captured graph that it was not made for.

    Args:
        optimizer: about to step.
    """
    name = "_accelerator_graph_capture_health_check"
    check = getattr(optimizer, name, None)  # from torch 2.11 on
    if check is None:
        check = getattr(optimizer, "_cuda_graph_capture_health_check", None)
    if check is None:
        _taken(f"torch.optim.Optimizer.{name}", "warn of graphs that optimizers are captured in")
    else:
        check()


def check_pipeline_stage() -> None:
    """Raise ImportError where torch's stages of pipelines do not have the methods of ours."""
    where = "torch.distributed.pipelining.PipelineStage"
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        _taken(f"{where}.{name}", "keep the search for shapes out of histories")
    for name in ("get_fwd_send_ops", "get_fwd_recv_ops", "get_bwd_send_ops", "get_bwd_recv_ops"):
        _taken(f"{where}.{name}", "send planes between stages")
    for name in ("forward_one_chunk", "backward_one_chunk"):
        _taken(f"{where}.{name}", "decode what stages receive")
    _taken(f"{where}.backward_weight_one_chunk", "leave out what a whole backward has done")
    for name in ("set_local_fwd_input", "set_local_bwd_input"):
        _taken(f"{where}.{name}", "quantize what stages of one rank hand over")


def split_backward() -> tuple[Any, Any]:
    """Return torch's backward of a stage's inputs, and its backward of the stage's weights."""
    where, use = "torch.distributed.pipelining._backward", "see that split backwards are right"
    inputs = _taken(f"{where}.stage_backward_input", use)
    return inputs, _taken(f"{where}.stage_backward_weight", use)


#: Let a tensor's memory, which a wrapper lacks, raise where C++ asks for its address.
refuse_memory: Final[Any] = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)
#: The handle of the current stream of a GPU, by the GPU's number, without the object that
#: `torch.cuda.current_stream` makes. None where torch was built without CUDA or has moved it.
cuda_stream: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: `torch.as_strided` of new memory that nobody else knows: no view, half as long to make.
part_of: Final[Any] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)


# ---- operators
#: A context without fake tensors, and without all else that watches operators.
without_modes: Final = _taken(
    "torch.utils._python_dispatch._disable_current_modes", "ask a user's Python for sizes"
)

any_requires_grad: Final = _taken("torch._C._any_requires_grad", "refuse a gradient")
#: A context in which autograd's kernels are passed by; the keys behind them.
below_autograd: Final = _taken("torch._C._AutoDispatchBelowAutograd", "pass autograd by")
after_autograd: Final = _taken("torch._C._after_autograd_keyset", "pass autograd by")
#: A view of a tensor that reads negated values.
neg_view: Final = _taken("torch._neg_view", "copy into a negated view")

# ---- gathers, recomputation
#: -1 outside of a backward; every gather asks for it, and every recomputation.
graph_task_id: Final = _taken("torch._C._current_graph_task_id", "tell that a backward runs")
#: `torch.get_float32_matmul_precision` without its checks; every gather asks for it.
fp32_matmul_precision: Final = _taken(
    "torch._C._get_float32_matmul_precision", "compare what ranks compute"
)
#: A context in which writes to tensors are none to autograd.
preserve_versions: Final = _taken(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "fill memory again that a backward has saved",
)
#: Whose `try_get()` is not None while dynamo traces.
tracing_context: Final = _taken("torch._guards.TracingContext", "see that a graph is traced")
#: Whether an operator has a kernel for a dispatch key.
has_kernel: Final = _taken(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "take composite operators apart"
)
#: The `__torch_function__` of a tensor that has none.
no_torch_function: Final = _taken(
    "torch._C._disabled_torch_function_impl", "keep functions from seeing a subclass"
)
#: Copies many tensors by one call.
copy_each: Final = _taken("torch._foreach_copy_", "fill planes and histories at once")
zero_each: Final = _taken("torch._foreach_zero_", "pad shards at once")
tree_flatten: Final = _taken("torch.utils._pytree.tree_flatten", "find tensors in arguments")
tree_leaves: Final = _taken("torch.utils._pytree.tree_leaves", "find tensors in arguments")
tree_map: Final = _taken("torch.utils._pytree.tree_map", "replace tensors in arguments")
tree_unflatten: Final = _taken("torch.utils._pytree.tree_unflatten", "replace tensors in arguments")


def has_compiled() -> bool:
    """Return whether anything was given to torch.compile in this process, or may have been.

    The compiler is not loaded for the answer.
    """
    found = sys.modules.get("torch._dynamo.eval_frame")
    if found is None:
        return False
    # Functions that only keep the compiler out have none.
    backends = getattr(found, "cached_backends", {0: "unknown"})
    return any(backend is not None for backend in backends.values())


def leave_frame_alone(function: Any) -> Any:
    """Return a function that dynamo starts no graph at, nor at what it calls.

    A graph that is begun may have it inside, as before. It is for what dynamo's own code calls
    around a graph: torch up to 2.10 would compile it there, and without end what the guards call.

    Args:
        function: of Python.
    """
    where, use = "torch._C._dynamo.eval_frame", "keep compilers from what is around a graph"
    skip = _taken(f"{where}._FrameAction", use).SKIP
    strategy = _taken(f"{where}._FrameExecStrategy", use)(skip, skip)
    _taken(f"{where}.set_code_exec_strategy", use)(function.__code__, strategy)
    return function


# torch.distributed is not loaded before it is needed, and not every build of torch has it.
def functional_all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Return x reduced over a group, as operations that a compiler sees.

    Args:
        x: of any shape.
        op: `"max"`, ...
        group: the process group's name.
    """
    path = "torch.ops._c10d_functional"
    functional = _taken(path, "reduce amaxes in compiled code")
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
    name = "all_gather_single" if hasattr(_taken(path, use), "all_gather_single") else ""
    _taken(f"{path}.{name or 'all_gather_into_tensor'}", use)(found, own, group)


def _functional(name: str, use: str) -> Any:
    _taken("torch.distributed._functional_collectives", use)  # registers the operations
    return _taken(f"torch.ops._c10d_functional.{name}", use)


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
    leave = _taken(where, "leave experts out of DDP")
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    leave(model, [*known, *names])


def process_group(name: str) -> Any:
    """Return the process group of a name.

    Args:
        name: of it.
    """
    path = "torch.distributed.distributed_c10d._resolve_process_group"
    return _taken(path, "find a process group by its name")(name)


def group_timeout(group: Any, device: torch.device) -> float:
    """Return how long the messages of a process group are waited for, in seconds.

    Args:
        group: the process group.
        device: of the messages.
    """
    get = _taken("torch.distributed.ProcessGroup._get_backend", "wait no longer than a group does")
    timeout: float = get(group, device).options._timeout.total_seconds()
    return timeout


_SYMMETRIC: Final = "torch.distributed._symmetric_memory"


def symmetric_backend(device: torch.device) -> str | None:
    """Return the name of torch's symmetric memory on a device; None: it has none there.

    Args:
        device: of any type.
    """
    name: str | None = _taken(f"{_SYMMETRIC}.get_backend", "ask for symmetric memory")(device)
    return name


def symmetric_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return new memory that other ranks may map, uint8 `[nbytes]`.

    Args:
        nbytes: of it.
        device: where it lies.
    """
    kind = _taken("torch._C._distributed_c10d._SymmetricMemory", "have symmetric memory")
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
    return _taken(f"{_SYMMETRIC}.rendezvous", "map the memory of other ranks")(buffer, name)


def register_event(x: torch.Tensor) -> None:
    """Let `wait_tensor` wait for what the current stream of x's device has to do by now.

    Args:
        x: on a GPU.
    """
    use = "wait for copies between ranks"
    work = _taken(f"{_SYMMETRIC}.Work", use)()
    _taken("torch._C._distributed_c10d._register_work", use)(x, work)


def local_shape_and_offset(parameter: Any) -> tuple[Any, Any]:
    """Return the shape of this rank's part of a DTensor, and where it begins in the whole.

    Args:
        parameter: a DTensor.
    """
    path = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
    found = _taken(path, "draw the random bits of the whole parameter")
    return found(parameter.shape, parameter.device_mesh, parameter.placements)


def sharded_of(gathered: torch.Tensor) -> Any:
    """Return what FSDP2 knows of a parameter that it has gathered for a module; None: it has not.

    It has `sharded_param`, a DTensor, which is the same for the whole run.

    Args:
        gathered: the parameter as its module finds it in a forward.
    """
    found = sys.modules.get("torch.distributed._composable_state")  # that of FSDP2, once in use
    states = () if found is None else list(found._module_state_mapping.values())
    for reference in states:
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = (getattr(state, "_fsdp_param_group", None),)
        for group in groups:
            for one in () if group is None else group.fsdp_params:
                if getattr(one, "_unsharded_param", None) is gathered:
                    return one
    return None


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
    return RingAttention(*[_taken(path, use) for path in (*paths, flash, f"{flash}_backward")])
