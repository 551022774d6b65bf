"""The command behind `make mutants`.

The tests must pass in the unmutated copy; then each mutant is applied, built if it is C++, and
tested. It is caught if a test fails by an assertion; an error of any other kind (an import, the
compiler, an exception, a test that does not end) is no proof and fails the command, as a survivor
does. A line for each is printed as soon as it is known; with --results it stands in a file too, and
the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from . import ALL, Mutant
from .record import ROOT, occurrences
from .workspace import BuildError, Run, Workspace

_SLOWEST_S = 900.0  # of one run; a mutant that makes tests hang is no catch
_SLOWEST_FIRST_S = 3600.0  # of all tests in the copy as it is


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    outcome: str  # caught, survived, broken or skipped
    text: str
    time_s: float

    @property
    def is_caught(self) -> bool:
        return self.outcome == "caught"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="names or slugs, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the mutants and do nothing")
    parser.add_argument("--results", type=Path, help="file of verdicts; those it has are kept")
    options = parser.parse_args(arguments)
    chosen = choose(options.only)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:50} {mutant.rule.section}: {mutant.rule.text}")
        return 0
    stale = [m.name for m in ALL if occurrences(m) != 1]
    if stale:
        _say(f"mutants: out of date, the old text does not occur exactly once: {', '.join(stale)}")
        return 1
    start, kept = time.monotonic(), Kept(options.results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folder goes, as after Ctrl-C
    with tempfile.TemporaryDirectory(prefix="hybridq-mutants-") as folder:
        verdicts = check(Workspace(Path(folder)), chosen, kept)
    return summary(verdicts, time.monotonic() - start)


def choose(names: str) -> tuple[Mutant, ...]:
    """The mutants of the given names (`core.nibbles-swapped`) or slugs; all if there are none."""
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = wanted - {m.name for m in ALL} - {m.slug for m in ALL} - {m.layer for m in ALL}
    if unknown:
        raise SystemExit(f"mutants: must be names of mutants (--list), got {sorted(unknown)}")
    return tuple(m for m in ALL if not wanted or wanted & {m.name, m.slug, m.layer})


class Kept:
    """Verdicts on mutants that were caught, kept in a file of one JSON value per line.

    Args:
        file: where; None: nothing is kept. A verdict holds as long as the edited file, the edit and
            the tests' files are what they were.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.is_file() else []
        self._known = {line["key"]: line for line in map(json.loads, lines)}

    def known(self, mutant: Mutant) -> Verdict | None:
        """Return the verdict on a mutant, if it was caught before."""
        line = self._known.get(self._key(mutant))
        if line is None or line["outcome"] != "caught":
            return None
        return Verdict(mutant, line["outcome"], line["text"], line["time_s"])

    def add(self, verdict: Verdict) -> None:
        """Write a verdict, whatever it is."""
        if self._file is None:
            return
        mutant = verdict.mutant
        line = {
            "name": mutant.name,
            "outcome": verdict.outcome,
            "text": verdict.text,
            "time_s": round(verdict.time_s, 1),
            "key": self._key(mutant),
        }
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    @staticmethod
    def _key(mutant: Mutant) -> str:
        files = sorted({mutant.file, *(test.partition("::")[0] for test in mutant.tests)})
        parts = [repr(mutant), *((ROOT / file).read_text() for file in files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check(space: Workspace, mutants: tuple[Mutant, ...], kept: Kept) -> list[Verdict]:
    """Test the copy as it is, then every mutant that is not known to be caught."""
    verdicts = [found for mutant in mutants if (found := kept.known(mutant))]
    if verdicts:
        _say(f"caught before: {len(verdicts)}")
    mutants = tuple(mutant for mutant in mutants if kept.known(mutant) is None)
    if not mutants:
        return verdicts
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    run = space.test(tuple(tests), "", _SLOWEST_FIRST_S)
    if run.exit_code != 0 or run.passed == 0 or not run.is_of_the_copy:
        raise SystemExit(
            f"mutants: the unmutated copy must pass with its own package and core, got "
            f"{run.failed or 'no failure'} {run.error}, imported {run.imported}\n{run.output}"
        )
    _say(f"unmutated: {run.passed} tests pass")
    for number, mutant in enumerate(mutants, 1):
        verdict = _verdict(space, mutant)
        verdicts.append(verdict)
        kept.add(verdict)
        _say(
            f"[{number}/{len(mutants)}] {mutant.name}: {verdict.outcome} {verdict.text} "
            f"({verdict.time_s:.0f} s)"
        )
    # The build follows every edit, and every revert too: as at first, byte for byte.
    if space.build() != space.pristine:
        raise SystemExit("mutants: the last build must equal the first one, got another binary")
    return verdicts


def _verdict(space: Workspace, mutant: Mutant) -> Verdict:
    if not _machine_has(mutant.needs):
        return Verdict(mutant, "skipped", f"this machine has no {mutant.needs}", 0.0)
    start = time.monotonic()
    space.apply(mutant)
    try:
        outcome, text = _outcome(space, mutant)
    except BuildError as error:
        outcome, text = "broken", f"does not compile: {error}"
    finally:
        space.revert(mutant)
    return Verdict(mutant, outcome, text, time.monotonic() - start)


def _outcome(space: Workspace, mutant: Mutant) -> tuple[str, str]:
    # A Python mutant too builds: what the mutant before it left in the core must go.
    is_changed = space.build(mutant) != space.pristine
    if is_changed != mutant.is_compiled:
        return "broken", "the edit does not change the compiled core"
    return _judged(space.test(mutant.tests, mutant.keyword, _SLOWEST_S))


def _judged(run: Run) -> tuple[str, str]:
    if run.exit_code == 0:
        return "survived", f"{run.passed} tests pass"
    if run.failed and run.is_assertion and run.is_of_the_copy:
        return "caught", run.failed
    return "broken", f"{run.failed or ''} {run.error}, imported {run.imported} {run.output[-800:]}"


def _machine_has(need: str) -> bool:
    if need == "bf16":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return need in ("", platform.machine())


def summary(verdicts: list[Verdict], time_s: float) -> int:
    """Print the table by rule; return the exit status."""
    heading = ""
    for verdict in sorted(verdicts, key=lambda v: (v.mutant.rule.section, v.mutant.rule.text)):
        rule = verdict.mutant.rule
        if heading != f"{rule.section}: {rule.text}":
            heading = f"{rule.section}: {rule.text}"
            _say(f"\n{heading}")
        by = f"by {verdict.text.removeprefix('tests/')}" if verdict.is_caught else verdict.text
        _say(f"  {verdict.mutant.name:42} {verdict.outcome} {by}")
    count = Counter(verdict.outcome for verdict in verdicts)
    rules = len({verdict.mutant.rule for verdict in verdicts if verdict.is_caught})
    _say(
        f"\n{count['caught']} of {len(verdicts)} mutants of {rules} rules caught, "
        f"{count['survived']} survived, {count['broken']} broken, {count['skipped']} skipped, "
        f"{time_s / 60:.1f} minutes"
    )
    return 1 if count["survived"] or count["broken"] or not count["caught"] else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
