"""One token times one weight on a CPU, read as codes, beside torch's BF16 and FP32 linear.

    python benchmarks/decode_token.py [--threads 1 2] [--shapes 1024x1024 ...] [--formats mxfp8 ...]
        [--rows 1] [--rounds 15] [--write]

Every call takes the next of several weights that together are four times the last cache, as a
model's layers do; with --hot always the same one. In every round each case is timed right after
torch's BF16 `F.linear` of the same shape, on one thread by its processor time, on more by the wall;
shown are medians over the rounds, with quartiles in the file:

- `vs bf16`: time of torch's BF16 linear / time of the case: more than 1 is faster;
- `of floor`: time to read the case's bytes of weights (a sum of as many in the same round) / its
  time: 1 is as fast as memory can be read;
- `us`: the case's own time, for the reader, on this machine and at this load.

Cases: `torch fp32`; `decoded`: hybridq's product with a decoded weight that is kept; a format and
what the rows are: `plain` (BF16), `quantized` (in the forward, by the recipe), `static` (the same,
by an amax that a calibration has found, where the recipe takes one). `Linear` is a whole
eager forward of a module of `hybridq.quantize_model`; `gemm` is `hybridq.gemm`.
With --write, benchmarks/results/decode-token-<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import machine_slug
from torch import nn
from torch.nn import functional

import hybridq
from hybridq.kernels.choice import GemmArgs, Operand
from hybridq.kernels.cpu import product_reason
from hybridq.kernels.decoded.decoded_gemm import multiply_sides
from hybridq.kernels.decoded.decoded_sides import Side, decode_side
from hybridq.report import diagnose

SHAPES = ("1024x1024", "2048x2048", "4096x4096", "4096x14336", "8192x8192")
FORMATS = ("mxfp8", "nvfp4", "mxfp4", "fp8_e4m3", "fp8_128x128")
#: Recipes whose weight has one of these formats along rows.
RECIPES = {"mxfp8": "mxfp8", "nvfp4": "nvfp4_1d_weight", "fp8_e4m3": "fp8_current"}
#: Of those, whose inputs have one amax for the tensor.
STATIC = ("nvfp4", "fp8_e4m3")
#: What the rows are, and how a module is told.
ROWS = (("plain", "high_precision"), ("quantized", "quantized"), ("static", "quantized"))
_ALL_WEIGHTS = 256 << 20  # bytes of codes or values that a case goes through
_MOST = 24  # weights


@dataclass(frozen=True)
class Case:
    """One line: a call for each weight, and the bytes of one weight."""

    label: str
    calls: list[Callable[[], object]]
    nbytes: int


def copies(nbytes: int, hot: bool) -> int:
    """How many weights of so many bytes a case goes through."""
    return 1 if hot else min(max(_ALL_WEIGHTS // nbytes, 2), _MOST)


def plane_nbytes(w: Any) -> int:
    """Bytes of a quantized weight."""
    return sum(buffer.numel() * buffer.element_size() for buffer in w.rowwise.tensors)


def cases(n: int, k: int, rows: int, formats: list[str], hot: bool) -> list[Case]:
    """torch's BF16 linear first, and all cases."""
    torch.manual_seed(0)
    count = copies(2 * n * k, hot)
    wide = [torch.randn(n, k) for _ in range(copies(4 * n * k, hot))]
    weights = [wide[i % len(wide)].bfloat16() for i in range(count)]
    x = torch.randn(rows, k)
    xb = x.bfloat16()
    made = [
        Case("torch bf16", [lambda w=w: functional.linear(xb, w) for w in weights], 2 * n * k),
        Case("torch fp32", [lambda w=w: functional.linear(x, w) for w in wide], 4 * n * k),
    ]
    left, args = Side(xb, None, True), GemmArgs(None, None, torch.bfloat16)
    plane = hybridq.quantize(weights[0], "mxfp8").rowwise
    dtype = torch.bfloat16 if product_reason() is None else torch.float32
    side = decode_side(Operand(plane.tensors, plane.spec, n, k), True, dtype)
    nbytes = side.matrix.nbytes
    sides = [side._replace(matrix=side.matrix.clone()) for _ in range(copies(nbytes, hot))]
    kept = [lambda s=s: multiply_sides(left, s, args) for s in sides]
    name = str(dtype).removeprefix("torch.")
    made.append(Case(f"decoded to {name}, kept", kept, nbytes))
    for name in formats:
        first = hybridq.quantize(weights[0], name, columnwise=None)
        nbytes = plane_nbytes(first)
        planes = [first] + [first.clone() for _ in range(copies(nbytes, hot) - 1)]
        calls = [lambda w=w: hybridq.gemm(xb, w) for w in planes]
        made.append(Case(f"{name}, plain rows, gemm", calls, nbytes))
        if name not in RECIPES:
            continue
        for label, activations in ROWS:
            if label == "static" and name not in STATIC:
                continue
            layers = []
            for _ in range(len(planes)):
                layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
                layer.weight = nn.Parameter(weights[0])
                given = {"activations": activations, "least_width": 1}
                if label == "static":
                    given["calibration"] = hybridq.calibrate(layer, [xb], least_width=1)
                layers.append(hybridq.quantize_model(layer, RECIPES[name], **given))
            nbytes = plane_nbytes(layers[0].weight)
            calls = [lambda layer=layer: layer(xb) for layer in layers]
            made.append(Case(f"{name}, {label} rows, Linear", calls, nbytes))
    return made


def seconds(call: Callable[[], object]) -> float:
    """Time of one call: on one thread its processor time, on more that of the wall."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def measure(made: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Each case beside the first one and beside a read of its bytes."""
    memory = torch.zeros(max(case.nbytes for case in made) // 4 + (_ALL_WEIGHTS // 4))
    rest = [itertools.cycle(case.calls) for case in made]
    offset = 0

    def read(nbytes: int) -> float:
        nonlocal offset
        size = nbytes // 4
        if offset + size > memory.numel():
            offset = 0
        part = memory[offset : offset + size]
        offset += size
        return seconds(part.sum)

    for call in itertools.chain.from_iterable(case.calls for case in made):
        call()
    found: list[list[tuple[float, float, float]]] = [[] for _ in made]
    for _ in range(rounds):
        for index, case in enumerate(made):
            base = seconds(next(rest[0]))
            own = seconds(next(rest[index]))
            found[index].append((base / own, read(case.nbytes) / own, own * 1e6))
    rows = []
    for case, turns in zip(made, found, strict=True):
        ratios, floors, times = zip(*turns, strict=True)
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "case": case.label,
                "vs_bf16": round(middle, 2),
                "quartiles": [round(low, 2), round(high, 2)],
                "of_floor": round(statistics.median(floors), 2),
                "us": round(statistics.median(times)),
                "bytes": case.nbytes,
            }
        )
    return rows


def main() -> None:
    """Measure, print tables, and write the result where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hot", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    tables = []
    with torch.no_grad():
        for shape in options.shapes:
            n, k = (int(one) for one in shape.split("x"))
            made = cases(n, k, options.rows, options.formats, options.hot)
            for threads in options.threads:
                torch.set_num_threads(threads)
                rows = measure(made, options.rounds)
                tables.append({"shape": [n, k], "threads": threads, "cases": rows})
                print(f"{n} x {k}, {threads} threads{'':<14}vs bf16   of floor        us")
                for row in rows:
                    print(
                        f"  {row['case']:<32}{row['vs_bf16']:9.2f}x{row['of_floor']:10.2f}"
                        f"{row['us']:10d}",
                        flush=True,
                    )
    if not options.write:
        return
    found = diagnose("cpu")
    result = {
        "what": "time of torch's BF16 linear / time, and share of the floor; medians over rounds",
        "machine": found.machine.cpu,
        "versions": {key: found.versions[key] for key in ("hybridq", "torch", "python")},
        "load": round(os.getloadavg()[0], 1),
        "rows": options.rows,
        "rounds": options.rounds,
        "hot": options.hot,
        "tables": tables,
    }
    name = f"decode-token-{machine_slug()}-{datetime.date.today().isoformat()}.json"
    path = Path(__file__).parent / "results" / name
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
