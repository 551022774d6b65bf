"""Study of training: recipes beside BF16, paired by seed: `make study`, docs/reference/study.md.

    python benchmarks/study.py --sizes 0.4m --seeds 5          runs what has not run yet
    python benchmarks/study.py --list                          says what has, and what has not
    python benchmarks/study.py --write                         the record and the page of all runs
    python benchmarks/study.py --device cuda --jobs 8          on a GPU, which one run does not fill

A run is one cell (a recipe), one size and one seed. It writes a file of its own when it is done, in
build/study, and is skipped where that file is; a study that was ended goes on. A run of more than
five minutes is saved on its way, and goes on there, with the bits that it would have had. Files
that another state of the code made are not told apart: begin with another --folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from study_cells import BASELINE, CELLS, SIZES, source
from study_page import CLAIMS, RECORD, machine
from timing import cpu_name

import hybridq
from hybridq.demo.data import Corpus, load_corpus
from hybridq.demo.train import Run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "study"
#: Seconds after which a run that is not done is saved.
SAVE = 300.0


class Key(NamedTuple):
    """Which run it is."""

    size: str
    cell: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Return the file of the run's result."""
        slug = re.sub(r"[^a-z0-9_.-]+", "_", self.cell)
        return folder / self.size / slug / f"{self.seed}.json"


class StudyRun(Run):
    """The demo's run, under a schedule too, and without its measures of memory."""

    def __init__(
        self, key: Key, corpus: Corpus, steps: int | None = None, device: str = "cpu"
    ) -> None:
        size = SIZES[key.size]
        if steps is not None:
            size = size._replace(steps=steps)
        super().__init__(replace(size.config(key.seed), device=device), BASELINE, corpus)
        self._recipe: Any = source(key.cell, size.steps)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if isinstance(self._recipe, hybridq.RecipeSchedule):
            state["schedule"] = self._recipe.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if isinstance(self._recipe, hybridq.RecipeSchedule):
            self._recipe.load_state_dict(state["schedule"])

    def _measure(self) -> None:
        """Nothing of this is a part of the study."""

    def _step(self, *given: Any) -> float:
        loss = super()._step(*given)
        if isinstance(self._recipe, hybridq.RecipeSchedule):
            self._recipe.step()
        return loss


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield where to write what `path` gets whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    yield part
    os.replace(part, path)


def train(
    key: Key, corpus: Corpus, device: str = "cpu", saved: Path | None = None, every: float = SAVE
) -> dict[str, Any]:
    """Return the result of a run; losses in nats per byte.

    Args:
        key: which.
        corpus: the bytes.
        device: as torch names it.
        saved: a file that the run is written to on its way, and goes on from; None: neither.
        every: seconds between two such writes.
    """
    run = StudyRun(key, corpus, device=device)
    if saved is not None and saved.exists():
        run.load_state_dict(torch.load(saved, weights_only=True))
    last = time.monotonic()
    for _ in run.steps():
        if saved is not None and time.monotonic() - last >= every:
            with _whole(saved) as part:
                torch.save(run.state_dict(), part)
            last = time.monotonic()
    result = run.result
    return {
        **key._asdict(),
        "steps": run.config.steps,
        "status": result.status,
        "validation_loss": result.validation_loss,
        "validation_curve": result.validation_curve,
        "train_curve": result.train_curve,
        "seconds": round(result.seconds, 2),
        "corpus": corpus.digest,
        "source": corpus.source,
        "torch": torch.__version__,
        "hybridq": hybridq.__version__,
        **_machine(device),
        "threads": torch.get_num_threads(),
    }


def chosen(sizes: list[str], cells: list[str], seeds: int) -> list[Key]:
    """Return the runs that are asked for: all cells of a seed before the next seed.

    Args:
        sizes: names in `SIZES`.
        cells: patterns of names in `CELLS`; the baseline is always among them.
        seeds: how many, from 0 on.

    Raises:
        ValueError: a size is unknown, or a pattern meets no cell.
    """
    for size in sizes:
        if size not in SIZES:
            raise ValueError(f"study: a size must be one of {', '.join(SIZES)}, got {size!r}")
    for pattern in cells:
        if not any(fnmatchcase(cell, pattern) for cell in CELLS):
            raise ValueError(f"study: a pattern must meet a cell, got {pattern!r}; see --list")
    names = [
        cell
        for cell in CELLS
        if cell == BASELINE or any(fnmatchcase(cell, pattern) for pattern in cells)
    ]
    return [Key(size, cell, seed) for size in sizes for seed in range(seeds) for cell in names]


def this_machine(device: str = "cpu") -> str:
    """Return what `study_page.machine` says of runs that are made here."""
    return machine(_machine(device))


def _machine(device: str) -> dict[str, Any]:
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return {"machine": name, "cpu_capability": f"sm_{major}{minor}"}
    return {
        "machine": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def unrecorded(keys: Iterable[Key], runs: Iterable[dict[str, Any]], here: str) -> list[Key]:
    """Return what a record lacks: every cell beside each that it is compared with, on one machine.

    Cells are compared with the baseline, and with one another where a claim does so. Of a pair that
    no machine has whole, this one runs what it has not run.

    Args:
        keys: what is asked for, baselines among them.
        runs: the record.
        here: the machine, as `this_machine` says it.
    """
    of: dict[Key, set[str]] = {}
    for run in runs:
        of.setdefault(Key(run["size"], run["cell"], run["seed"]), set()).add(machine(run))
    keys = list(keys)
    asked, none = set(keys), set[str]()
    compared = [(cell, BASELINE) for cell in CELLS] + [(claim.a, claim.b) for claim in CLAIMS]
    lacking: set[Key] = set()
    for size, seed in {(key.size, key.seed) for key in keys}:
        for pair in compared:
            both = {Key(size, cell, seed) for cell in pair}
            if both <= asked and not set.intersection(*(of.get(key, none) for key in both)):
                lacking |= {key for key in both if here not in of.get(key, none)}
    return [key for key in keys if key in lacking]


def run_all(
    keys: list[Key],
    folder: Path,
    corpus: Corpus,
    deadline: float,
    say: Callable[[str], Any],
    device: str = "cpu",
) -> int:
    """Run what has no result yet; return how many runs that were.

    Args:
        keys: in order.
        folder: of the results.
        corpus: the bytes.
        deadline: time in seconds, as `time.time`, after which no run begins.
        say: is told of each run.
        device: as torch names it.
    """
    count = 0
    for key in keys:
        path = key.path(folder)
        if path.exists():
            continue
        if time.time() >= deadline:
            say("study: the time is over; the same command goes on where it ended")
            break
        saved = path.with_suffix(".state")
        result = train(key, corpus, device, saved)
        with _whole(path) as part:
            part.write_text(json.dumps(result) + "\n", encoding="utf-8")
        saved.unlink(missing_ok=True)
        say(f"{key.size} {key.cell} seed {key.seed}: {result['status']}, "
            f"{result['validation_loss']} nats per byte, {result['seconds']} s")  # fmt: skip
        count += 1
    return count


def record() -> list[dict[str, Any]]:
    """Return the runs that are recorded."""
    runs: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return runs


def results(folder: Path, recorded: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return what has run, in the order of sizes, cells, seeds and machines.

    Args:
        folder: of runs of this machine.
        recorded: earlier ones, of any; a run in the folder takes the place of the same one.
    """
    files = folder.glob("*/*/*.json")
    runs = [*recorded, *(json.loads(path.read_text(encoding="utf-8")) for path in files)]
    found = {(run["size"], run["cell"], run["seed"], machine(run)): run for run in runs}
    sizes, cells = list(SIZES), list(CELLS)
    known = [key for key in found if key[0] in SIZES and key[1] in CELLS]
    known.sort(key=lambda key: (sizes.index(key[0]), cells.index(key[1]), *key[2:]))
    return [found[key] for key in known]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="3m,25m,moe", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--cells", action="append", help="a pattern as nvfp4*; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--minutes", type=float, default=None, help="begin no run after them")
    parser.add_argument("--threads", type=int, default=1, help="of torch; they change the bits")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with some of the runs")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs' results")
    parser.add_argument("--again", action="store_true", help="what the record has, too")
    parser.add_argument("--list", action="store_true", help="say which runs there are")
    parser.add_argument("--write", action="store_true", help="write record, figures and page")
    given = parser.parse_args()
    if given.write:
        from study_page import write  # which draws

        write(results(given.folder, record()))
        return
    try:
        keys = chosen(given.sizes.split(","), given.cells or ["*"], given.seeds)
    except ValueError as error:
        sys.exit(str(error))
    left = keys if given.again else unrecorded(keys, record(), this_machine(given.device))
    if given.list:
        for key in keys:
            is_done = key not in left or key.path(given.folder).exists()
            print(*key, "done" if is_done else "-", sep="\t")
        return
    if given.jobs > 1:
        command = [sys.executable, *sys.argv, "--jobs", "1"]
        parts = [f"{part}/{given.jobs}" for part in range(given.jobs)]
        processes = [subprocess.Popen([*command, "--part", part]) for part in parts]
        sys.exit(max(process.wait() for process in processes))
    part, count = map(int, given.part.split("/"))
    torch.set_num_threads(given.threads)
    longest = max(SIZES[key.size].model.sequence for key in keys)
    corpus = load_corpus(None, longest)
    deadline = float("inf") if given.minutes is None else time.time() + 60 * given.minutes
    say = functools.partial(print, flush=True)
    run_all(left[part::count], given.folder, corpus, deadline, say, given.device)


if __name__ == "__main__":
    main()
