"""Whether a call may bypass torch's dispatcher: nothing that it serves observes the call.

The dispatcher costs an eager call more than a small kernel. It is needed wherever something has to
see the operator: a compiler, a tracer, a mode, a transform, autograd, a profiler, a kind of tensor
that is more than its memory. This is the one place where that is decided.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..._torch_private import (
    DispatchKey,
    DispatchKeySet,
    dispatch_keys,
    forward_ad,
    interpreter,
    is_profiling,
    num_dispatch_modes,
    num_function_modes,
    tracing_state,
)
from .flop_counters import tell_flop_counters

__all__ = ["can_bypass_dispatcher", "can_cache", "is_plain", "is_transformed"]

_is_grad_enabled: Final[Any] = torch.is_grad_enabled
_is_compiling: Final[Any] = torch.compiler.is_compiling
_Tensor: Final = torch.Tensor
_Parameter: Final = torch.nn.Parameter


def _keys(name: str) -> Any:
    """Return the set of one dispatch key."""
    return DispatchKeySet(getattr(DispatchKey, name))


def _plain_keys() -> frozenset[int]:
    """Return the sets of dispatch keys of tensors that are nothing but memory on a CPU or GPU.

    A lazy negation, a lazy zero, a functional or batched wrapper, a subclass, another layout and
    another device each have a key more, or another one. Tensors of inference mode have two less.
    """
    found = set()
    for kind in ("CPU", "CUDA"):
        inference = DispatchKeySet(getattr(DispatchKey, kind)) | DispatchKeySet(
            getattr(DispatchKey, f"Autocast{kind}")
        )
        keys = (
            inference
            | DispatchKeySet(getattr(DispatchKey, f"Autograd{kind}"))
            | DispatchKeySet(DispatchKey.ADInplaceOrView)
        )
        found |= {inference.raw_repr(), keys.raw_repr()}
    return frozenset(found)


_PLAIN: Final = _plain_keys()


def can_bypass_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call that takes these tensors may go past torch's dispatcher.

    Not while a compiler or torch.jit traces, a dispatch or function mode or a functorch transform
    is on (fake tensors, make_fx, `torch.device` as a context, vmap, ...), a profiler records, or
    forward-mode AD runs; not for a tensor that autograd differentiates, or that is more than its
    memory (see `_plain_keys`).

    Args:
        tensors: all that the call takes; None is no tensor.
    """
    if _is_compiling():
        return False
    if num_dispatch_modes():
        tell_flop_counters()
        return False
    if (
        num_function_modes()
        or interpreter() is not None
        or tracing_state() is not None
        or is_profiling()
        or forward_ad._current_level >= 0
    ):
        return False
    grads = _is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        # What `is_plain` says, without a call for each tensor of many.
        kind = type(tensor)
        if (kind is not _Tensor and kind is not _Parameter) or (grads and tensor.requires_grad):
            return False
        if dispatch_keys(tensor).raw_repr() not in _PLAIN:
            return False
    return True


def is_transformed() -> bool:
    """Return whether a compiler, a tracer, functorch or forward-mode AD looks into calls.

    Such a call is made of torch's own operators, which they all know, and of no autograd function.
    """
    return bool(
        _is_compiling()
        or interpreter() is not None
        or tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is nothing but memory on a CPU or GPU (see `_plain_keys`)."""
    kind = type(tensor)
    return (kind is _Tensor or kind is _Parameter) and dispatch_keys(tensor).raw_repr() in _PLAIN


def can_cache(tensor: torch.Tensor) -> bool:
    """Return whether what is made of `tensor` may be used again, past the dispatcher.

    Not of a tensor of inference mode, which counts no versions, nor of one without memory, nor
    during the capture of a CUDA graph: its replays alone would fill what was kept.

    Args:
        tensor: one for which `can_bypass_dispatcher` holds.
    """
    if tensor.is_inference():
        return False
    return tensor.is_cpu or (tensor.is_cuda and not torch.cuda.is_current_stream_capturing())
