"""The backend `row_blocks`: FP8 planes whose blocks are one row high and of any width.

The core has kernels for blocks of 16 to 128 columns, and reads planes with a scale for each row,
and writes them. A plane of several wide blocks in a row is decoded as one of narrower blocks,
whose scales are repeated. All of it has the reference's bits.

Source: ours; docs/reference/numerics.md, "Blockwise FP8" (the rule of a block's scale).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import torch

from ..formats import PlaneSpec
from ..formats.elements import FP32
from .choice import (
    Backend,
    DeviceSupport,
    EncodeRequest,
    OpQuery,
    is_unforced_native,
    register_backend,
    unforced,
)
from .inputs import HIGH_PRECISION
from .reference_backend import REFERENCE

__all__ = ["ROW_BLOCKS"]

#: Widths of blocks that the core decodes, the fastest first.
_WIDTHS: Final = (128, 64, 32, 16)
_CPU: Final = "cpu"


def _reason(spec: PlaneSpec) -> str | None:
    own = spec.format
    if spec.scale_layout:
        return "scales lie as a product reads them"
    if own.is_python or own.is_identity or own.element is None or own.block is None:
        return "is for planes of blocks"
    if own.block[0] != 1 or own.scale != FP32 or own.rule != "amax":
        return "is for FP8 with FP32 scales of one row"
    if own.block[1] in _WIDTHS:
        return "the core has kernels for blocks of 16, 32, 64 and 128 columns"
    if spec.stochastic or spec.signs is not None:
        return "rounds to nearest, and transforms nothing"
    return None


def _supports(query: OpQuery) -> str | None:
    if query.dtype not in HIGH_PRECISION:
        return f"takes FP32, BF16 and FP16, got {query.dtype}"
    specs = [spec for spec in (query.row, query.col) if spec is not None]
    if not specs:
        return "needs a spec"
    reasons = (_reason(spec) or _reason_of_core(query, spec) for spec in specs)
    return next((one for one in reasons if one is not None), None)


def _reason_of_core(query: OpQuery, spec: PlaneSpec) -> str | None:
    """Return why the core cannot do what is asked of it for such a plane."""
    by_row = spec.by_row(1)
    asked = [replace(query, row=by_row, col=None)]
    if query.op != "encode":
        asked.append(replace(query, row=_with_block(spec, (1, _WIDTHS[0])), col=None))
    return None if all(map(is_unforced_native, asked)) else "the core has no kernels for it here"


@lru_cache(maxsize=1024)
def _with_block(spec: PlaneSpec, block: tuple[int, int] | None) -> PlaneSpec:
    return replace(spec, format=replace(spec.format, block=block))


def _encode_by_row(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None
) -> list[torch.Tensor]:
    """Return the planes of a matrix of which each of their own rows has one scale."""
    own = row and row.by_row(x.shape[1]), col and col.by_row(x.shape[0])
    run = unforced(OpQuery("encode", x.device.type, x.dtype, *own)).ops["encode"]
    planes: list[torch.Tensor] = run(x, *own, EncodeRequest())
    return planes


def _encode_plane(x: torch.Tensor, spec: PlaneSpec) -> list[torch.Tensor]:
    rows, cols = x.shape
    width = (spec.format.block or (1, 1))[1]
    if not x.numel():
        found: list[torch.Tensor] = REFERENCE.ops["encode"](x, spec, None, EncodeRequest())
        return found
    if cols <= width:
        return _encode_by_row(x, spec, None)
    if cols % width == 0:
        codes, scale = _encode_by_row(x.reshape(-1, width), spec, None)
        return [codes.reshape(rows, cols), scale.reshape(rows, -1)]
    whole = cols // width * width
    pieces = zip(*(_encode_plane(one, spec) for one in (x[:, :whole], x[:, whole:])), strict=True)
    return [torch.cat(pair, 1) for pair in pieces]


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
) -> list[torch.Tensor]:
    del request  # such planes need neither a statistic nor a seed
    rows, cols = x.shape
    own = ((row, cols), (col, rows))
    if x.numel() and all(spec is None or spec.by_row(n) is not spec for spec, n in own):
        return _encode_by_row(x, row, col)
    made = [] if row is None else _encode_plane(x, row)
    return made if col is None else made + _encode_plane(x.t(), col)


def _as_core_reads(
    buffers: Sequence[torch.Tensor], spec: PlaneSpec, cols: int, op: str
) -> tuple[list[torch.Tensor], PlaneSpec] | None:
    """Return the plane in blocks that the core decodes; None: there are none."""
    codes, scale = buffers
    width = (spec.format.block or (1, 1))[1]
    if cols <= width and (op == "decode" or codes.device.type != _CPU):
        return [codes, scale], spec.by_row(cols)
    if cols <= width:  # an operand has its scales, and is asked whether BF16 holds it
        step, scale = _WIDTHS[0], scale.expand(-1, -(-cols // _WIDTHS[0]))
    else:
        step = next((one for one in _WIDTHS if width % one == 0), 0)
        if not step:
            return None
        scale = scale.repeat_interleave(width // step, 1)[:, : -(-cols // step)]
    return [codes, scale.contiguous()], _with_block(spec, (1, step))


def _read(
    op: str,
    buffers: Sequence[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *more: Any,
) -> Any:
    """Return what `decode` or `operand` does, of the same values in blocks that the core knows."""
    made = _as_core_reads(buffers, spec, cols, op) if rows * cols else None
    if made is None:
        return REFERENCE.ops[op](buffers, spec, rows, cols, dtype, *more)
    is_by_row = bool(made[1].scale_layout)
    own = unforced(OpQuery("decode" if is_by_row else op, buffers[0].device.type, dtype, made[1]))
    if not is_by_row:
        return own.ops[op](*made, rows, cols, dtype, *more)
    values = own.ops["decode"](*made, rows, cols, dtype)
    return values if op == "decode" else (values, False)


#: The backend of scales of whole rows, and of blocks whose width the core has no kernel for.
ROW_BLOCKS = register_backend(
    Backend(
        "row_blocks",
        _supports,
        {
            "encode": _encode,
            "decode": partial(_read, "decode"),
            "operand": partial(_read, "operand"),
        },
        devices=DeviceSupport((_CPU, "cuda")),
        priority=18,
        notes=lambda query: ("kernels of the core for scales of rows and for narrower blocks",),
        scratch_nbytes=16,
    )
)
