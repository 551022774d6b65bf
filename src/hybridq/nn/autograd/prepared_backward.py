"""What the backward of a linear module under one plan and in one size does not find out again.

On the current GPU, past torch's dispatcher: the gradient's rowwise plane and what dies with the two
products lie in one allocation.
"""

from __future__ import annotations

import torch

from ... import settings
from ...kernels import OperandCache
from ...kernels.choice import GemmArgs, Operand, Place, cached_choice
from ...kernels.inputs import is_current, stream_of
from ...kernels.operators import (
    GpuGemmPlan,
    check_buffers,
    gpu_gemm_plan,
    placed_encoders,
    run_gemm,
)
from ...recipes import Plan
from ..weights import Buffers
from .prepared_linear import PreparedSlot

__all__ = ["PreparedBackward", "prepared_backward"]


class PreparedBackward:
    """The backward under one plan, in one size.

    Args:
        plan: of the call, in the specs in which its planes are encoded.
        sizes: rows, in_features and out_features.
        wants: whether the gradients of the input and of the weight are wanted, the first of them
            for certain.
        dtype: of the gradient.
        device: a GPU.
    """

    __slots__ = ("_dtype", "_encoder", "_is_saved", "_plans", "_precisions", "_sizes", "_slot")

    def __init__(
        self,
        plan: Plan,
        sizes: tuple[int, int, int],
        wants: tuple[bool, bool],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        grad, precision = plan.grad_output, plan.precision
        rows, inner, outer = self._sizes = sizes
        self._slot, self._dtype = PreparedSlot(grad, "grad_output", device.type), dtype
        self._is_saved = wants[1]
        specs = self._slot.dying[wants[1]]
        found = None if specs is None else placed_encoders(specs, None, dtype, device.type)
        self._encoder = None if found is None else found[0]
        self._plans: list[GpuGemmPlan] = []
        self._precisions = (precision.dgrad, precision.wgrad)
        for is_wanted, texts, how, size in (
            (True, (grad.row.spec, plan.weight.col.spec), precision.dgrad, (rows, inner, outer)),
            (wants[1], (grad.col.spec, plan.input.col.spec), precision.wgrad, (outer, inner, rows)),
        ):
            if is_wanted and self._encoder is not None:
                self._plans.append(gpu_gemm_plan(*texts, dtype, how, size, device))

    @property
    def is_possible(self) -> bool:
        """Whether the gradient's planes are made at once."""
        return self._encoder is not None

    def encode(
        self, dy: torch.Tensor, seed: torch.Tensor | None
    ) -> tuple[Buffers, Buffers, Place | None]:
        """Return the planes of dy that are wanted, and memory for the products.

        Args:
            dy: `[rows, out_features]` on the current device.
            seed: int64 `[1]` where a plane is rounded stochastically.
        """
        encoder = self._encoder
        if encoder is None:
            raise ValueError("PreparedBackward: this plan's gradient is encoded in several steps")
        rows, _, outer = self._sizes
        room = encoder.room(rows, outer)
        work = max([plan.room for plan in self._plans])
        memory = torch.empty(room + work, dtype=torch.uint8, device=dy.device)
        stream = stream_of(dy.device)
        place = Place(memory, 0, stream)
        row, col = self._slot.operand_in(dy, self._is_saved, seed, encoder, place)
        return row, col, Place(memory, room, stream)

    def dgrad(
        self, dy: Buffers, w: Buffers, kept: OperandCache | None, work: Place | None
    ) -> torch.Tensor:
        """Return the gradient of the input.

        Args:
            dy: rowwise plane of the gradient.
            w: columnwise plane of the weight, which may have been through a user's hooks.
            kept: where what is made of it is kept, or None.
            work: what `encode` returned.
        """
        rows, inner, outer = self._sizes
        plan, precision = self._plans[0], self._precisions[0]
        check_buffers(w, plan.b, inner, outer, "gemm")
        right = Operand(w, plan.b, inner, outer, kept)
        return self._product(plan, precision, Operand(dy, plan.a, rows, outer), right, work)

    def wgrad(self, dy: Buffers, x: Buffers, work: Place | None) -> torch.Tensor:
        """Return the gradient of the weight.

        Args:
            dy: columnwise plane of the gradient.
            x: columnwise plane of the input, which may have been through a user's hooks.
            work: what `encode` returned.
        """
        rows, inner, outer = self._sizes
        plan, precision = self._plans[1], self._precisions[1]
        check_buffers(x, plan.b, inner, rows, "gemm")
        right = Operand(x, plan.b, inner, rows)
        return self._product(plan, precision, Operand(dy, plan.a, outer, rows), right, work)

    def _product(
        self, plan: GpuGemmPlan, precision: str, a: Operand, b: Operand, work: Place | None
    ) -> torch.Tensor:
        args = GemmArgs(None, None, self._dtype, precision, plan.chip, None, work)
        if a.buffers[0].device != b.buffers[0].device:
            return run_gemm(a, b, args)  # which says so
        return plan.run(a, b, args)


def prepared_backward(
    plan: Plan, sizes: tuple[int, int, int], wants: tuple[bool, bool], dy: torch.Tensor
) -> PreparedBackward | None:
    """Return what makes the gradients of a call, or None: its backward is the general one.

    Args:
        plan, sizes, wants: as `PreparedBackward` takes them.
        dy: the gradient, on a GPU.
    """
    if not (wants[0] and is_current(dy.device)) or 0 in sizes:
        return None
    return _prepared(plan, sizes, wants, dy.dtype, dy.device, settings.current().backend)


@cached_choice
def _prepared(
    plan: Plan,
    sizes: tuple[int, int, int],
    wants: tuple[bool, bool],
    dtype: torch.dtype,
    device: torch.device,
    forced: str | None,
) -> PreparedBackward | None:
    del forced  # what `select` asks for
    grad = plan.grad_output
    planes = [grad.row, *((grad.col, plan.input.col) if wants[1] else ()), plan.weight.col]
    if grad.is_delayed or grad.amax_group or any(plane.is_plain for plane in planes):
        return None
    made = PreparedBackward(plan, sizes, wants, dtype, device)
    return made if made.is_possible else None
