"""Grouped GEMM by torch: exact decode, then one product per group.

On a CPU the groups are a loop. On CUDA it is `torch.nn.functional.grouped_mm`, whose offsets stay
on the device; its result is BF16, so that it serves where nothing follows the product. Factors, of
tensors and of groups, go into the decoded tokens before it, as they do in a dense product
(`factored_gemm`); not where precision is "exact". A bias is a term of the sum: a column of ones
beside the tokens, and the bias as a column of each matrix.

Source: torch, aten/src/ATen/native/cuda/GroupedBlas.cpp (chips, strides of 16 bytes, dtypes).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import factor_bound
from ..choice import GroupedArgs, GroupedOperand, Operand, OpQuery, choose, operation
from ..inputs import without_autocast
from ..ragged import factor_of_groups, group_of_tokens, of_group, one_of, pad_tokens, product_loop
from ..ragged import group_ends as ends_of
from ..scaled_mm import ceil_to, group_count_reason
from .decoded_gemm import exact_gemm
from .decoded_sides import decode_side, fp32_reason, inexact_operands

__all__ = [
    "group_ends",
    "grouped_gemm",
    "grouped_reason",
    "keeps_transformed",
    "wants_decoded_groups",
]

#: Elements of BF16 in 16 bytes, the stride that the grouped product wants.
_STEP = 8
#: From so many tokens per group on, it pays to decode a stack before the product. Measured on an
#: H100: products of groups that decode in registers make 1.7e14 operations per second, torch's in
#: BF16 7.5e14, and a decode moves 2.6 bytes of a code at 2.9e12 per second. With T tokens the first
#: takes 2 T / 1.7e14 s of a code and the second 9e-13 + 2 T / 7.5e14 s: they meet at T = 100. With
#: fewer than 256, torch's tiles of 128 rows are partly empty.
_ENOUGH = 256


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
    if query.dtype != torch.bfloat16 or not (query.is_alone or query.is_biased):
        return "torch's grouped product rounds to BF16, so nothing may follow it"
    reason = group_count_reason(query)
    if reason is not None:
        return reason
    for name, spec in (("a", query.row), ("b", query.col)):
        if spec is None or not spec.needs_amax:
            continue
        if spec.row_scaled or query.precision == "exact":
            return f"operand {name} has a factor that follows the product ({spec.format})"
    a, b = query.row, query.col
    if a is None or b is None:
        return "needs two operands"
    if rounded_of_groups(query) is not None:
        return None
    return fp32_reason(a, b, query.device, query.dtype, is_alone=True)


def rounded_of_groups(query: OpQuery) -> int | None:
    """Return which operand of a grouped GEMM on a GPU is rounded to BF16, which does not hold it.

    Args:
        query: a grouped GEMM.

    Returns:
        0 or 1; None: neither, or it takes factors before.
    """
    a, b = query.row, query.col
    if a is None or b is None or query.precision == "exact" or a.signs != b.signs:
        return None
    inexact = inexact_operands(a, b)
    if len(inexact) != 1 or any(spec.needs_amax for spec in (a, b)):
        return None
    return None if (a, b)[inexact[0]].format.is_identity else inexact[0]


def wants_decoded_groups(query: OpQuery) -> str | None:
    """Return why groups that could be decoded in registers are better decoded before, or None.

    Args:
        query: a grouped GEMM on an NVIDIA GPU.
    """
    chip, sizes, groups = query.chip, query.sizes, query.groups
    # Nowhere else was either measured.
    if chip is None or chip.capability is None or chip.capability[0] != 9:
        return None
    tokens = query.tokens_per_group
    if tokens is None and sizes is not None and groups:  # a contraction over tokens
        tokens = sizes[2] // groups
    if tokens is None or tokens < _ENOUGH or grouped_reason(query) is not None:
        return None
    return f"operands are decoded before the product from {_ENOUGH} tokens per group on"


def grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """Return `[T, N]` if b is a stack, else `[G, M, N]`; operands exact, sums in FP32."""
    device = args.offsets.device.type
    with without_autocast(device):
        if device != "cuda":
            return product_loop(a, b, args, exact_gemm)
        return _rows_cuda(a, b, args) if b.is_stack else _tokens_cuda(a, b, args)


def _operand(one: GroupedOperand) -> Operand:
    """Return the plane without its factor: what is decoded is code times scale."""
    buffers = one.buffers
    if one.by_group:  # one number is what a plane has; nobody reads it
        buffers = [*buffers[:-1], buffers[-1].flatten()[:1]]
    return Operand(buffers, one.spec, one.rows, one.cols)


def keeps_transformed(a: GroupedOperand, b: GroupedOperand) -> bool:
    """Whether a shared transform may stay: plain tokens are not transformed by groups."""
    return a.spec.signs == b.spec.signs and (b.is_stack or a.is_padded == b.is_padded)


def _aligned(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return BF16 `[rows, K]`, K a multiple of 8, zeros added, rows one after the other."""
    width = ceil_to(matrix.shape[-1], _STEP)
    extra = (0, width - matrix.shape[-1], 0, rows - matrix.shape[-2])
    matrix = matrix.to(torch.bfloat16)
    return torch.nn.functional.pad(matrix, extra) if any(extra) else matrix.contiguous()


def _factor(a: GroupedOperand, b: GroupedOperand) -> torch.Tensor | None:
    """Return the factor of both operands, `[1]` or `[G]`, or None."""
    found = [f for f in map(factor_of_groups, (a, b)) if f is not None]
    if len(found) < 2:
        return found[0].flatten() if found else None
    return (found[0] * found[1]).flatten()


def _times(matrix: torch.Tensor, factor: torch.Tensor, is_own: bool) -> torch.Tensor:
    """Return BF16 `matrix` times an FP32 factor, rounded once; written over what is nobody's."""
    place = matrix if is_own else torch.empty_like(matrix)
    return torch.mul(matrix, factor, out=place)


def _of_tokens(factor: torch.Tensor, ends: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the factor of each token's group, `[T]`, or of all, `[1]`; of no group it is 1."""
    if factor.shape[0] == 1:
        return factor
    return of_group(factor, group_of_tokens(ends, tokens), 1.0)


def _rows_cuda(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    keep, columns = keeps_transformed(a, b), ceil_to(b.rows, _STEP)
    ends = group_ends(args)
    if not (ends.shape[0] and a.rows and b.rows):
        return ends.new_zeros((a.rows, b.rows), dtype=torch.bfloat16)
    factor = _factor(a, b)
    each = None if factor is None else _of_tokens(factor, ends, a.rows)
    values = None if each is None or args.bias is not None else _decoded_with(a, each)
    if values is None:
        values = decode_side(_operand(a), keep, torch.bfloat16).matrix
    else:
        each = None  # it is in the values
    left = _aligned(values, a.rows)
    right = _aligned(_decoded_stack(b, keep), columns)
    if args.bias is not None:
        left, right = _with_bias(left, right, None if each is None else each[:, None], args.bias)
    elif each is not None:
        left = _times(left, each[:, None], not a.spec.format.is_identity)
    product = torch.nn.functional.grouped_mm(left, right.transpose(-2, -1), offs=ends)
    return _cleared(product, ends, b.rows)


def _decoded_with(a: GroupedOperand, factors: torch.Tensor) -> torch.Tensor | None:
    """Return BF16 tokens decoded with a factor for each, in one pass; None: not of such a spec.

    They are decoded as a plane whose rows have amaxes of their own. One that overflows here belongs
    to a product that does.

    Args:
        a: tokens.
        factors: FP32 `[T]` or `[1]`, of both operands.
    """
    spec, bound = a.spec, factor_bound(a.spec)
    is_square = spec.format.block is not None and spec.format.block[0] > 1
    if not bound or spec.row_scaled or spec.signs is not None or is_square:
        return None
    own = replace(spec, row_scaled=True)
    amax = (factors * bound).expand(a.rows).contiguous()
    run = operation("decode", amax.device.type, torch.bfloat16, own)
    made: torch.Tensor = run([*a.buffers[:2], amax], own, a.rows, a.cols, torch.bfloat16)
    return made


def _cleared(product: torch.Tensor, ends: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the columns of a product with zeros behind the last group, which are not written."""
    found = choose(OpQuery("clear_rest", product.device.type, product.dtype)).chosen
    if found is not None and product.is_contiguous():
        found.ops["clear_rest"](product, ends)
        return product[:, :columns].contiguous()
    is_token = torch.arange(product.shape[0], device=ends.device, dtype=ends.dtype) < ends[-1]
    return torch.where(is_token[:, None], product[:, :columns], 0.0)


def _with_bias(
    left: torch.Tensor, right: torch.Tensor, factor: torch.Tensor | None, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[T, K + 8]` and `[G, N, K + 8]`, whose product has the bias in its FP32 sum.

    Args:
        left, right: BF16 `[T, K]` and `[G, N, K]`.
        factor: FP32 `[T, 1]` or `[1, 1]` of the tokens, which the bias does not take, or None.
        bias: BF16 `[G, at most N]`.
    """
    k = left.shape[-1]
    tokens = left.new_empty((left.shape[0], k + _STEP))
    stack = right.new_empty((*right.shape[:2], k + _STEP))
    if factor is None:
        tokens[:, :k] = left
    else:
        torch.mul(left, factor, out=tokens[:, :k])
    stack[..., :k] = right
    tokens[:, k:] = 1.0
    stack[..., k:] = 0.0
    stack[:, : bias.shape[1], k] = bias
    return tokens, stack


def _decoded_stack(stack: GroupedOperand, keep_transformed: bool) -> torch.Tensor:
    """Return `[G, rows, K]` without factors: one decode where all rows are one plane's."""
    groups, fmt = stack.buffers[0].shape[0], stack.spec.format
    if fmt.is_identity:
        return stack.buffers[0]
    height = 1 if fmt.block is None else fmt.block[0]
    if stack.rows % height == 0 and groups:
        flat = [buffer.flatten(0, 1) for buffer in stack.buffers]
        if stack.spec.needs_amax:
            flat[-1] = flat[-1][:1]  # nobody reads it
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
    factor = _factor(a, b)
    if factor is not None:
        each = _of_tokens(factor, args.padded[1:], left.shape[1])
        if a.rows <= b.rows:
            left = _times(left, each, not a.spec.format.is_identity)
        else:
            right = _times(right, each, not b.spec.format.is_identity)
    product = torch.nn.functional.grouped_mm(left, right.t(), offs=args.padded[1:])
    return product[:, :, : b.rows].contiguous()
