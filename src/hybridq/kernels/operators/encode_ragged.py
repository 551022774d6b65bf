"""Encode of ragged tokens as an operator: rows of x as they are, columns of the padded tokens.

`encode_ragged` is `encode` for tokens sorted by group. The rowwise plane is that of x `[T, C]`; the
columnwise plane is that of `pad_tokens(x, offsets)`, so that no block lies in two groups (see
`ragged`). A plain columnwise plane is x transposed, not padded: a product may begin anywhere in it.

A backend whose kernel reads x through the offsets has an operation `encode_ragged` beside its
`encode`; it says None, before it launches anything, for what that kernel does not take. Everywhere
else the tokens are moved and encoded. Both give the same bits; the offsets stay on their device.

With a `row_index` the tokens are `x[row_index]`, which such a kernel reads without making that
matrix: a token that several groups have is stored once. A row that x does not have is an error on a
CPU, as of `index_select`; on a device a kernel takes it for a row of zeros.

With `by_group` every group is a tensor of its own (`group_loop`, `sync_free_groups`; on a device
kernels that know each group's statistic): it has its own amax, from x, or from `row_stat` and
`col_stat` `[G, *stat]` as `amax_ragged` gives them, and a random seed of `[G]`.

`activation_encode_ragged` is `encode_ragged` of what `activation` returns. Where a backend has a
kernel for it (`map_encode_ragged`), tiles of that matrix are made as they are encoded.
"""

from __future__ import annotations

import torch

from ...errors import must_be_one_of
from ...formats import PlaneSpec
from ...reference import ACTIVATIONS, one_nan
from ..choice import EncodeRequest, Groups, OpQuery, Prologue, encode_decoded, together
from ..inputs import check_index, check_matrix, is_host
from ..ragged import (
    TOKEN_PAD,
    capacity,
    encode_by_group,
    encode_loop,
    group_ends,
    is_by_group,
    pad_tokens,
    padded_offsets,
    pads_rows,
    ragged_shapes,
)
from .encode_matrix import check_request
from .encode_plan import given_statistic
from .library import encode_operator
from .norm_activation_steps import activation_prologue, map_matrix

__all__: list[str] = []

_NAME = "encode_ragged"
_MAPPED = "activation_encode_ragged"


def _checked(
    x: torch.Tensor, offsets: torch.Tensor, request: EncodeRequest, name: str = _NAME
) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    """Return the two specs; raise unless the arguments go together."""
    check_matrix(x, name)
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(
            f"{name}: offsets must be int32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(
            f"{name}: x and offsets must be on one device, got {x.device} and {offsets.device}"
        )
    check_index(x, request.row_index, name)
    seed, groups = request.seed, offsets.shape[0]
    if request.by_group and seed is not None:
        if tuple(seed.shape) != tuple(offsets.shape):
            raise ValueError(
                f"{name}: by group there must be a seed for each of {groups} groups, "
                f"got {tuple(seed.shape)}"
            )
        seed = seed.narrow(0, 0, 1) if groups else seed.new_zeros(1)
    return check_request(name, x, request._replace(seed=seed))


def _tokens(x: torch.Tensor, request: EncodeRequest) -> int:
    """Return how many tokens are encoded."""
    return x.shape[0] if request.row_index is None else request.row_index.shape[0]


def _moved(x: torch.Tensor, request: EncodeRequest) -> tuple[torch.Tensor, EncodeRequest]:
    """Return the tokens as a matrix, and the request of that."""
    if request.row_index is None:
        return x, request
    return x.index_select(0, request.row_index), request._replace(row_index=None)


def _by_kernel(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
    prologue: Prologue | None = None,
) -> list[torch.Tensor] | None:
    """Return the buffers of both planes if one backend reads x through the offsets, else None.

    With a `prologue` those of what it makes of x.
    """
    tokens = _tokens(x, request)
    if 0 in (*x.shape, tokens, offsets.shape[0]):
        return None  # nothing to read
    name = _NAME if prologue is None else "map_encode_ragged"
    whole = OpQuery(name, x.device.type, x.dtype, row, col)
    backend = together(whole, whole.parts()).chosen
    if backend is None:
        return None
    groups = Groups(
        group_ends(offsets, tokens),
        padded_offsets(offsets, tokens),
        capacity(tokens, offsets.shape[0]),
    )
    first = (x,) if prologue is None else (x, prologue)
    made: list[torch.Tensor] | None = backend.ops[name](*first, groups, row, col, request)
    return made


def _encode_ragged(
    x: torch.Tensor, offsets: torch.Tensor, request: EncodeRequest
) -> list[torch.Tensor]:
    row_spec, col_spec = _checked(x, offsets, request)
    if request.by_group:
        _check_blocks(row_spec, col_spec)
        # Of no groups there is nothing to ask a device for.
        if is_host(x.device.type) or not offsets.shape[0]:
            return _on_host(x, offsets, row_spec, col_spec, request)
        if _depends_on_group(row_spec, col_spec):
            made = _on_device(x, offsets, row_spec, col_spec, request)
            if made is not None:
                return made
            x, request = _moved(x, request)
            return encode_by_group(x, offsets, row_spec, col_spec, request)
        # Nothing is of a group: what is drawn is drawn for all of them at once.
        seed = None if request.seed is None else request.seed[:1]
        request = request._replace(by_group=False, seed=seed)
    if request.is_decoded():
        x, request = _moved(x, request)

    def encode(x: torch.Tensor, own: EncodeRequest) -> list[torch.Tensor]:
        row = row_spec if own.row and own.keep_row else None
        return _planes(x, offsets, row, col_spec if own.col else None, own)

    if not request.is_decoded():
        return encode(x, request)

    def decode(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.ops.hybridq.decode(rows, request.row, *x.shape, x.dtype)

    return encode_decoded(request, encode, decode, x)


def _on_host(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[torch.Tensor]:
    """Return the buffers of the planes by group, made by one kernel or by a loop."""
    kept = row if request.keep_row else None
    made = None
    if not request.is_decoded() and (kept is not None or col is not None):
        made = _by_kernel(x, offsets, kept, col, request)
    if made is not None:
        return made
    x, request = _moved(x, request)
    return encode_loop(x, offsets, row, col, request)


def _on_device(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[torch.Tensor] | None:
    """Return the buffers of the planes by group if a kernel makes the columnwise one, else None.

    The rowwise plane is of the same kernel, or made of operations on all tokens.
    """
    if request.is_decoded() or (col is None and request.row_index is None):
        return None
    planes = (row if request.keep_row else None, col)
    if any(spec is not None and spec.format.is_identity for spec in planes):
        return None
    if col is not None and col.row_scaled:  # a statistic of each column of each group
        return None
    given = request._replace(
        row_stat=_as_kernels_take(request.row_stat, planes[0]),
        col_stat=_as_kernels_take(request.col_stat, col),
    )
    made = _by_kernel(x, offsets, *planes, given)
    if made is not None or None in planes or request.row_index is not None:
        return made
    made = _by_kernel(x, offsets, None, col, given)
    if made is None:
        return None
    return [*encode_by_group(x, offsets, row, None, request), *made]


def _as_kernels_take(stat: torch.Tensor | None, spec: PlaneSpec | None) -> torch.Tensor | None:
    """Return the statistics of a plane's groups or rows, each finite or the one NaN."""
    if stat is None or spec is None or not spec.needs_amax:
        return None
    return one_nan(stat.clamp(max=torch.finfo(torch.float32).max)).contiguous()


def _planes(
    x: torch.Tensor,
    offsets: torch.Tensor,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[torch.Tensor]:
    """Return the buffers of the rowwise plane of x and of the columnwise one of padded tokens."""
    # A plain row is a copy; no kernel need read the groups for it.
    quantized = None if row is None or row.format.is_identity else row
    is_plain_col = col is not None and col.format.is_identity
    if is_plain_col or quantized is not row:
        x, request = _moved(x, request)
    made = None
    # Of rows alone that are where they belong, encode has as good a kernel.
    if not is_plain_col and (col is not None or request.row_index is not None):
        stats = (
            given_statistic(_tokens(x, request), quantized, request.row_stat, _NAME),
            given_statistic(x.shape[1], col, request.col_stat, _NAME),
        )
        given = request._replace(row_stat=stats[0], col_stat=stats[1])
        made = _by_kernel(x, offsets, quantized, col, given)
        if made is not None and quantized is row:
            return made
    x, request = _moved(x, request)
    call, alone = torch.ops.hybridq.encode, request.row_alone()
    rows = call(x, *alone.planes(), **alone.options()) if row is not None else []
    if col is None or made is not None:
        return [*rows, *(made or ())]
    if col.format.is_identity:
        return [*rows, *call(x, "", request.col)]
    alone = request.col_alone()
    return [*rows, *call(pad_tokens(x, offsets), *alone.planes(), **alone.options())]


def _encode_ragged_fake(
    x: torch.Tensor, offsets: torch.Tensor, request: EncodeRequest
) -> list[torch.Tensor]:
    row_spec, col_spec = _checked(x, offsets, request)
    tokens, cols = _tokens(x, request), x.shape[1]
    shapes = [
        one
        for spec, is_col in ((row_spec if request.keep_row else None, False), (col_spec, True))
        if spec is not None
        for one in ragged_shapes(spec, tokens, cols, offsets.shape[0], is_col, request.by_group)
    ]
    return [x.new_empty(shape, dtype=dtype or x.dtype) for shape, dtype in shapes]


def _columns(x: torch.Tensor, kind: str) -> int:
    """Return the columns of an activation of x; raise if there is none."""
    check_matrix(x, _MAPPED)
    if kind not in ACTIVATIONS:
        raise ValueError(f"{_MAPPED}: kind {must_be_one_of(ACTIVATIONS, kind)}")
    is_gated = ACTIVATIONS[kind].is_gated
    if is_gated and x.shape[1] % 2:
        raise ValueError(f"{_MAPPED}: {kind} takes an even number of columns, got {x.shape[1]}")
    return x.shape[1] // (1 + is_gated)


def _activation_encode_ragged(
    x: torch.Tensor, offsets: torch.Tensor, kind: str, request: EncodeRequest
) -> list[torch.Tensor]:
    cols = _columns(x, kind)
    row, col = _checked(x, offsets, request, _MAPPED)
    quantized = [spec for spec in (row, col) if spec is not None]
    # Statistics that are given belong to what is encoded, whose shape is not that of x.
    is_alone = cols and request.row_stat is None and request.col_stat is None
    is_plain = any(spec.format.is_identity for spec in quantized)
    prologue = activation_prologue(kind)
    if (
        request.by_group
        and is_alone
        and request.keep_row
        and not (request.is_decoded() or is_plain)
    ):
        _check_blocks(row, col)
        if is_host(x.device.type):
            made = _by_kernel(x, offsets, row, col, request, prologue)
            if made is not None:
                return made
    return _encode_ragged(map_matrix(x, prologue)[0], offsets, request)


def _activation_encode_ragged_fake(
    x: torch.Tensor, offsets: torch.Tensor, kind: str, request: EncodeRequest
) -> list[torch.Tensor]:
    y = x.new_empty((x.shape[0], _columns(x, kind)))
    _checked(y, offsets, request, _MAPPED)
    return _encode_ragged_fake(y, offsets, request)


def _check_blocks(row: PlaneSpec | None, col: PlaneSpec | None) -> None:
    """Raise where blocks along tokens would reach from one group into the next."""
    for spec, axis in ((row, 0), (col, 1)):
        if spec is not None and spec.format.is_python:
            raise ValueError(
                f"{_NAME}: a codec is given whole matrices, and no groups of tokens, got {spec}; "
                "take a linear module for each group, or another format"
            )
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


encode_operator(
    _NAME,
    "Tensor x, Tensor offsets",
    _encode_ragged,
    _encode_ragged_fake,
    tensor="row_index",
    more=", bool by_group=False",
)
encode_operator(
    _MAPPED,
    "Tensor x, Tensor offsets, str kind",
    _activation_encode_ragged,
    _activation_encode_ragged_fake,
    more=", bool by_group=False",
)
