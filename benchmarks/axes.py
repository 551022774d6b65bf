"""Collectives, bytes and encodes of a training step, for each axis: python benchmarks/axes.py

One step of the same model on the same 4 sequences of 128 tokens, on 2 and 4 processes with gloo:
dealt out by data (DDP, FSDP2), matrices (tensor parallelism), tokens (Ulysses) or layers (a
pipeline of four microbatches). Counted are all collectives of the first rank and what it encodes,
in a later step, optimizer included. Counts are exact, and no times: a loaded machine will do.

    python benchmarks/axes.py --save     a file of benchmarks/results, and the guide's tables
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes_steps import BATCH, LENGTH, MICROBATCHES, SIZES, cases, cost
from axes_table import GUIDE, replaced, tables
from timing import cpu_name

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4)


def on_rank(rank: int, world: int, store: str, answers: Any) -> None:
    """Count as one rank; rank 0 answers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for axis, recipe in cases(world):
        found.setdefault(axis, {})[recipe] = cost(axis, recipe)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int) -> dict[str, Any]:
    """What the first of `world` processes finds."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_rank, args=(rank, world, f"{folder}/store", answers))
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        found: dict[str, Any] = answers.get(timeout=600)
        for one in ranks:
            one.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the file and the tables")
    save = parser.parse_args().save
    found = {
        "command": "python benchmarks/axes.py --save",
        "date": str(date.today()),
        "machine": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "model": SIZES,
        "tokens": f"{BATCH} sequences of {LENGTH}; {MICROBATCHES} microbatches of a pipeline",
        "measured": {str(world): measured(world) for world in RANKS},
    }
    text = tables(found["measured"])
    print(text)
    if save:
        file = RESULTS / f"axes-{date.today()}.json"
        file.write_text(json.dumps(found, indent=1) + "\n")
        GUIDE.write_text(replaced(GUIDE.read_text(), text))


if __name__ == "__main__":
    main()
