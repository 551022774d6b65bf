"""Grouped GEMM by torch: exact decode, then one product per group.

On a CPU the groups are a loop. On CUDA it is `torch.nn.functional.grouped_mm`, whose offsets stay
on the device; its result is BF16, so that it serves where nothing follows the product.

Source: torch, aten/src/ATen/native/cuda/GroupedBlas.cpp (chips, strides of 16 bytes, dtypes).
"""

from __future__ import annotations

import torch

from ..choice import GroupedArgs, GroupedOperand, Operand, OpQuery
from ..inputs import is_host, without_autocast
from ..ragged import group_ends as ends_of
from ..ragged import one_of, pad_tokens, product_loop
from ..scaled_mm import ceil_to
from .decoded_gemm import exact_gemm
from .decoded_sides import decode_side, fp32_reason

__all__ = ["group_ends", "grouped_gemm", "grouped_reason", "keeps_transformed"]

#: Elements of BF16 in 16 bytes, the stride that the grouped product wants.
_STEP = 8


def group_ends(args: GroupedArgs) -> torch.Tensor:
    """Return the ends of the groups, never beyond the tokens and never before an earlier one."""
    return ends_of(args.offsets, args.tokens)


def grouped_reason(query: OpQuery) -> str | None:
    """Return None if this runs a grouped query on its device, else why not."""
    if query.chip is None or query.chip.capability is None:
        return None  # a loop over the groups
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return "this torch has no torch.nn.functional.grouped_mm"
    if query.chip.capability[0] not in (9, 10):
        return f"torch's grouped product reads the offsets on the host on {query.chip}"
    if query.dtype != torch.bfloat16 or not query.is_alone:
        return "torch's grouped product rounds to BF16, so nothing may follow it"
    for name, spec in (("a", query.row), ("b", query.col)):
        if spec is not None and spec.needs_amax:
            return f"operand {name} has a factor that follows the product ({spec.format})"
    if query.row is None or query.col is None:
        return "needs two operands"
    return fp32_reason(query.row, query.col, query.device, query.dtype, is_alone=True)


def grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """Return `[T, N]` if b is a stack, else `[G, M, N]`; operands exact, sums in FP32."""
    device = args.offsets.device.type
    with without_autocast(device):
        if is_host(device):
            return product_loop(a, b, args, exact_gemm)
        return _rows_cuda(a, b, args) if b.is_stack else _tokens_cuda(a, b, args)


def _operand(one: GroupedOperand) -> Operand:
    return Operand(one.buffers, one.spec, one.rows, one.cols)


def keeps_transformed(a: GroupedOperand, b: GroupedOperand) -> bool:
    """Whether a shared transform may stay: plain tokens are not transformed by groups."""
    return a.spec.signs == b.spec.signs and (b.is_stack or a.is_padded == b.is_padded)


def _aligned(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return BF16 `[rows, K]`, K a multiple of 8, zeros added, rows one after the other."""
    width = ceil_to(matrix.shape[-1], _STEP)
    extra = (0, width - matrix.shape[-1], 0, rows - matrix.shape[-2])
    matrix = matrix.to(torch.bfloat16)
    return torch.nn.functional.pad(matrix, extra) if any(extra) else matrix.contiguous()


def _rows_cuda(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    keep, columns = keeps_transformed(a, b), ceil_to(b.rows, _STEP)
    left = _aligned(decode_side(_operand(a), keep, torch.bfloat16).matrix, a.rows)
    right = _aligned(_decoded_stack(b, keep), columns)
    ends = group_ends(args)
    if not (ends.shape[0] and a.rows and b.rows):
        return left.new_zeros((a.rows, b.rows))
    product = torch.nn.functional.grouped_mm(left, right.transpose(-2, -1), offs=ends)
    # What lies behind the last group is not written.
    is_token = torch.arange(a.rows, device=ends.device, dtype=ends.dtype) < ends[-1]
    return torch.where(is_token[:, None], product[:, : b.rows], 0.0)


def _decoded_stack(stack: GroupedOperand, keep_transformed: bool) -> torch.Tensor:
    """Return `[G, rows, K]`: one decode where the stack's rows are one plane's, else one each."""
    groups, fmt = stack.buffers[0].shape[0], stack.spec.format
    if fmt.is_identity:
        return stack.buffers[0]
    height = 1 if fmt.block is None else fmt.block[0]
    if stack.rows % height == 0 and not stack.spec.needs_amax:
        flat = [buffer.flatten(0, 1) for buffer in stack.buffers]
        whole = Operand(flat, stack.spec, groups * stack.rows, stack.cols)
        matrix = decode_side(whole, keep_transformed, torch.bfloat16).matrix
        return matrix.reshape(groups, stack.rows, matrix.shape[1])
    sides = [
        decode_side(one_of(stack, group), keep_transformed, torch.bfloat16)
        for group in range(groups)
    ]
    return torch.stack([side.matrix for side in sides])


def _tokens_cuda(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    keep = keeps_transformed(a, b)
    ends = group_ends(args)
    groups = ends.shape[0]
    first, second = (decode_side(_operand(one), keep, torch.bfloat16).matrix for one in (a, b))
    if not (groups and a.rows and b.rows and first.shape[1]):
        return first.new_zeros((groups, a.rows, b.rows), dtype=torch.bfloat16)
    if args.padded is None:
        # Tokens one below the other, so that a group may begin anywhere: with tokens side by side
        # torch wants every group to begin at 16 bytes.
        left = _aligned(first.t(), first.shape[1])
        right = _aligned(second.t(), second.shape[1])
        product = torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
        # On sm_100 some versions leave the result of a contraction over nothing unwritten.
        has_tokens = ends > torch.nn.functional.pad(ends[:-1], (1, 0))
        return torch.where(has_tokens[:, None, None], product[:, : a.rows, : b.rows], 0.0)
    # Zeros between the groups add nothing, so padded ends serve both operands.
    first, second = (
        side if one.is_padded else pad_tokens(side.t(), ends).t()
        for side, one in zip((first, second), (a, b), strict=True)
    )
    left = _aligned(first, a.rows)
    right = _aligned(second, ceil_to(b.rows, _STEP))
    product = torch.nn.functional.grouped_mm(left, right.t(), offs=args.padded[1:])
    return product[:, :, : b.rows].contiguous()
