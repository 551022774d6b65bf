"""TokenGather: planes of the tokens of all ranks, of the planes that each made of its own.

A rank encodes its rows once, with the amaxes of all ranks (`Cut`), and bytes travel: the codes and
scales of the planes that are wanted, in one all-gather. What arrives are the planes of the whole
matrix, byte for byte.

Source: parts of the sequence: arXiv:2205.05198; planes instead of values: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._torch_ranks import functional_all_gather, wait_tensor
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneText
from .cut import Cut
from .row_sums import SumInFlight, send_sum
from .token_axis import token_axis

__all__ = ["Arriving", "OwnPlane", "TokenGather"]


class OwnPlane(NamedTuple):
    """A plane of one rank's rows.

    Args:
        buffers: of it.
        plane: which it is.
        direction: of it.
    """

    buffers: Sequence[torch.Tensor]
    plane: PlaneText
    direction: Direction


class TokenGather(NamedTuple):
    """How the rows of a matrix, the tokens, are dealt out to the ranks of a group: as many to each.

    Args:
        group: the process group's name.
        rank: whose part it is, by its number in the group.
        world: number of ranks.
        runs: of how many pieces of the whole, equally long, a rank's rows are (`Cut.runs`): of
            `[batch, tokens, features]` whose tokens are dealt out, the batch.
        sums: spec string of the terms of sums over ranks (`send_sum`); empty: values.
    """

    group: str
    rank: int
    world: int
    runs: int = 1
    sums: str = ""

    def unit(self, row: PlaneText, col: PlaneText | None) -> int:
        """Return what each run must have a multiple of, for blocks to be whole.

        Args:
            row, col: planes of the slot, None: not made.
        """
        units = [] if row.is_plain else [row.units[0]]
        if col is not None and not col.is_plain:
            units.append(col.units[1])
        return math.lcm(1, *units)

    def cut(self, rows: int, row: PlaneText, col: PlaneText) -> Cut | None:
        """Return how a rank's rows lie in the whole; None: encoding takes nothing of that.

        Args:
            rows: of each rank.
            row, col: planes of the slot.
        """
        cut = Cut(self.group, self.rank, (rows,) * self.world, 0, 1, self.runs)
        return cut if cut.is_seen(row, col) else None

    def start(self, planes: Sequence[OwnPlane], are_of_one: bool = False) -> Arriving:
        """Send planes of this rank's rows; return what waits for those of all.

        All ranks of the group must call it, for planes of the same specs.

        Args:
            planes: one or both of one matrix.
            are_of_one: both are made of the same values by the same scales; then one of them is
                sent where the other follows from it.
        """
        planes = list(planes)
        is_one = are_of_one and len(planes) == 2 and _follows(*planes)
        sent = planes[:1] if is_one else planes
        payload = [
            buffer.contiguous().flatten().view(torch.uint8)
            for own in sent
            for buffer in own.buffers
            if token_axis(buffer, own.plane, own.direction) is not None
        ]
        flat = payload[0] if len(payload) == 1 else torch.cat(payload)
        return Arriving(functional_all_gather(flat, self.world, self.group), planes, is_one, self)

    def scatter(self, x: torch.Tensor) -> SumInFlight:
        """Send this rank's term of a sum, of which each rank gets its rows.

        Args:
            x: `[rows, cols]` of the whole.
        """
        if self.runs > 1:
            pieces = x.view(self.runs, self.world, -1, x.shape[1])
            x = pieces.transpose(0, 1).reshape(x.shape)
        return send_sum(x, self.world, self.group, self.sums)


class Arriving(NamedTuple):
    """Planes on their way.

    Args:
        payload: uint8, to be waited for.
        planes: of this rank's own rows.
        is_one: of two planes the first is sent, and the second follows from it.
        tokens: how rows are dealt out.
    """

    payload: torch.Tensor
    planes: Sequence[OwnPlane]
    is_one: bool
    tokens: TokenGather

    def wait(self) -> list[list[torch.Tensor]]:
        """Return the buffers of each plane of the whole, when they have come."""
        world = self.tokens.world
        arrived = wait_tensor(self.payload).view(world, -1)
        found, at = [], 0
        for own in self.planes[:1] if self.is_one else self.planes:
            buffers = []
            for buffer in own.buffers:
                axis = token_axis(buffer, own.plane, own.direction)
                if axis is None:
                    buffers.append(buffer)
                    continue
                nbytes = buffer.numel() * buffer.element_size()
                piece = arrived.narrow(1, at, nbytes)
                if buffer.dtype != torch.uint8:
                    piece = piece.contiguous().view(buffer.dtype)
                buffers.append(self._joined(piece, buffer, axis))
                at += nbytes
            found.append(buffers)
        if self.is_one:
            found.append([one.t().contiguous() if one.dim() == 2 else one for one in found[0]])
        return found

    def _joined(self, pieces: torch.Tensor, own: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the buffer of the whole.

        Args:
            pieces: `[ranks, numel]`.
            own: this rank's.
            axis: along which rows stand.
        """
        world, runs = self.tokens.world, self.tokens.runs
        length = own.shape[axis] // runs
        if axis == 1:
            split = pieces.reshape(world, own.shape[0], runs, length)
            whole = split.permute(1, 2, 0, 3).contiguous()
            return whole.view(own.shape[0], world * own.shape[1])
        split = pieces.reshape(world, runs, length, *own.shape[1:])
        whole = split.transpose(0, 1) if runs > 1 else split
        return whole.contiguous().view(world * own.shape[0], *own.shape[1:])


def _follows(first: OwnPlane, second: OwnPlane) -> bool:
    """Return whether the second plane of a matrix is the first one, transposed."""
    if first.direction != ROWWISE or second.direction != COLUMNWISE:
        return False
    one = first.plane
    return one.spec == second.plane.spec and one.is_derivable and one.codes_per_byte == 1
