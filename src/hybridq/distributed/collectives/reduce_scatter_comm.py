"""Gradients of FSDP2, reduced by quantized messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..._torch_ranks import watch_reduced
from .error_feedback import Residual
from .overflows import mark_overflows_
from .public import all_reduce, reduce_scatter

__all__ = ["quantized_reduce_scatter"]


class _UnitFeedback:
    """Residuals of a unit's gradients, by parameter: a backward may have gradients of some only.

    Args:
        ranks: how many parts a message has.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._residual = Residual()
        #: Of the message that the residual belongs to: numbers of parameters, and values per part.
        self._about: tuple[tuple[int, int], ...] = ()
        #: Residuals of parameters that the last message did not have, `[ranks, values]`.
        self._parts: dict[int, torch.Tensor] = {}

    def of(self, about: tuple[tuple[int, int], ...], x: torch.Tensor) -> Residual:
        """Return the residual of a message.

        Args:
            about: numbers of the parameters in it, in order, and how many values each has in the
                part for a rank.
            x: the message, 1-D.

        Raises:
            RuntimeError: it has another number of values.
        """
        if about == self._about:
            return self._residual
        if self._ranks * sum(count for _, count in about) != x.numel():
            raise RuntimeError(
                f"quantized_reduce_scatter: error_feedback needs to know what FSDP2 reduces, got "
                f"{x.numel()} values for parameters of {about} with torch {torch.__version__}; "
                "leave error_feedback out"
            )
        before = self._residual.sent
        if before is not None:
            rows = before.view(self._ranks, -1).split([count for _, count in self._about], 1)
            kept = zip(self._about, rows, strict=True)
            self._parts |= {number: part.clone() for (number, _), part in kept}
        self._about, self._residual = about, Residual()
        if any(number in self._parts for number, _ in about):
            parts = [
                self._parts.pop(number)
                if number in self._parts
                else x.new_zeros(self._ranks, count, dtype=torch.float32)
                for number, count in about
            ]
            self._residual.sent = torch.cat(parts, 1).flatten()
        return self._residual


class _Unit:
    """The residuals of a unit, and what it is about to reduce.

    Args:
        unit: an FSDPModule.
    """

    def __init__(self, unit: Any) -> None:
        self._about: tuple[tuple[int, int], ...] = ()
        self._feedback: dict[str, _UnitFeedback] = {}
        watch_reduced(unit, self._tell)

    def _tell(self, about: tuple[tuple[int, int], ...]) -> None:
        self._about = about

    def residual(self, which: str, x: torch.Tensor, ranks: int) -> Residual:
        """Return the residual of a message of the gradients that are being reduced.

        Args:
            which: `"scattered"` or `"averaged"`.
            x: the message, 1-D.
            ranks: how many parts it has.

        Raises:
            RuntimeError: as of `_UnitFeedback.of`.
        """
        found = self._feedback.setdefault(which, _UnitFeedback(ranks))
        return found.of(self._about, x)


class _ReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: one for each unit.

    Args:
        quantizer: of the messages.
        feedback: of the unit, or None.
    """

    def __init__(self, quantizer: Any, feedback: _Unit | None) -> None:
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
        mark_overflows_(input_tensor, self._quantizer)
        residual = None
        if self._feedback is not None:
            ranks = input_tensor.numel() // max(output_tensor.numel(), 1)
            residual = self._feedback.residual("scattered", input_tensor, ranks)
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
    once. FSDP2's `reduce_dtype` is what is quantized and what comes out. An infinity becomes NaN,
    which no format loses.

    Args:
        model: with modules that `fully_shard` was called for; of torch >= 2.8.
        quantizer: a Quantizer, a format or its name; None: not quantized, added in FP32 in the
            order of ranks. Formats with a scale per block suit units, which hold gradients of
            several parameters.
        error_feedback: add what rounding took from a gradient to the next one of the same
            parameter: FP32 memory of a unit's whole gradients on each rank. No checkpoint has it: a
            run that is resumed lacks the rounding of one step, and has other bits than one that
            went on.
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
        feedback = _Unit(unit) if error_feedback else None
        unit.set_custom_reduce_scatter(_ReduceScatter(quantizer, feedback))  # type: ignore[arg-type]
        if replicas is not None:
            _average_over(unit, quantizer, replicas, feedback)


def _average_over(unit: Any, quantizer: Any, replicas: Any, feedback: _Unit | None) -> None:
    """Have a unit's gradients averaged over ranks that hold the same shards."""
    if any(parameter.device_mesh.ndim > 1 for parameter in unit.parameters()):
        raise ValueError(
            "quantized_reduce_scatter: under HSDP FSDP2 itself reduces over replicas; shard over "
            "the mesh's shard dimension alone, and give the other one as replicas"
        )

    @torch.no_grad()
    def hook(gradient: torch.Tensor) -> None:
        mark_overflows_(gradient, quantizer)
        residual = None if feedback is None else feedback.residual("averaged", gradient, 1)
        gradient.copy_(
            all_reduce(gradient, quantizer, replicas, op="mean", error_feedback=residual)
        )

    unit.set_all_reduce_hook(hook)
