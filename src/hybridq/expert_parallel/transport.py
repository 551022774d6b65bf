"""Rows to the ranks of their experts, and back: values, or planes with scales of one row each."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.collectives.handle import CollectiveHandle
from ..distributed.collectives.send_planes import SentPlanes, send_planes
from ..errors import SpecError
from ..formats.row_format import row_format
from ..kernels.operators import StatedFunction
from ..nn.autograd import GradientPlane, MadePlane
from ..quantizers import Quantizer
from .padding import rows_at
from .plans import RoutePlan

__all__ = [
    "arrived_rows",
    "combine",
    "dispatch",
    "incoming",
    "outgoing",
    "returned",
    "row_text",
    "send_rows",
]


def row_text(where: str, quantizer: Any) -> str:
    """Return the spec string of a format as it travels, as `row_format` does.

    Args:
        where: the function, for errors.
        quantizer: a Quantizer, the name of a format, or None.

    Raises:
        SpecError: as `row_format`; or no rowwise plane.
        TypeError: it is something else.
    """
    if quantizer is None or isinstance(quantizer, str):
        return row_format(where, quantizer or "")
    if isinstance(quantizer, Quantizer):
        rowwise = quantizer.rowwise if quantizer.makes_rowwise else None
        if rowwise is None:
            raise SpecError(f"{where}: rowwise planes travel, got {quantizer}; see with_usage")
        return "" if quantizer.is_identity else row_format(where, rowwise.text)
    raise TypeError(
        f"{where}: the format must be a name, a Quantizer or None, got {type(quantizer).__name__}"
    )


def send_rows(
    x: torch.Tensor,
    plan: RoutePlan,
    formats: tuple[str, str],
    is_back: bool = False,
    is_apart: bool = False,
) -> SentPlanes:
    """Start to send rows to the ranks of their experts, or back.

    Args:
        x: rows that are sent.
        plan: of them.
        formats: spec strings of rows and of their gradients, as `row_text` gives them.
        is_back: from the experts to where rows came from.
        is_apart: something is computed before they are waited for.
    """
    splits, table = (plan.sent, plan.received), plan.table
    if is_back:
        splits, table = (plan.received, plan.sent), tuple(zip(*table, strict=True))
    return send_planes(x, formats, plan.group, splits, is_apart, table)


def arrived_rows(sent: SentPlanes) -> tuple[torch.Tensor, MadePlane | None]:
    """Return the rows that arrive, and their rowwise plane where it is what has travelled.

    Args:
        sent: what `send_rows` returned.
    """
    values, spec, buffers = sent.wait()
    return values, MadePlane(spec, buffers) if buffers else None


def dispatch(
    x: torch.Tensor,
    plan: RoutePlan,
    quantizer: Any = None,
    grad_quantizer: Any = None,
    *,
    async_op: bool = False,
) -> Any:
    """Return the rows of all ranks that are for this rank's experts, as `plan.arrived` says.

    Each row is quantized by its sender, once; its gradient by the rank of its expert. All ranks of
    the group must call it.

    Args:
        x: `[rows, H]` float32, bfloat16 or float16, sorted by expert (`permute`); rows of no
            expert last.
        plan: of these rows, from `route_plan`.
        quantizer: a format whose scales are of one row each, its name, or a Quantizer, whose
            rowwise plane travels; None: values as they are. NVFP4 has an amax for each row.
        grad_quantizer: the same of the gradient.
        async_op: return a `CollectiveHandle`, whose `wait()` gives the result: what is computed
            before it runs while rows travel, and so does its backward while gradients travel.

    Returns:
        `[plan.num_received, H]` of x's dtype; or a CollectiveHandle.

    Raises:
        SpecError: no such format, or one whose scales are of several rows.
        ValueError: x has other rows than the plan.

    Source: ours.
    """
    if x.dim() != 2 or x.shape[0] != plan.rows:
        raise ValueError(
            f"dispatch: x must be [{plan.rows}, features], as the plan has rows, got "
            f"{tuple(x.shape)}"
        )
    formats = row_text("dispatch", quantizer), row_text("dispatch", grad_quantizer)
    sent = send_rows(outgoing(x, plan), plan, formats, is_apart=async_op)
    return CollectiveHandle(sent.values) if async_op else sent.values()


def combine(
    y: torch.Tensor,
    plan: RoutePlan,
    quantizer: Any = None,
    grad_quantizer: Any = None,
    *,
    async_op: bool = False,
) -> Any:
    """Return what the experts of all ranks made of this rank's rows: the way back of `dispatch`.

    All ranks of the group must call it.

    Args:
        y: `[plan.num_received, H]`, in the order in which rows arrived.
        plan: of `dispatch`.
        quantizer, grad_quantizer, async_op: as `dispatch` takes them.

    Returns:
        `[plan.rows, H]` of y's dtype, sorted by expert; rows of no expert are zero. Or a
        CollectiveHandle.

    Raises:
        SpecError: no such format, or one whose scales are of several rows.
        ValueError: y has other rows than the plan.

    Source: ours.
    """
    if y.dim() != 2 or y.shape[0] != plan.num_received:
        raise ValueError(
            f"combine: y must be [{plan.num_received}, features], as many rows as arrived, got "
            f"{tuple(y.shape)}"
        )
    formats = row_text("combine", quantizer), row_text("combine", grad_quantizer)
    sent = send_rows(y, plan, formats, is_back=True, is_apart=async_op)
    if async_op:
        return CollectiveHandle(lambda: incoming(sent.values(), plan))
    return incoming(sent.values(), plan)


def outgoing(x: torch.Tensor, plan: RoutePlan) -> torch.Tensor:
    """Return the rows that are sent, of this rank's.

    Args:
        x: `[plan.rows, H]`.
        plan: of them.
    """
    if plan.padding is not None:
        return rows_at(x, plan.padding.slots, plan.padding.places)
    return x.narrow(0, 0, plan.num_sent)


def incoming(back: torch.Tensor, plan: RoutePlan) -> torch.Tensor:
    """Return this rank's rows, of those that came back; rows of no expert are zero.

    Args:
        back: `[plan.num_sent, H]`.
        plan: of them.
    """
    if plan.padding is not None:
        return rows_at(back, plan.padding.places, plan.padding.slots)
    rest = plan.rows - plan.num_sent
    return torch.nn.functional.pad(back, (0, 0, 0, rest)) if rest else back


def returned(
    y: torch.Tensor, plan: RoutePlan, formats: tuple[str, str], arriving: GradientPlane | None
) -> torch.Tensor:
    """Return the experts' outputs, where their tokens came from, `[plan.num_sent, H]`.

    Args:
        y: `[plan.num_received, H]`, in the order of the experts.
        plan: of the rows.
        formats: as for `send_rows`.
        arriving: where the gradient's plane is put; None: nobody takes it.
    """
    made: torch.Tensor = _Returned.apply(y, plan, formats, arriving)
    return made


class _Returned(StatedFunction):
    """The outputs by sender, sent there. Its backward gets their gradient, and the plane of it."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        plan: RoutePlan,
        formats: tuple[str, str],
        arriving: GradientPlane | None,
    ) -> torch.Tensor:
        ctx.plan, ctx.back, ctx.arriving = plan, formats[1], arriving
        by_sender = y.index_select(0, plan.arrived.inverse.flatten())
        return send_rows(by_sender, plan, formats, is_back=True).values()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        plan, order = ctx.plan, ctx.plan.arrived.order
        values, made = arrived_rows(send_rows(grad, plan, (ctx.back, ctx.back)))
        own = values.index_select(0, order)
        if made is not None and ctx.arriving is not None:
            ctx.arriving.put(own, made, order)
        return own, None, None, None
