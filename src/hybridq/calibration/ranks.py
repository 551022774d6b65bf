"""Ranks that calibrate together: they wait for no one who failed, and end with one result.

Every collective here is joined by every rank of the group, whatever it has seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..shards import named_ranks

__all__ = ["Ranks", "ranks_of"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a calibration, from the view of one of them.

    Args:
        group: their process group; None: the default one, or none at all where `count` is 1.
        numbers: the global ranks of the group, in its order.
        me: the place of this rank among them.
    """

    group: Any = None
    numbers: tuple[int, ...] = (0,)
    me: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    @property
    def writes(self) -> bool:
        """Whether this rank writes files: global rank 0, or the lowest of the group."""
        return self.numbers[self.me] == min(self.numbers)

    @property
    def _device(self) -> torch.device:
        """Where tensors must be that travel."""
        is_nccl = "nccl" in str(dist.get_backend(self.group))
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def _joined(self, collective: Callable[[], None]) -> None:
        try:
            collective()
        except RuntimeError as error:  # what torch.distributed raises of ranks that are gone
            raise RuntimeError(
                f"calibrate: all {self.count} ranks must come to the end, and one is gone or did "
                "not answer in time; nothing was written"
            ) from error

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do a part of the work in the block: where it fails on one rank, all ranks raise.

        Raises:
            RuntimeError: another rank failed, and said why there.
        """
        is_done = False
        try:
            yield
            is_done = True
        finally:  # the others wait for this
            failed = self._failed(is_done)
        if failed:
            ranks = _named([self.numbers[one] for one in failed])
            raise RuntimeError(
                f"calibrate: every rank must come to the end, got an error on {ranks}, which says "
                "what it was; nothing was written"
            )

    def _failed(self, is_done: bool) -> list[int]:
        """Return the places of the ranks that failed, as all ranks see them."""
        if self.count == 1:
            return []
        said = self.gathered(torch.tensor([not is_done], dtype=torch.uint8, device="cpu"))
        return [place for place, one in enumerate(said) if bool(one)]

    def gathered(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return what all ranks give, in their order.

        Args:
            value: of the same shape and dtype everywhere.
        """
        mine = value.to(self._device)
        found = [torch.empty_like(mine) for _ in self.numbers]
        self._joined(lambda: dist.all_gather(found, mine, group=self.group))
        return [one.cpu() for one in found]

    def texts(self, mine: str) -> list[str]:
        """Return the texts of all ranks, in their order; one collective where they are equal.

        Args:
            mine: of this rank.
        """
        if self.count == 1:
            return [mine]
        hashed = bytearray(hashlib.sha256(mine.encode()).digest())
        digest = torch.frombuffer(hashed, dtype=torch.uint8)
        digests = self.gathered(digest)
        if all(torch.equal(one, digests[0]) for one in digests):
            return [mine] * self.count
        found: list[Any] = [None] * self.count
        self._joined(lambda: dist.all_gather_object(found, mine, group=self.group))
        return found

    def same_lines(self, mine: Sequence[str], what: str) -> None:
        """Raise the same error on every rank unless all have the same lines.

        Args:
            mine: of this rank.
            what: they are.

        Raises:
            ValueError: they differ.
        """
        texts = self.texts("\n".join(mine))
        by_text: dict[str, list[int]] = {}
        for number, text in zip(self.numbers, texts, strict=True):
            by_text.setdefault(text, []).append(number)
        if len(by_text) == 1:
            return
        first, other = list(by_text)[:2]
        lines = set(first.splitlines()) ^ set(other.splitlines())
        only = sorted(lines)[0] if lines else "in another order"
        has = by_text[first if only in first.splitlines() else other]
        raise ValueError(
            f"calibrate: every rank must have the same {what}, got {only!r} on "
            f"{_named(has)} alone, among {len(lines)} differences"
        )

    def reduced(self, value: torch.Tensor, how: str) -> torch.Tensor:
        """Return the maximum or the sum over all ranks.

        Args:
            value: of the same shape and dtype everywhere; on the CPU.
            how: `"max"` or `"sum"`.
        """
        if self.count == 1 or not value.numel():
            return value
        made = value.to(self._device, copy=True)
        op = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
        self._joined(lambda: dist.all_reduce(made, op=op, group=self.group))
        return made.cpu()


def _named(numbers: Sequence[int]) -> str:
    return named_ranks(list(numbers))


def ranks_of(group: Any) -> Ranks:
    """Return the ranks that calibrate together.

    Args:
        group: a process group; None: all ranks, where torch.distributed is initialized; `"alone"`:
            this rank by itself.

    Raises:
        TypeError: it is something else.
        ValueError: this rank is none of the group.
    """
    if isinstance(group, str) and group == "alone":
        return Ranks()
    is_there = dist.is_available() and dist.is_initialized()
    if group is None and not is_there:
        return Ranks()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"calibrate: group must be a ProcessGroup, None or 'alone', got {type(group).__name__}"
        )
    numbers = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in numbers:
        raise ValueError(
            f"calibrate: group must hold this rank, {dist.get_rank()}, got ranks {_named(numbers)}"
        )
    return Ranks(group, numbers, numbers.index(dist.get_rank()))
