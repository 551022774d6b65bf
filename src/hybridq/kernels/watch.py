"""Whether anything watches a call: then it goes through torch's dispatcher, else past it.

The dispatcher costs an eager call more than a small kernel. It is needed wherever something has to
see the operator: a compiler, a tracer, a mode, a transform, autograd, a profiler, a kind of tensor
that is more than its memory. This is the one place where that is decided.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd import forward_ad

__all__ = ["is_plain", "is_transformed", "may_keep", "nothing_watches"]

_Keys = torch._C.DispatchKeySet
_Key = torch._C.DispatchKey
_keys_of: Final[Any] = torch._C._dispatch_keys
_dispatch_modes: Final[Any] = torch._C._len_torch_dispatch_stack
_function_modes: Final[Any] = torch._C._len_torch_function_stack
_transform: Final[Any] = torch._C._functorch.peek_interpreter_stack
_tracing: Final[Any] = torch._C._get_tracing_state
_profiling: Final[Any] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_grad_enabled: Final[Any] = torch.is_grad_enabled
_is_compiling: Final[Any] = torch.compiler.is_compiling
_Tensor: Final = torch.Tensor
_Parameter: Final = torch.nn.Parameter


def _plain_keys() -> frozenset[int]:
    """Return the sets of dispatch keys of tensors that are nothing but memory on a CPU or GPU.

    A lazy negation, a lazy zero, a functional or batched wrapper, a subclass, another layout and
    another device each have a key more, or another one. Tensors of inference mode have two less.
    """
    found = set()
    for kind in ("CPU", "CUDA"):
        inference = _Keys(getattr(_Key, kind)) | _Keys(getattr(_Key, f"Autocast{kind}"))
        keys = inference | _Keys(getattr(_Key, f"Autograd{kind}")) | _Keys(_Key.ADInplaceOrView)
        found |= {inference.raw_repr(), keys.raw_repr()}
    return frozenset(found)


_PLAIN: Final = _plain_keys()


def nothing_watches(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call that takes these tensors may go past torch's dispatcher.

    Not while a compiler or torch.jit traces, a dispatch or function mode or a functorch transform
    is on (fake tensors, make_fx, `torch.device` as a context, vmap, ...), a profiler records, or
    forward-mode AD runs; not for a tensor that autograd differentiates, or that is more than its
    memory (see `_plain_keys`).

    Args:
        tensors: all that the call takes; None is no tensor.
    """
    if (
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _tracing() is not None
        or _profiling()
        or forward_ad._current_level >= 0
    ):
        return False
    grads = _is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (not is_plain(tensor) or (grads and tensor.requires_grad)):
            return False
    return True


def is_transformed() -> bool:
    """Return whether a compiler, a tracer, functorch or forward-mode AD looks into calls.

    Such a call is made of torch's own operators, which they all know, and of no autograd function.
    """
    return bool(
        _is_compiling()
        or _transform() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is nothing but memory on a CPU or GPU (see `_plain_keys`)."""
    kind = type(tensor)
    return (kind is _Tensor or kind is _Parameter) and _keys_of(tensor).raw_repr() in _PLAIN


def may_keep(tensor: torch.Tensor) -> bool:
    """Return whether what is made of `tensor` may be used again, where nothing watches.

    Not of a tensor of inference mode, which counts no versions, nor during the capture of a CUDA
    graph: its replays alone would fill what was kept.

    Args:
        tensor: one for which `nothing_watches` holds.
    """
    if tensor.is_inference():
        return False
    return tensor.is_cpu or not torch.cuda.is_current_stream_capturing()
