"""Encode of ragged tokens as an operator: rows of x as they are, columns of the padded tokens.

`encode_ragged` is `encode` for tokens sorted by group. The rowwise plane is that of x `[T, C]`; the
columnwise plane is that of `pad_tokens(x, offsets)`, so that no block lies in two groups (see
`ragged`). A plain columnwise plane is x transposed, not padded: a product may begin anywhere in it.

A backend whose kernel reads x through the offsets has an operation `encode_ragged` beside its
`encode`; it says None, before it launches anything, for what that kernel does not take. Everywhere
else the tokens are moved and encoded. Both give the same bits; the offsets stay on their device.

With `by_group` every group is a tensor of its own (`group_loop`, `group_device`): it has its own
amax, from x, or from `row_stat` and `col_stat` `[G, *stat]` as `amax_ragged` gives them, and a
random seed of `[G]`.
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from .checks import check_encode, check_matrix, check_place, spec_of
from .derivatives import refuse
from .encode import statistic
from .group_device import encode_by_group
from .group_loop import encode_loop, is_by_group, pads_rows, ragged_shapes
from .ops import LIBRARY
from .ragged import TOKEN_PAD, capacity, group_ends, pad_tokens, padded_offsets
from .registry import Call, select
from .types import EncodeArgs, Groups

__all__: list[str] = []

LIBRARY.define(
    "encode_ragged(Tensor x, Tensor offsets, str row, str col, Tensor? row_stat=None, "
    "Tensor? col_stat=None, Tensor? seed=None, *, str col_source='original', bool keep_row=True, "
    "int row_stream=0, int col_stream=1, bool by_group=False) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_NAME = "encode_ragged"


def _check(
    x: torch.Tensor,
    offsets: torch.Tensor,
    specs: tuple[PlaneSpec | None, PlaneSpec | None],
    stats: tuple[torch.Tensor | None, torch.Tensor | None],
    seed: torch.Tensor | None,
    col_source: str,
    streams: tuple[int, int],
    by_group: bool,
) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(
            f"{_NAME}: offsets must be int32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(
            f"{_NAME}: x and offsets must be on one device, got {x.device} and {offsets.device}"
        )
    if by_group and seed is not None:
        if tuple(seed.shape) != tuple(offsets.shape):
            raise ValueError(
                f"{_NAME}: by group there must be a seed for each of {offsets.shape[0]} groups, "
                f"got {tuple(seed.shape)}"
            )
        seed = seed.narrow(0, 0, 1) if offsets.shape[0] else seed.new_zeros(1)
    check_encode(x, specs, stats, seed, col_source, _NAME)
    check_place(_NAME, 0, 0, *streams)


def _by_kernel(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec,
    args: EncodeArgs,
) -> list[torch.Tensor] | None:
    """Return the buffers of both planes if one backend reads x through the offsets, else None."""
    if 0 in (*x.shape, offsets.shape[0]):
        return None  # nothing to read
    backend = select(Call("encode", x.device.type, x.dtype, col))
    run = backend.ops.get(_NAME)
    if run is None:
        return None
    if row is not None and select(Call("encode", x.device.type, x.dtype, row)) is not backend:
        return None
    tokens = x.shape[0]
    groups = Groups(
        group_ends(offsets, tokens),
        padded_offsets(offsets, tokens),
        capacity(tokens, offsets.shape[0]),
    )
    made: list[torch.Tensor] | None = run(x, groups, row, col, args)
    return made


def _encode_ragged(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
    by_group: bool = False,
) -> list[torch.Tensor]:
    check_matrix(x, _NAME)
    row_spec, col_spec = spec_of(row, x.dtype), spec_of(col, x.dtype)
    specs, stats, streams = (row_spec, col_spec), (row_stat, col_stat), (row_stream, col_stream)
    _check(x, offsets, specs, stats, seed, col_source, streams, by_group)
    if by_group:
        _check_blocks(row_spec, col_spec)
    if by_group and (x.device.type == "cpu" or _depends_on_group(row_spec, col_spec)):
        run = encode_loop if x.device.type == "cpu" else encode_by_group
        return run(
            x,
            offsets,
            row_spec,
            col_spec,
            row_stat,
            col_stat,
            seed,
            col_source=col_source,
            keep_row=keep_row,
            row_stream=row_stream,
            col_stream=col_stream,
        )
    encode = torch.ops.hybridq.encode

    def rows() -> list[torch.Tensor]:
        made: list[torch.Tensor] = encode(x, row, "", row_stat, None, seed, row_stream=row_stream)
        return made

    wants_row = row_spec is not None and keep_row
    if col_spec is None:
        return rows() if wants_row else []
    kept: list[torch.Tensor] = []
    if col_source == "rowwise_dequantized" and row_spec is not None:
        buffers = rows()
        x = torch.ops.hybridq.decode(buffers, row, *x.shape, x.dtype)
        kept, wants_row = buffers if keep_row else [], False
    if col_spec.format.is_identity:
        kept = rows() if wants_row else kept
        return [*kept, *encode(x, "", col)]
    # A plain row is a copy; no kernel need read the groups for it.
    together = row_spec if wants_row and row_spec and not row_spec.format.is_identity else None
    given = EncodeArgs(
        None if row_stat is None or together is None else statistic(x, together, row_stat, _NAME),
        None if col_stat is None else statistic(x.t(), col_spec, col_stat, _NAME),
        seed,
        row_stream=row_stream,
        col_stream=col_stream,
    )
    made = _by_kernel(x, offsets, together, col_spec, given)
    if made is not None:
        return [*(rows() if wants_row and together is None else kept), *made]
    kept = rows() if wants_row else kept
    padded = pad_tokens(x, offsets)
    return [*kept, *encode(padded, "", col, None, col_stat, seed, col_stream=col_stream)]


def _encode_ragged_fake(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
    by_group: bool = False,
) -> list[torch.Tensor]:
    check_matrix(x, _NAME)
    row_spec, col_spec = spec_of(row, x.dtype), spec_of(col, x.dtype)
    specs, stats, streams = (row_spec, col_spec), (row_stat, col_stat), (row_stream, col_stream)
    _check(x, offsets, specs, stats, seed, col_source, streams, by_group)
    tokens, cols = x.shape
    shapes = [
        one
        for spec, is_col in ((row_spec if keep_row else None, False), (col_spec, True))
        if spec is not None
        for one in ragged_shapes(spec, tokens, cols, offsets.shape[0], is_col, by_group)
    ]
    return [x.new_empty(shape, dtype=dtype or x.dtype) for shape, dtype in shapes]


def _check_blocks(row: PlaneSpec | None, col: PlaneSpec | None) -> None:
    """Raise where blocks along tokens would reach from one group into the next."""
    for spec, axis in ((row, 0), (col, 1)):
        if spec is not None and TOKEN_PAD % spec.unit(axis):
            raise ValueError(
                f"{_NAME}: by group, blocks along tokens must divide the {TOKEN_PAD} tokens that "
                f"groups begin at multiples of, got {spec}"
            )


def _depends_on_group(*specs: PlaneSpec | None) -> bool:
    """Return whether planes by group differ from planes of all tokens (padded, if columnwise)."""
    row, col = specs
    return (
        any(spec is not None and spec.stochastic for spec in specs)
        or (row is not None and (is_by_group(row, False) or pads_rows(row)))
        or (col is not None and is_by_group(col, True))
    )


LIBRARY.impl(_NAME, _encode_ragged, "CompositeExplicitAutograd")
torch.library.register_fake(f"hybridq::{_NAME}", _encode_ragged_fake, lib=LIBRARY)
torch.library.register_autograd(f"hybridq::{_NAME}", refuse(f"hybridq::{_NAME}"), lib=LIBRARY)
