"""From operands to launches: strides, tile sizes, grids. No Triton is imported to decide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from ..choice import GemmArgs, GroupedArgs, GroupedOperand, Operand
from ..decoded import with_row_factors
from ..inputs import begins_at
from .form import VALUES, Form, form_of, portable_form
from .plan_parts import FP8, Launch, added_arguments, bits_of, processors

__all__ = ["SMALL", "plan_block", "plan_gemm", "plan_grouped"]

#: A GEMM with at most so many rows on one side is bound by reading the other: packed codes win.
SMALL: Final = 64
#: A share of K has at least so many codes, or adding the shares costs more than it hides.
_MIN_SHARE: Final = 512
_MAX_SHARES: Final = 16


@dataclass(frozen=True)
class _Side:
    """One operand: tensors and strides under the names that the kernels give them."""

    form: Form
    rows: int
    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    is_stack: bool = False

    @property
    def is_packed(self) -> bool:
        return self.form.code.bits < 16

    def arguments(self, name: str, with_groups: bool) -> dict[str, Any]:
        data, scale, factor = self.data, self.scale, self.factor
        given: dict[str, Any] = {
            f"{name}_data": data,
            f"{name}_scale": scale,
            f"{name}_factor": factor,
            f"{name}_stride": data.stride(-2),
            f"{name}_k_stride": data.stride(-1),
            f"{name}_scale_stride": scale.stride(-2) if scale.dim() > 1 else 0,
            f"{name}_scale_k_stride": scale.stride(-1),
            f"{name}_scale_cols": scale.shape[-1],
            f"{name}_factor_stride": factor.stride(-1),
        }
        if with_groups:
            for what, buffer in (("", data), ("_scale", scale), ("_factor", factor)):
                stride = buffer.stride(0) if self.is_stack else 0
                given[f"{name}{what}_group_stride"] = stride
        return given


def _side(operand: Operand | GroupedOperand) -> _Side:
    form = form_of(operand.spec)
    if torch.version.hip is not None:
        form = portable_form(form)
    is_stack = isinstance(operand, GroupedOperand) and operand.is_stack
    data = operand.buffers[0]
    if form.code.bits >= 16:
        data = bits_of(data)
        return _Side(form, operand.rows, data, data, data, is_stack)
    if data.stride(-1) != 1:
        data = data.contiguous()
    factor = operand.buffers[-1] if form.bound else data
    if operand.spec.has_scales_as_factors:
        factor = factor[..., 0]
    scale = operand.buffers[1] if form.scale.bits else data
    if form.per_unit == 1 and _has_words(data):
        data, form = data.view(torch.int16), form._replace(per_unit=2)
    elif form.per_unit == 2:
        form = form._replace(is_odd=operand.spec.padded(operand.cols) % 2 == 1)
    return _Side(form, operand.rows, data, scale, factor, is_stack)


def _has_words(data: torch.Tensor) -> bool:
    """Return whether every row of bytes is a row of aligned 16-bit words."""
    even = (data.shape[-1], data.storage_offset(), begins_at(data), *data.stride()[:-1])
    return all(number % 2 == 0 for number in even)


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _tile(rows: int) -> int:
    """Return the rows of a tile for a small side: a power of two that tl.dot takes."""
    return next((size for size in (16, 32, 64) if rows <= size), 128)


def _places(tensor: torch.Tensor, name: str, is_swapped: bool) -> dict[str, Any]:
    left, right = (tensor.stride(-1), tensor.stride(-2))[:: 1 if is_swapped else -1]
    return {f"{name}_left_stride": left, f"{name}_right_stride": right}


def plan_gemm(a: Operand, b: Operand, args: GemmArgs) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """Return an empty result `[M, N]` and the launches that write `a @ b.T` into it."""
    result = a.buffers[0].new_empty((a.rows, b.rows), dtype=args.out_dtype)
    if result.numel() == 0:
        return result, ()
    first, second = _side(with_row_factors(a)), _side(with_row_factors(b))
    is_small = min(a.rows, b.rows) <= SMALL
    # The left operand's tile stays in registers: the large one, or the one to be decoded.
    if is_small:
        is_swapped = b.rows > a.rows
    else:
        is_swapped = second.is_packed and not first.is_packed
    left, right = (second, first) if is_swapped else (first, second)
    block_l, block_r, block_k = (64, _tile(right.rows), 128) if is_small else (128, 128, 64)
    k = a.spec.padded(a.cols)
    tiles = _ceil(left.rows, block_l) * _ceil(right.rows, block_r)
    share = _share(k, tiles, processors(result.device), block_k)
    shares = max(1, _ceil(k, share))
    out = bits_of(result)
    into = args.accumulate_into
    whole = {
        "left_rows": left.rows,
        "right_rows": right.rows,
        "IS_SWAPPED": is_swapped,
        "BLOCK_L": block_l,
        "BLOCK_R": block_r,
        **added_arguments(args.bias, into, out),
        **_places(out if into is None else into, "into", is_swapped),
        **_places(out, "out", is_swapped),
    }
    sides = left.arguments("left", False) | right.arguments("right", False)
    product = {
        **sides,
        **whole,
        "k_size": k,
        "k_share": share,
        "out_share_stride": 0,
        "LEFT": left.form,
        "RIGHT": right.form,
        "BLOCK_K": block_k,
    }
    warps, stages = (4, 4) if is_small else (8, 3)
    if shares == 1:
        return result, (Launch("dense", (tiles, 1), product, warps, stages),)
    parts = result.new_empty((shares, left.rows, right.rows), dtype=torch.float32)
    product |= {
        "out": parts,
        "out_share_stride": parts.stride(0),
        "out_left_stride": right.rows,
        "out_right_stride": 1,
        "LEFT": left.form._replace(bound=0.0),
        "RIGHT": right.form._replace(bound=0.0),
        "BIAS": False,
        "IS_ADDED": False,
    }
    keep = ("factor", "factor_stride")
    end = {
        **{
            f"{side}_{what}": sides[f"{side}_{what}"] for side in ("left", "right") for what in keep
        },
        **whole,
        "parts": parts,
        "SHARES": shares,
        "LEFT": left.form,
        "RIGHT": right.form,
        "BLOCK_L": 32,
        "BLOCK_R": 16,
    }
    small_tiles = _ceil(left.rows, 32) * _ceil(right.rows, 16)
    return result, (
        Launch("dense", (tiles, shares), product, warps, stages),
        Launch("reduce", (small_tiles,), end, 4, 1),
    )


def _share(k: int, tiles: int, processors: int, block_k: int) -> int:
    """Return how much of K one program takes, so that about two programs run per processor."""
    wanted = min(_MAX_SHARES, max(1, 2 * processors // tiles), max(1, k // _MIN_SHARE))
    return max(block_k, _ceil(_ceil(k, wanted), block_k) * block_k)


def plan_grouped(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs
) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """Return an empty result, `[T, N]` or `[G, M, N]`, and the launch that writes it."""
    groups = args.offsets.shape[0]
    shape = (a.rows, b.rows) if b.is_stack else (groups, a.rows, b.rows)
    result = a.buffers[0].new_empty(shape, dtype=args.out_dtype)
    if result.numel() == 0:
        return result, ()
    if groups == 0:  # tokens, but no group that they could belong to
        into = args.accumulate_into
        return (result.zero_() if into is None else result.copy_(into)), ()
    first, second = _side(a), _side(b)
    # The offsets are not known here, but how many tokens a group has on average is.
    average = _ceil(args.tokens, groups)
    is_small = b.is_stack and average <= SMALL
    is_swapped = is_small or (second.is_packed and not first.is_packed)
    left, right = (second, first) if is_swapped else (first, second)
    of_left, of_right = (b, a) if is_swapped else (a, b)
    ragged = "k"
    if b.is_stack:
        ragged = "right" if is_swapped else "left"
    block_l, block_r, block_k = (64, _tile(average), 128) if is_small else (128, 128, 64)
    is_wide = left.form.is_wide or right.form.is_wide
    if is_wide:  # tiles of FP32 take twice the shared memory
        block_l, block_r, block_k = 64, min(block_r, 64), 32
    out = bits_of(result)
    into = args.accumulate_into
    added = out if into is None else into
    arguments = {
        **left.arguments("left", True),
        **right.arguments("right", True),
        **added_arguments(args.bias, into, out),
        **_places(added, "into", is_swapped),
        **_places(out, "out", is_swapped),
        "bias_group_stride": 0 if args.bias is None else args.bias.stride(0),
        "into_group_stride": 0 if b.is_stack else added.stride(0),
        "out_group_stride": 0 if b.is_stack else out.stride(0),
        "offsets": args.offsets,
        "padded": args.offsets if args.padded is None else args.padded,
        "groups": groups,
        "tokens": args.tokens,
        "left_rows": left.rows,
        "right_rows": right.rows,
        "k_size": _grouped_k(a, b),
        "LEFT": left.form,
        "RIGHT": right.form,
        "RAGGED": ragged,
        "LEFT_PADDED": of_left.is_padded,
        "RIGHT_PADDED": of_right.is_padded,
        "IS_SWAPPED": is_swapped,
        "GROUPS": 1 << groups.bit_length(),
        "BLOCK_L": block_l,
        "BLOCK_R": block_r,
        "BLOCK_K": block_k,
    }
    # At most so many tiles, whatever the offsets are.
    if b.is_stack:
        ragged_block, block = (block_r, block_l) if is_swapped else (block_l, block_r)
        most = (_ceil(args.tokens, ragged_block) + groups + 1) * _ceil(b.rows, block)
    else:
        most = groups * _ceil(left.rows, block_l) * _ceil(right.rows, block_r)
    programs = min(most, processors(result.device) * (2 if is_small or is_wide else 1))
    warps, stages = (4, 4) if is_small or is_wide else (8, 3)
    return result, (Launch("grouped", (programs,), arguments, warps, stages),)


def _grouped_k(a: GroupedOperand, b: GroupedOperand) -> int:
    """Return the contraction length: for a ragged contraction that of the padded planes."""
    if b.is_stack:
        return a.spec.padded(a.cols)
    return next((side.cols for side in (a, b) if side.is_padded), a.cols)


def plan_block(
    a_data: torch.Tensor,
    a_scale: torch.Tensor,
    b_data: torch.Tensor,
    b_scale: torch.Tensor,
    elements: tuple[str, str],
    b_is_square: bool,
    args: GemmArgs,
) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """Return an empty result `[M, N]` and the launch that writes the FP8 product into it."""
    (m, k), n = a_data.shape, b_data.shape[0]
    result = a_data.new_empty((m, n), dtype=args.out_dtype)
    if result.numel() == 0:
        return result, ()
    out, into = bits_of(result), args.accumulate_into
    added = out if into is None else into
    block_a = 64 if m <= 64 else 128
    # A scale per column needs a product of its own beside the sums: half as many columns.
    block_b = 128 if b_is_square else 64
    arguments = {
        "a_data": a_data.view(FP8[elements[0]]),
        "a_scale": a_scale,
        "b_data": b_data.view(FP8[elements[1]]),
        "b_scale": b_scale,
        **added_arguments(args.bias, into, out),
        "a_rows": m,
        "b_rows": n,
        "k_size": k,
        "a_stride": a_data.stride(0),
        "a_scale_stride": a_scale.stride(0),
        "a_scale_k_stride": a_scale.stride(1),
        "b_stride": b_data.stride(0),
        "b_scale_stride": b_scale.stride(0),
        "b_scale_k_stride": b_scale.stride(1),
        "into_stride": added.stride(0),
        "into_column_stride": added.stride(1),
        "out_stride": out.stride(0),
        "out_column_stride": out.stride(1),
        "PLAIN": VALUES,
        "B_IS_SQUARE": b_is_square,
        "BLOCK_A": block_a,
        "BLOCK_B": block_b,
        "TILES_DOWN": 8,
    }
    tiles = _ceil(m, block_a) * _ceil(n, block_b)
    return result, (Launch("block", (tiles,), arguments, 4 if block_a == 64 else 8, 3),)
