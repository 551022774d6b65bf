"""The CPU backend: the compiled core, on any x86-64 or arm64 processor."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from .. import settings
from ..formats import PlaneSpec
from .registry import Backend, Call, register_backend
from .types import EncodeArgs

__all__ = ["CPU", "core", "core_error"]

DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

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
        core.set_variant(settings.cpu_variant())


@lru_cache(maxsize=4096)
def core_spec(spec: PlaneSpec) -> tuple[Any, str | None]:
    """Return the core's form of `spec` and None, or None and the reason why it has none."""
    fmt = spec.format
    if core is None:
        return None, f"the compiled core is missing ({core_error})"
    if fmt.is_identity or fmt.element is None or fmt.scale is None:
        return None, "an identity plane needs no kernel"
    block = fmt.block or (0, 0)
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
            spec.row_scaled,
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


def _supports(call: Call) -> str | None:
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if call.device != "cpu":
        return f"runs on CPU tensors, got {call.device}"
    if call.dtype not in DTYPES and call.op != "transpose":
        return f"takes float32, bfloat16 and float16, got {call.dtype}"
    for spec in (call.row, call.col):
        # A transform and the maximum of a matrix are the same for every format.
        if spec is not None and (call.op != "amax" or spec.row_scaled):
            reason = core_spec(spec)[1]
            if reason is not None:
                return reason
    return None


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, args: EncodeArgs
) -> list[torch.Tensor]:
    rows, cols = x.shape
    seed = 0 if args.seed is None else int(args.seed.item()) & 0xFFFFFFFFFFFFFFFF
    buffers: list[torch.Tensor] = []
    planes: list[Any] = []
    for spec, shape, stat, stream in (
        (row, (rows, cols), args.row_stat, args.row_stream),
        (col, (cols, rows), args.col_stat, args.col_stream),
    ):
        if spec is None:
            planes.append(None)
            continue
        own = [torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in spec.buffers(*shape)]
        if len(own) == 3 and stat is not None:
            own[2].copy_(stat)
        planes.append(
            core.PlaneOut(
                core_spec(spec)[0],
                own[0].data_ptr(),
                own[1].data_ptr(),
                _pointer(stat),
                seed,
                args.row0,
                args.col0,
                stream,
            )
        )
        buffers += own
    core.encode(
        x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), *planes, torch.get_num_threads()
    )
    return buffers


def _run_decode(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    is_operand: bool,
) -> tuple[torch.Tensor, bool]:
    own = [buffer.contiguous() for buffer in buffers]
    out = torch.empty(rows, spec.padded(cols) if is_operand else cols, dtype=dtype)
    outside = core.decode(
        core_spec(spec)[0],
        own[0].data_ptr(),
        own[1].data_ptr(),
        _pointer(own[2] if len(own) == 3 else None),
        rows,
        cols,
        out.data_ptr(),
        DTYPES[dtype],
        is_operand,
        torch.get_num_threads(),
    )
    return out, outside


def _decode(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    return _run_decode(buffers, spec, rows, cols, dtype, False)[0]


def _operand(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    asks_range: bool = True,
) -> tuple[torch.Tensor, bool]:
    return _run_decode(buffers, spec, rows, cols, dtype, True)


def _amax(x: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    out = torch.empty(spec.stat_shape(x.shape[0]), dtype=torch.float32)
    core.amax(
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        *x.stride(),
        -1 if spec.signs is None else spec.signs,
        out.data_ptr(),
        torch.get_num_threads(),
        spec.row_scaled,
    )
    return out


def _transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    source = data.contiguous()
    width = -(-rows // 2) if bits == 4 else rows
    out = torch.empty(cols, width, dtype=data.dtype)
    core.transpose(source.data_ptr(), rows, cols, bits, out.data_ptr(), torch.get_num_threads())
    return out


def _round_stochastic(
    x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, stream: int, row0: int, col0: int
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    core.round_stochastic(
        x.data_ptr(),
        *x.shape,
        *x.stride(),
        DTYPES[dtype],
        int(seed.item()) & 0xFFFFFFFFFFFFFFFF,
        row0,
        col0,
        stream,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


#: The backend of the compiled core, on any CPU.
CPU = register_backend(
    Backend(
        "cpu",
        _supports,
        {
            "encode": _encode,
            "decode": _decode,
            "operand": _operand,
            "amax": _amax,
            "transpose": _transpose,
            "round_stochastic": _round_stochastic,
        },
    )
)
