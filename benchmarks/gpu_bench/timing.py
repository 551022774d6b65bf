"""Time calls on a device: warmed up, over rotating buffers, interleaved with their baseline.

A GPU runs what the host has queued. While the host queues a batch, the GPU spins; only then do the
timed calls start, back to back, so that an event pair around a call measures the device and not
the Python above it. Whether the host was done before the spinning ended is checked, and a batch
where it was not is repeated with a longer spin; a sample that stays so is marked `host_limited`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Budget", "GpuTimer", "HostTimer", "Sample", "Timer", "rotations"]

Call = Callable[[], Any]

#: Calls queued behind one spin: a stream takes about a thousand launches before the host waits.
_BATCH = 48
#: What the buffers of a case's rotation come to, in sizes of the L2 cache.
_FLUSH = 4
_MOST_ROTATIONS = 8


def rotations(nbytes: int, l2_nbytes: int) -> int:
    """Return over how many sets of buffers of `nbytes` a case rotates, so that the L2 is cold."""
    wanted = math.ceil(_FLUSH * l2_nbytes / max(1, nbytes))
    return max(1, min(_MOST_ROTATIONS, wanted))


@dataclass(frozen=True)
class Sample:
    """Microseconds per call, one value for each round.

    Args:
        rounds: in the order of the rounds.
        host_limited: the host did not stay ahead of the device.
    """

    rounds: tuple[float, ...]
    host_limited: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    def ratio(self, other: Sample) -> float:
        """Return the median of `other / self`, round by round: how much faster this one is."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(theirs / mine for mine, theirs in pairs)


class Timer(Protocol):
    """Times several cases against each other."""

    def measure(self, cases: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Sample]:
        """Return a sample for each case; a round runs every rotation of every case once."""
        ...


class _Kept:
    """Keeps a case's last results, so that its next ones are written to other memory."""

    def __init__(self, cases: Mapping[str, Sequence[Call]]) -> None:
        self._results: dict[str, list[Any]] = {name: [None] * len(c) for name, c in cases.items()}

    def run(self, name: str, calls: Sequence[Call]) -> None:
        kept = self._results[name]
        for i, call in enumerate(calls):
            kept[i] = call()


class HostTimer:
    """Wall-clock time of calls that are done when they return: dry runs on a CPU.

    Args:
        clock: seconds; another one in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def measure(self, cases: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Sample]:
        kept = _Kept(cases)
        found: dict[str, list[float]] = {name: [] for name in cases}
        for round_index in range(rounds + 1):
            for name, calls in cases.items():
                start = self._clock()
                kept.run(name, calls)
                passed = self._clock() - start
                if round_index:  # the first is the warm-up
                    found[name].append(1e6 * passed / len(calls))
        return {name: Sample(tuple(values)) for name, values in found.items()}


class GpuTimer:
    """Device time by CUDA events, queued behind a spinning kernel.

    Args:
        warm_up: rounds before the first that counts.
        tries: how often a batch is queued before it is kept although the host was late.
    """

    def __init__(self, warm_up: int = 3, tries: int = 3) -> None:
        self._warm_up = warm_up
        self._tries = tries
        self._cycles_per_second = self._spin_rate()

    @staticmethod
    def _spin_rate() -> float:
        """Return how many cycles of `torch.cuda._sleep` a second has."""
        cycles = 20_000_000
        torch.cuda._sleep(cycles)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (begin.elapsed_time(end) / 1e3)

    def measure(self, cases: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Sample]:
        kept = _Kept(cases)
        for _ in range(self._warm_up):
            start = time.perf_counter()
            for name, calls in cases.items():
                kept.run(name, calls)
            host_s = time.perf_counter() - start  # of the last: the caches are warm
            torch.cuda.synchronize()
        calls_per_round = sum(len(calls) for calls in cases.values())
        rounds_per_batch = max(1, _BATCH // calls_per_round)
        found: dict[str, list[float]] = {name: [] for name in cases}
        is_late = False
        done = 0
        while done < rounds:
            now = min(rounds_per_batch, rounds - done)
            values, late = self._batch(cases, kept, now, host_s * now)
            is_late |= late
            for name, times in values.items():
                found[name] += times
            done += now
        return {name: Sample(tuple(values), is_late) for name, values in found.items()}

    def _batch(
        self, cases: Mapping[str, Sequence[Call]], kept: _Kept, rounds: int, host_s: float
    ) -> tuple[dict[str, list[float]], bool]:
        spin_s = 2 * host_s + 2e-4
        for attempt in range(self._tries):
            torch.cuda._sleep(int(spin_s * self._cycles_per_second))
            spun = torch.cuda.Event()
            spun.record()
            marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in cases}
            for _ in range(rounds):
                for name, calls in cases.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    kept.run(name, calls)
                    end.record()
                    marks[name].append((begin, end))
            is_late = spun.query()
            torch.cuda.synchronize()
            if not is_late or attempt + 1 == self._tries:
                break
            spin_s *= 3
        return {
            name: [1e3 * begin.elapsed_time(end) / len(cases[name]) for begin, end in pairs]
            for name, pairs in marks.items()
        }, is_late


class Budget:
    """Seconds that may be spent; parts of it are budgets too.

    Args:
        seconds: None for no limit.
        clock: another one in tests.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._clock())

    @property
    def is_over(self) -> bool:
        return self.left <= 0.0

    def part(self, share: float) -> Budget:
        """Return a budget of `share` of what is left."""
        left = self.left
        return Budget(None if math.isinf(left) else share * left, self._clock)
