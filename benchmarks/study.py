"""Study of training: recipes beside BF16, paired by seed: `make study`, docs/reference/study.md.

    python benchmarks/study.py --sizes 0.4m --seeds 5          runs what has not run yet
    python benchmarks/study.py --list                          says what has, and what has not
    python benchmarks/study.py --write                         the record and the page of all runs

A run is one cell (a recipe), one size and one seed. It writes a file of its own when it is done, in
build/study, and is skipped where that file is; a study that was ended goes on. Files that another
state of the code made are not told apart: begin with another --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from study_cells import BASELINE, CELLS, SIZES, source
from timing import cpu_name

import hybridq
from hybridq.demo.data import Corpus, load_corpus
from hybridq.demo.train import Run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "study"


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

    def __init__(self, key: Key, corpus: Corpus, steps: int | None = None) -> None:
        size = SIZES[key.size]
        if steps is not None:
            size = size._replace(steps=steps)
        super().__init__(size.config(key.seed), BASELINE, corpus)
        self._recipe: Any = source(key.cell, size.steps)

    def _measure(self) -> None:
        """Nothing of this is a part of the study."""

    def _step(self, *given: Any) -> float:
        loss = super()._step(*given)
        if isinstance(self._recipe, hybridq.RecipeSchedule):
            self._recipe.step()
        return loss


def train(key: Key, corpus: Corpus) -> dict[str, Any]:
    """Return the result of a run; losses in nats per byte.

    Args:
        key: which.
        corpus: the bytes.
    """
    run = StudyRun(key, corpus)
    for _ in run.steps():
        pass
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
        "machine": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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


def run_all(
    keys: list[Key], folder: Path, corpus: Corpus, deadline: float, say: Callable[[str], Any]
) -> int:
    """Run what has no result yet; return how many runs that were.

    Args:
        keys: in order.
        folder: of the results.
        corpus: the bytes.
        deadline: time in seconds, as `time.time`, after which no run begins.
        say: is told of each run.
    """
    count = 0
    for key in keys:
        path = key.path(folder)
        if path.exists():
            continue
        if time.time() >= deadline:
            say("study: the time is over; the same command goes on where it ended")
            break
        result = train(key, corpus)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result) + "\n", encoding="utf-8")
        os.replace(part, path)  # whole or not at all
        say(f"{key.size} {key.cell} seed {key.seed}: {result['status']}, "
            f"{result['validation_loss']} nats per byte, {result['seconds']} s")  # fmt: skip
        count += 1
    return count


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what has run, in the order of sizes, cells and seeds."""
    for size in SIZES:
        for cell in CELLS:
            files = Key(size, cell, 0).path(folder).parent.glob("*.json")
            for path in sorted(files, key=lambda one: int(one.stem)):
                yield json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="3m,25m,moe", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--cells", action="append", help="a pattern as nvfp4*; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--minutes", type=float, default=None, help="begin no run after them")
    parser.add_argument("--threads", type=int, default=1, help="of torch; they change the bits")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs' results")
    parser.add_argument("--list", action="store_true", help="say which runs there are")
    parser.add_argument("--write", action="store_true", help="write record, figures and page")
    given = parser.parse_args()
    if given.write:
        from study_page import write  # which draws

        write(list(results(given.folder)))
        return
    try:
        keys = chosen(given.sizes.split(","), given.cells or ["*"], given.seeds)
    except ValueError as error:
        sys.exit(str(error))
    if given.list:
        for key in keys:
            print(*key, "done" if key.path(given.folder).exists() else "-", sep="\t")
        return
    torch.set_num_threads(given.threads)
    longest = max(SIZES[key.size].model.sequence for key in keys)
    corpus = load_corpus(None, longest)
    deadline = float("inf") if given.minutes is None else time.time() + 60 * given.minutes
    run_all(keys, given.folder, corpus, deadline, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
