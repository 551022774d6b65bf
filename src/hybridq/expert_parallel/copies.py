"""Copies of experts that are asked for often: their weights on other ranks, for one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._torch_ranks import functional_all_to_all, wait_tensor
from ..kernels.operators import StatedFunction

__all__ = ["CopyPlaces", "Dealt"]


class Dealt(NamedTuple):
    """Rows by the place that they go to.

    Attributes:
        order: int64 `[rows]`, the row that stands at each place of the new order.
        inverse: int64 `[rows]`, where each row stands in it.
        offsets: int32 `[places]`, where each place's rows end.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class CopyPlaces:
    """Which experts each rank multiplies with: its own, and behind them copies of others'.

    Attributes:
        group: name of the process group.
        rank: of this process in it.
        sizes: own experts of each rank.
        copied: of each rank the experts that it has copies of, by number.
    """

    group: str
    rank: int
    sizes: tuple[int, ...]
    copied: tuple[tuple[int, ...], ...]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Experts of each rank, copies included."""
        pairs = zip(self.sizes, self.copied, strict=True)
        return tuple(size + len(copies) for size, copies in pairs)

    def _first(self, rank: int) -> int:
        return sum(self.sizes[:rank])

    def _of_rank(self, owner: int, other: int) -> tuple[int, ...]:
        """Return the experts of one rank that another one has copies of."""
        first = self._first(owner)
        last = first + self.sizes[owner]
        return tuple([one for one in self.copied[other] if first <= one < last])

    def table(self) -> tuple[list[list[int]], list[int]]:
        """Return the places of each expert, its own rank's first; and how many it has."""
        found: list[list[int]] = [[] for _ in range(sum(self.sizes))]
        begin = 0
        for rank, (size, copies) in enumerate(zip(self.sizes, self.copied, strict=True)):
            for number in range(size):
                found[self._first(rank) + number].insert(0, begin + number)
            for number, expert in enumerate(copies):
                found[expert].append(begin + size + number)
            begin += size + len(copies)
        most = max(len(one) for one in found)
        return [one + one[:1] * (most - len(one)) for one in found], [len(one) for one in found]

    def dealt(self, offsets: torch.Tensor, rows: int) -> Dealt:
        """Return the rows of one rank by place: those of an expert go to its copies in turn.

        Args:
            offsets: int32 `[experts]`, where each expert's rows end.
            rows: of this rank, those of no expert behind.
        """
        places, counts = self.table()
        device, total = offsets.device, sum(self.by_rank)
        integers: Any = {"dtype": torch.int64, "device": device}
        # Behind the experts, what is of none.
        table = torch.tensor([*places, [total] * len(places[0])], **integers)
        shares = torch.tensor([*counts, 1], **integers)
        ends = offsets.long()
        starts = torch.cat([ends.new_zeros(1), ends])
        row = torch.arange(rows, **integers)
        expert = torch.searchsorted(ends, row, right=True)
        # Ranks begin with copies of their own, so that few rows of each are many of every copy.
        turn = (row - starts[expert] + self.rank) % shares[expert]
        place = table[expert, turn]
        order = place.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, row)
        sizes = torch.zeros(total + 1, **integers).scatter_add_(0, place, torch.ones_like(place))
        return Dealt(order, inverse, sizes[:total].cumsum(0).int())

    def with_copies(self, own: torch.Tensor) -> torch.Tensor:
        """Return this rank's experts and the copies behind; gradients of copies go to the experts.

        All ranks must call it.

        Args:
            own: `[own experts, ...]` of a parameter.
        """
        made: torch.Tensor = _WithCopies.apply(own, self)
        return made

    def rows_with_copies(self, whole: torch.Tensor) -> torch.Tensor:
        """Return of what every rank has whole the rows of this rank's experts, and of the copies.

        Args:
            whole: `[experts, ...]`.
        """
        first = self._first(self.rank)
        numbers = [*range(first, first + self.sizes[self.rank]), *self.copied[self.rank]]
        index = torch.tensor(numbers, dtype=torch.int64, device=whole.device)
        return whole.index_select(0, index)

    def sent(self) -> tuple[list[int], list[int], list[int]]:
        """Return the own experts that others have copies of; how many each has, and has of whom."""
        world = range(len(self.sizes))
        to = [self._of_rank(self.rank, other) for other in world]
        number = [one - self._first(self.rank) for part in to for one in part]
        got = [len(self._of_rank(other, self.rank)) for other in world]
        return number, [len(part) for part in to], got


def _moved(x: torch.Tensor, places: CopyPlaces, is_back: bool) -> torch.Tensor:
    made: torch.Tensor = _Moved.apply(x, places, is_back)
    return made


class _Moved(StatedFunction):
    """Experts from their own ranks to those of their copies, or back."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: CopyPlaces, is_back: bool) -> torch.Tensor:
        ctx.places, ctx.is_back = places, is_back
        _, sent, got = places.sent()
        splits = (sent, got) if is_back else (got, sent)
        arrived = functional_all_to_all(x.contiguous(), *splits, places.group)
        return wait_tensor(arrived).view(sum(splits[0]), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _moved(grad, ctx.places, not ctx.is_back), None, None


class _WithCopies(StatedFunction):
    """Own experts and copies. Gradients are summed in FP32, and rounded once."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: CopyPlaces) -> torch.Tensor:
        ctx.places = places
        number, *_ = places.sent()
        index = torch.tensor(number, dtype=torch.int64, device=own.device)
        return torch.cat([own, _moved(own.index_select(0, index), places, False)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        places: CopyPlaces = ctx.places
        number, *_ = places.sent()
        count = places.sizes[places.rank]
        back = _moved(grad[count:], places, True)
        own = grad[:count]
        if not number:
            return own, None
        hot = sorted(set(number))
        integers: Any = {"dtype": torch.int64, "device": grad.device}
        index = torch.tensor(hot, **integers)
        slots = torch.tensor([hot.index(one) for one in number], **integers)
        exact = torch.promote_types(grad.dtype, torch.float32)
        summed = own.index_select(0, index).to(exact).index_add(0, slots, back.to(exact))
        return own.index_copy(0, index, summed.to(grad.dtype)), None
