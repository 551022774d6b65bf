"""Encoding planned: what does not depend on the tensor is decided once per kind of call.

The operator `hybridq::encode` and the callers that may go past it (see `watch`) run the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import settings
from ..formats import PlaneSpec
from ..reference import one_nan
from .registry import Backend, Call, cached_choice, operation, select
from .types import EncodeArgs

__all__ = [
    "EncodePlan",
    "Place",
    "encode_plan",
    "given_statistic",
    "raise_to_amax",
    "run_encode",
    "statistic",
]

#: row0, col0, row_stream, col_stream, as in `EncodeArgs`.
Place = tuple[int, int, int, int]
#: `run(x, row_stat, col_stat, seed, row0, col0, row_stream, col_stream)`: the planes' buffers.
Run = Callable[..., list[torch.Tensor]]


def _runner(backend: Backend, row: PlaneSpec | None, col: PlaneSpec | None, dtype: Any) -> Run:
    """Return how `backend` encodes these planes of tensors of `dtype`."""
    if backend.encoder is not None:
        return backend.encoder(row, col, dtype)
    encode = backend.ops["encode"]

    def run(x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        return encode(x, row, col, EncodeArgs(*rest))

    return run


class EncodePlan:
    """How one or both planes of tensors of one dtype on one kind of device are encoded.

    Args:
        row, col: the planes, or None; an identity's dtype is fixed.
        dtype: of the tensors.
        device: type of their device.
    """

    __slots__ = (
        "_both",
        "_device",
        "_dtype",
        "_each",
        "_finds",
        "_is_shared",
        "_pair",
        "_raises",
        "at_once",
    )

    def __init__(
        self, row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype, device: str
    ) -> None:
        self._pair = (row, col)
        self._dtype, self._device = dtype, device
        chosen = [
            (position, spec, None if spec.format.is_identity else self._choose(spec))
            for position, spec in enumerate((row, col))
            if spec is not None
        ]
        backends = [backend for _, _, backend in chosen if backend is not None]
        #: One call makes both planes.
        self._both: Run | None = None
        if len(chosen) == 2 and len(backends) == 2 and backends[0] is backends[1]:
            pair = Call("encode", device, dtype, row, col)
            if backends[0].reason(pair) is None:
                self._both = _runner(backends[0], row, col, dtype)
        elif len(chosen) == 1 and backends:
            self._both = _runner(backends[0], row, col, dtype)
        self._each = [
            (
                position,
                spec,
                None if backend is None else _runner(backend, *_at(position, spec), dtype),
            )
            for position, spec, backend in chosen
        ]
        self._finds = all(backend.finds_amax for backend in backends)
        #: The call that makes all planes also raises a `found`, and finds what it is not given.
        self._raises = self._both is not None and self._finds and backends[0].raises_found
        #: What makes all planes if no statistic is given, or None where that takes several steps.
        self.at_once = self._both if self._finds else None
        self._is_shared = (
            row is not None
            and col is not None
            and row.needs_tensor_amax
            and col.needs_tensor_amax
            and row.signs == col.signs is None
        )

    def _choose(self, spec: PlaneSpec) -> Backend:
        return select(Call("encode", self._device, self._dtype, spec))

    def __call__(
        self,
        x: torch.Tensor,
        row_stat: torch.Tensor | None,
        col_stat: torch.Tensor | None,
        seed: torch.Tensor | None,
        row0: int,
        col0: int,
        row_stream: int,
        col_stream: int,
        found: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, the rowwise plane's first.

        Args:
            x: `[rows, cols]`.
            row_stat, col_stat: an amax given from outside, or None.
            seed: int64 `[1]` where a plane is rounded stochastically.
            row0, col0, row_stream, col_stream: as in `EncodeArgs`.
            found: FP32 `[1]`, raised to max|x| in the same pass where the backend can; or None.
        """
        if found is not None:
            if self._raises and self._both is not None:
                place = (row0, col0, row_stream, col_stream)
                return self._both(x, row_stat, col_stat, seed, *place, found)
            raise_to_amax(found, x)
        if row_stat is not None or col_stat is not None or not self._finds:
            shared = self._is_shared and row_stat is None and col_stat is None
            row_stat = statistic(x, self._pair[0], row_stat)
            # One pass over x serves both.
            col_stat = row_stat if shared else statistic(x.t(), self._pair[1], col_stat)
        rest = (row_stat, col_stat, seed, row0, col0, row_stream, col_stream)
        if self._both is not None:
            return self._both(x, *rest)
        buffers: list[torch.Tensor] = []
        for position, spec, run in self._each:
            if run is not None:
                buffers += run(x, *rest)
                continue
            own = x.t() if position else x
            dtype = spec.format.storage_dtype or x.dtype
            buffers.append(own.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format))
        return buffers


def raise_to_amax(found: torch.Tensor, x: torch.Tensor) -> None:
    """Raise `found` in place to max|x|, infinity and NaN as they are.

    Args:
        found: FP32 `[1]`.
        x: of any shape; of what is empty the maximum is 0.
    """
    if x.numel() == 0:
        own = found.new_zeros(1)
    else:
        low, high = torch.aminmax(x)
        # The signs of zeros and NaN go: a maximum is a magnitude.
        own = torch.maximum(low.abs(), high.abs()).to(torch.float32).reshape(1)
    found.copy_(one_nan(torch.maximum(found, own)))


def statistic(
    x: torch.Tensor, spec: PlaneSpec | None, given: torch.Tensor | None, where: str = "encode"
) -> torch.Tensor | None:
    """Return the amax that `spec` needs of the plane's own matrix x: the given one, or x's.

    Args:
        x: `[rows, cols]` of the plane.
        spec: of the plane, or None.
        given: FP32, an amax from outside, or None.
        where: the function that takes it, for the error.

    Raises:
        ValueError: `given` is not FP32, or not as many values as the plane needs.
    """
    if spec is None or not spec.needs_amax:
        return None
    if given is not None:
        return given_statistic(x.shape[0], spec, given, where)
    return operation("amax", "cpu" if x.is_cpu else x.device.type, x.dtype, spec)(x, spec)


def given_statistic(
    rows: int, spec: PlaneSpec | None, given: torch.Tensor | None, where: str
) -> torch.Tensor | None:
    """Return the amax that was given for a plane, as kernels take it; None where there is none.

    Args:
        rows: of the plane.
        spec: of the plane, or None.
        given: FP32, or None.
        where: the function that takes it, for the error.

    Raises:
        ValueError: `given` is not FP32, or not as many values as the plane needs.
    """
    if spec is None or given is None or not spec.needs_amax:
        return None
    shape = spec.stat_shape(rows)
    if given.dtype != torch.float32 or given.numel() != shape[0]:
        wanted = f"one value for each of {shape[0]} rows" if spec.row_scaled else "one value"
        raise ValueError(
            f"{where}: a statistic of {spec} must be float32 with {wanted}, got {given.dtype} "
            f"{tuple(given.shape)}"
        )
    return one_nan(given.reshape(shape).clamp(max=torch.finfo(torch.float32).max))


def _at(position: int, spec: PlaneSpec) -> tuple[PlaneSpec | None, PlaneSpec | None]:
    return (None, spec) if position else (spec, None)


def encode_plan(row: str, col: str, dtype: torch.dtype, device: str) -> EncodePlan:
    """Return the plan of these planes under the backend that is forced now, if one is.

    Args:
        row, col: canonical texts of the planes; empty for no plane.
        dtype: of the tensors that will be encoded.
        device: type of their device.

    Raises:
        BackendError: no backend can encode one of them.
    """
    return _plan(row, col, dtype, device, settings.current().backend)


@cached_choice
def _plan(row: str, col: str, dtype: torch.dtype, device: str, forced: str | None) -> EncodePlan:
    specs = [PlaneSpec.parse(text).resolve(dtype) if text else None for text in (row, col)]
    return EncodePlan(specs[0], specs[1], dtype, device)


def run_encode(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    is_decoded: bool,
    keep_row: bool,
    place: Place,
    found: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the planes' buffers: what the operator runs, and callers that may go past it.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16.
        row, col: canonical texts of the planes; empty for no plane.
        row_stat, col_stat: an amax given from outside, or None.
        seed: int64 `[1]` where a plane is rounded stochastically.
        is_decoded: the columnwise plane is made of what the rowwise one decodes to.
        keep_row: whether the rowwise plane is returned.
        place: where x lies in the whole tensor, and the random streams.
        found: FP32 `[1]`, raised to max|x| on the way; or None.
    """
    device = "cpu" if x.is_cpu else x.device.type
    if not (is_decoded and row and col):
        plan = encode_plan(row if keep_row else "", col, x.dtype, device)
        return plan(x, row_stat, col_stat, seed, *place, found)
    buffers = encode_plan(row, "", x.dtype, device)(x, row_stat, None, seed, *place, found)
    spec = PlaneSpec.parse(row).resolve(x.dtype)
    if spec.format.is_identity:
        seen = buffers[0].to(x.dtype)
    else:
        seen = operation("decode", device, x.dtype, spec)(buffers, spec, *x.shape, x.dtype)
    second = encode_plan("", col, x.dtype, device)(seen, None, col_stat, seed, *place)
    return buffers + second if keep_row else second
