"""Norm + encode and activation + encode: whether a backend does both at once, and else one by one.

What the operators of `norm_activation_encode` run.
"""

from __future__ import annotations

import torch

from ...formats import PlaneSpec
from ...reference import ACTIVATIONS
from ..choice import (
    EncodeRequest,
    Prologue,
    encode_decoded,
    operation,
)
from .encode_plan import decoded_rows, given_statistic, mapped_run, run_encode

__all__ = ["activation_prologue", "map_matrix", "norm_prologue", "run_fused"]


def norm_prologue(
    gamma: torch.Tensor, beta: torch.Tensor | None, eps: float, kind: str, zero_centered: bool
) -> Prologue:
    """Return a norm as backends take it, its weights in FP32.

    Args:
        gamma, beta, eps, kind, zero_centered: as `norm_encode` takes them.
    """
    return Prologue(kind, kind, False, gamma, beta, float(eps), zero_centered).wide()


def activation_prologue(kind: str) -> Prologue:
    """Return the activation `kind` as backends take it."""
    record = ACTIVATIONS[kind]
    return Prologue(kind, record.core, record.is_gated)


def _device(x: torch.Tensor) -> str:
    return "cpu" if x.is_cpu else x.device.type


def map_matrix(x: torch.Tensor, prologue: Prologue) -> tuple[torch.Tensor, ...]:
    """Return y, and of a norm the rows' mean and rstd.

    Args:
        x: `[rows, cols]`.
        prologue: what y is of x.

    Raises:
        BackendError: no backend can run it.
    """
    made: tuple[torch.Tensor, ...] = operation("map", _device(x), x.dtype)(x, prologue)
    return made


def _of_made(y: torch.Tensor, request: EncodeRequest) -> list[torch.Tensor]:
    """Return the planes of y, which nobody else has: a rowwise plane of plain values is y."""
    row = request.row if request.keep_row else ""
    spec = PlaneSpec.parse(row).resolve(y.dtype) if row else None
    if spec is None or not spec.format.is_identity:
        return run_encode(y, request)
    planes = run_encode(y, request.col_alone())
    return [y.to(spec.format.storage_dtype or y.dtype), *planes]


def run_fused(
    x: torch.Tensor, prologue: Prologue, cols: int, request: EncodeRequest, where: str
) -> list[torch.Tensor]:
    """Return the planes' buffers, and of a norm the rows' mean and rstd after them.

    Args:
        x: what the prologue takes.
        prologue: a norm or an activation.
        cols: of the matrix that is encoded.
        request: what is made of that matrix.
        where: the function that takes it all, for errors.

    Raises:
        ValueError: a statistic is wrong.
        BackendError: no backend can run it.
    """
    stats: list[torch.Tensor] = []

    def of_result(x: torch.Tensor, own: EncodeRequest) -> list[torch.Tensor]:
        row = own.row if own.keep_row else ""
        run = mapped_run(row, own.col, x.dtype, _device(x))
        if run is None:
            y, *found = map_matrix(x, prologue)
            buffers = _of_made(y, own)
        else:
            specs = run.keywords
            row_stat = given_statistic(x.shape[0], specs["row"], own.row_stat, where)
            col_stat = given_statistic(cols, specs["col"], own.col_stat, where)
            own = own._replace(row_stat=row_stat, col_stat=col_stat)
            buffers, *found = run(x, prologue, own)
        stats.extend(found)
        return buffers

    if not request.is_decoded():
        return [*of_result(x, request), *stats]

    def encode(source: torch.Tensor, own: EncodeRequest) -> list[torch.Tensor]:
        return of_result(source, own) if own.row else run_encode(source, own)

    def decode(rows: list[torch.Tensor]) -> torch.Tensor:
        return decoded_rows(rows, request.row, x.shape[0], cols, x.dtype)

    return [*encode_decoded(request, encode, decode, x), *stats]
