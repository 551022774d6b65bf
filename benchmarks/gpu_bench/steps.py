"""Steps of a run on a chip: each a process group of its own, whose end is on disk before the next.

A run may be ended at any moment, by a limit or by SIGKILL. So every step writes its output into the
log itself, and how it ended is in `run.json` before the next one begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Run", "Step", "write_json"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Step:
    """One thing that a run does.

    Args:
        name: unique in its plan.
        command: what is executed, from the root of the tree.
        seconds: it is ended after so many.
        least: it is not begun where less time is left.
        reason: why it cannot run here; it is left out then.
        is_needed: where it fails, the run ends.
        environment: variables beside those of the run.
    """

    name: str
    command: Sequence[str]
    seconds: float
    least: float = 5.0
    reason: str | None = None
    is_needed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Args:
        name: of the step.
        what: `"ok"`, `"failed"`, `"ended"` (it took too long), or `"left out"`.
        detail: the exit status, the limit or the reason.
        seconds: it took.
    """

    name: str
    what: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}: {self.what}{detail}, {self.seconds:.0f} s"


def write_json(file: Path, value: Any) -> None:
    """Write a file as a whole or not at all, whatever ends the process."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, file)


def _end_with_parent() -> None:
    # A step left behind would hold the GPU.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Run:
    """Runs steps within a time, and keeps what is known after each.

    Args:
        folder: gets `run.json` and `log.txt`.
        root: where commands are executed.
        seconds: for all steps together.
        about: what `run.json` says beside the outcomes: plan, machine, versions.
        environment: of every step.
        after: called after each step, with its outcome; what it gathers is on disk then, too.
        clock: seconds; another one in tests.
    """

    def __init__(
        self,
        folder: Path,
        root: Path,
        seconds: float,
        about: Mapping[str, Any],
        environment: Mapping[str, str],
        after: Callable[[Outcome], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.root, self.about = folder, root, dict(about)
        self.environment, self.after = dict(environment), after
        self.outcomes: list[Outcome] = []
        self._clock = clock
        self._start = clock()
        self._end = self._start + seconds
        self.write("begun")

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def left(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._clock())

    def write(self, state: str) -> None:
        """Write `run.json`."""
        made = {
            **self.about,
            "state": state,
            "seconds": round(self._clock() - self._start, 1),
            "steps": [asdict(outcome) for outcome in self.outcomes],
        }
        write_json(self.folder / "run.json", made)

    def step(self, step: Step) -> Outcome:
        """Run one step; return how it ended."""
        start = self._clock()
        if step.reason is not None:
            what, detail = "left out", step.reason
        elif self.left < step.least:
            what, detail = "left out", "no time left"
        else:
            self.write(f"in {step.name}")
            what, detail = self._execute(step, min(step.seconds, self.left))
        outcome = Outcome(step.name, what, detail, round(self._clock() - start, 1))
        self.outcomes.append(outcome)
        self.write(f"after {step.name}")
        self.after(outcome)
        return outcome

    def steps(self, steps: Sequence[Step]) -> bool:
        """Run steps in turn; return whether none failed and none was ended."""
        for step in steps:
            outcome = self.step(step)
            print(f"gpu: {outcome}", flush=True)
            if outcome.what in ("failed", "ended"):
                print(self.tail(), flush=True)
            if step.is_needed and outcome.what != "ok":
                break
        self.write("done")
        return all(outcome.what in ("ok", "left out") for outcome in self.outcomes)

    def tail(self, lines: int = 25) -> str:
        """Return the log's last lines."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _execute(self, step: Step, seconds: float) -> tuple[str, str]:
        with self.log.open("ab") as log:
            log.write(f"\n==== {step.name}: {' '.join(step.command)}\n".encode())
            log.flush()
            try:
                process = subprocess.Popen(
                    list(step.command),
                    cwd=self.root,
                    env={**self.environment, **step.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            except OSError as error:
                return "failed", str(error)
            try:
                status = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                return "ended", f"after {seconds:.0f} s"
            finally:
                # Also what a step that is done left running: the next one gets the whole GPU.
                _kill(process)
        return ("ok", "") if status == 0 else ("failed", f"exit status {status}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
