"""Kernels, products and layers on a GPU, each beside its baseline; `make gpu` runs this.

    python benchmarks/gpu.py [--quick] [--budget 200] [--sections cast,gemm]
    python benchmarks/gpu.py --dry-run      # tiny shapes on the CPU: does everything run?

Casts are compared with a device copy of as many bytes as the task needs, products with cuBLAS on
BF16, layers with nn.Linear, all in the same rounds. Writes gpu-<machine>-<date>.json to every
folder of --results, again after every case, and prints one short table. The exit status is 1 if a
case failed, and 2 without a GPU. Cases for which there was no time are named in the file and are no
failure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_bench import casts, groups, layers, many, peers, products, result
from gpu_bench.case import Bench
from gpu_bench.kernels import kernels_of
from gpu_bench.runner import Runner
from gpu_bench.timing import Budget, GpuTimer, HostTimer

RESULTS = Path(__file__).parent / "results"
#: Section and its share of the budget that is left when it starts.
SECTIONS = {
    "cast": 0.4,
    "gemm": 0.4,
    "grouped": 0.3,
    "linear": 0.5,
    "host": 0.3,
    "small_m": 0.7,
    "peer": 1.0,
}

_BF16, _FP32 = torch.bfloat16, torch.float32


def real_bench(is_quick: bool) -> Bench:
    """Return the shapes of a GPU run: those of the goals."""
    large = [(8192, 8192, _BF16)]
    if not is_quick:
        large += [(16384, 16384, _BF16), (4096, 4096, _BF16), (4096, 4096, _FP32)]
    shapes = [("S2", 8192, 8192, 8192)]
    if not is_quick:
        shapes += [("S1", 4096, 4096, 4096), ("S3", 16384, 4096, 16384)]
        # K of a model whose blocks of 128 do not divide it.
        shapes += [("S4", 8192, 2880, 2880)]
    return Bench(
        device="cuda",
        casts=large,
        products=shapes,
        small=(1, 64) if is_quick else (1, 16, 64, 128),
        small_weight=(4096, 4096),
        linear=(16384, 4096, 16384),
        host=(16, 256, 256),
        many=(64, 1024, 1024),
        l2_nbytes=result.machine("cuda")["l2_nbytes"],
    )


def dry_bench() -> Bench:
    """Return shapes that a CPU runs in a moment."""
    return Bench(
        device="cpu",
        casts=[(64, 64, _BF16), (32, 64, _FP32)],
        products=[("S1", 32, 32, 64)],
        small=(1,),
        small_weight=(32, 64),
        linear=(32, 32, 64),
        host=(2, 16, 16),
        many=(3, 32, 64),
        grouped=(2, 32, 16, 32),
    )


def profile(bench: Bench) -> dict[str, dict[str, float]]:
    """Return which kernels each cast launches: the same ones for every size that is aligned."""
    calls = {}
    small = [case for cases in many.many_cases(bench) for case in cases]
    for case in (*casts.matrix_cases(bench, 512, 512, _BF16), *small):
        try:
            call = case.make(0)
            call()
        # It will raise again where it is measured, and be reported there.
        except Exception:
            continue
        calls[case.name] = call
    try:
        return kernels_of(calls)
    except RuntimeError as error:
        print(f"gpu: torch's profiler does not run here: {error}", file=sys.stderr)
        return {}


def measure(runner: Runner, sections: tuple[str, ...], budget: Budget) -> None:
    """Run the sections, each within its share of the budget."""
    bench = runner.bench
    for section in sections:
        start = time.monotonic()
        before = len(runner.cases)
        part = budget.part(SECTIONS[section])
        if section == "host":
            if not (part.is_over or runner.is_broken):
                rounds = 2 if bench.device == "cpu" else 30
                calls = 2 if bench.device == "cpu" else 50
                runner.add_host(layers.host_samples(bench, rounds, calls), layers.HOST_GOALS)
        elif section == "peer":
            for name, cases, reason in peers.peer_cases(bench):
                runner.run(cases, part)
                if reason:
                    runner.say(f"{name}: {reason}")
                runner.free()
        else:
            parts: Any = {
                # One by one the host is late, and a batch is tried again: that comes last.
                "cast": lambda b: chain(casts.cast_cases(b), many.many_cases(b)),
                "gemm": products.product_cases,
                "grouped": groups.group_cases,
                "small_m": products.small_cases,
                "linear": lambda b: [layers.layer_cases(b)],
            }[section]
            # Not under no_grad: casts and products make no graph, and layers need one.
            for cases in parts(bench):
                runner.run(cases, part)
                runner.free()
        count = len(runner.cases) - before
        runner.say(f"{section}: {count} cases in {time.monotonic() - start:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the result and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape of each kind, 10 rounds")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=0, help="0: 10 if quick, else 25")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--cases", default="", help="a pattern that names of cases begin with")
    parser.add_argument("--label", default="", help="follows the names of cases")
    parser.add_argument("--results", type=Path, action="append", help=f"default: {RESULTS}")
    parser.add_argument("--tests", type=Path, help="JSON of the test run, to be kept beside it")
    options = parser.parse_args(arguments)
    budget = Budget(options.budget)
    sections = tuple(name for name in options.sections.split(",") if name)
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: must be of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu: needs a GPU that torch can use, found none (--dry-run runs on the CPU)")
        return 2
    torch.manual_seed(0)
    bench = dry_bench() if options.dry_run else real_bench(options.quick)
    where = result.machine(bench.device)
    rounds = options.rounds or (2 if options.dry_run else 10 if options.quick else 25)
    runner = Runner(
        bench,
        HostTimer() if options.dry_run else GpuTimer(),
        rounds,
        {},
        lambda text: print(f"gpu: {text}", file=sys.stderr, flush=True),
        wanted=options.cases,
        label=options.label,
    )
    made = {
        "schema": result.SCHEMA,
        "date": result.today(),
        "command": "python benchmarks/gpu.py " + " ".join(arguments or sys.argv[1:]),
        "machine": where,
        "versions": result.versions(),
        "cases": runner.cases,
        "left_out": runner.left_out,
        "tests": json.loads(options.tests.read_text()) if options.tests else None,
    }

    def save() -> list[Path]:
        # After every case: whatever ends the process, what was measured is there.
        kind = "dry" if options.dry_run else "gpu"
        return result.save(made, options.results or [RESULTS], kind)

    runner.changed = save
    if not options.dry_run and "cast" in sections:
        runner.kernels = profile(bench)
        bench.forget()
    measure(runner, sections, budget)
    wrong = result.check(made)
    files = save()
    print(result.render(made))
    print(f"kept in {', '.join(str(file) for file in files)}")
    for text in wrong[:5]:
        print(f"gpu: {text}", file=sys.stderr)
    for case in runner.failures:
        print(f"gpu: {case['section']} {case['name']}: {case['reason']}", file=sys.stderr)
    return 1 if wrong or runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
