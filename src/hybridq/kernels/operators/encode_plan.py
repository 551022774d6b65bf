"""Encoding planned: what does not depend on the tensor is decided once per kind of call.

The operator `hybridq::encode` and the callers that may go past it (see `watch`) run the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ... import settings
from ...formats import PlaneSpec
from ...reference import one_nan
from ..choice import (
    Backend,
    EncodeRequest,
    GroupEncoder,
    OpQuery,
    PlacedEncoder,
    cached_choice,
    encode_decoded,
    operation,
    select,
    together,
)
from .contiguous import contiguous_copy

__all__ = [
    "EncodePlan",
    "decode_recorder",
    "decoded_rows",
    "encode_plan",
    "given_statistic",
    "group_encoder",
    "mapped_run",
    "placed_encoders",
    "run_encode",
    "statistic",
    "transpose_recorder",
    "update_amax",
]

#: `run(x, request)`: the planes' buffers; some also take a `found` (see `EncodePlan`).
Run = Callable[..., list[torch.Tensor]]


def _runner(backend: Backend, row: PlaneSpec | None, col: PlaneSpec | None, dtype: Any) -> Run:
    """Return how `backend` encodes these planes of tensors of `dtype`."""
    if backend.encoder is not None:
        return backend.encoder(row, col, dtype)
    encode = backend.ops["encode"]

    def run(x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
        return encode(x, row, col, request)

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
            (position, spec, None if spec.format.is_identity else self._choose(position, spec))
            for position, spec in enumerate((row, col))
            if spec is not None
        ]
        backends = [backend for _, _, backend in chosen if backend is not None]
        #: One call makes both planes.
        self._both: Run | None = None
        whole = OpQuery("encode", device, dtype, row, col)
        own = together(whole, whole.parts()).chosen
        if own is not None and len(backends) == len(chosen):  # no plane is a copy
            self._both = _runner(own, row, col, dtype)
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
        self._raises = self._both is not None and self._finds and backends[0].updates_amax
        #: What makes all planes if no statistic is given, or None where that takes several steps.
        self.at_once = self._both if self._finds else None
        self._is_shared = (
            row is not None
            and col is not None
            and row.needs_tensor_amax
            and col.needs_tensor_amax
            and row.signs == col.signs is None
        )

    @property
    def recorder(self) -> Callable[..., None] | None:
        """What has `Steps` encode one plane (`record` of the CPU's encoder), or None."""
        return getattr(self._both, "record", None)

    @property
    def placed(self) -> PlacedEncoder | None:
        """What makes all planes at once, the rowwise one in memory that is given; or None."""
        return getattr(self.at_once, "placed", None)

    def _choose(self, position: int, spec: PlaneSpec) -> Backend:
        return select(OpQuery("encode", self._device, self._dtype, *_at(position, spec)))

    def scaled(self, x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
        """Return the buffers of the planes of x by statistics that kernels take as they are.

        Args:
            x: `[rows, cols]`.
            request: with what `given_statistic` returns for each plane that needs a statistic.
        """
        return self(x, request) if self._both is None else self._both(x, request)

    def __call__(
        self, x: torch.Tensor, request: EncodeRequest, found: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, the rowwise plane's first.

        Args:
            x: `[rows, cols]`.
            request: statistics, seed, place and streams; the planes are the plan's.
            found: FP32 `[1]`, updated to max|x| in the same pass where the backend can; or None.
        """
        if found is not None:
            if self._raises and self._both is not None:
                return self._both(x, request, found)
            update_amax(found, x)
        row_stat, col_stat = request.row_stat, request.col_stat
        if row_stat is not None or col_stat is not None or not self._finds:
            shared = self._is_shared and row_stat is None and col_stat is None
            row_stat = statistic(x, self._pair[0], row_stat)
            # One pass over x serves both.
            col_stat = row_stat if shared else statistic(x.t(), self._pair[1], col_stat)
            request = request._replace(row_stat=row_stat, col_stat=col_stat)
        if self._both is not None:
            return self._both(x, request)
        buffers: list[torch.Tensor] = []
        for position, spec, run in self._each:
            if run is not None:
                buffers += run(x, request)
                continue
            own = x.t() if position else x
            buffers.append(contiguous_copy(own, spec.format.storage_dtype))
        return buffers


def update_amax(found: torch.Tensor, x: torch.Tensor) -> None:
    """Update `found` in place to max|x| if that is more, infinity and NaN as they are.

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


def placed_encoders(
    a: tuple[str, str],
    b: tuple[str, str] | None,
    dtype: torch.dtype,
    device: str,
    is_mapped: bool = False,
) -> tuple[PlacedEncoder, PlacedEncoder] | None:
    """Return what encodes two matrices with rowwise planes in memory that is given, or None.

    Args:
        a, b: the planes of each, as `encode_plan` takes them; b None: there is one matrix, and
            its encoder is returned twice.
        dtype: of the matrices.
        device: type of their device.
        is_mapped: the first matrix is one that a prologue makes.

    Raises:
        BackendError: no backend can encode one of them.
    """
    return _placed(a, b, dtype, device, is_mapped, settings.current().backend)


@cached_choice
def _placed(
    a: tuple[str, str],
    b: tuple[str, str] | None,
    dtype: torch.dtype,
    device: str,
    is_mapped: bool,
    forced: str,
) -> tuple[PlacedEncoder, PlacedEncoder] | None:
    first = encode_plan(*a, dtype, device).placed
    second = first if b is None else encode_plan(*b, dtype, device).placed
    if first is None or second is None or (is_mapped and mapped_run(*a, dtype, device) is None):
        return None
    return first, second


def group_encoder(
    row: str, col: str, dtype: torch.dtype, device: str, op: str
) -> GroupEncoder | None:
    """Return what encodes for products of groups, where one backend makes both planes, or None.

    Args:
        row, col, dtype, device: as `encode_plan` takes them; neither plane is an identity.
        op: `"encode_ragged"` of tokens, `"encode_many"` of matrices.
    """
    return _group_encoder(row, col, dtype, device, op, settings.current().backend)


@cached_choice
def _group_encoder(
    row: str, col: str, dtype: torch.dtype, device: str, op: str, forced: str | None
) -> GroupEncoder | None:
    del forced
    specs = [PlaneSpec.parse(text).resolve(dtype) if text else None for text in (row, col)]
    whole = OpQuery(op, device, dtype, specs[0], specs[1])
    backend = together(whole, whole.parts()).chosen
    if backend is None or backend.group_encoder is None:
        return None
    made: GroupEncoder = backend.group_encoder(specs[0], specs[1], dtype)
    return made


def mapped_run(row: str, col: str, dtype: torch.dtype, device: str) -> partial[Any] | None:
    """Return what encodes planes of a matrix that a prologue makes, and that is not made; or None.

    Args:
        row, col, dtype, device: as `encode_plan` takes them.

    Returns:
        It takes `(x, prologue, request)` and returns the buffers and a norm's statistics.
    """
    return _mapped(row, col, dtype, device, settings.current().backend)


@cached_choice
def _mapped(
    row: str, col: str, dtype: torch.dtype, device: str, forced: str | None
) -> partial[Any] | None:
    del forced
    specs = [PlaneSpec.parse(text).resolve(dtype) if text else None for text in (row, col)]
    some = [spec for spec in specs if spec is not None]
    if not some or any(spec.format.is_identity for spec in some):
        return None
    whole = OpQuery("map_encode", device, dtype, specs[0], specs[1])
    backend = together(whole, whole.parts()).chosen
    if backend is None:
        return None
    return partial(backend.ops["map_encode"], row=specs[0], col=specs[1])


def run_encode(
    x: torch.Tensor, request: EncodeRequest, found: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the planes' buffers: what the operator runs, and callers that may go past it.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16.
        request: what is made of it.
        found: FP32 `[1]`, updated to max|x| on the way; or None.
    """
    device = "cpu" if x.is_cpu else x.device.type
    if not request.is_decoded():
        plan = encode_plan(request.row if request.keep_row else "", request.col, x.dtype, device)
        return plan(x, request, found)

    def encode(y: torch.Tensor, own: EncodeRequest) -> list[torch.Tensor]:
        # What is found is the maximum of x, not of what its rowwise plane decodes to.
        return encode_plan(own.row, own.col, y.dtype, device)(y, own, found if own.row else None)

    def decode(rows: list[torch.Tensor]) -> torch.Tensor:
        return decoded_rows(rows, request.row, x.shape[0], x.shape[1], x.dtype)

    return encode_decoded(request, encode, decode, x)


def decoded_rows(
    buffers: list[torch.Tensor], row: str, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return what a rowwise plane decodes to, for a columnwise plane that is made of it.

    Args:
        buffers: of the plane.
        row: its spec string.
        rows, cols: of the matrix.
        dtype: of the matrix.
    """
    spec = PlaneSpec.parse(row).resolve(dtype)
    if spec.format.is_identity:
        return buffers[0].to(dtype)
    device = "cpu" if buffers[0].is_cpu else buffers[0].device.type
    return operation("decode", device, dtype, spec)(buffers, spec, rows, cols, dtype)


def decode_recorder(spec: PlaneSpec, dtype: torch.dtype, device: str) -> Callable[..., None] | None:
    """Return what has `Steps` decode a plane (`record` of the CPU's decoder), or None.

    Args:
        spec: of the planes.
        dtype: that they are decoded to.
        device: type of their device.
    """
    make = select(OpQuery("decode", device, dtype, spec)).decoder
    return None if make is None else getattr(make(spec, dtype, False), "record", None)


def transpose_recorder(dtype: torch.dtype, device: str) -> Callable[..., None] | None:
    """Return what has `Steps` transpose codes (`record` of the CPU's operation), or None.

    Args:
        dtype: of the codes' buffers.
        device: type of their device.
    """
    return getattr(operation("transpose", device, dtype), "record", None)
