"""Overhead of `hybridq.monitor`: python benchmarks/monitor.py, on one thread, interleaved.

The demo's model trains twice side by side, watched and not, in turns of one step. In a cycle of 50
steps the monitor samples one and leaves 49 as they are, so what is measured is the time of both
kinds of step beside a step of the unwatched twin: overhead = (sampled + 49 * other) / 50 - 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from timing import cpu_name, machine_slug

import hybridq
from hybridq.demo.data import load_corpus, training_batches
from hybridq.demo.model import ModelConfig
from hybridq.demo.train import Run, TrainConfig, make_optimizer

EVERY = 50
RECIPES = ("mxfp8", "nvfp4", "fp8_current")
RESULTS = Path(__file__).parent / "results"


def measure(recipe: str, pairs: int) -> dict[str, Any]:
    """Return ratios of steps, watched over not, as medians over interleaved pairs of steps."""
    config = TrainConfig(ModelConfig(), batch=8, steps=10 * pairs)
    corpus = load_corpus(None, config.model.sequence)
    runs = [Run(config, recipe, corpus) for _ in range(2)]
    steps = [(run, make_optimizer(run.model, config)) for run in runs]
    [(x, y)] = training_batches(corpus, config.batch, config.model.sequence, 1, 0)

    def timed(which: int) -> float:
        run, optimizer = steps[which]
        start = time.thread_time()
        run._step(run.model, optimizer, 0, x, y)
        if which:
            watch.step()
        return time.thread_time() - start

    ratios: dict[bool, list[float]] = {True: [], False: []}
    with hybridq.monitor(runs[1].model, every=4) as watch:
        for number in range(4 * pairs + 4):
            times = [timed(which) for which in ((0, 1) if number // 4 % 2 else (1, 0))]
            first, second = times if number // 4 % 2 else times[::-1]
            if number >= 4:
                ratios[number % 4 == 0].append(second / first)
    sampled, other = (statistics.median(ratios[kind]) for kind in (True, False))
    overhead = (sampled - 1) / EVERY + max(other - 1, 0.0) * (EVERY - 1) / EVERY
    return {
        "recipe": recipe,
        "sampled_step": round(sampled, 3),
        "other_step": round(other, 4),
        "other_step_quartiles": [
            round(one, 4) for one in statistics.quantiles(ratios[False], n=4)[::2]
        ],
        "overhead_percent_every_50": round(100 * overhead, 2),
        "by_sampled_steps_alone_percent": round(100 * (sampled - 1) / EVERY, 2),
        "pairs": pairs,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs",
        type=int,
        default=16,
        help="of sampled steps; there are three times as many others",
    )
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(recipe, given.pairs) for recipe in RECIPES]
    made = {
        "machine": cpu_name(),
        "torch": torch.__version__,
        "hybridq": hybridq.__version__,
        "threads": 1,
        "clock": "the thread's own processor time",
        "command": f"python benchmarks/monitor.py --pairs {given.pairs} --write",
        "rows": rows,
    }
    text = json.dumps(made, indent=1) + "\n"
    print(text)
    if given.write:
        (RESULTS / f"monitor-{machine_slug()}-{date.today()}.json").write_text(text)


if __name__ == "__main__":
    main()
