"""GEMMs of quantized operands on a CPU, decode included, over torch's BF16 and FP32 products.

Every round times all of them one after the other; a ratio is the median over rounds of the time
over that of torch's product in the same round, with its quartiles. With one thread it is the
thread's own processor time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quantize import cpu_name

import hybridq

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("mxfp8", "nvfp4"),
    ("mxfp4", "mxfp6_e3m2"),
    ("fp8_1x128", "fp8_128x128"),
]


def measure(
    size: int, rows: int, threads: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return ratios by call: over torch's BF16 product, and over its FP32 product."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    a, b = torch.randn(rows, size).bfloat16(), torch.randn(size, size).bfloat16()
    wide_a, wide_b = a.float(), b.float()
    calls: dict[str, Callable[[], object]] = {
        "torch BF16": lambda: a @ b.t(),
        "torch FP32": lambda: wide_a @ wide_b.t(),
    }
    with hybridq.gemm_cache(0):
        for left, right in PAIRS:
            planes = (hybridq.quantize(a, left).rowwise, hybridq.quantize(b, right).rowwise)
            calls[f"{left} x {right}"] = lambda p=planes: hybridq.gemm(*p, out_dtype=torch.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                begin = clock()
                call()
                if turn:  # the first round warms up
                    times[name].append(clock() - begin)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for base in ("torch BF16", "torch FP32"):
        tables[f"time / {base} product"] = {
            name: _band([x / y for x, y in zip(own, times[base], strict=True)])
            for name, own in times.items()
            if name != base
        }
    return tables


def _band(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="K and N")
    parser.add_argument("--rows", type=int, default=4096, help="M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = measure(options.size, options.rows, options.threads, options.rounds)
    for title, rows in tables.items():
        print(title)
        for name, band in rows.items():
            print(f"  {name:28s} {band['median']:6.2f}   ({band['low']:.2f} to {band['high']:.2f})")
    if options.json:
        record = {
            "machine": cpu_name(),
            "threads": options.threads,
            "shape": [options.rows, options.size, options.size],
            "versions": {"hybridq": hybridq.__version__, "torch": torch.__version__},
            "command": f"python benchmarks/gemm_cpu.py --rows {options.rows} "
            f"--size {options.size} --threads {options.threads}",
            "tables": tables,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
