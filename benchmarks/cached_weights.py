"""What a GEMM gains from a weight that keeps its decoded form, on a CPU.

    python benchmarks/cached_weights.py [--out 2048] [--in 2048] [--threads 1] [--rounds 21]

Every round times the GEMM with the kept operand and without it, one after the other, so that both
meet the same noise; reported is the median over rounds of the ratio of a round. Absolute times are
not kept: the figures compare two ways, on the machine that is named in the result.
Writes benchmarks/results/cached-weights-<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import machine_slug

import hybridq
from hybridq.report import diagnose

NAMES = ("mxfp8", "nvfp4", "fp8_128x128")
ROWS = (16, 128, 512)
DTYPES = (torch.bfloat16, torch.float32)


def seconds(call: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(
    name: str, rows: int, dtype: torch.dtype, shape: tuple[int, int], rounds: int
) -> dict[str, object]:
    """Median, quartiles of time without over time with the kept operand."""
    w = hybridq.quantize(torch.randn(*shape).to(dtype), name)
    x = torch.randn(rows, shape[1]).to(dtype)

    def product() -> object:
        return hybridq.gemm(x, w)

    def without() -> object:
        with hybridq.gemm_cache(0):
            return hybridq.gemm(x, w)

    for call in (product, product, product, without):
        call()
    ratios = []
    for _ in range(rounds):
        kept = seconds(product)
        ratios.append(seconds(without) / kept)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "format": name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "ratio": round(middle, 2),
        "quartiles": [round(low, 2), round(high, 2)],
        "operand_cache_nbytes": w.rowwise.operand_cache.nbytes,
    }


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=int, default=2048)
    parser.add_argument("--in", type=int, default=2048, dest="inner")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = diagnose("cpu")
    rows = [
        ratio(name, count, dtype, (options.out, options.inner), options.rounds)
        for name in NAMES
        for count in ROWS
        for dtype in DTYPES
    ]
    for row in rows:
        print(
            f"{row['format']:<12} {row['rows']:>4} rows {row['dtype']:<9} {row['ratio']:>6}x  "
            f"quartiles {row['quartiles']}"
        )
    result = {
        "what": "time without / time with a cached decoded weight, median over rounds",
        "machine": found.machine.cpu,
        "versions": {key: found.versions[key] for key in ("hybridq", "torch", "python")},
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 1),
        "shape": [options.out, options.inner],
        "rounds": options.rounds,
        "cases": rows,
    }
    day = datetime.date.today().isoformat()
    name = machine_slug()
    file = f"cached-weights-{name}-{options.threads}t-{day}.json"
    path = Path(__file__).parent / "results" / file
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
