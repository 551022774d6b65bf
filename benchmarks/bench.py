"""Run the CPU benchmarks, print one table and keep it.

    python benchmarks/bench.py [--parts quantize] [--threads 1,2] [--rounds 9] [--runs 3]

A part is a module beside this one with a NAME and `cases(rows, cols, threads)`; it is named in
PARTS. Every run makes its matrices anew; of several runs the table gives the median of the medians,
between the lowest and the highest of their quartiles. Writes
benchmarks/results/cpu-[<parts>-]<machine>-<date>.json, one table per part and thread count.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import fused
import layers
import modules
import products
import quantize
import torch
from timing import cpu_name, lines, machine_slug, measure, over_runs

PARTS = {part.NAME: part for part in (quantize, products, layers, fused, modules)}


def main() -> None:
    """Run the parts asked for, print their tables, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("rows", 4096), ("cols", 4096), ("rounds", 9), ("runs", 3)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--threads", default="1,2", help="thread counts, with commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    options = parser.parse_args()
    if options.rounds < 2 or options.runs < 1:
        given = f"{options.rounds} and {options.runs}"
        parser.error(f"--rounds must be at least 2 and --runs at least 1, got {given}")
    names = options.parts.split(",")
    torch.manual_seed(0)
    found: dict[str, list[dict[str, dict[str, object]]]] = {}
    for run in range(options.runs):
        for count in map(int, options.threads.split(",")):
            torch.set_num_threads(count)
            for name in names:
                cases = PARTS[name].cases(options.rows, options.cols, count)
                table = measure(cases, options.rounds, count)
                found.setdefault(f"{name}, {count} thread{'s' if count > 1 else ''}", []).append(
                    table
                )
                print(f"run {run + 1} of {options.runs}: {name}, threads: {count}", flush=True)
    tables = {name: over_runs(of_runs) for name, of_runs in found.items()}
    for name, table in tables.items():
        print(f"\n{name}: time over the base (median, quartiles)")
        print("\n".join("  " + line for line in lines(table)))
    result = {
        "machine": cpu_name(),
        "shape": [options.rows, options.cols],
        "rounds": options.rounds,
        "runs": options.runs,
        "versions": quantize.versions(),
        "command": f"python benchmarks/bench.py --parts {options.parts} --threads {options.threads}"
        f" --rounds {options.rounds} --runs {options.runs}",
        "tables": tables,
    }
    day = datetime.date.today().isoformat()
    name = "-".join(["cpu", *([] if set(names) == set(PARTS) else names), machine_slug(), day])
    file = Path(__file__).parent / "results" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nkept in {file}")


if __name__ == "__main__":
    main()
