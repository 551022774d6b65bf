"""A linear module's forward of few rows in one step of the core: see `kernels.few_rows`."""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from ..kernels import Kept
from ..kernels.exact import Side, decode_side
from ..kernels.few_rows import few_rows_product
from ..kernels.types import Operand
from ..recipes import Plan
from .kept_weight import Buffers
from .operands import STREAMS

__all__ = ["FewRows"]


class FewRows:
    """The forward under one plan, for tensors of one dtype on a CPU.

    Args:
        plan: of the module.
        dtype: of input, weight and bias.

    Attributes:
        plan, dtype: the same.
        is_possible: the plan has nothing that takes more than one step, as far as it tells.
    """

    __slots__ = ("_column", "_weight", "dtype", "is_possible", "plan")

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan, self.dtype = plan, dtype
        slot, weight = plan.input, plan.weight
        is_outside = plan.is_delayed or slot.amax_group or weight.amax_group
        self.is_possible = not (is_outside or slot.row.is_plain or weight.row.is_plain)
        self._weight = PlaneSpec.parse(weight.row.spec).resolve(dtype)
        #: What is made of the input for the backward; None where that is another step.
        self._column = None
        if not slot.col.is_plain and slot.col_source == "original":
            self._column = slot.col.spec

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        saves_x: bool,
        w_planes: tuple[Buffers, Buffers] | None,
        kept: Kept | None,
    ) -> tuple[torch.Tensor, Buffers, Buffers] | None:
        """Return y, what is saved of x, and what is saved of w; None: not done.

        Args:
            x, w, bias, seed: as for `function.linear`; nothing watches them.
            saves_x: the backward will want x's columnwise plane.
            w_planes: buffers of w's rowwise plane, and what is saved of w; None: w is quantized on
                the way, and nothing of it is saved.
            kept: where what is made of the rowwise plane is kept, or None.
        """
        plan, column = self.plan, self._column if saves_x else ""
        if column is None:
            return None
        texts = (plan.input.row.spec, column, plan.weight.row.spec)
        product = few_rows_product(*texts, self.dtype, bias is not None, plan.precision.fprop)
        if product is None:
            return None
        right: torch.Tensor | Side = w
        if w_planes is not None:
            n, k = w.shape
            operand = Operand(w_planes[0], self._weight, n, k, kept)
            right = decode_side(operand, True, torch.bfloat16)
            if not right.is_bf16:
                return None
        made = product(x, right, bias, seed, STREAMS["input"][1])
        return made and (*made, [] if w_planes is None else w_planes[1])
