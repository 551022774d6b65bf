"""Grouped products on a device of what is by group, made of products of ordinary ragged planes.

The operands enter without the factors of their groups, with FP32 out; then come the factors, what
is added, and one rounding, as in a product of single planes. Padded rows are multiplied where they
lie and moved back. Nothing is read on the host.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...reference import tensor_factor
from ..choice import Backend, GroupedArgs, GroupedOperand
from .sync_free_groups import group_of_tokens, of_group, places_of_tokens

__all__ = ["factor_of_groups", "product_by_group", "stacked"]


def factor_of_groups(operand: GroupedOperand) -> torch.Tensor | None:
    """Return the factor of each group `[G, 1]` or `[G, rows]`, or of all `[1, 1]`, or None.

    Args:
        operand: one plane for all groups, or a stack.
    """
    found = tensor_factor(operand.buffers, operand.spec)
    if found is None or operand.by_group or operand.is_stack:
        return found
    return found.view(1, -1)


def _without_factor(operand: GroupedOperand) -> GroupedOperand:
    """Return the operand with a factor of 1 in all groups."""
    spec = operand.spec
    if not spec.needs_amax:
        return operand
    element = spec.format.element
    unit = 1.0
    if not spec.format.is_tensor_scaled and element is not None:
        unit = spec.tensor_bound * element.max
    shape: tuple[int, ...] = spec.stat_shape(operand.rows)
    if operand.is_stack:
        shape = (operand.buffers[0].shape[0], *shape)
    one = operand.buffers[-1].new_full(shape, unit)
    return replace(operand, buffers=[*operand.buffers[:-1], one], by_group=False)


def stacked(operand: GroupedOperand) -> GroupedOperand:
    """Return an operand whose planes are not one by one.

    Args:
        operand: a stack, or a list, of matrices.
    """
    if not operand.is_list:
        return operand
    count = len(operand.spec.buffers(1, 1))
    buffers = [torch.stack(operand.buffers[i::count]) for i in range(count)]
    return replace(operand, buffers=buffers, is_list=False, cache=None)


def product_by_group(
    choose: Callable[[torch.dtype, bool], Backend],
    a: GroupedOperand,
    b: GroupedOperand,
    args: GroupedArgs,
) -> torch.Tensor:
    """Return the grouped product of operands that are by group, padded rows, or lists.

    Args:
        choose: returns what multiplies ordinary operands to a dtype; the flag says whether nothing
            follows the product.
        a, b, args: as a backend's `grouped_gemm` takes them.
    """

    def product(dtype: torch.dtype, is_alone: bool, given: GroupedArgs) -> torch.Tensor:
        backend = choose(dtype, is_alone)
        keeps = backend.stacks_lists and b.cache is not None
        made: torch.Tensor = backend.ops["grouped_gemm"](a, b if keeps else stacked(b), given)
        return made

    groups = args.offsets.shape[0]
    is_padded = b.is_stack and a.is_padded
    factors: list[torch.Tensor | None] = [None, None]
    is_alone = args.bias is None and args.accumulate_into is None
    takes_factors = False
    if a.by_group or b.by_group:
        b = stacked(b)
        if args.accumulate_into is None:
            takes_factors = choose(args.out_dtype, is_alone).takes_group_factors
        if not takes_factors:
            factors = [factor_of_groups(a), factor_of_groups(b)]
            a, b = _without_factor(a), _without_factor(b)
    has_factor = any(factor is not None for factor in factors)
    if not (is_padded or has_factor):
        return product(args.out_dtype, is_alone, args)
    ends = args.offsets
    # With factors in the product, a bias is, too.
    own = args if takes_factors else replace(args, bias=None, accumulate_into=None)
    bias = None if takes_factors else args.bias
    if is_padded and args.padded is not None:
        own = replace(own, offsets=args.padded[1:], tokens=a.rows, padded=None)
        a = replace(a, is_padded=False)
    is_last = takes_factors or (is_alone and not has_factor)
    dtype = args.out_dtype if is_last else torch.float32
    made = product(dtype, own.bias is None, replace(own, out_dtype=dtype))
    if b.is_stack:
        group = group_of_tokens(ends, args.tokens)
        if is_padded:
            made = made[places_of_tokens(ends, args.tokens)]
            made = torch.where((group < groups)[:, None], made, 0.0)
        for factor in factors:
            if factor is not None:
                made = made * of_group(factor, group, 1.0)
        if bias is not None:
            made = made + of_group(bias.to(made.dtype), group, 0.0)
    else:
        for factor, axis in zip(factors, (-1, -2), strict=True):
            if factor is not None:
                made = made * factor.unsqueeze(axis)
    if args.accumulate_into is not None:
        made = made + args.accumulate_into.to(made.dtype)
    return made.to(args.out_dtype)
