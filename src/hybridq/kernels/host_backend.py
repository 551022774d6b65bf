"""The backend `host`: operations on tensors of other devices, made by the CPU, there and back.

For devices that have no FP64 (Apple's GPUs, Intel's Arc), in which the reference rounds: they have
the CPU's bits, at the price of a copy in each direction. Products are not among the operations:
decoded operands are multiplied on their own device.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .._log import log_once
from ..formats import PlaneSpec
from .choice import (
    Backend,
    DeviceSupport,
    EncodeRequest,
    OpQuery,
    Prologue,
    register_backend,
    unforced,
)
from .inputs import has_float64

__all__ = ["HOST"]

_Tensors = TypeVar("_Tensors")


def _supports(query: OpQuery) -> str | None:
    return None  # as the CPU does


def _leaves(query: OpQuery) -> str | None:
    if has_float64(query.device):
        return f"{query.device} has FP64, so that the reference runs there"
    return None


def _moved(given: _Tensors, device: torch.device | str) -> _Tensors:
    """Return arguments with their tensors on a device.

    Args:
        given: tensors in lists and (named) tuples, and what is none.
        device: where they are wanted.
    """
    made: Any = given
    if isinstance(given, torch.Tensor):
        made = given.to(device)
    elif isinstance(given, list):
        made = [_moved(one, device) for one in given]
    elif isinstance(given, tuple):
        parts = [_moved(one, device) for one in given]
        made = tuple(parts) if type(given) is tuple else type(given)(*parts)
    return made


def _by_cpu(device: torch.device, query: tuple[Any, ...], *given: Any) -> Any:
    """Return what the CPU makes of arguments, on their device.

    Args:
        device: of the tensors.
        query: operation, dtype and specs, as `OpQuery` takes them without the device.
        given: what the operation's function takes.
    """
    op, dtype, *specs = query
    run = unforced(OpQuery(op, "cpu", dtype, *specs)).ops[op]
    log_once(
        f"host: {device.type}",
        f"tensors on {device.type} are quantized and decoded by the CPU, copied there and back: "
        "the PyTorch reference rounds in FP64, which such a device may not have; products of what "
        f"is decoded run on {device.type}; this is reported once",
    )
    with torch.no_grad():
        return _moved(run(*_moved(given, "cpu")), device)


def _encode(
    x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None, request: EncodeRequest
) -> Any:
    return _by_cpu(x.device, ("encode", x.dtype, row, col), x, row, col, request)


def _decode(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
) -> Any:
    own = (buffers, spec, rows, cols, dtype)
    return _by_cpu(buffers[0].device, ("decode", dtype, spec), *own)


def _operand(
    buffers: list[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    asks_range: bool = True,
) -> Any:
    own = (buffers, spec, rows, cols, dtype, asks_range)
    return _by_cpu(buffers[0].device, ("operand", dtype, spec), *own)


def _amax(x: torch.Tensor, spec: PlaneSpec) -> Any:
    return _by_cpu(x.device, ("amax", x.dtype, spec), x, spec)


def _map(x: torch.Tensor, prologue: Prologue) -> Any:
    return _by_cpu(x.device, ("map", x.dtype), x, prologue)


def _transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> Any:
    return _by_cpu(data.device, ("transpose", data.dtype), data, rows, cols, bits)


def _round_stochastic(
    x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, stream: int, row0: int, col0: int
) -> Any:
    own = (x, seed, dtype, stream, row0, col0)
    return _by_cpu(x.device, ("round_stochastic", dtype), *own)


#: The backend of devices without FP64.
HOST = register_backend(
    Backend(
        "host",
        _supports,
        {
            "encode": _encode,
            "decode": _decode,
            "operand": _operand,
            "amax": _amax,
            "map": _map,
            "transpose": _transpose,
            "round_stochastic": _round_stochastic,
        },
        devices=DeviceSupport(others=("cpu", "cuda")),
        leaves=_leaves,
        # After what users register for such a device.
        priority=-10,
        notes=lambda query: ("by the CPU: tensors are copied there and back",),
    )
)
