"""The child: round after round with seeds of their own, progress each minute, a watchdog."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import io
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from . import pool
from .door import PublicDoor
from .policy import Wrong
from .quantizers import register_own

__all__ = ["EXAMPLES", "fuzz_round", "run"]

#: Few in a round: from the eleventh on hypothesis mostly varies the example before.
EXAMPLES = 10


def fuzz_round(number: int, steps: int, *, examples: int = EXAMPLES) -> None:
    """Run the examples of the round `number`; raises the shrunk failure of the first that fails.

    Args:
        number: the round's seed.
        steps: of an example.
        examples: of the round.
    """
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(PublicDoor), settings=options)


class _Log:
    """Where the fuzzer is: the steps of the example on disk, a watchdog, lines of progress."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.timeout = arguments.timeout
        self.steps = (arguments.folder / "steps.txt").open("w")
        self.round = arguments.folder / "round.txt"
        self.fault = arguments.fault
        self.examples = self.rounds = self.operations = 0
        self.start = self.told = time.monotonic()

    def step(self, text: str) -> None:
        """Note a step that begins; an empty text: an example begins."""
        if text:
            self.operations += 1
            self.steps.write(text + "\n")
            self.steps.flush()
            if self.fault is not None and self.examples > 2:
                _break(self.fault, text)
            return
        self.examples += 1
        # Kills the process with a traceback, also where it hangs in C++.
        faulthandler.dump_traceback_later(self.timeout, exit=True)
        self.steps.seek(0)
        self.steps.truncate()
        if time.monotonic() - self.told >= 60:
            self.tell()

    def tell(self) -> None:
        """Print the counts."""
        self.told = time.monotonic()
        counts = " ".join(f"{name}={n}" for name, n in sorted(pool.COUNTS.items()))
        print(
            f"fuzz: {self.told - self.start:.0f} s, {self.rounds} rounds, {self.examples} "
            f"examples, {self.operations} operations: {counts}",
            flush=True,
        )


def _break(fault: str, text: str) -> None:
    """Do what a bug would do."""
    if fault == "crash":
        ctypes.string_at(0)
    elif fault == "hang":
        time.sleep(1e6)
    elif text.startswith("shape("):
        raise Wrong("--break: a fault was asked for")


def run(arguments: argparse.Namespace) -> int:
    """Fuzz until the time or the rounds are over; returns the exit status."""
    faulthandler.enable()
    register_own()
    log = _Log(arguments)
    pool.HOOKS.append(log.step)
    number = arguments.seed
    print(f"fuzz: rounds from {number}, reports in {arguments.folder}", flush=True)
    while time.monotonic() - log.start < 60 * arguments.minutes:
        if arguments.rounds and log.rounds >= arguments.rounds:
            break
        log.round.write_text(f"{number}\n")
        try:
            fuzz_round(number, arguments.steps)
        except Exception:
            log.tell()
            report = io.StringIO()
            traceback.print_exc(file=report)
            text = report.getvalue()
            (arguments.folder / f"example-{number}.txt").write_text(text)
            print(text, file=sys.stderr, flush=True)
            return 1
        log.rounds += 1
        number += 1
    faulthandler.cancel_dump_traceback_later()
    log.tell()
    print("fuzz: nothing found", flush=True)
    return 0
