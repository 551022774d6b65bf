"""Runs cases against their baselines within a budget, and keeps what came of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .case import Bench, Case
from .predict import Prediction, predict
from .timing import Budget, Sample, Timer, rotations

__all__ = ["Runner", "record"]

Call = Callable[[], Any]


def record(
    case: Case,
    sample: Sample,
    ratio: float | None,
    buffers: int,
    kernels: dict[str, float],
    prediction: Prediction,
) -> dict[str, Any]:
    """Return a measured case as a result holds it."""
    time_us = sample.median
    return {
        "section": case.section,
        "name": case.name,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "time_us": time_us,
        "low_us": sample.low,
        "high_us": sample.high,
        "rounds": len(sample.rounds),
        "buffers": buffers,
        "baseline": case.baseline,
        "ratio": ratio,
        "goal": case.goal,
        "floor_us": prediction.floor_us,
        "predicted_us": prediction.time_us,
        "formula": prediction.formula,
        "nbytes": case.nbytes,
        "tb_per_s": case.nbytes / time_us / 1e6 if case.nbytes else None,
        "tflops": case.flops / time_us / 1e6 if case.flops else None,
        "host_limited": sample.host_limited,
        "is_headline": case.is_headline,
        "kernels": kernels,
        "backend": case.told.get("backend", ""),
        "note": case.note,
    }


@dataclass
class Runner:
    """Measures cases.

    Args:
        bench: where.
        timer: how.
        rounds: per case.
        kernels: case name to the kernels that it launches, with their share of its time.
        say: where progress goes.
        changed: called when there is more to keep.
        wanted: names of cases match it from their beginning, others do not run.
        label: follows the name of every case: what was built otherwise, say.
    """

    bench: Bench
    timer: Timer
    rounds: int
    kernels: dict[str, dict[str, float]]
    say: Callable[[str], None]
    changed: Callable[[], None] = lambda: None
    wanted: str = ""
    label: str = ""
    cases: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    is_broken: bool = False
    _arena: torch.Tensor | None = None

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Cases that raised; one for which there was no time or no memory is none."""
        return [case for case in self.left_out if case["reason"].startswith("failed")]

    def _copies(self, nbytes: int, count: int) -> list[Call]:
        """Return copies that read and write `nbytes` in all, over `count` parts of one arena."""
        half = max(16, nbytes // 2 // 16 * 16)
        if self._arena is None or self._arena.numel() < 2 * half * count:
            self._arena = None
            self._arena = torch.empty(
                2 * half * count, dtype=torch.uint8, device=self.bench.device
            ).random_()
        parts = [self._arena[2 * half * i :][: 2 * half] for i in range(count)]

        def copy(part: torch.Tensor) -> Call:
            source, target = part[:half], part[half:]
            return lambda: (target.copy_(source), None)[1]

        return [copy(part) for part in parts]

    def _skip(self, case: Case, reason: str) -> None:
        self.left_out.append(
            {
                "section": case.section,
                "name": case.name + self.label,
                "shape": list(case.shape),
                "dtype": case.dtype,
                "reason": reason,
            }
        )
        if reason.startswith("failed"):
            self.changed()

    def run(self, cases: Sequence[Case], budget: Budget) -> None:
        """Measure cases of one section and shape, each beside its baseline."""
        by_name = {case.name: case for case in cases}
        for case in cases:
            if not re.match(self.wanted, case.name):
                continue
            if self.is_broken or budget.is_over:
                self._skip(case, "the GPU gave up" if self.is_broken else "no time left")
                continue
            try:
                self._run_one(case, by_name.get(case.baseline))
            except torch.OutOfMemoryError:
                self._skip(case, "not enough memory")
                self.free()
            # A failing case must not cost the others: the run ends with an error all the same.
            except Exception as error:
                # A peer that raises says nothing about this project.
                kind = "peer raised" if case.section == "peer" else "failed"
                self._skip(case, f"{kind}: {type(error).__name__}: {error}"[:400])
                self.say(f"{case.section} {case.name} {case.shape} failed: {error}")
                self.is_broken = not self._is_alive()

    def _is_alive(self) -> bool:
        """Whether the GPU still takes work: after an illegal access no call does."""
        if self.bench.device != "cuda":
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _run_one(self, case: Case, baseline: Case | None) -> None:
        count = rotations(case.footprint or case.nbytes or 1, self.bench.l2_nbytes)
        calls = {"case": [case.make(i) for i in range(count)]}
        if baseline is not None:
            calls["baseline"] = [baseline.make(i) for i in range(count)]
        elif case.baseline == "copy":
            calls["baseline"] = self._copies(case.nbytes, count)
        kernels = self.kernels.get(case.name, {}) if case.section == "cast" else {}
        samples = self.timer.measure(calls, self.rounds)
        ratio = samples["case"].ratio(samples["baseline"]) if "baseline" in samples else None
        self._keep(case, samples["case"], ratio, count, kernels)

    def _keep(
        self,
        case: Case,
        sample: Sample,
        ratio: float | None,
        buffers: int,
        kernels: dict[str, float],
    ) -> None:
        named = replace(case, name=case.name + self.label)
        self.cases.append(record(named, sample, ratio, buffers, kernels, predict(case)))
        self.changed()

    def add_host(self, samples: Iterable[tuple[str, Sample]], goals: dict[str, float]) -> None:
        """Add the host times of a layer, beside that of nn.Linear."""
        found = dict(samples)
        plain = found["nn.Linear"]
        for name, sample in found.items():
            is_plain = name == "nn.Linear"
            goal = None if is_plain else goals.get(name, goals["quantized"])
            case = Case(
                "host",
                name,
                self.bench.host,
                lambda i: lambda: None,
                "" if is_plain else "nn.Linear",
                goal=goal,
                note="goal: at most so many times the host time of nn.Linear",
                is_headline=True,
            )
            ratio = None if is_plain else sample.ratio(plain)
            self._keep(case, sample, ratio, 1, {})

    def free(self) -> None:
        """Free the buffers of the last cases."""
        self._arena = None
        if not self.is_broken:
            self.bench.forget()
