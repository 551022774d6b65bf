"""Encode of many matrices as one operator: `hybridq::encode_many`.

A model has many weights, and each is quantized once per step. Where a backend has a kernel for
it, matrices of one dtype and one pair of specs share launches, their amaxima included; elsewhere
they are encoded one after the other. The bits are those of `encode` either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import SpecError
from ..formats import PlaneSpec
from .checks import check_matrix, check_place, spec_of
from .derivatives import refuse
from .ops import LIBRARY, _encode, _encode_fake
from .registry import Backend, Call, select
from .types import ManyArgs

__all__: list[str] = []

_MANY = (
    "encode_many(Tensor[] xs, str row, str col, Tensor? row_stats=None, Tensor? col_stats=None, "
    "Tensor? seeds=None, *, str col_source='original', bool keep_row=True, int row_stream=0, "
    "int col_stream=1) -> Tensor[]"
)
LIBRARY.define(_MANY, tags=(torch.Tag.pt2_compliant_tag,))


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
    xs: Sequence[torch.Tensor],
    row: str,
    col: str,
    row_stats: torch.Tensor | None,
    col_stats: torch.Tensor | None,
    seeds: torch.Tensor | None,
    col_source: str,
) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    """Return the two specs; raise unless the arguments go together."""
    for x in xs:
        check_matrix(x, "encode_many")
        if x.dtype != xs[0].dtype or x.device != xs[0].device:
            raise ValueError(
                "encode_many: all matrices must have one dtype and one device, got "
                f"{xs[0].dtype} on {xs[0].device} and {x.dtype} on {x.device}"
            )
    row_spec, col_spec = spec_of(row, xs[0].dtype), spec_of(col, xs[0].dtype)
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
    if col_source not in ("original", "rowwise_dequantized"):
        raise ValueError(
            "encode_many: col_source must be 'original' or 'rowwise_dequantized', got "
            f"{col_source!r}"
        )
    if col_source == "rowwise_dequantized" and row_spec is None and col_spec is not None:
        raise SpecError("encode_many: col_source 'rowwise_dequantized' needs a row spec, got none")
    return row_spec, col_spec


def _is_quantized(spec: PlaneSpec | None) -> bool:
    return spec is not None and not spec.format.is_identity


def _taker(x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None) -> Backend | None:
    """Return the backend that a single encode would take, if it takes many, else None.

    One that takes many finds statistics that it is not given.
    """
    quantized = [spec for spec in (row, col) if spec is not None and _is_quantized(spec)]
    calls = [Call("encode", x.device.type, x.dtype, spec) for spec in quantized]
    chosen = [select(call) for call in calls]
    if not chosen or chosen[0] is not chosen[-1] or "encode_many" not in chosen[0].ops:
        return None
    both = replace(calls[0], col=quantized[-1] if len(quantized) == 2 else None)
    return chosen[0] if chosen[0].reason(both) is None else None


def _given(stats: torch.Tensor | None, spec: PlaneSpec | None) -> torch.Tensor | None:
    if stats is None or spec is None or not spec.needs_amax:
        return None
    return stats.contiguous().clamp(max=torch.finfo(torch.float32).max)


def _run(
    backend: Backend,
    xs: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    args: ManyArgs,
) -> list[list[torch.Tensor]]:
    """Return the buffers of each matrix; an identity plane is a copy."""
    made: list[list[torch.Tensor]] = [[] for _ in xs]
    pair = [spec if _is_quantized(spec) else None for spec in (row, col)]
    if pair != [None, None]:
        flat = backend.ops["encode_many"](xs, *pair, args)
        size = len(flat) // len(xs)
        made = [flat[i * size : (i + 1) * size] for i in range(len(xs))]
    for spec, is_col in ((row, False), (col, True)):
        if spec is None or _is_quantized(spec):
            continue
        dtype = spec.format.storage_dtype or xs[0].dtype
        for x, own in zip(xs, made, strict=True):
            plain = (x.t() if is_col else x).to(
                dtype=dtype, copy=True, memory_format=torch.contiguous_format
            )
            own.insert(len(own) if is_col else 0, plain)
    return made


def _encode_many(
    xs: Sequence[torch.Tensor],
    row: str,
    col: str,
    row_stats: torch.Tensor | None = None,
    col_stats: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    if not xs:
        return []
    row_spec, col_spec = _checked(xs, row, col, row_stats, col_stats, seeds, col_source)
    check_place("encode_many", 0, 0, row_stream, col_stream)
    backend = _taker(xs[0], row_spec, col_spec)
    if backend is None:
        options = {"col_source": col_source, "keep_row": keep_row}
        streams = {"row_stream": row_stream, "col_stream": col_stream}
        return _one_by_one(xs, row, col, (row_stats, col_stats, seeds), **options, **streams)
    first_stats, second_stats = _given(row_stats, row_spec), _given(col_stats, col_spec)
    seed = None if seeds is None else seeds.contiguous()
    args = ManyArgs(first_stats, second_stats, seed, row_stream, col_stream)
    if col_source == "original" or col_spec is None or row_spec is None:
        made = _run(backend, xs, row_spec if keep_row else None, col_spec, args)
        return [buffer for own in made for buffer in own]
    first = _run(backend, xs, row_spec, None, args)
    second = _run(backend, _decoded(xs, first, row_spec), None, col_spec, args)
    kept = first if keep_row else [[] for _ in xs]
    return [buffer for pair in zip(kept, second, strict=True) for own in pair for buffer in own]


def _one_by_one(
    xs: Sequence[torch.Tensor],
    row: str,
    col: str,
    values: tuple[torch.Tensor | None, ...],
    **options: Any,
) -> list[torch.Tensor]:
    """Return the same by `encode`; `values`: both statistics and the seeds."""
    made: list[torch.Tensor] = []
    for i, x in enumerate(xs):
        own = [None if value is None else value[i : i + 1] for value in values]
        made += _encode(x, row, col, *own, **options)
    return made


def _decoded(
    xs: Sequence[torch.Tensor], planes: Sequence[list[torch.Tensor]], spec: PlaneSpec
) -> list[torch.Tensor]:
    """Return what the rowwise planes decode to, in the dtype of xs."""
    dtype = xs[0].dtype
    if spec.format.is_identity:
        return [buffers[0].to(dtype) for buffers in planes]
    decode = select(Call("decode", xs[0].device.type, dtype, spec)).ops["decode"]
    return [decode(buffers, spec, *x.shape, dtype) for x, buffers in zip(xs, planes, strict=True)]


def _encode_many_fake(
    xs: Sequence[torch.Tensor],
    row: str,
    col: str,
    row_stats: torch.Tensor | None = None,
    col_stats: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    **_: Any,
) -> list[torch.Tensor]:
    if not xs:
        return []
    _checked(xs, row, col, row_stats, col_stats, seeds, col_source)
    seed = None if seeds is None else seeds.narrow(0, 0, 1)
    return [
        buffer
        for x in xs
        for buffer in _encode_fake(x, row, col, seed=seed, col_source=col_source, keep_row=keep_row)
    ]


LIBRARY.impl("encode_many", _encode_many, "CompositeExplicitAutograd")
torch.library.register_fake("hybridq::encode_many", _encode_many_fake, lib=LIBRARY)
torch.library.register_autograd("hybridq::encode_many", refuse("hybridq::encode_many"), lib=LIBRARY)
