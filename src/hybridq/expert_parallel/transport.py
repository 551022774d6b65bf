"""Rows to the ranks of their experts, and back: values, or planes with scales of one row each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..distributed.collectives.public import exchange_planes
from ..errors import SpecError
from ..formats import PlaneSpec
from ..nn.autograd import MadePlane
from ..quantizers import Quantizer
from .plans import RoutePlan

__all__ = ["combine", "dispatch", "row_format", "sent_rows"]


@lru_cache(maxsize=256)
def row_format(where: str, text: str) -> str:
    """Return the spec string of a format as it travels: each row by itself.

    What a row becomes must not depend on the rows beside it, which other numbers of ranks would
    change. So NVFP4 has an amax for each row, and formats with one scale for a tensor are refused.

    Args:
        where: the function, for errors.
        text: name of a format, or of a PlaneSpec; empty: values as they are.

    Raises:
        SpecError: an unknown name, or a format whose scales are not of one row.
    """
    if not text:
        return ""
    spec = PlaneSpec.parse(text)
    if spec.format.is_identity:
        return spec.text
    if spec.format.rule == "two_level" and not spec.row_scaled and not spec.format.is_square:
        spec = PlaneSpec.parse(f"{spec.text};rows")
    if spec.unit(0) != 1 or spec.needs_tensor_amax or spec.format.block is None:
        raise SpecError(
            f"{where}: tokens travel in formats whose scales are of one row each, such as mxfp8, "
            f"fp8_1x128 and nvfp4, got {text!r}"
        )
    return spec.text


def _wire(where: str, quantizer: Any) -> str:
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


def sent_rows(
    where: str, x: torch.Tensor, plan: RoutePlan, formats: tuple[Any, Any], is_back: bool = False
) -> tuple[torch.Tensor, MadePlane | None]:
    """Return the rows that arrive, and their rowwise plane where it is what has travelled.

    Args:
        where: the function, for errors.
        x: rows that are sent.
        plan: of them.
        formats: of rows and of their gradients, as `dispatch` takes them.
        is_back: from the experts to where rows came from.
    """
    texts = (_wire(where, one) for one in formats)
    forward, backward = (PlaneSpec.parse(text) if text else None for text in texts)
    splits = (plan.received, plan.sent) if is_back else (plan.sent, plan.received)
    values, spec, buffers = exchange_planes(x, (forward, backward), plan.group, splits)
    return values, MadePlane(spec, buffers) if buffers else None


def dispatch(
    x: torch.Tensor, plan: RoutePlan, quantizer: Any = None, grad_quantizer: Any = None
) -> torch.Tensor:
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

    Returns:
        `[plan.num_received, H]` of x's dtype.

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
    own = x.narrow(0, 0, plan.num_sent)
    return sent_rows("dispatch", own, plan, (quantizer, grad_quantizer))[0]


def combine(
    y: torch.Tensor, plan: RoutePlan, quantizer: Any = None, grad_quantizer: Any = None
) -> torch.Tensor:
    """Return what the experts of all ranks made of this rank's rows: the way back of `dispatch`.

    All ranks of the group must call it.

    Args:
        y: `[plan.num_received, H]`, in the order in which rows arrived.
        plan: of `dispatch`.
        quantizer, grad_quantizer: as `dispatch` takes them.

    Returns:
        `[plan.rows, H]` of y's dtype, sorted by expert; rows of no expert are zero.

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
    back, _ = sent_rows("combine", y, plan, (quantizer, grad_quantizer), True)
    rest = plan.rows - plan.num_sent
    return torch.nn.functional.pad(back, (0, 0, 0, rest)) if rest else back
