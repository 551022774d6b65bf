"""Encode of one matrix as an operator, alone and with the amax of what it reads.

The scale of delayed scaling is fixed before its tensor is seen, so encode needs no amax; it finds
one for the steps to come. `hybridq::encode_with_amax` returns it, beside the buffers of
`hybridq::encode`, and `hybridq::record_amax` updates a state to it: the one operator of the three
that writes, and says so. Eager calls that need no dispatcher do both at once, past it.

Source: docs/reference/numerics.md, "Per-tensor FP8, delayed scaling".
"""

from __future__ import annotations

import torch

from ...formats import PlaneSpec
from ..choice import EncodeRequest
from ..inputs import (
    can_bypass_dispatcher,
    check_encode,
    check_matrix,
    check_place,
    check_seed,
    spec_of,
)
from .encode_plan import run_encode, statistic
from .library import encode_operator, operator

__all__ = ["check_request", "encode", "encode_recording", "encoded_fake", "record_amax"]

#: The specs of a rowwise and of a columnwise plane, or None.
_Specs = tuple[PlaneSpec | None, PlaneSpec | None]


def check_request(where: str, x: torch.Tensor, request: EncodeRequest) -> _Specs:
    """Return the specs that a request names; raise unless it fits the matrix x.

    Args:
        where: the operator, for the error.
        x: `[rows, cols]`.
        request: as a user gave it.

    Raises:
        TypeError, ValueError, SpecError: an argument is wrong.
    """
    check_matrix(x, where)
    specs = spec_of(request.row, x.dtype), spec_of(request.col, x.dtype)
    stats = (request.row_stat, request.col_stat)
    check_encode(x, specs, stats, request.seed, request.col_source, where)
    check_place(where, 0, 0, request.row_stream, request.col_stream)
    return specs


def encoded_fake(
    x: torch.Tensor, specs: _Specs, request: EncodeRequest, cols: int | None = None
) -> list[torch.Tensor]:
    """Return empty buffers of the planes of a matrix with the rows of x.

    Args:
        x: a tensor on the buffers' device.
        specs: of the planes.
        request: says whether the rowwise plane is returned.
        cols: of the matrix; None: those of x.
    """
    row, col = specs
    rows, cols = x.shape[0], x.shape[1] if cols is None else cols
    wanted = list(row.buffers(rows, cols)) if row is not None and request.keep_row else []
    if col is not None:
        wanted += col.buffers(cols, rows)
    return [x.new_empty(buffer.shape, dtype=buffer.dtype or x.dtype) for buffer in wanted]


def _encode(x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
    check_request("encode", x, request)
    check_place("encode", request.row0, request.col0)
    return run_encode(x, request)


def _encode_fake(x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
    return encoded_fake(x, check_request("encode", x, request), request)


encode_operator("encode", "Tensor x", _encode, _encode_fake, place="SymInt row0=0, SymInt col0=0, ")


def encode(x: torch.Tensor, request: EncodeRequest, direct: bool = False) -> list[torch.Tensor]:
    """Return what `torch.ops.hybridq.encode` returns, past the dispatcher where that may be.

    For callers above, whose specs and options are right; x and the seed may come from a user.

    Args:
        x: `[rows, cols]`.
        request: what is made of it; it lies at the beginning of its tensor.
        direct: the caller has checked x and the seed, and that the dispatcher can be bypassed.
    """
    if direct or can_bypass_dispatcher(x, *request.tensors()):
        if not direct:
            check_matrix(x, "encode")
            if request.seed is not None:
                check_seed(request.seed, x, "encode")
        return run_encode(x, request)
    return torch.ops.hybridq.encode(x, *request.planes(), **request.options())


def _encode_with_amax(x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
    row, col = check_request("encode_with_amax", x, request)
    row_stat = _checked(x, row, request.row_stat)
    col_stat = _checked(x.t(), col, request.col_stat)
    request = request._replace(row_stat=row_stat, col_stat=col_stat)
    if not x.numel():  # nothing was seen
        return [*run_encode(x, request), x.new_full((1,), -1.0, dtype=torch.float32)]
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    return [*run_encode(x, request, found), found]


def _checked(
    own: torch.Tensor, spec: PlaneSpec | None, stat: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a given statistic as kernels may read it; None if none is given, or needed."""
    return None if stat is None else statistic(own, spec, stat, "encode_with_amax")


def _encode_with_amax_fake(x: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
    specs = check_request("encode_with_amax", x, request)
    return [*encoded_fake(x, specs, request), x.new_empty(1, dtype=torch.float32)]


encode_operator("encode_with_amax", "Tensor x", _encode_with_amax, _encode_with_amax_fake)


def record_amax(amaxes: torch.Tensor, at: int, found: torch.Tensor) -> None:
    """Update `amaxes[at]` in place to `found` if that is more, NaN kept: `hybridq::record_amax`.

    Args:
        amaxes: FP32 `[n]`.
        at: which of them.
        found: FP32 `[1]`.

    Raises:
        ValueError: a tensor of another dtype or shape, or `at` out of range.
    """
    if amaxes.dtype != torch.float32 or amaxes.dim() != 1 or not 0 <= at < amaxes.shape[0]:
        raise ValueError(
            f"record_amax: amaxes must be float32 [n] with n > at, got {amaxes.dtype} "
            f"{tuple(amaxes.shape)} and at={at}"
        )
    if found.dtype != torch.float32 or found.numel() != 1:
        raise ValueError(
            f"record_amax: found must be float32 [1], got {found.dtype} {tuple(found.shape)}"
        )
    own = amaxes.narrow(0, at, 1)
    own.copy_(torch.maximum(own, found.reshape(1)))


def _record_amax_fake(amaxes: torch.Tensor, at: int, found: torch.Tensor) -> None:
    return None


operator(
    "record_amax(Tensor(a!) amaxes, int at, Tensor found) -> ()", record_amax, _record_amax_fake
)


def encode_recording(
    x: torch.Tensor,
    request: EncodeRequest,
    direct: bool,
    amaxes: torch.Tensor,
    at: tuple[int, ...],
) -> list[torch.Tensor]:
    """Return what `encode` returns, and update `amaxes[i]` to max|x| for each i of `at`.

    A matrix without elements has no amax: it changes none.

    Args:
        x, request, direct: as `encode` takes them.
        amaxes: FP32 `[n]`, written.
        at: which of them; at least one.
    """
    if direct or can_bypass_dispatcher(x, *request.tensors(), amaxes):
        if not direct:
            check_matrix(x, "encode")
        if not x.numel():
            return run_encode(x, request)
        found = amaxes.narrow(0, at[0], 1) if len(at) == 1 else amaxes.new_zeros(1)
        made = run_encode(x, request, found)
        if len(at) > 1:
            for i in at:
                record_amax(amaxes, i, found)
        return made
    call = torch.ops.hybridq.encode_with_amax
    *buffers, found = call(x, *request.planes(), **request.options())
    for i in at:
        torch.ops.hybridq.record_amax(amaxes, i, found)
    return buffers
