"""The products of a grouped linear module by operators, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels import OperandCache
from ...kernels.inputs import can_bypass_dispatcher, without_autocast
from ...kernels.operators import run_grouped_gemm
from ...kernels.ragged import capacity
from ...recipes import Plan
from ...tensor.stack import split_stack, split_transposed
from ..weights import Buffers, Into, accumulate_groups, adds_to, given_to_autograd, target_of

__all__ = ["Layout", "Side", "each", "late_gradients", "rows_product", "weight_gradients"]


class Layout(NamedTuple):
    """How the parameters of a grouped linear module are given.

    Attributes:
        groups: how many there are.
        is_single: the weights are one tensor `[G, out, in]`, else one `[out, in]` each.
        has_bias: there are biases.
        is_single_bias: they are one tensor `[G, out]`, else one `[out]` each.
        features: (in_features, out_features).
        is_transposed: the one tensor of weights is `[G, in, out]`.
    """

    groups: int
    is_single: bool
    has_bias: bool
    is_single_bias: bool
    features: tuple[int, int]
    is_transposed: bool = False

    def matrices(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices `[out, in]` of the one tensor that the weights are.

        Args:
            weight: as the module holds it.
        """
        return split_transposed(weight) if self.is_transposed else split_stack(weight)


class Side(NamedTuple):
    """One side of a product: the buffers of its planes, and their spec."""

    buffers: Buffers
    spec: str


def rows_product(
    a: Side,
    b: Side,
    shape: tuple[int, int, int],
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str,
    caches: Sequence[OperandCache] = (),
) -> torch.Tensor:
    """Return `[T, N]`: the rows of each group with its own matrix `[N, K]`; shape is (T, N, K).

    `caches`: of b's planes, one for each group; none: nothing is kept of them.
    """
    tokens, n, k = shape
    rows = a.buffers[0].shape[0]
    operands = (*a, (rows, k), *b, (n, k), offsets, tokens, bias)
    options: dict[str, Any] = {
        "is_stack": True,
        "a_padded": rows != tokens,  # rows with square blocks
        "out_dtype": dtype,
        "precision": precision,
    }
    if caches and can_bypass_dispatcher(*a.buffers, *b.buffers, offsets, bias):
        return run_grouped_gemm(*operands, **options, cache=caches[0].of_stack(caches))
    made: torch.Tensor = torch.ops.hybridq.grouped_gemm(*operands, **options)
    return made


def weight_gradients(
    plan: Plan,
    layout: Layout,
    into: tuple[Into | None, ...],
    dy_col: Buffers,
    x_col: Buffers,
    offsets: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each weight parameter, or what autograd is given instead."""
    in_features, out_features = layout.features
    grad, padded = plan.grad_output, capacity(tokens, layout.groups)
    sides = [plane.num_buffers > 1 for plane in (grad.col, plan.input.col)]
    left = (dy_col, grad.col.spec, (out_features, padded if sides[0] else tokens))
    right = (x_col, plan.input.col.spec, (in_features, padded if sides[1] else tokens))
    if layout.is_transposed:  # x.T @ dy: a gradient that lies in memory as the weights do
        left, right, sides = right, left, sides[::-1]
    operands = (*left, *right, offsets, tokens)
    options = {"is_stack": False, "a_padded": sides[0], "b_padded": sides[1]}
    precision = plan.precision.wgrad
    target = next((one for one in into if one is not None and one.main_grad is not None), None)
    if target is not None and layout.is_single:
        torch.ops.hybridq.grouped_gemm_(
            target_of(target),
            *operands,
            accumulate=adds_to(target),
            precision=precision,
            **options,
        )
        return (given_to_autograd(target),)
    if target is not None:
        dtype = torch.float32
    dw = torch.ops.hybridq.grouped_gemm(*operands, out_dtype=dtype, precision=precision, **options)
    return (
        accumulate_groups(into, dw)
        if target is not None
        else each(dw, layout.groups, layout.is_single)
    )


def each(grad: torch.Tensor | None, count: int, is_single: bool) -> tuple[Any, ...]:
    if is_single:
        return (grad,)
    return (None,) * count if grad is None else tuple([grad[g] for g in range(count)])


def late_gradients(*given: Any) -> tuple[torch.Tensor | None, ...]:
    """Return what `weight_gradients` does, outside of a backward."""
    with without_autocast(given[5].device.type):
        return weight_gradients(*given)
