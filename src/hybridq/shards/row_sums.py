"""Sums over ranks of matrices whose rows are dealt out, each term quantized by its rank.

Source: the all-to-all instead of a ring, so that each value is quantized once: ZeRO++ (Wang et al.,
arXiv:2306.10209); formats whose scales are of one row, and the order of ranks: ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._torch_ranks import functional_all_to_all, functional_scatter, wait_tensor
from ..formats import PlaneSpec
from ..tensor.in_graph import runs_at_once

__all__ = ["SumInFlight", "send_sum"]


class SumInFlight(NamedTuple):
    """A sum over ranks on its way; each gets its rows.

    Attributes:
        payload: what arrives, complete once it was waited for.
        spec: spec string of the terms; empty: values travel, and the sum arrives.
        world: number of ranks.
        rows, cols: of this rank's part.
        dtype: of the result.
    """

    payload: torch.Tensor
    spec: str
    world: int
    rows: int
    cols: int
    dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        """Return this rank's rows of the sum: in FP32 in the order of ranks, rounded once."""
        arrived = wait_tensor(self.payload)
        if not self.spec:
            return arrived
        buffers, at = [], 0
        for shape, dtype in _buffers(self.spec, self.rows, self.cols):
            nbytes = dtype.itemsize
            for size in shape:
                nbytes = nbytes * size
            piece = arrived.view(self.world, -1).narrow(1, at, nbytes).contiguous()
            buffers.append(piece.view(dtype).view(self.world * shape[0], *shape[1:]))
            at += nbytes
        whole = (self.world * self.rows, self.cols)
        terms = torch.ops.hybridq.decode(buffers, self.spec, *whole, torch.float32)
        terms = terms.view(self.world, self.rows, self.cols)
        total = terms[0].clone()
        for number in range(1, self.world):
            total += terms[number]
        return total.to(self.dtype)


def send_sum(x: torch.Tensor, world: int, group: str, spec: str = "") -> SumInFlight:
    """Send this rank's term of a sum; nothing waits. All ranks of the group must call it.

    Args:
        x: `[rows, cols]` of the whole; rank i gets the i-th part of the rows, all equally many.
        world: number of ranks.
        group: the process group's name.
        spec: of the terms, a format whose scales are of one row each (`row_format`); empty: values
            travel.
    """
    rows, cols = x.shape[0] // world, x.shape[1]
    if not spec or not x.numel():
        payload = functional_scatter(x.contiguous(), world, group)
        return SumInFlight(payload, "", world, rows, cols, x.dtype)
    buffers = torch.ops.hybridq.encode(x, spec, "")
    flat = [one.contiguous().view(torch.uint8).view(world, -1) for one in buffers]
    message = (flat[0] if len(flat) == 1 else torch.cat(flat, 1)).flatten()
    sizes = [message.shape[0] // world] * world
    payload = functional_all_to_all(message, sizes, sizes, group)
    return SumInFlight(payload, spec, world, rows, cols, x.dtype)


def _buffers(spec: str, rows: int, cols: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the buffers of a rank's rows, rows first."""
    return [
        (tuple(rows if one < 0 else one for one in shape), dtype)
        for shape, dtype in _shapes(spec, int(cols))
    ]


@runs_at_once
def _shapes(spec: str, cols: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of the buffers of a matrix, -1 for its rows."""
    own = PlaneSpec.parse(spec).buffers(1, cols)  # each row has its own part of every buffer
    return tuple(((-1, *one.shape[1:]), one.dtype or torch.uint8) for one in own)
