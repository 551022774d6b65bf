"""Encode of many matrices as one operator: `hybridq::encode_many`.

A model has many weights, and each is quantized once per step. Where a backend has a kernel for
it, matrices of one dtype and one pair of specs share launches, their amaxes included; elsewhere
they are encoded one after the other. The bits are those of `encode` either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import SpecError
from ...formats import PlaneSpec
from ..choice import (
    DECODED,
    ORIGINAL,
    Backend,
    EncodeRequest,
    OpQuery,
    encode_decoded,
    together,
)
from ..inputs import check_matrix, check_place, spec_of
from .contiguous import contiguous_copy
from .encode_matrix import encoded_fake
from .encode_plan import decoded_rows, run_encode
from .library import encode_operator

__all__: list[str] = []


def _check_list(
    values: torch.Tensor | None, name: str, dtype: torch.dtype, xs: Sequence[torch.Tensor]
) -> None:
    """Raise unless `values` is None or holds one value for each of xs, where they are."""
    if values is None:
        return
    if values.dtype != dtype or tuple(values.shape) != (len(xs),):
        raise ValueError(
            f"encode_many: {name} must be {dtype} [{len(xs)}], one value for each matrix, got "
            f"{values.dtype} {tuple(values.shape)}"
        )
    if values.device != xs[0].device:
        raise ValueError(
            f"encode_many: all tensors must be on one device, got {xs[0].device} and "
            f"{values.device} for {name}"
        )


def _checked(
    xs: Sequence[torch.Tensor], request: EncodeRequest
) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    """Return the two specs; raise unless the arguments go together."""
    for x in xs:
        check_matrix(x, "encode_many")
        if x.dtype != xs[0].dtype or x.device != xs[0].device:
            raise ValueError(
                "encode_many: all matrices must have one dtype and one device, got "
                f"{xs[0].dtype} on {xs[0].device} and {x.dtype} on {x.device}"
            )
    row_spec, col_spec = spec_of(request.row, xs[0].dtype), spec_of(request.col, xs[0].dtype)
    row_stats, col_stats, seeds = request.tensors()
    _check_list(row_stats, "row_stats", torch.float32, xs)
    _check_list(col_stats, "col_stats", torch.float32, xs)
    _check_list(seeds, "seeds", torch.int64, xs)
    for spec, stats in ((row_spec, row_stats), (col_spec, col_stats)):
        if stats is not None and spec is not None and spec.row_scaled:
            raise ValueError(
                f"encode_many: {spec} has an amax for each row, and takes none from outside; use "
                "encode"
            )
        if spec is not None and spec.stochastic and seeds is None:
            raise ValueError("encode_many: stochastic rounding needs seeds, got None")
    if request.col_source not in (ORIGINAL, DECODED):
        raise ValueError(
            "encode_many: col_source must be 'original' or 'rowwise_dequantized', got "
            f"{request.col_source!r}"
        )
    if request.col_source == DECODED and row_spec is None and col_spec is not None:
        raise SpecError("encode_many: col_source 'rowwise_dequantized' needs a row spec, got none")
    check_place("encode_many", 0, 0, request.row_stream, request.col_stream)
    return row_spec, col_spec


def _is_quantized(spec: PlaneSpec | None) -> bool:
    return spec is not None and not spec.format.is_identity


def _taker(x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None) -> Backend | None:
    """Return the backend that a single encode would take, if it takes many, else None.

    One that takes many finds statistics that it is not given.
    """
    first, second = (spec if _is_quantized(spec) else None for spec in (row, col))
    whole = OpQuery("encode_many", x.device.type, x.dtype, first, second)
    return together(whole, whole.parts()).chosen


def _given(stats: torch.Tensor | None, spec: PlaneSpec | None) -> torch.Tensor | None:
    if stats is None or spec is None or not spec.needs_amax:
        return None
    return stats.contiguous().clamp(max=torch.finfo(torch.float32).max)


def _run(
    backend: Backend,
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[list[torch.Tensor]]:
    """Return the buffers of each matrix; an identity plane is a copy."""
    made: list[list[torch.Tensor]] = [[] for _ in xs]
    pair = [spec if _is_quantized(spec) else None for spec in (row, col)]
    if pair != [None, None]:
        flat = backend.ops["encode_many"](xs, *pair, request)
        size = len(flat) // len(xs)
        made = [flat[i * size : (i + 1) * size] for i in range(len(xs))]
    for spec, is_col in ((row, False), (col, True)):
        if spec is None or _is_quantized(spec):
            continue
        dtype = spec.format.storage_dtype or xs[0].dtype
        for x, own in zip(xs, made, strict=True):
            plain = contiguous_copy(x.t() if is_col else x, dtype)
            own.insert(len(own) if is_col else 0, plain)
    return made


def _encode_many(xs: Sequence[torch.Tensor], request: EncodeRequest) -> list[torch.Tensor]:
    if not xs:
        return []
    specs = _checked(xs, request)
    backend = _taker(xs[0], *specs)
    if backend is None:
        return _one_by_one(xs, request)
    request = request._replace(
        row_stat=_given(request.row_stat, specs[0]),
        col_stat=_given(request.col_stat, specs[1]),
        seed=None if request.seed is None else request.seed.contiguous(),
    )

    def encode(xs: Sequence[torch.Tensor], own: EncodeRequest) -> list[list[torch.Tensor]]:
        row = specs[0] if own.row and own.keep_row else None
        return _run(backend, xs, row, specs[1] if own.col else None, own)

    if not request.is_decoded():
        return [buffer for made in encode(xs, request) for buffer in made]

    def decode(planes: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [
            decoded_rows(buffers, request.row, x.shape[0], x.shape[1], x.dtype)
            for x, buffers in zip(xs, planes, strict=True)
        ]

    made = encode_decoded(request, encode, decode, xs)
    kept = [iter(made[i : i + len(xs)]) for i in range(0, len(made), len(xs))]
    return [buffer for own in zip(*kept, strict=True) for plane in own for buffer in plane]


def _one_by_one(xs: Sequence[torch.Tensor], request: EncodeRequest) -> list[torch.Tensor]:
    """Return the same by `encode`."""
    return [buffer for i, x in enumerate(xs) for buffer in run_encode(x, request.of_group(i))]


def _encode_many_fake(xs: Sequence[torch.Tensor], request: EncodeRequest) -> list[torch.Tensor]:
    if not xs:
        return []
    specs = _checked(xs, request)
    return [buffer for x in xs for buffer in encoded_fake(x, specs, request)]


encode_operator("encode_many", "Tensor[] xs", _encode_many, _encode_many_fake, plural="s")
