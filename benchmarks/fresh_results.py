"""Encode and decode with fresh results on a CPU, beside the kernel into memory that is there.

    python benchmarks/fresh_results.py [--rows 4096] [--cols 8192] [--rounds 15] [--write]

One thread, by its processor time. In every round each operator is timed right after its kernel,
once with results in ordinary pages and once in huge ones; results are freed after each call, as in
a training loop. Shown are medians over the rounds of time / time of the kernel, and page faults of
one call. `peak` is the largest resident memory of a process that runs all operators so.
With --write, benchmarks/results/fresh-results-<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import machine_slug

import hybridq
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.cpu import backend, results
from hybridq.kernels.inputs import matrix

ENCODES = (("mxfp8", ""), ("mxfp8", "mxfp8"), ("fp8_e4m3", "fp8_e4m3"), ("nvfp4", "nvfp4"))
DECODES = ("mxfp8", "nvfp4", "fp8_e4m3")
WAYS = ("kernel", "ordinary", "huge")

Call = Callable[[], object]


def spec(name: str) -> Any:
    """Return the spec of a format for BF16; None for no plane."""
    return hybridq.PlaneSpec.parse(name).resolve(torch.bfloat16) if name else None


def encode_calls(x: torch.Tensor, row: str, col: str) -> tuple[Call, Call]:
    """Return the kernel into memory that is there, and the operator."""
    specs = spec(row), spec(col)
    request = EncodeRequest(*("" if one is None else one.text for one in specs))
    buffers, planes, _ = backend.encoder(*specs, x.dtype).planes(*x.shape, request)
    given = (*matrix("x", x), *x.shape, *x.stride(), *planes, 1, 0, 0)

    def kernel(keep: object = buffers) -> None:
        backend.core.encode_from_scratch(*given)

    return kernel, lambda: torch.ops.hybridq.encode(x, request.row, request.col)


def decode_calls(x: torch.Tensor, name: str) -> tuple[Call, Call]:
    """Return the kernel into memory that is there, and the operator."""
    one = spec(name)
    buffers = torch.ops.hybridq.encode(x, one.text, "")
    out = torch.empty_like(x)
    places = [buffer.data_ptr() for buffer in buffers] + [0]
    native = backend.core_spec(one)[0]

    def kernel(keep: object = out) -> None:
        given = (native, *places[:3], *x.shape, out.data_ptr(), "bfloat16", False, 1)
        backend.core.decode(*given)

    return kernel, lambda: torch.ops.hybridq.decode(buffers, one.text, *x.shape, x.dtype)


def all_calls(x: torch.Tensor) -> dict[str, tuple[Call, Call]]:
    """Return the kernel and the operator of every line."""
    found = {}
    for row, col in ENCODES:
        found[f"{row} {'both' if col else 'row'}"] = encode_calls(x, row, col)
    for name in DECODES:
        found[f"{name} decode"] = decode_calls(x, name)
    return found


def measure(kernel: Call, operator: Call, rounds: int) -> dict[str, Any]:
    """Return medians and quartiles of time / time of the kernel, and page faults of one call."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    faults = dict.fromkeys(WAYS, 0)
    for number in range(rounds + 1):
        for way in WAYS:
            backend.prepare = results.prepare if way == "huge" else lambda buffer: None
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.thread_time()
            made = (kernel if way == "kernel" else operator)()
            took = time.thread_time() - start
            faults[way] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            del made
            if number:  # the first round warms up
                times[way].append(took)
    line: dict[str, Any] = {"faults": faults}
    for way in WAYS[1:]:
        ratios = [a / b for a, b in zip(times[way], times["kernel"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        line[way] = {"median": middle, "quartiles": [low, high]}
    return line


def peak_nbytes(options: argparse.Namespace, pages: str) -> int:
    """Return the peak of resident bytes of a process that runs all operators three times."""
    given = [sys.executable, __file__, "--rows", str(options.rows), "--cols", str(options.cols)]
    environment = {**os.environ, "HYBRIDQ_HUGE_PAGES": pages}
    run = subprocess.run(
        [*given, "--peak"], env=environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout.split()[-1])


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peak", action="store_true", help="run the operators, print the peak")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = all_calls(torch.randn(options.rows, options.cols, dtype=torch.bfloat16))
    if options.peak:
        for _ in range(3):
            for _, operator in calls.values():
                operator()
        print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    lines = {}
    for label, (kernel, operator) in calls.items():
        line = lines[label] = measure(kernel, operator, options.rounds)
        ratios = "  ".join(f"{way} {line[way]['median']:.2f}" for way in WAYS[1:])
        print(f"{label:16} {ratios}  faults {line['faults']}", flush=True)
    peaks = {
        name: peak_nbytes(options, pages) for name, pages in (("ordinary", "0"), ("huge", "1"))
    }
    print("peak MB", {name: round(nbytes / 1e6) for name, nbytes in peaks.items()})
    if options.write:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "torch": torch.__version__,
            "variant": backend.core.variant(),
            "transparent_hugepage": enabled,
            "shape": [options.rows, options.cols],
            "rounds": options.rounds,
            "lines": lines,
            "peak_nbytes": peaks,
        }
        day = datetime.date.today().isoformat()
        file = Path(__file__).parent / f"results/fresh-results-{machine_slug()}-{day}.json"
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
