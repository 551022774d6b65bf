"""Gradients of DistributedDataParallel, reduced by quantized messages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .error_feedback import Residual
from .overflows import mark_overflows_
from .public import all_reduce

__all__ = ["ddp_hook"]


class _BucketFeedback:
    """Residuals of buckets, kept when DDP deals parameters out to other buckets.

    It does so once, after the first step. What a rank has sent of a gradient stays that rank's;
    the residual of the sums is that of other values then, and begins anew. What the buckets of
    before had is let go. So is what a model had that is gone: one hook may serve several in turn,
    and parameters of a later one may have the identities of its.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._residuals: dict[tuple[int, ...], Residual] = {}
        #: By a parameter's identity: the part of a residual that is its own.
        self._parts: dict[int, torch.Tensor] = {}

    def residual(self, parameters: list[torch.Tensor]) -> Residual:
        """Return the residual of a bucket.

        Args:
            parameters: whose gradients the bucket has, in its order.
        """
        key = tuple(map(id, parameters))
        if any(self._is_new(one) for one in parameters):
            self._forget_gone()
            self._seen.update((id(one), weakref.ref(one)) for one in parameters)
        found = self._residuals.get(key)
        if found is not None:
            return found
        dealt = set(key)
        for other in [other for other in self._residuals if dealt.intersection(other)]:
            del self._residuals[other]
        found = self._residuals[key] = Residual()
        if any(id(one) in self._parts for one in parameters):
            kept = [self._parts.get(id(one), one.new_zeros(one.numel())) for one in parameters]
            found.sent = torch.cat([part.reshape(-1).float() for part in kept])
        return found

    def _is_new(self, parameter: torch.Tensor) -> bool:
        known = self._seen.get(id(parameter))
        return known is None or known() is not parameter

    def _forget_gone(self) -> None:
        """Let go of what parameters had that are there no more."""
        gone = {key for key, known in self._seen.items() if known() is None}
        for key in gone:
            del self._seen[key]
            self._parts.pop(key, None)
        for other in [other for other in self._residuals if gone.intersection(other)]:
            del self._residuals[other]

    def keep(self, parameters: list[torch.Tensor]) -> None:
        """Note which part of a bucket's residual belongs to which parameter.

        Args:
            parameters: as `residual` took them.
        """
        found = self._residuals[tuple(map(id, parameters))]
        sizes = [one.numel() for one in parameters]
        if found.sent is not None and found.sent.numel() == sum(sizes):
            parts = zip(parameters, found.sent.split(sizes), strict=True)
            self._parts.update({id(one): part for one, part in parts})


def ddp_hook(
    quantizer: Any, *, error_feedback: bool = False
) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """Return a communication hook that averages gradients by quantized messages.

    `model.register_comm_hook(group, hybridq.distributed.ddp_hook("mxfp8"))`: every bucket of
    gradients is an `all_reduce(op="mean")`, so all ranks have the same gradients, and each value
    is quantized twice. An infinity becomes NaN, which no format loses: a GradScaler sees it. On a
    GPU it runs beside the backward, on a stream of its own.

    Args:
        quantizer: a Quantizer, a format or its name; None: not quantized, added in FP32 in the
            order of ranks. Formats with a scale per block suit buckets, which hold gradients of
            several parameters.
        error_feedback: add what rounding took from a gradient to the next one: FP32 memory of one
            and 1 / ranks gradients on each rank. No checkpoint has it: a run that is resumed lacks
            the rounding of one step, and has other bits than one that went on.

    Returns:
        `hook(state, bucket)`; `state`, the first argument of `register_comm_hook`, is the group,
        in any form that `all_reduce` takes; None: all ranks.

    Raises:
        TypeError, ValueError, SpecError, PlaneError: in the first backward, as `all_reduce`.
        RuntimeError: ranks differ in a quantizer or in a bucket.

    Source: ours; the protocol is torch's, `DistributedDataParallel.register_comm_hook`.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> model.register_comm_hook(None, hybridq.distributed.ddp_hook("mxfp8"))
        >>> model(torch.randn(4, 64)).sum().backward()
        >>> bool(model.module.weight.grad.any())
        True
        >>> dist.destroy_process_group()
    """
    feedback = _BucketFeedback() if error_feedback else None
    streams: dict[torch.device, Any] = {}

    def reduced(state: Any, bucket: Any) -> torch.Tensor:
        own = bucket.buffer()
        mark_overflows_(own, quantizer)
        if feedback is None:
            return all_reduce(own, quantizer, state, op="mean")
        parameters = bucket.parameters()
        residual = feedback.residual(parameters)
        made = all_reduce(own, quantizer, state, op="mean", error_feedback=residual)
        feedback.keep(parameters)
        return made

    # torch wants annotations that are no strings, or none.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        device = bucket.buffer().device
        if device.type == "cpu":
            made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            with torch.no_grad():
                made.set_result(reduced(state, bucket))
            return made
        module = torch.get_device_module(device)
        stream = streams.get(device) or streams.setdefault(device, module.Stream(device))
        stream.wait_stream(module.current_stream(device))
        made = torch.futures.Future(devices=[device])
        with torch.no_grad(), module.stream(stream):
            own = bucket.buffer()
            own.record_stream(stream)
            made.set_result(reduced(state, bucket))  # its readers wait for what this stream does
        return made

    return hook
