"""Norm + encode and activation + encode: whether a backend does both at once, and else one by one.

What the operators of `ops_fused` run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .. import settings
from ..formats import PlaneSpec
from ..reference import ACTIVATIONS
from .encode import given_statistic, run_encode
from .registry import Call, cached_choice, operation, select
from .types import EncodeArgs, Prologue

__all__ = ["Rest", "activation_prologue", "map_matrix", "norm_prologue", "run_fused"]

#: What encode takes of two planes: row_stat, col_stat, seed, is_decoded, keep_row, and the streams.
Rest = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, bool, bool, tuple[int, int]
]


def norm_prologue(
    gamma: torch.Tensor, beta: torch.Tensor | None, eps: float, kind: str, zero_centered: bool
) -> Prologue:
    """Return a norm as backends take it, its weights in FP32.

    Args:
        gamma, beta, eps, kind, zero_centered: as `ops_fused.norm_encode` takes them.
    """
    scale = gamma.to(torch.float32)
    if zero_centered:
        scale = scale + 1.0
    shift = None if beta is None else beta.to(torch.float32).contiguous()
    return Prologue(kind, kind, False, scale.contiguous(), shift, float(eps))


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


@cached_choice
def _fused(
    row: str, col: str, dtype: torch.dtype, device: str, forced: str | None
) -> partial[Any] | None:
    """Return what encodes these planes of a matrix that is not made, or None where it must be."""
    specs = [PlaneSpec.parse(text).resolve(dtype) if text else None for text in (row, col)]
    some = [spec for spec in specs if spec is not None]
    if not some or any(spec.format.is_identity for spec in some):
        return None
    chosen = [select(Call("encode", device, dtype, spec)) for spec in some]
    backend, pair = chosen[0], Call("map_encode", device, dtype, specs[0], specs[1])
    if backend is not chosen[-1] or backend.reason(pair):
        return None
    return partial(backend.ops["map_encode"], row=specs[0], col=specs[1])


def _of_made(
    y: torch.Tensor, row: str, col: str, rest: Rest, place: tuple[int, int, int, int]
) -> list[torch.Tensor]:
    """Return the planes of y, which nobody else has: a rowwise plane of plain values is y."""
    row_stat, col_stat, seed = rest[:3]
    spec = PlaneSpec.parse(row).resolve(y.dtype) if row else None
    if spec is None or not spec.format.is_identity:
        return run_encode(y, row, col, row_stat, col_stat, seed, False, True, place)
    planes = run_encode(y, "", col, None, col_stat, seed, False, True, place)
    return [y.to(spec.format.storage_dtype or y.dtype), *planes]


def run_fused(
    x: torch.Tensor,
    prologue: Prologue,
    cols: int,
    row: str,
    col: str,
    rest: Rest,
    where: str,
) -> list[torch.Tensor]:
    """Return the planes' buffers, and of a norm the rows' mean and rstd after them.

    Args:
        x: what the prologue takes.
        prologue: a norm or an activation.
        cols: of the matrix that is encoded.
        row, col: canonical texts of the planes; empty for no plane.
        rest: what else encode takes.
        where: the function that takes it all, for errors.

    Raises:
        ValueError: a statistic is wrong.
        BackendError: no backend can run it.
    """
    row_stat, col_stat, seed, is_decoded, keep_row, streams = rest
    place = (0, 0, *streams)
    later = ""
    if is_decoded and row and col:
        col, later = "", col  # made of what the rowwise plane decodes to
    elif not keep_row:
        row = ""
    run = _fused(row, col, x.dtype, _device(x), settings.current().backend)
    if run is None:
        y, *stats = map_matrix(x, prologue)
        buffers = _of_made(y, row, col, rest, place)
    else:
        args = EncodeArgs(
            given_statistic(x.shape[0], run.keywords["row"], row_stat, where),
            given_statistic(cols, run.keywords["col"], col_stat, where),
            seed,
            row_stream=streams[0],
            col_stream=streams[1],
        )
        buffers, *stats = run(x, prologue, args)
    if later:
        seen = torch.ops.hybridq.decode(buffers, row, x.shape[0], cols, x.dtype)
        planes = run_encode(seen, "", later, None, col_stat, seed, False, True, place)
        buffers = [*(buffers if keep_row else []), *planes]
    return [*buffers, *stats]
