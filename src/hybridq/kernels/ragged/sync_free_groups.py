"""Groups of tokens on a device, without reading where they end: made of operations on all tokens.

The same planes and products as those of `group_loop`, where no kernel knows the statistics of
groups (the operator `encode_ragged` asks one first), but one for a tensor or one for each row:

- **Rows of two levels**: a row-scaled plane whose rows have the amax of their group has the codes
  and the scales of the group's own plane.
- **One scale per tensor**: tokens are multiplied with their group's encode scale before the cast,
  in FP32 as the kernel does, and the kernel is given the amax for which its own scale is 1.
- **Columns of two levels**: a padded plane is made of tiles of 128 tokens, each in one group, so
  that the rows of all tiles are one row-scaled matrix.

Products are in `sync_free_products`.

Random bytes are those of one encode, with the first group's seed: they differ from the loop's, and
in columns from those of a kernel, which draws for all padded tokens.

Source: ours.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...direction import COLUMNWISE
from ...errors import BackendError
from ...formats import PlaneSpec
from ...formats import format as named_format
from ...reference import block_scales, hadamard, inverse_hadamard, one_nan
from ..choice import EncodeRequest, encode_decoded
from .group_loop import pads_rows
from .padded_layout import TOKEN_PAD, capacity, group_ends, pad_tokens, padded_offsets

__all__ = [
    "amax_by_group",
    "encode_by_group",
    "group_of_tokens",
    "largest_by_group",
    "of_group",
    "places_of_tokens",
    "sum_by_group",
]

_FP32 = torch.finfo(torch.float32)
Buffers = list[torch.Tensor]


def group_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the group of each token, `[T]`; G for a token of none."""
    ends = group_ends(offsets, tokens)
    row = torch.arange(tokens, device=offsets.device, dtype=ends.dtype)
    return torch.searchsorted(ends, row, right=True)


def _group_of_tiles(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the group of every 128 rows of the padded tokens; G for those behind the last."""
    tiles = capacity(tokens, offsets.shape[0]) // TOKEN_PAD
    begins = torch.arange(tiles, device=offsets.device, dtype=torch.int32) * TOKEN_PAD
    return torch.searchsorted(padded_offsets(offsets, tokens)[1:], begins, right=True)


def places_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the row of each token among the padded ones, `[T]`; 0 for a token of no group."""
    ends, starts = group_ends(offsets, tokens), padded_offsets(offsets, tokens)
    row = torch.arange(tokens, device=offsets.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, row, right=True)
    begins = torch.nn.functional.pad(ends, (1, 0))
    return torch.where(row < ends[-1], starts[group] + row - begins[group], 0)


def of_group(values: torch.Tensor, group: torch.Tensor, rest: float) -> torch.Tensor:
    """Return `values[group]`, and `rest` for a group that there is not."""
    more = values.new_full((1, *values.shape[1:]), rest)
    return torch.cat([values, more])[group]


def _tiles(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the padded tokens as `[tiles * C, 128]`: the columns of each tile are rows."""
    padded = pad_tokens(x, offsets)
    tiles = padded.shape[0] // TOKEN_PAD
    rows = padded.view(tiles, TOKEN_PAD, x.shape[1]).transpose(1, 2)
    return rows.reshape(tiles * x.shape[1], TOKEN_PAD)


def _maximum(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the maximum of FP32 `values` `[n, ...]` over each group, `[G, ...]`, NaN kept.

    The bits of values that are not negative order as the values do, NaN above all.
    """
    bits = one_nan(values).view(torch.int32) & 0x7FFFFFFF
    index = group.view(-1, *[1] * (values.dim() - 1)).expand_as(bits)
    out = bits.new_zeros((groups + 1, *values.shape[1:]))
    return out.scatter_reduce(0, index, bits, "amax")[:groups].view(torch.float32)


def amax_by_group(
    x: torch.Tensor,
    offsets: torch.Tensor,
    spec: PlaneSpec,
    direction: str,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the FP32 statistic of each group of x, as `group_loop.amax_loop` does.

    Args:
        x: `[T, C]`.
        offsets: int32 `[G]`.
        spec: of the plane.
        direction: of the plane.
        index: int64; the groups are of the rows `x[index]`, or None: of those of x. Where a
            statistic is of single rows, each row of x is read once.

    Returns:
        `[G, 1]`; of a row-scaled columnwise plane `[G, C]`.
    """
    is_column = direction == COLUMNWISE
    if index is not None and is_column and (spec.signs is not None or spec.row_scaled):
        x, index = x.index_select(0, index), None
    (tokens, cols), groups = x.shape, offsets.shape[0]
    tokens = tokens if index is None else index.shape[0]
    width = cols if is_column and spec.row_scaled else 1
    if 0 in (tokens, cols, groups):
        return x.new_zeros((groups, width), dtype=torch.float32)
    # A statistic of rows depends on the transform only, not on the format.
    signs = spec.signs
    rows = PlaneSpec(named_format("nvfp4"), signs=signs, row_scaled=True).text
    if is_column and (signs is not None or spec.row_scaled):
        found = torch.ops.hybridq.amax(_tiles(x, offsets), rows, "rowwise").view(-1, cols)
        found = found if spec.row_scaled else found.amax(1, keepdim=True)
        return _maximum(found, _group_of_tiles(offsets, tokens), groups)
    found = _taken(torch.ops.hybridq.amax(x, rows, "rowwise").view(-1, 1), index)
    return _maximum(found, group_of_tokens(offsets, tokens), groups)


def _taken(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Return `values[index]`; all, in their order, if there is no index."""
    return values if index is None else values.index_select(0, index)


def largest_by_group(
    x: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Return max|x| of each group, FP32 `[G, 1]`, NaN and infinity kept, 0 of no token.

    Args:
        x: `[T, C]`.
        offsets: int32 `[G]`.
        index: as of `amax_by_group`.
    """
    (tokens, cols), groups = x.shape, offsets.shape[0]
    tokens = tokens if index is None else index.shape[0]
    if 0 in (tokens, cols, groups):
        return x.new_zeros((groups, 1), dtype=torch.float32)
    found = torch.maximum(x.amax(1), -x.amin(1)).to(torch.float32).view(-1, 1)
    return _maximum(_taken(found, index), group_of_tokens(offsets, tokens), groups)


def sum_by_group(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each group of dy `[T, C]`, in FP32 and rounded: `[G, C]`."""
    groups = offsets.shape[0]
    if 0 in (*dy.shape, groups):
        return dy.new_zeros((groups, dy.shape[1]))
    ends = group_ends(offsets, dy.shape[0])
    lengths = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    wide = dy.to(torch.float32)
    # unsafe: it would look at the lengths on the host.
    total = torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    return total.to(dy.dtype)


def _plain_tensor_spec(spec: PlaneSpec) -> tuple[PlaneSpec, float]:
    """Return one scale per tensor without options, and the amax for which that scale is 1."""
    fmt = spec.format
    plain = replace(spec, format=replace(fmt, power_of_two=False, eps=0.0), signs=None)
    return plain, fmt.element.max if fmt.element else 1.0


def _row_scaled(spec: PlaneSpec) -> PlaneSpec:
    if spec.format.is_square:
        raise BackendError(
            f"encode_ragged: no backend encodes tokens of {spec} by group on a device, got a "
            "square block that needs the amax of its group; use 1xN blocks for tokens, or a CPU"
        )
    return replace(spec, row_scaled=True)


def _rows(
    x: torch.Tensor,
    offsets: torch.Tensor,
    spec: PlaneSpec,
    stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
) -> Buffers:
    """Return the buffers of the rowwise plane."""
    encode, tokens = torch.ops.hybridq.encode, x.shape[0]
    if spec.needs_tensor_amax and stat is None:
        stat = amax_by_group(x, offsets, spec, "rowwise")
    group = group_of_tokens(offsets, tokens)
    if pads_rows(spec):
        x = pad_tokens(x, offsets)
        group = _group_of_tiles(offsets, tokens).repeat_interleave(TOKEN_PAD)
    if stat is None or not spec.needs_tensor_amax:
        made: Buffers = encode(x, spec.text, "", None, None, seed, row_stream=stream)
        return made
    if not spec.format.is_tensor_scaled:
        own = _row_scaled(spec).text
        amax = of_group(stat, group, 0.0).view(-1)
        data, scale, _ = encode(x, own, "", amax, None, seed, row_stream=stream)
        return [data, scale, stat.clamp(max=_FP32.max)]
    scales = block_scales(stat, spec, stat, _FP32.max)
    transformed = x if spec.signs is None else hadamard(x, spec.signs)
    values = transformed.to(torch.float32) * of_group(scales.multiplier, group, 1.0)
    plain, unit = _plain_tensor_spec(spec)
    one = values.new_full((1,), unit)
    data, _ = encode(values, plain.text, "", one, None, seed, row_stream=stream)
    return [data, scales.stored]


def _columns(
    x: torch.Tensor,
    offsets: torch.Tensor,
    spec: PlaneSpec,
    stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
) -> Buffers:
    """Return the buffers of the columnwise plane, of the padded tokens if it is quantized."""
    encode, cols = torch.ops.hybridq.encode, x.shape[1]
    if spec.format.is_identity or not spec.needs_amax:
        source = x if spec.format.is_identity else pad_tokens(x, offsets)
        made: Buffers = encode(source, "", spec.text, None, None, seed, col_stream=stream)
        return made
    if stat is None:
        stat = amax_by_group(x, offsets, spec, COLUMNWISE)
    group = _group_of_tiles(offsets, x.shape[0])
    if not spec.format.is_tensor_scaled:
        own = (spec if spec.row_scaled else _row_scaled(spec)).text
        amax = of_group(stat, group, 0.0).expand(-1, cols).reshape(-1)
        made = encode(_tiles(x, offsets), own, "", amax, None, seed, row_stream=stream)
        data, scale = (_along(one, group.shape[0], cols) for one in made[:2])
        return [data, scale, stat.clamp(max=_FP32.max)]
    scales = block_scales(stat, spec, stat, _FP32.max)
    padded = pad_tokens(x, offsets).t()
    transformed = padded if spec.signs is None else hadamard(padded, spec.signs)
    multiplier = of_group(scales.multiplier, group, 1.0).repeat_interleave(TOKEN_PAD)
    values = transformed.to(torch.float32) * multiplier
    plain, unit = _plain_tensor_spec(spec)
    one = values.new_full((1,), unit)
    data, _ = encode(values, plain.text, "", one, None, seed, row_stream=stream)
    return [data, scales.stored]


def _along(buffer: torch.Tensor, tiles: int, cols: int) -> torch.Tensor:
    """Return `[C, tiles * n]` of a buffer `[tiles * C, n]`."""
    return buffer.view(tiles, cols, -1).transpose(0, 1).reshape(cols, -1)


def _decoded_rows(
    buffers: Buffers, x: torch.Tensor, offsets: torch.Tensor, spec: PlaneSpec
) -> torch.Tensor:
    """Return what the rowwise plane of x decodes to, in x's shape and dtype."""
    decode, tokens, cols = torch.ops.hybridq.decode, x.shape[0], x.shape[1]
    group = group_of_tokens(offsets, tokens)
    if not spec.needs_tensor_amax:
        rows = capacity(tokens, offsets.shape[0]) if pads_rows(spec) else tokens
        made: torch.Tensor = decode(buffers, spec.text, rows, cols, x.dtype)
        return made[places_of_tokens(offsets, tokens)] if pads_rows(spec) else made
    if not spec.format.is_tensor_scaled:
        own = [*buffers[:2], of_group(buffers[2], group, 0.0).view(-1)]
        return decode(own, _row_scaled(spec).text, tokens, cols, x.dtype)
    plain, _ = _plain_tensor_spec(spec)
    one = [buffers[0], torch.ones_like(buffers[1][:1]).view(-1)]
    values = decode(one, plain.text, tokens, spec.padded(cols), torch.float32)
    values = values * of_group(buffers[1], group, 1.0)
    if spec.signs is not None:
        values = inverse_hadamard(values, spec.signs, cols)
    return values.to(x.dtype)


def encode_by_group(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> Buffers:
    """Return what `group_loop.encode_loop` returns, but for the random bytes; nothing is read.

    Args:
        x, offsets, row, col, request: as `group_loop.encode_loop` takes them.

    Raises:
        BackendError: a square block that needs an amax of its group.
    """
    seed = None if request.seed is None else request.seed[:1]
    row_stat, col_stat, _ = request.tensors()
    streams = (request.row_stream, request.col_stream)

    def encode(x: torch.Tensor, own: EncodeRequest) -> Buffers:
        made: Buffers = []
        if row is not None and own.row and own.keep_row:
            made += _rows(x, offsets, row, row_stat, seed, streams[0])
        if col is not None and own.col:
            made += _columns(x, offsets, col, col_stat, seed, streams[1])
        return made

    def decode(rows: Buffers) -> torch.Tensor:
        return x if row is None else _decoded_rows(rows, x, offsets, row)

    return (
        encode_decoded(request, encode, decode, x) if request.is_decoded() else encode(x, request)
    )
