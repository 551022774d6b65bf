"""Groups of tokens one after the other, for CPUs: each group is a tensor of its own.

This is the meaning of "by group": the planes and the products of group g are those of its tokens
alone, with an amax and a random seed of their own, so that they have the bits that a loop of single
calls gives. The offsets are read on the host, which on a CPU waits for nothing; what a device does
instead is in `sync_free_groups`.

A ragged plane that is made by group has the buffers of any ragged plane, but the one that holds a
value for the whole tensor (`scale` of one scale per tensor, `amax` of two levels) holds one for
each group: `[G, *shape]`. An amax of each row of a rowwise plane belongs to the tokens already. A
rowwise plane with square blocks is that of the padded tokens, so that no block lies in two groups.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...direction import COLUMNWISE
from ...formats import PlaneSpec
from ...reference import encode_plane, one_nan
from ..choice import EncodeRequest, GemmArgs, GroupedArgs, GroupedOperand, Operand
from .padded_layout import TOKEN_PAD, capacity, group_ends, padded_offsets

__all__ = [
    "amax_loop",
    "column_part",
    "encode_loop",
    "fill_values",
    "is_by_group",
    "largest_loop",
    "one_of",
    "pads_rows",
    "product_loop",
    "ragged_shapes",
    "row_part",
    "sum_loop",
]

Gemm = Callable[[Operand, Operand, GemmArgs], torch.Tensor]


def pads_rows(spec: PlaneSpec) -> bool:
    """Return whether the rowwise plane of a group must begin at a padded offset."""
    return spec.format.block is not None and spec.format.block[0] > 1


def is_by_group(spec: PlaneSpec, is_column: bool) -> bool:
    """Return whether the plane's last buffer holds a statistic of each group."""
    return spec.needs_amax if is_column else spec.needs_tensor_amax


def ragged_shapes(
    spec: PlaneSpec, tokens: int, cols: int, groups: int, is_column: bool, by_group: bool
) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    """Return shape and dtype of each buffer of a ragged plane.

    Args:
        spec: of the plane.
        tokens, cols: of the matrix of tokens.
        groups: how many there are.
        is_column: the plane is columnwise.
        by_group: it is made by group.
    """
    if is_column:
        width = tokens if spec.format.is_identity else capacity(tokens, groups)
        specs = spec.buffers(cols, width)
    else:
        is_padded = by_group and pads_rows(spec)
        specs = spec.buffers(capacity(tokens, groups) if is_padded else tokens, cols)
    shapes = [(tuple(one.shape), one.dtype) for one in specs]
    if by_group and is_by_group(spec, is_column):
        shapes[-1] = ((groups, *shapes[-1][0]), shapes[-1][1])
    return shapes


@lru_cache(maxsize=1024)
def fill_values(spec: PlaneSpec) -> tuple[float, ...]:
    """Return what each buffer of a plane of zeros holds, one value for each."""
    rows, cols = spec.format.block or (1, 2)
    device = torch.device("cpu")  # whatever the default is
    shape = spec.stat_shape(rows)
    stat = torch.zeros(shape, dtype=torch.float32, device=device) if spec.needs_amax else None
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    x = torch.zeros(rows, cols, dtype=torch.float32, device=device)
    made = encode_plane(x, spec, stat=stat, seed=seed)
    return tuple(buffer.flatten()[0].item() for buffer in made)


def row_part(
    buffers: list[torch.Tensor], spec: PlaneSpec, cols: int, at: int, size: int, g: int
) -> list[torch.Tensor]:
    """Return the buffers of `size` rows from row `at` on, which are those of group g."""
    own = []
    for buffer, before, part in zip(
        buffers, spec.buffers(at, cols), spec.buffers(size, cols), strict=True
    ):
        if buffer is buffers[-1] and spec.needs_tensor_amax:
            own.append(buffer[g] if buffer.dim() > len(part.shape) else buffer)
        else:
            own.append(buffer.narrow(0, before.shape[0], part.shape[0]))
    return own


def column_part(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, at: int, size: int, g: int
) -> list[torch.Tensor]:
    """Return the buffers of `size` columns from column `at` on, which are those of group g."""
    own = []
    for buffer, before, part in zip(
        buffers, spec.buffers(rows, at), spec.buffers(rows, size), strict=True
    ):
        if buffer is buffers[-1] and spec.needs_amax:
            own.append(buffer[g] if buffer.dim() > len(part.shape) else buffer)
        else:
            own.append(buffer.narrow(1, before.shape[1], part.shape[1]))
    return own


def one_of(stack: GroupedOperand, group: int) -> Operand:
    """Return the plane of one group of a stack."""
    if stack.is_list:
        count = len(stack.spec.buffers(1, 1))
        buffers = stack.buffers[group * count : (group + 1) * count]
    else:
        buffers = [buffer[group] for buffer in stack.buffers]
    return Operand(buffers, stack.spec, stack.rows, stack.cols)


def _spans(args: GroupedArgs) -> list[tuple[int, int]]:
    ends: list[int] = group_ends(args.offsets, args.tokens).tolist()
    return list(zip([0, *ends], ends, strict=False))


def product_loop(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs, gemm: Gemm
) -> torch.Tensor:
    """Return the grouped product as one product per group; on a CPU.

    Args:
        a, b, args: as a backend's `grouped_gemm` takes them.
        gemm: the product of two planes.

    Returns:
        `[T, N]` if b is a stack, else `[G, M, N]`.
    """
    places = [] if args.padded is None else args.padded.tolist()
    if not b.is_stack:
        a, b = _cuttable(a), _cuttable(b)
    into, spans = args.accumulate_into, _spans(args)
    shape = (args.tokens, b.rows) if b.is_stack else (len(spans), a.rows, b.rows)
    if into is None:
        out = args.offsets.new_empty(shape, dtype=args.out_dtype)
    else:
        out = into.to(args.out_dtype, copy=True)
    if b.is_stack and into is None:  # tokens of no group
        out[spans[-1][1] if spans else 0 :].zero_()
    for g, (begin, end) in enumerate(spans):
        size = end - begin
        if b.is_stack:
            if size:
                place = out[begin:end]
                _put(place, _rows(a, b, args, gemm, g, (begin, end), places, place))
            continue
        if size == 0:
            if into is None:
                out[g].zero_()
            continue
        sides = [
            Operand(
                column_part(
                    one.buffers, one.spec, one.rows, places[g] if one.is_padded else begin, size, g
                ),
                one.spec,
                one.rows,
                size,
            )
            for one in (a, b)
        ]
        own = None if into is None else into[g]
        place = out[g]
        given = GemmArgs(None, own, args.out_dtype, place=place if own is None else None)
        _put(place, gemm(sides[0], sides[1], given))
    return out


def _put(place: torch.Tensor, made: torch.Tensor) -> None:
    """Write a product to its place, unless it was made there."""
    if made is not place:
        place.copy_(made)


def _cuttable(operand: GroupedOperand) -> GroupedOperand:
    """Return an operand whose columns may be cut where groups begin: decoded if blocks forbid it.

    Every block length of a format that has a name divides 128.
    """
    spec = operand.spec
    if not operand.is_padded or operand.by_group or TOKEN_PAD % spec.unit(1) == 0:
        return operand
    shape = (operand.rows, operand.cols)
    matrix = torch.ops.hybridq.decode(operand.buffers, spec.text, *shape, torch.float32)
    return GroupedOperand([matrix], PlaneSpec.plain(torch.float32), *shape, is_padded=True)


def _rows(
    a: GroupedOperand,
    b: GroupedOperand,
    args: GroupedArgs,
    gemm: Gemm,
    g: int,
    span: tuple[int, int],
    places: list[int],
    place: torch.Tensor,
) -> torch.Tensor:
    """Return the product of the rows of group g, `[size, N]`, made in its place if possible."""
    begin, end = span
    at = places[g] if a.is_padded else begin
    # In a plane of all tokens a block of several rows may begin in the group before.
    lead = at % a.spec.unit(0)
    size = end - begin + lead
    buffers = row_part(a.buffers, a.spec, a.cols, at - lead, size, g)
    own = None
    if args.accumulate_into is not None:
        own = args.accumulate_into[begin - lead : end]
    bias = None if args.bias is None else args.bias[g]
    left = Operand(buffers, a.spec, size, a.cols)
    given = GemmArgs(bias, own, args.out_dtype, place=None if lead or own is not None else place)
    made = gemm(left, one_of(b, g), given)
    return made[lead:] if lead else made


def amax_loop(
    x: torch.Tensor, offsets: torch.Tensor, spec: PlaneSpec, direction: str
) -> torch.Tensor:
    """Return the statistic of each group of x, `[G, *stat]`, by one `amax` each; on a CPU."""
    ends = group_ends(offsets, x.shape[0]).tolist()
    spans = zip([0, *ends], ends, strict=False)
    made = [torch.ops.hybridq.amax(x[begin:end], spec.text, direction) for begin, end in spans]
    if made:
        return torch.stack(made)
    width = x.shape[1] if direction == COLUMNWISE and spec.row_scaled else 1
    return x.new_zeros((0, width), dtype=torch.float32)


def largest_loop(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return max|x| of each group, FP32 `[G, 1]`, NaN and inf kept, 0 of no token; on a CPU."""
    made = x.new_zeros((offsets.shape[0], 1), dtype=torch.float32)
    begin = 0
    for g, end in enumerate(group_ends(offsets, x.shape[0]).tolist()):
        if end > begin and x.shape[1]:
            low, high = x[begin:end].aminmax()
            made[g] = torch.maximum(high.abs().float(), low.abs().float())
        begin = end
    return one_nan(made)


def sum_loop(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each group of dy, `[G, C]`, as `bias_grad` sums; on a CPU."""
    ends = group_ends(offsets, dy.shape[0]).tolist()
    spans = zip([0, *ends], ends, strict=False)
    made = [torch.ops.hybridq.bias_grad(dy[begin:end]) for begin, end in spans]
    return torch.stack(made) if made else dy.new_zeros((0, dy.shape[1]))


def encode_loop(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[torch.Tensor]:
    """Return the buffers of both ragged planes of x by group, by one `encode` each; on a CPU.

    Args:
        x: `[T, C]`.
        offsets: int32 `[G]`.
        row, col: specs of the planes, or None; a dtype is fixed.
        request: the rest; its tensors are FP32 `[G, *stat]` and int64 `[G]`.
    """
    (tokens, cols), groups = x.shape, offsets.shape[0]
    ends = group_ends(offsets, tokens).tolist()
    places = padded_offsets(offsets, tokens).tolist()
    wanted = [(row if request.keep_row else None, False), (col, True)]
    planes = [
        (spec, is_col, _filled(spec, tokens, cols, groups, is_col, x.device))
        for spec, is_col in wanted
        if spec is not None
    ]
    begin = 0
    for g, end in enumerate(ends):
        if end == begin:
            continue
        own = request.of_group(g)
        made = torch.ops.hybridq.encode(x[begin:end], *own.planes(), **own.options())
        for spec, is_col, buffers in planes:
            group, made = made[: len(buffers)], made[len(buffers) :]
            if is_col:
                at = begin if spec.format.is_identity else places[g]
                parts = column_part(buffers, spec, cols, at, end - begin, g)
            else:
                at = places[g] if pads_rows(spec) else begin
                parts = row_part(buffers, spec, cols, at, end - begin, g)
            for part, one in zip(parts, group, strict=True):
                part.copy_(one)
        begin = end
    return [buffer for _, _, buffers in planes for buffer in buffers]


def _filled(
    spec: PlaneSpec, tokens: int, cols: int, groups: int, is_column: bool, device: torch.device
) -> list[torch.Tensor]:
    """Return the buffers of a ragged plane of zeros."""
    shapes = ragged_shapes(spec, tokens, cols, groups, is_column, True)
    return [
        torch.full(shape, value, dtype=dtype, device=device)
        for (shape, dtype), value in zip(shapes, fill_values(spec), strict=True)
    ]
