"""Interleaved timing: what every part of `make bench` measures with.

A case is timed right after its base, in every round, so that both meet the same noise; kept is the
ratio of the two times, as its median over the rounds with the quartiles around it. Absolute times
are not kept: the machines are shared. On one thread the clock is the thread's own processor time,
which stands still while somebody else has the core; on more it is the time of the wall.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One line of the table: `run` beside `base`.

    Args:
        label: What is measured; unique within its part.
        run: The call.
        base: The call that it is divided by.
        unit: What `base` is, for the reader.
        most: The largest ratio of the floors of the project, or None where there is none.
    """

    label: str
    run: Run
    base: Run
    unit: str
    most: float | None = None


def measure(cases: Iterable[Case], rounds: int, threads: int) -> dict[str, dict[str, object]]:
    """Return time(run) / time(base) of every case: median and quartiles over the rounds."""
    cases = list(cases)
    clock = time.thread_time if threads == 1 else time.perf_counter
    for case in cases:
        case.base()
        case.run()
    found: dict[str, list[float]] = {case.label: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            times = []
            for call in (case.base, case.run):
                start = clock()
                call()
                times.append(clock() - start)
            found[case.label].append(times[1] / times[0])
    table: dict[str, dict[str, object]] = {}
    for case in cases:
        low, median, high = statistics.quantiles(found[case.label], n=4)
        table[case.label] = {
            "median": round(median, 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "unit": case.unit,
            "most": case.most,
        }
    return table


def over_runs(tables: list[dict[str, dict[str, object]]]) -> dict[str, dict[str, object]]:
    """Return the tables of several runs as one: medians of the medians, and the widest bands."""
    merged: dict[str, dict[str, object]] = {}
    for label, first in tables[0].items():
        rows: list[Any] = [table[label] for table in tables]
        medians = [row["median"] for row in rows]
        merged[label] = first | {
            "median": statistics.median(medians),
            "low": min(row["low"] for row in rows),
            "high": max(row["high"] for row in rows),
            "medians": medians,
        }
    return merged


def lines(table: dict[str, dict[str, object]]) -> list[str]:
    """Return the table as text: ratio, band, and the floor with whether it is met."""
    out = []
    for label, row in table.items():
        text = f"{label:<46}{row['median']:8.2f}  {row['low']:.2f} .. {row['high']:.2f}"
        if row["most"] is not None:
            met = row["median"] <= row["most"]  # type: ignore[operator]
            text += f"   at most {row['most']:.2f}: {'met' if met else 'NOT MET'}"
        out.append(f"{text}   of {row['unit']}")
    return out


def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def machine_slug() -> str:
    """Return the processor as a part of a file name, with what its kernels were held to, if so."""
    variant = os.environ.get("HYBRIDQ_CPU_VARIANT", "")
    return slug(f"{variant} {cpu_name()}")


def slug(text: str) -> str:
    """Return `text` as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
