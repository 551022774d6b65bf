"""torch's private names that hybridq stands on, each with what it is for: the one place for them.

Those of ranks stand in `_torch_ranks`. Where torch has moved one, importing this file says which,
and a test tries them all. Tensors' own protocol (`_make_wrapper_subclass`, `_version`, `_base`, a
DTensor's `_local_tensor`) is used where it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "TorchDispatchMode",
    "after_autograd",
    "any_requires_grad",
    "assert_async",
    "below_autograd",
    "check_graph_capture",
    "copy_each",
    "cuda_stream",
    "dispatch_keys",
    "dispatch_modes",
    "exclude_keys",
    "forward_ad",
    "fp32_matmul_precision",
    "graph_task_id",
    "has_compiled",
    "has_kernel",
    "in_selective_checkpoint",
    "interpreter",
    "is_old_batched",
    "is_profiling",
    "is_wrapper_subclass",
    "leave_frame_alone",
    "module_apply",
    "neg_view",
    "no_torch_function",
    "norm_each",
    "num_dispatch_modes",
    "num_function_modes",
    "out_of_graphs",
    "outside_selective_checkpoint",
    "parameter_new",
    "part_of",
    "preserve_versions",
    "rebuild_tensor",
    "refuse_memory",
    "tracing_context",
    "tracing_state",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_modes",
    "zero_each",
]


def taken(path: str, use: str) -> Any:
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
DispatchKey: Final = taken("torch._C.DispatchKey", "know a plain tensor by its keys")
DispatchKeySet: Final = taken("torch._C.DispatchKeySet", "know a plain tensor by its keys")
#: The set of dispatch keys of a tensor.
dispatch_keys: Final = taken("torch._C._dispatch_keys", "know a plain tensor by its keys")
#: A context in which a key of dispatch is left out, or is not.
exclude_keys: Final = taken("torch._C._SetExcludeDispatchKeyGuard", "make views of planes")
num_dispatch_modes: Final = taken("torch._C._len_torch_dispatch_stack", "see dispatch modes")
#: All of them, the innermost last.
dispatch_modes: Final = taken(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "find counters of operations"
)
num_function_modes: Final = taken("torch._C._len_torch_function_stack", "see function modes")
#: What converts the parameters of a module; known by its code where it is in the stack of calls.
module_apply: Final = taken("torch.nn.Module._apply", "keep parameters quantized in conversions")
#: What makes a parameter; known likewise.
parameter_new: Final = taken("torch.nn.Parameter.__new__", "keep what is written to parameters")
#: The innermost of functorch's transforms, or None.
interpreter: Final = taken("torch._C._functorch.peek_interpreter_stack", "see vmap and grad")
is_old_batched: Final = taken("torch._C._functorch.is_legacy_batchedtensor", "see old vmap")
#: What a pickled tensor is made by.
rebuild_tensor: Final = taken("torch._utils._rebuild_tensor_v2", "read pickled tensors")
#: What torch.jit.trace records into, or None.
tracing_state: Final = taken("torch._C._get_tracing_state", "see torch.jit.trace")
is_profiling: Final = taken("torch.autograd._profiler_enabled", "see a profiler")
taken("torch.autograd.forward_ad._current_level", "see forward-mode differentiation")
#: A module, whose `_current_level` is -1 outside of forward-mode differentiation.
forward_ad: Final = taken("torch.autograd.forward_ad", "see forward-mode differentiation")
#: Stops a device where a value is false, without waiting for it.
assert_async: Final = taken("torch._assert_async", "check values on a device")
is_wrapper_subclass: Final = taken(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "look into subclasses"
)
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = taken("torch.utils._python_dispatch.TorchDispatchMode", "count traffic")


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
        taken(f"torch.optim.Optimizer.{name}", "warn of graphs that optimizers are captured in")
    else:
        check()


#: Let a tensor's memory, which a wrapper lacks, raise where C++ asks for its address.
refuse_memory: Final[Any] = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)
#: The handle of the current stream of a GPU, by the GPU's number, without the object that
#: `torch.cuda.current_stream` makes. None where torch was built without CUDA or has moved it.
cuda_stream: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: `torch.as_strided` of new memory that nobody else knows: no view, half as long to make.
part_of: Final[Any] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)


# ---- operators
#: A context without fake tensors, and without all else that watches operators.
without_modes: Final = taken(
    "torch.utils._python_dispatch._disable_current_modes", "ask a user's Python for sizes"
)

_push_mode: Final = taken("torch.utils._python_dispatch._push_mode", "gather in a recomputation")
_pop_mode: Final = taken("torch.utils._python_dispatch._pop_mode", "gather in a recomputation")
#: Modes of a selective checkpoint: in its forward, and as it is computed again.
_SELECTIVE: Final = (
    taken("torch.utils.checkpoint._CachingTorchDispatchMode", "gather in a recomputation"),
    taken("torch.utils.checkpoint._CachedTorchDispatchMode", "gather in a recomputation"),
)


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint watches operators: its forward, or a recomputation."""
    return num_dispatch_modes() > 0 and any(isinstance(m, _SELECTIVE) for m in dispatch_modes())


@contextmanager
def outside_selective_checkpoint() -> Iterator[None]:
    """A context whose operators no selective checkpoint saves, or looks for when it recomputes.

    It is for what is done once, in the forward or as it is computed again, by the state of the
    program. Other modes stay.
    """
    if not in_selective_checkpoint():
        yield
        return
    all_of = [_pop_mode() for _ in dispatch_modes()][::-1]
    others = [one for one in all_of if not isinstance(one, _SELECTIVE)]
    for one in others:
        _push_mode(one)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for one in all_of:
            _push_mode(one)


any_requires_grad: Final = taken("torch._C._any_requires_grad", "refuse a gradient")
#: A context in which autograd's kernels are passed by; the keys behind them.
below_autograd: Final = taken("torch._C._AutoDispatchBelowAutograd", "pass autograd by")
after_autograd: Final = taken("torch._C._after_autograd_keyset", "pass autograd by")
#: A view of a tensor that reads negated values.
neg_view: Final = taken("torch._neg_view", "copy into a negated view")

# ---- gathers, recomputation
#: -1 outside of a backward; every gather asks for it, and every recomputation.
graph_task_id: Final = taken("torch._C._current_graph_task_id", "tell that a backward runs")
#: `torch.get_float32_matmul_precision` without its checks; every gather asks for it.
fp32_matmul_precision: Final = taken(
    "torch._C._get_float32_matmul_precision", "compare what ranks compute"
)
#: A context in which writes to tensors are none to autograd.
preserve_versions: Final = taken(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "fill memory again that a backward has saved",
)
#: `torch.compiler.disable` that imports the compiler at the first call, which takes seconds.
out_of_graphs: Final = taken("torch._compile._disable_dynamo", "keep functions out of graphs")
#: Whose `try_get()` is not None while dynamo traces.
tracing_context: Final = taken("torch._guards.TracingContext", "see that a graph is traced")
#: Whether an operator has a kernel for a dispatch key.
has_kernel: Final = taken(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "take composite operators apart"
)
#: The `__torch_function__` of a tensor that has none.
no_torch_function: Final = taken(
    "torch._C._disabled_torch_function_impl", "keep functions from seeing a subclass"
)
#: Copies many tensors by one call.
copy_each: Final = taken("torch._foreach_copy_", "fill planes and histories at once")
#: The norm of each of many tensors, by one call.
norm_each: Final = taken("torch._foreach_norm", "clip gradients by their norm")
zero_each: Final = taken("torch._foreach_zero_", "pad shards at once")
tree_flatten: Final = taken("torch.utils._pytree.tree_flatten", "find tensors in arguments")
tree_leaves: Final = taken("torch.utils._pytree.tree_leaves", "find tensors in arguments")
tree_map: Final = taken("torch.utils._pytree.tree_map", "replace tensors in arguments")
tree_unflatten: Final = taken("torch.utils._pytree.tree_unflatten", "replace tensors in arguments")


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
    skip = taken(f"{where}._FrameAction", use).SKIP
    strategy = taken(f"{where}._FrameExecStrategy", use)(skip, skip)
    taken(f"{where}.set_code_exec_strategy", use)(function.__code__, strategy)
    return function
