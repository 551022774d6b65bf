"""Grouped GEMM by the chip's own scaled products: `torch.nn.functional.scaled_grouped_mm`.

| kind | chip | one scale per | torch's recipe |
| --- | --- | --- | --- |
| `row` | sm_90 | row of each operand (a tensor's one scale counts for every row) | RowWise |
| `mx` | sm_100 | 1x32 | BlockWise1x32, swizzled group by group |
| `nvfp4` | sm_100 | 1x16, and tensor | BlockWise1x16, swizzled group by group, and TensorWise |

Views are laid out on the device, without asking where groups end: K and N are padded, the scales of
ragged rows moved so that every group begins with a tile of its own, those of ragged columns sorted
by group. Two things that torch leaves to its caller: rows behind the last group are not written,
and a contraction over no tokens is refused or not written, depending on the version. The first are
zeroed here; the second do not occur, since a padded group has tokens (see `ragged`).

Source: torch, aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupMMCommon.cuh and ScaledGroupMM.cu;
MSLK, include/mslk/gemm/cutlass/grouped_common.cuh (offsets of the scales of each group).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ...errors import BackendError
from ...formats.elements import E4M3
from ...reference import tensor_factor
from ..choice import GroupedArgs, GroupedOperand, Operand, OpQuery
from ..inputs import chip_of
from ..ragged import group_ends, pad_tokens
from .chip_gates import GROUPED_GATES, KIND_NAMES
from .operand_layout import ceil_to, pad_codes
from .operand_views import (
    KINDS,
    fp8_codes,
    fp8_target,
    mx_scales,
    nvfp4_scales,
    pair_reason,
    swizzled,
    view_reason,
)

__all__ = ["group_count_reason", "grouped_gemm", "grouped_kind", "multiply_groups"]

scaled_grouped_mm: Any = getattr(torch.nn.functional, "scaled_grouped_mm", None)

#: Torch's kernels take fewer groups than this: one thread of a block is a group's.
_MOST_GROUPS: Final = 1024
#: Rows and columns of scales in a tile, and its bytes.
_TILE_ROWS: Final = 128
_TILE_COLS: Final = 4
_TILE: Final = _TILE_ROWS * _TILE_COLS
#: Values that share a scale.
_WIDTH: Final = {"mx": 32, "nvfp4": 16}


@dataclass(frozen=True)
class _Side:
    """One operand of the product, padded.

    Args:
        data: codes `[rows, K]`, or `[G, rows, K]` of a stack, in torch's dtype.
        scales: one or two levels.
    """

    data: torch.Tensor
    scales: tuple[torch.Tensor, ...]


def group_count_reason(query: OpQuery) -> str | None:
    """Return why torch's grouped products, scaled or BF16, take no query's groups, or None.

    Args:
        query: a grouped GEMM on a GPU.
    """
    if query.groups is None or query.groups < _MOST_GROUPS:
        return None
    return f"torch's grouped product takes fewer than {_MOST_GROUPS} groups, got {query.groups}"


def grouped_kind(query: OpQuery) -> tuple[str | None, str]:
    """Return the kind of scaling in which `call` is multiplied group by group, or the reason.

    Args:
        call: a grouped GEMM on a chip that is known.

    Returns:
        `(kind, "")`, or `(None, reason)`.
    """
    a, b, chip = query.row, query.col, query.chip
    if scaled_grouped_mm is None:
        return None, "this torch has no torch.nn.functional.scaled_grouped_mm"
    if a is None or b is None or chip is None:
        return None, "needs two operands"
    if query.dtype != torch.bfloat16 or not query.is_alone:
        return None, "torch's scaled grouped product rounds to BF16, so nothing may follow it"
    reason = group_count_reason(query) or pair_reason(a, b)
    for name, spec in (("a", a), ("b", b)):
        if reason is None and spec.row_scaled:
            reason = f"operand {name} has a factor per row that follows the product ({spec})"
    if reason is not None:
        return None, reason
    misfits, lacks = [], []
    for kind, gate in GROUPED_GATES.items():
        misfit = view_reason(KINDS[kind], a, b, None if query.sizes is None else query.sizes[2])
        for name, spec in (("a", a), ("b", b)):
            if misfit is None and kind != "nvfp4" and fp8_target(spec) != E4M3:
                misfit = f"torch's grouped product takes E4M3, got operand {name} ({spec.format})"
        lack = gate.reason(kind, chip)
        if misfit is None and lack is None:
            return kind, ""
        if misfit is None and lack is not None:
            lacks.append(lack)
        elif misfit is not None and lack is None:
            misfits.append(misfit)
    if lacks or misfits:
        return None, "; ".join(lacks) or misfits[-1]
    names = ", ".join(f"{KIND_NAMES[kind]} ({gate.what})" for kind, gate in GROUPED_GATES.items())
    return None, f"torch has scaled grouped products of {names}, got {chip}"


def _flat(operand: GroupedOperand) -> Operand:
    """Return the operand with the groups of a stack below each other: for its codes."""
    buffers, rows = operand.buffers, operand.rows
    if operand.is_stack:
        rows *= buffers[0].shape[0]
        buffers = [buffers[0].flatten(0, 1), *buffers[1:]]
    return Operand(buffers, operand.spec, rows, operand.cols)


def _one(operand: GroupedOperand) -> Operand:
    """Return the operand with the rows of one group: for its scales, which may be stacks."""
    return Operand(operand.buffers, operand.spec, operand.rows, operand.cols)


def _codes(operand: GroupedOperand, kind: str, rows: int, step: int) -> torch.Tensor:
    """Return the codes `[rows, K]`, or `[G, rows, K]` of a stack; zeros added to both axes."""
    flat, groups = _flat(operand), operand.buffers[0].shape[0]
    height = rows if not operand.is_stack else flat.rows
    if kind == "nvfp4":
        width = ceil_to(operand.spec.padded(operand.cols), step) // 2
        data = pad_codes(flat.buffers[0], height, width)
        dtype = torch.float4_e2m1fn_x2
    else:
        data = fp8_codes(flat, height, step).view(torch.uint8)
        dtype = torch.float8_e4m3fn
    if operand.is_stack:
        data = data.view(groups, operand.rows, data.shape[1])
        if rows != operand.rows:
            wide = data.new_zeros((groups, rows, data.shape[2]))
            wide[:, : operand.rows] = data
            data = wide
    return data.view(dtype)


# ---- FP8 with one scale per row


def _row_scales(operand: GroupedOperand, rows: int, groups: int, is_stack: bool) -> torch.Tensor:
    """Return FP32 scales: `[T]` of ragged rows, `[G, rows]` of a stack, else `[G * rows]`.

    Where the contraction is ragged, each group has scales of its own; here they are equal.
    """
    scale = operand.buffers[1]
    if operand.spec.format.block is None:
        scale = scale.view(-1, 1, 1) if operand.is_stack else scale.view(1, 1)
        scale = scale.expand(*scale.shape[:-2], operand.rows, 1)
    scale = scale.squeeze(-1)
    if scale.shape[-1] != rows:
        scale = torch.nn.functional.pad(scale, (0, rows - scale.shape[-1]))
    return (scale if is_stack else scale.repeat(groups)).contiguous()


def _row_sides(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs, columns: int
) -> tuple[_Side, _Side]:
    groups = args.offsets.shape[0]
    left = _codes(a, "row", a.rows, 16), _row_scales(a, a.rows, groups, b.is_stack)
    right = _codes(b, "row", columns, 16), _row_scales(b, columns, groups, b.is_stack)
    return _Side(left[0], left[1:]), _Side(right[0], right[1:])


# ---- block scales in tiles


def _scales(operand: GroupedOperand, kind: str, blocks: int) -> torch.Tensor:
    """Return one-byte scales `[..., rows, blocks]`, zeros added."""
    one = _one(operand)
    if kind == "nvfp4":
        return nvfp4_scales(one, blocks)
    scale = mx_scales(one)
    return torch.nn.functional.pad(scale, (0, blocks - scale.shape[-1]))


def _tiles_by_group(flat: torch.Tensor, down: int, ends: torch.Tensor, width: int) -> torch.Tensor:
    """Return the tiles of a ragged contraction sorted by group.

    Args:
        flat: scales of all columns in tiles: row by row of tiles, over all groups.
        down: tiles one below the other.
        ends: int32 `[G]`, where each group's padded tokens end.
        width: tokens that a tile covers; padded groups are made of whole tiles.

    Returns:
        As many bytes: the tiles of group 0, row by row of tiles, then those of group 1, ...
    """
    tiles = flat.view(down, -1, _TILE)
    column = torch.arange(tiles.shape[1], device=flat.device, dtype=torch.int32)
    bounds = torch.nn.functional.pad(ends // width, (1, 0))
    stops = torch.nn.functional.pad(bounds[1:], (0, 1), value=tiles.shape[1])
    group = torch.searchsorted(bounds[1:], column, right=True)
    begin, end = bounds[group], stops[group]  # what belongs to no group is one more, at the end
    row = torch.arange(down, device=flat.device, dtype=torch.int32)[:, None]
    place = down * begin + row * (end - begin) + (column - begin)
    sorted_ = torch.empty_like(tiles).view(-1, _TILE)
    sorted_.index_copy_(0, place.flatten().long(), tiles.reshape(-1, _TILE))
    return sorted_.flatten()


def _block_sides(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs, kind: str, columns: int
) -> tuple[_Side, _Side]:
    width = _WIDTH[kind]
    step = width * _TILE_COLS  # of K, so that rows of scales are whole tiles
    groups = args.offsets.shape[0]
    # Fewer tokens than groups count as none in some versions, and nothing would be written.
    rows = max(a.rows, groups) if b.is_stack else a.rows
    left, right = _codes(a, kind, rows, step), _codes(b, kind, columns, step)
    blocks = ceil_to(a.spec.padded(a.cols), step) // width
    first, second = (_scales(one, kind, blocks) for one in (a, b))
    if b.is_stack:
        first = swizzled(pad_tokens(first, args.offsets, least=0)).view(-1, blocks)
        tall = ceil_to(columns, _TILE_ROWS)
        second = torch.nn.functional.pad(second, (0, 0, 0, tall - second.shape[1]))
        second = swizzled(second.flatten(0, 1)).view(groups, -1)
    elif args.padded is not None:
        sides = []
        for scale in (first, second):
            tall = ceil_to(scale.shape[0], _TILE_ROWS)
            down = tall // _TILE_ROWS
            flat = _tiles_by_group(swizzled(scale), down, args.padded[1:], step)
            sides.append(flat.view(tall, blocks))
        first, second = sides
    dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu
    factors = [_factors(one, groups) for one in (a, b)] if kind == "nvfp4" else [(), ()]
    return (
        _Side(left, (first.view(dtype), *factors[0])),
        _Side(right, (second.view(dtype), *factors[1])),
    )


def _factors(operand: GroupedOperand, groups: int) -> tuple[torch.Tensor, ...]:
    """Return NVFP4's second level: FP32 `[G]`, one factor per group."""
    factor = tensor_factor(operand.buffers, operand.spec)
    if factor is None:  # cannot be: the kind is NVFP4
        factor = operand.buffers[0].new_ones(1, dtype=torch.float32)
    return (factor.reshape(-1).expand(groups).contiguous(),)


_RECIPES: Final = {
    "row": (("RowWise",), ()),
    "mx": (("BlockWise1x32",), ("SWIZZLE_32_4_4",)),
    "nvfp4": (("BlockWise1x16", "TensorWise"), ("SWIZZLE_32_4_4", "NO_SWIZZLE")),
}


def _multiply(left: _Side, right: _Side, kind: str, ends: torch.Tensor) -> torch.Tensor:
    scaling, swizzling = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    recipes, swizzles = _RECIPES[kind]
    recipe = [getattr(scaling, name) for name in recipes]
    swizzle = [getattr(swizzling, name) for name in swizzles] or None
    product: torch.Tensor = scaled_grouped_mm(
        left.data,
        right.data.transpose(-2, -1),
        list(left.scales),
        recipe,
        list(right.scales),
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=ends,
        output_dtype=torch.bfloat16,
        # Partial sums are added in FP32 on the way; without that the error is ten times as large.
        use_fast_accum=False,
    )
    return product


def multiply_groups(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs, kind: str
) -> torch.Tensor:
    """Return the product of every group, BF16: `[T, N]` if b is a stack, else `[G, M, N]`.

    Args:
        a, b: operands that can be viewed as `kind`.
        args: groups; nothing may follow the product.
        kind: what `grouped_kind` returns.
    """
    groups = args.offsets.shape[0]
    shape = (a.rows, b.rows) if b.is_stack else (groups, a.rows, b.rows)
    if 0 in (groups, a.rows, a.cols, b.rows):
        return a.buffers[0].new_zeros(shape, dtype=torch.bfloat16)
    args = replace(args, offsets=group_ends(args.offsets, args.tokens))
    columns = ceil_to(b.rows, 16)
    sides = (
        _row_sides(a, b, args, columns)
        if kind == "row"
        else _block_sides(a, b, args, kind, columns)
    )
    ends = args.offsets if args.padded is None else args.padded[1:].contiguous()
    product = _multiply(*sides, kind, ends)
    if not b.is_stack:
        return product[..., : b.rows].contiguous()
    # What lies behind the last group is not written.
    is_token = torch.arange(a.rows, device=ends.device, dtype=ends.dtype) < ends[-1]
    return torch.where(is_token[:, None], product[: a.rows, : b.rows], 0.0)


def grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    """Return `[T, N]` if b is a stack, else `[G, M, N]`, by FP8 or FP4 tensor cores.

    Args:
        a, b, args: as every backend takes them.
    """
    chip = chip_of(args.offsets.device)
    sizes = (a.rows, b.rows, a.cols)
    query = OpQuery("grouped_gemm", chip.kind, args.out_dtype, a.spec, b.spec, "auto", sizes, chip)
    kind, reason = grouped_kind(query)
    if kind is None:
        raise BackendError(f"grouped_gemm: the native backend was chosen but cannot: {reason}")
    return multiply_groups(a, b, args, kind)
