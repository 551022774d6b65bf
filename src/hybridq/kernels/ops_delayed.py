"""Encode that also finds the amax of what it reads, and the record of it: delayed scaling.

The scale of a plane is fixed before its tensor is seen, so encode needs no amax; it finds one for
the steps to come. `hybridq::encode_with_amax` returns it, beside the buffers of `hybridq::encode`,
and `hybridq::record_amax` raises a state to it: the one operator of the two that writes, and says
so. Eager calls that nothing watches do both at once, past the dispatcher.

Source: docs/numerics.md, "Per-tensor FP8, delayed scaling".
"""

from __future__ import annotations

import torch

from ..formats import PlaneSpec
from .checks import check_encode, check_matrix, check_place, spec_of
from .derivatives import refuse, refuse_gradients
from .encode import run_encode, statistic
from .ops import LIBRARY, _encode_fake
from .watch import nothing_watches

__all__ = ["encode_recording", "record_amax"]

_ENCODE = (
    "encode_with_amax(Tensor x, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, "
    "Tensor? seed=None, *, str col_source='original', bool keep_row=True, int row_stream=0, "
    "int col_stream=1) -> Tensor[]"
)
_RECORD = "record_amax(Tensor(a!) amaxes, int at, Tensor found) -> ()"

for _schema in (_ENCODE, _RECORD):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _encode_with_amax(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    check_matrix(x, "encode_with_amax")
    specs = spec_of(row, x.dtype), spec_of(col, x.dtype)
    check_encode(x, specs, (row_stat, col_stat), seed, col_source, "encode_with_amax")
    check_place("encode_with_amax", 0, 0, row_stream, col_stream)
    row_stat = _checked(x, specs[0], row_stat)
    col_stat = _checked(x.t(), specs[1], col_stat)
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    place = (0, 0, row_stream, col_stream)
    is_decoded = col_source == "rowwise_dequantized"
    made = run_encode(x, row, col, row_stat, col_stat, seed, is_decoded, keep_row, place, found)
    return [*made, found]


def _checked(
    own: torch.Tensor, spec: PlaneSpec | None, stat: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a given statistic as kernels may read it; None if none is given, or needed."""
    if stat is None:
        return None
    if stat.device != own.device:
        raise ValueError(
            f"encode_with_amax: x and its statistics must be on one device, got {own.device} and "
            f"{stat.device}"
        )
    return statistic(own, spec, stat, "encode_with_amax")


def _encode_with_amax_fake(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    **_: object,
) -> list[torch.Tensor]:
    made = _encode_fake(x, row, col, seed=seed, col_source=col_source, keep_row=keep_row)
    return [*made, x.new_empty(1, dtype=torch.float32)]


def record_amax(amaxes: torch.Tensor, at: int, found: torch.Tensor) -> None:
    """Raise `amaxes[at]` in place to `found`, NaN kept: what `hybridq::record_amax` runs.

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


def encode_recording(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    is_decoded: bool,
    keep_row: bool,
    streams: tuple[int, int],
    direct: bool,
    amaxes: torch.Tensor,
    at: tuple[int, ...],
) -> list[torch.Tensor]:
    """Return the planes' buffers, and raise `amaxes[i]` to max|x| for each i of `at`.

    Args:
        x, row, col, row_stat, col_stat, seed, keep_row: as `hybridq::encode` takes them.
        is_decoded: `col_source` is `"rowwise_dequantized"`.
        streams: row_stream and col_stream.
        direct: the caller has checked x and the seed, and that nothing watches them.
        amaxes: FP32 `[n]`, written.
        at: which of them; at least one.
    """
    if direct or nothing_watches(x, row_stat, col_stat, seed, amaxes):
        if not direct:
            check_matrix(x, "encode")
        place = (0, 0, *streams)
        found = amaxes.narrow(0, at[0], 1) if len(at) == 1 else amaxes.new_zeros(1)
        made = run_encode(x, row, col, row_stat, col_stat, seed, is_decoded, keep_row, place, found)
        if len(at) > 1:
            for i in at:
                record_amax(amaxes, i, found)
        return made
    *buffers, found = torch.ops.hybridq.encode_with_amax(
        x,
        row,
        col,
        row_stat,
        col_stat,
        seed,
        col_source="rowwise_dequantized" if is_decoded else "original",
        keep_row=keep_row,
        row_stream=streams[0],
        col_stream=streams[1],
    )
    for i in at:
        torch.ops.hybridq.record_amax(amaxes, i, found)
    return buffers


for _name, _implementation, _fake in (
    ("encode_with_amax", _encode_with_amax, _encode_with_amax_fake),
    ("record_amax", record_amax, _record_amax_fake),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridq::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "hybridq::encode_with_amax", refuse("hybridq::encode_with_amax"), lib=LIBRARY
)
refuse_gradients("record_amax")
