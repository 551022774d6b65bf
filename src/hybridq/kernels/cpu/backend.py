"""The CPU backend: the compiled core, on any x86-64 or arm64 processor."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ... import settings
from ...errors import must_be_one_of
from ...formats import PlaneSpec
from ..choice import Backend, DeviceSupport, EncodeRequest, OpQuery, Prologue, register_backend
from ..inputs import (
    DTYPES,
    Description,
    described_plane,
    given,
    given_or_none,
    made,
    matrix,
    plane_description,
)
from .ragged_tokens import encode_ragged, map_encode_ragged
from .results import is_large, prepare, result
from .token_rows import spread_rows, sum_rows
from .transposer import Transposer

__all__ = ["CPU", "core", "core_error"]

#: Given to every allocation: another default device must not change where results are.
_CPU = torch.device("cpu")
_empty: Any = torch.empty
_threads = torch.get_num_threads

#: The compiled core (`hybridq._core`), or None.
core: Any = None
#: Why the compiled core could not be imported; empty where it could.
core_error = ""
try:
    core = import_module("hybridq._core")
except ImportError as error:  # the one import that may fail: a source tree that is not built
    core_error = str(error)
else:
    if settings.cpu_variant() is not None:
        try:
            core.set_variant(settings.cpu_variant())
        except ValueError:
            rule = must_be_one_of(core.build_info()["variants"], settings.cpu_variant())
            raise ValueError(f"HYBRIDQ_CPU_VARIANT: on this CPU {rule}") from None


@lru_cache(maxsize=4096)
def core_spec(spec: PlaneSpec) -> tuple[Any, str | None]:
    """Return the core's form of `spec` and None, or None and the reason why it has none."""
    fmt = spec.format
    if core is None:
        return None, f"the compiled core is missing ({core_error})"
    if fmt.is_identity or fmt.element is None or fmt.scale is None:
        return None, "an identity plane needs no kernel"
    if spec.scale_layout == "tiles":
        return None, "the core has no scales in tiles"
    block = (None if spec.has_scales_as_factors else fmt.block) or (0, 0)
    try:
        native = core.Spec(
            fmt.element.name,
            block[0],
            block[1],
            fmt.scale.name,
            fmt.rule,
            fmt.power_of_two,
            fmt.eps,
            spec.stochastic,
            -1 if spec.signs is None else spec.signs,
            spec.tensor_bound,
            spec.four_over_six or "",
            spec.has_row_factors,
        )
    except ValueError as error:
        return None, str(error)
    reason = core.supports(native)
    if reason is None and not _same_element(spec):
        reason = f"the core's {fmt.element.name} is another element"
    return (None, reason) if reason else (native, None)


def _same_element(spec: PlaneSpec) -> bool:
    element = spec.format.element
    if core is None or element is None:
        return False
    known = core.constants().get(element.name)
    return known is not None and all(
        known[key] == getattr(element, key)
        for key in ("bits", "exponent_bits", "mantissa_bits", "bias", "max", "nan_code")
    )


def _supports(query: OpQuery) -> str | None:
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if query.dtype not in DTYPES and query.op != "transpose":
        return f"takes float32, bfloat16 and float16, got {query.dtype}"
    for spec in (query.row, query.col):
        # A transform and the maximum of a matrix are the same for every format.
        if spec is not None and (query.op != "amax" or spec.row_scaled):
            reason = core_spec(spec)[1]
            if reason is not None:
                return reason
            if spec.has_scales_as_factors and query.op not in ("encode", "decode", "operand"):
                return f"has no {query.op} of {spec}"
            if query.op == "skinny_gemm" and (spec.stochastic or spec.row_scaled):
                return f"few rows need one factor for a plane, rounded to nearest ({spec})"
    return None


class _Encoder:
    """Encodes planes of some specs: the core's call, with all prepared that no tensor changes."""

    __slots__ = (
        "_col",
        "_col_needs_stat",
        "_name",
        "_row",
        "_row_needs_stat",
        "_seeded",
        "_sizes",
        "_specs",
    )

    def __init__(self, row: PlaneSpec | None, col: PlaneSpec | None, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise TypeError(f"encode: x must be float32, bfloat16 or float16, got {dtype}")
        self._specs, self._name = (row, col), DTYPES[dtype]
        #: The core's form of each spec; None for no plane.
        self._row = None if row is None else core_spec(row)[0]
        self._col = None if col is None else core_spec(col)[0]
        self._row_needs_stat = row is not None and row.needs_amax_inside
        self._col_needs_stat = col is not None and col.needs_amax_inside
        self._seeded = any(spec is not None and spec.stochastic for spec in (row, col))

        def sizes(rows: int, cols: int) -> tuple[_Sizes, int, tuple[int, ...]]:
            """Return all buffers, how many are the rowwise plane's, and which are large."""
            first = () if row is None else row.buffers(rows, cols)
            second = () if col is None else col.buffers(cols, rows)
            both = (*first, *second)
            widths = [torch.uint8 if buffer.dtype is None else buffer.dtype for buffer in both]
            sizes = [one.numel * dtype.itemsize for one, dtype in zip(both, widths, strict=True)]
            large = tuple(number for number, nbytes in enumerate(sizes) if is_large(nbytes))
            return tuple((one.shape, one.dtype) for one in both), len(first), large

        self._sizes = lru_cache(maxsize=256)(sizes)

    def __call__(
        self, x: torch.Tensor, request: EncodeRequest, found: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, and update `found` to max|x|, if it is given."""
        rows, cols = x.shape
        # The seed may be a copy, and is read in the call.
        buffers, planes, _seed = self.planes(rows, cols, request)
        stride0, stride1 = x.stride()
        source = matrix("encode: x", x)
        raised = 0  # of `found`: in the first plane's pass
        if found is not None:
            raised = given_or_none("encode: found", found, torch.float32, 1)
        raisers = (raised, 0) if planes[0] is not None else (0, raised)
        core.encode_from_scratch(
            *source, rows, cols, stride0, stride1, *planes, _threads(), *raisers
        )
        return buffers

    def record(
        self,
        steps: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        places: tuple[Any, Any, Any, Any],
        stat: Any,
    ) -> None:
        """Have `steps` encode a matrix: the only plane of the encoder, without a seed.

        Args:
            steps: of `Steps`.
            shape, strides: of the matrix, `(rows, cols)`, which has the encoder's dtype.
            places: of the matrix and of the plane's data, scales and amax, which are as large as it
                needs them; of an amax None where it has none. An amax that is given is not written.
            stat: place of the statistic, as `given_statistic` returns it; None: found in x.
        """
        spec, is_col = (self._col, True) if self._row is None else (self._row, False)
        steps.core.encode(spec, is_col, self._name, *shape, *strides, *places, stat)
        steps.encoded.append(shape)
        steps.is_empty = False

    def planes(
        self, rows: int, cols: int, request: EncodeRequest
    ) -> tuple[list[torch.Tensor], _Planes, torch.Tensor | None]:
        """Return new buffers of the planes, what the core takes of them, and the seed it reads.

        Args:
            rows, cols: of the matrix that will be encoded.
            request: statistics, seed, place and streams.
        """
        _, _, row_stat, col_stat, seed, _, _, row0, col0, row_stream, col_stream, *_ = request
        seed_pointer = 0
        if seed is not None and self._seeded:
            seed = seed.cpu()  # itself, if it is there already
            seed_pointer = given("encode: seed", seed, torch.int64, 1)
        buffers = []
        sizes, split, large = self._sizes(rows, cols)
        for size, dtype in sizes:
            buffers.append(_empty(*size, dtype=dtype, device=_CPU))
        for number in large:
            prepare(buffers[number])
        first = second = None
        row_finds = col_finds = False
        if self._row is not None:
            native, row_finds, stat = self._row, self._row_needs_stat, 0
            if row_finds:
                row_finds = row_stat is None
                stat = _stat_pointer(self._specs[0], rows, buffers[2:split], row_stat)
            first = (
                native,
                made(buffers[0]),
                made(buffers[1]),
                stat,
                seed_pointer,
                row0,
                col0,
                row_stream,
            )
        if self._col is not None:
            native, col_finds, stat = self._col, self._col_needs_stat, 0
            if col_finds:
                col_finds = col_stat is None
                stat = _stat_pointer(self._specs[1], cols, buffers[split + 2 :], col_stat)
            second = (
                native,
                made(buffers[split]),
                made(buffers[split + 1]),
                stat,
                seed_pointer,
                row0,
                col0,
                col_stream,
            )
        return buffers, (first, second, row_finds, col_finds), seed


#: Both planes, each as the core takes it or None, and whether the core finds the amax of each.
_Planes = tuple[tuple[Any, ...] | None, tuple[Any, ...] | None, bool, bool]
#: Shape and dtype of buffers.
_Sizes = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]


def _stat_pointer(
    spec: PlaneSpec | None, rows: int, amax: list[torch.Tensor], stat: torch.Tensor | None
) -> int:
    """Return where the core reads a plane's amax, or writes it if it is not given; 0: nowhere.

    Args:
        spec, rows: of the plane.
        amax: the plane's own buffer of it, if it has one.
        stat: the statistic that is given, or None.
    """
    if stat is None or spec is None:
        return made(amax[0]) if amax else 0
    address = given("encode: a statistic", stat, torch.float32, spec.stat_shape(rows)[0])
    if amax:
        amax[0].copy_(stat)
    return address


encoder = lru_cache(maxsize=1024)(_Encoder)


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
) -> list[torch.Tensor]:
    return encoder(row, col, x.dtype)(x, request)


#: gamma, beta, mean and rstd (addresses), eps.
_Weights = tuple[int, int, int, int, float]


def _prologue(
    x: torch.Tensor, prologue: Prologue
) -> tuple[torch.Tensor, int, list[torch.Tensor], _Weights | None]:
    """Return x with contiguous rows, the result's columns, a norm's statistics and its weights."""
    if x.stride(1) != 1:
        x = x.contiguous()
    cols = x.shape[1]
    if prologue.gamma is None:
        return x, cols // 2 if prologue.is_gated else cols, [], None
    count = x.shape[0]
    sizes = (count if prologue.kind == "LayerNorm" else 0, count)
    mean, rstd = (_empty(size, dtype=torch.float32, device=_CPU) for size in sizes)
    weights = (
        given("norm: gamma", prologue.gamma, torch.float32, cols),
        given_or_none("norm: beta", prologue.beta, torch.float32, cols),
        made(mean),
        made(rstd),
        prologue.eps,
    )
    return x, cols, [mean, rstd], weights


def _map(x: torch.Tensor, prologue: Prologue) -> tuple[torch.Tensor, ...]:
    x, cols, stats, weights = _prologue(x, prologue)
    rows = x.shape[0]
    out = result(rows, cols, dtype=x.dtype)
    core.map_store(
        prologue.core,
        prologue.is_gated,
        weights,
        *matrix("map: x", x),
        rows,
        cols,
        x.stride(0),
        made(out),
        _threads(),
    )
    return (out, *stats)


def _map_encode(
    x: torch.Tensor,
    prologue: Prologue,
    request: EncodeRequest,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
) -> tuple[Any, ...]:
    x, cols, stats, weights = _prologue(x, prologue)
    rows = x.shape[0]
    buffers, planes, _seed = encoder(row, col, x.dtype).planes(rows, cols, request)
    core.map_encode(
        prologue.core,
        prologue.is_gated,
        weights,
        *matrix("map_encode: x", x),
        rows,
        cols,
        x.stride(0),
        *planes,
        _threads(),
    )
    return (buffers, *stats)


class _Decoder:
    """Decodes planes of one spec: the core's call, with all prepared that no tensor changes.

    Args:
        spec: of the planes.
        dtype: decoded to.
        is_operand: all codes of a row, in the transform's own basis, without the tensor's factor.
    """

    __slots__ = ("_dtype", "_is_operand", "_name", "_native", "_sizes")

    def __init__(self, spec: PlaneSpec, dtype: torch.dtype, is_operand: bool) -> None:
        self._native = core_spec(spec)[0]
        self._dtype, self._name, self._is_operand = dtype, DTYPES[dtype], is_operand

        def sizes(rows: int, cols: int) -> tuple[int, Description, bool]:
            """Return the result's columns, what the buffers must be, and whether it is large."""
            width = spec.padded(cols) if is_operand else cols
            large = is_large(rows * width * dtype.itemsize)
            return width, plane_description(spec, rows, cols), large

        self._sizes = lru_cache(maxsize=256)(sizes)

    def __call__(self, buffers: list[torch.Tensor], rows: int, cols: int) -> Any:
        """Return the values `[rows, cols]`; of an operand with whether any leaves BF16's range.

        Args:
            buffers: of the plane; of any strides.
            rows, cols: of its matrix.
        """
        width, description, large = self._sizes(rows, cols)
        for buffer in buffers:
            if not buffer.is_contiguous():
                buffers = [one.contiguous() for one in buffers]
                break
        out = _empty(rows, width, dtype=self._dtype, device=_CPU)
        if large:
            prepare(out)
        outside = core.decode(
            self._native,
            *described_plane("decode", buffers, description),
            rows,
            cols,
            made(out),
            self._name,
            self._is_operand,
            _threads(),
        )
        return (out, outside) if self._is_operand else out

    def record(
        self, steps: Any, shape: tuple[int, ...], places: tuple[Any, Any, Any], out: Any
    ) -> None:
        """Have `steps` decode a plane.

        Args:
            steps: of `Steps`.
            shape: of its matrix.
            places: of the plane's data, scales and amax; None where it has none.
            out: place of as many values of the decoder's dtype.
        """
        steps.core.decode(self._native, self._name, *shape, *places, out)
        steps.is_empty = False


_decoder = lru_cache(maxsize=1024)(_Decoder)


def _decode(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    return _decoder(spec, dtype, False)(buffers, rows, cols)


def _operand(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    asks_range: bool = True,
) -> tuple[torch.Tensor, bool]:
    return _decoder(spec, dtype, True)(buffers, rows, cols)


def _amax(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    out = _empty(spec.stat_shape(x.shape[0]), dtype=torch.float32, device=_CPU)
    core.amax(
        *matrix("amax: x", x),
        *x.shape,
        *x.stride(),
        -1 if spec.signs is None else spec.signs,
        made(out),
        torch.get_num_threads(),
        spec.row_scaled,
    )
    return out


def _round_stochastic(
    x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, stream: int, row0: int, col0: int
) -> torch.Tensor:
    out = result(*x.shape, dtype=dtype)
    core.round_stochastic(
        matrix("round_stochastic: x", x, only="float32")[0],
        *x.shape,
        *x.stride(),
        DTYPES[dtype],
        int(seed.item()) & 0xFFFFFFFFFFFFFFFF,
        row0,
        col0,
        stream,
        made(out),
        torch.get_num_threads(),
    )
    return out


def _skinny_gemm(row: PlaneSpec, weight: PlaneSpec, dtype: torch.dtype) -> Any:
    """Return the core's product of few rows, of planes of two specs and tensors of a dtype."""
    return core.FewRows(core_spec(row)[0], core_spec(weight)[0], DTYPES[dtype])


#: The backend of the compiled core, on any CPU.
CPU = register_backend(
    Backend(
        "cpu",
        _supports,
        {
            "encode": _encode,
            "map": _map,
            "map_encode": _map_encode,
            "encode_ragged": encode_ragged,
            "map_encode_ragged": map_encode_ragged,
            "decode": _decode,
            "operand": _operand,
            "amax": _amax,
            "transpose": Transposer(),
            "round_stochastic": _round_stochastic,
            "sum_rows": sum_rows,
            "spread_rows": spread_rows,
            "skinny_gemm": _skinny_gemm,
        },
        devices=DeviceSupport(("cpu",)),
        priority=50,
        finds_amax=True,
        updates_amax=True,
        encoder=encoder,
        decoder=_decoder,
    )
)
