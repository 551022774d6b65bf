"""Gradients of FSDP2, reduced by quantized messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .error_feedback import ErrorFeedback
from .public import all_reduce, reduce_scatter

__all__ = ["quantized_reduce_scatter"]


class _ReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: one for each unit.

    Args:
        quantizer: of the messages.
        feedback: of the unit, or None.
    """

    def __init__(self, quantizer: Any, feedback: ErrorFeedback | None) -> None:
        self._quantizer = quantizer
        self._feedback = feedback

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory that FSDP2 reads from or writes to.

        Args:
            size, dtype, device: of it.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the ranks' sum or mean.

        Args:
            output_tensor, input_tensor: 1-D; the input has one part for each rank.
            group: of ranks.
            op: a ReduceOp: SUM or AVG.
            async_op: not asked for by FSDP2.
        """
        residual = None if self._feedback is None else self._feedback["gradient"]
        made = reduce_scatter(
            input_tensor,
            self._quantizer,
            group,
            op=_name(op),
            error_feedback=residual,
        )
        output_tensor.copy_(made)


def _name(op: Any) -> str:
    import torch.distributed as dist  # not every build of torch has it

    if op == dist.ReduceOp.AVG:
        return "mean"
    if op == dist.ReduceOp.SUM:
        return "sum"
    raise ValueError(
        f"quantized_reduce_scatter: FSDP2 must ask for a sum or a mean, got {op}; after "
        "set_gradient_divide_factor, call set_force_sum_reduction_for_comms(True) on the model"
    )


def quantized_reduce_scatter(
    model: nn.Module,
    quantizer: Any,
    *,
    error_feedback: bool = False,
    replicas: Any = None,
) -> None:
    """Have FSDP2 reduce the gradients of a model by quantized messages.

    Call it after `fully_shard`, on all ranks. Each unit's gradients are a `reduce_scatter` of one
    row of values for each rank, over the ranks that share a parameter; every value is quantized
    once. FSDP2's `reduce_dtype` is what is quantized and what comes out.

    Args:
        model: with modules that `fully_shard` was called for; of torch >= 2.8.
        quantizer: a Quantizer, a format or its name; None: not quantized, added in FP32 in the
            order of ranks. Formats with a scale per block suit units, which hold gradients of
            several parameters.
        error_feedback: add what rounding took from a gradient to the next one: FP32 memory of a
            unit's whole gradients on each rank.
        replicas: of a model that is sharded over a part of the ranks only (a node), a group of
            those ranks that hold the same shards: gradients are averaged over it too, by an
            `all_reduce` in the same format. None: by FSDP2 itself under HSDP, not quantized.

    Raises:
        ValueError: the model has no such modules, or is sharded by HSDP and `replicas` is given.
        RuntimeError: this torch has no custom reduce-scatter; in a backward, as `reduce_scatter`.

    Source: ours; the protocol is torch's (`FSDPModule.set_custom_reduce_scatter`).

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(torch.nn.Linear(64, 64))
        >>> hybridq.distributed.quantized_reduce_scatter(model, "mxfp8")
        >>> model(torch.randn(4, 64)).sum().backward()
        >>> dist.destroy_process_group()
    """
    from torch.distributed.fsdp import FSDPModule  # not every build of torch has it

    where = "quantized_reduce_scatter"
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"{where}: torch must have FSDPModule.set_custom_reduce_scatter (2.8), got "
            f"{torch.__version__}"
        )
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if not units:
        raise ValueError(f"{where}: the model must be sharded first, got no module of fully_shard")
    for unit in units:
        feedback = ErrorFeedback() if error_feedback else None
        unit.set_custom_reduce_scatter(_ReduceScatter(quantizer, feedback))  # type: ignore[arg-type]
        if replicas is not None:
            _average_over(unit, quantizer, replicas, error_feedback)


def _average_over(unit: Any, quantizer: Any, replicas: Any, error_feedback: bool) -> None:
    """Have a unit's gradients averaged over ranks that hold the same shards."""
    if any(parameter.device_mesh.ndim > 1 for parameter in unit.parameters()):
        raise ValueError(
            "quantized_reduce_scatter: under HSDP FSDP2 itself reduces over replicas; shard over "
            "the mesh's shard dimension alone, and give the other one as replicas"
        )
    feedback = ErrorFeedback() if error_feedback else None

    @torch.no_grad()
    def hook(gradient: torch.Tensor) -> None:
        residual = None if feedback is None else feedback["gradient"]
        gradient.copy_(
            all_reduce(gradient, quantizer, replicas, op="mean", error_feedback=residual)
        )

    unit.set_all_reduce_hook(hook)
