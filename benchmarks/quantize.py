"""Encode, decode and GEMM of every format beside a plain copy and torch's own casts.

    python benchmarks/quantize.py [--rows 4096] [--cols 4096] [--threads 1] [--rounds 15]

Every round times each case once, so that all cases meet the same noise; reported is the median
over rounds of the ratio to the copy (or to torch's BF16 matmul) of the same round. Absolute times
are not kept: the figures compare cases, on the machine that is named in the result.
Writes benchmarks/results/quantize-<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hybridq
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names

Case = Callable[[], object]


def spec(name: str, **options: object) -> str:
    """Canonical text of a format with options."""
    return PlaneSpec(format(name), **options).text  # type: ignore[arg-type]


def encode_cases(x: torch.Tensor) -> dict[str, Case]:
    """One case per format and direction, the options of NVFP4, and the zoo's hybrid pair."""
    encode, seed = torch.ops.hybridq.encode, torch.tensor([1])
    cases: dict[str, Case] = {}
    for name in names():
        if format(name).is_identity:
            continue
        text = spec(name)
        cases[f"{name} row"] = lambda t=text: encode(x, t, "")
        cases[f"{name} both"] = lambda t=text: encode(x, t, t)
    nvfp4 = {
        "nvfp4 row stochastic": (spec("nvfp4", stochastic=True), ""),
        "nvfp4 column transform": ("", spec("nvfp4", signs=DEFAULT_SIGNS)),
        "nvfp4 gradient (both, stochastic, transform)": (
            spec("nvfp4", stochastic=True),
            spec("nvfp4", stochastic=True, signs=DEFAULT_SIGNS),
        ),
        "mxfp8 row + nvfp4 column transform": (spec("mxfp8"), spec("nvfp4", signs=DEFAULT_SIGNS)),
    }
    for label, (row, col) in nvfp4.items():
        cases[label] = lambda r=row, c=col: encode(x, r, c, None, None, seed)
    cases["torch cast to float8_e4m3fn"] = lambda: x.to(torch.float8_e4m3fn)
    return cases


def decode_cases(x: torch.Tensor) -> dict[str, Case]:
    """Decode of one plane to BF16."""
    cases: dict[str, Case] = {}
    for name in ("fp8_e4m3", "fp8_1x128", "mxfp8", "nvfp4"):
        text = spec(name)
        plane = torch.ops.hybridq.encode(x, text, "")
        cases[f"{name} decode"] = lambda p=plane, t=text: torch.ops.hybridq.decode(
            p, t, *x.shape, torch.bfloat16
        )
    codes = x.to(torch.float8_e4m3fn)
    cases["torch cast from float8_e4m3fn"] = lambda: codes.to(torch.bfloat16)
    return cases


def gemm_cases(size: int) -> dict[str, Case]:
    """Square GEMMs of two planes, decode included."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16)
    cases: dict[str, Case] = {}
    for left, right in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp8", "nvfp4")):
        x, y = hybridq.quantize(a, left, False), hybridq.quantize(b, right, False)
        cases[f"{left} x {right}"] = lambda x=x, y=y: hybridq.gemm(x, y)
    wide_a, wide_b = a.float(), b.float()
    cases["torch float32"] = lambda: wide_a @ wide_b.t()
    return cases


def ratios(base: Case, cases: dict[str, Case], rounds: int) -> dict[str, dict[str, float]]:
    """Median, lowest and highest of time(case) / time(base), pair by pair."""
    for case in (base, *cases.values()):
        case()
    found: dict[str, list[float]] = {label: [] for label in cases}
    for _ in range(rounds):
        for label, case in cases.items():
            times = []
            for one in (base, case):
                start = time.perf_counter()
                one()
                times.append(time.perf_counter() - start)
            found[label].append(times[1] / times[0])
    return {
        label: {
            "median": round(statistics.median(values), 3),
            "low": round(min(values), 3),
            "high": round(max(values), 3),
        }
        for label, values in found.items()
    }


def cpu_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def main() -> None:
    """Run all cases, print a table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("rows", 4096), ("cols", 4096), ("gemm", 2048), ("rounds", 15)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.cols, dtype=torch.bfloat16)
    into = torch.empty_like(x)
    a, b = torch.randn(2, options.gemm, options.gemm, dtype=torch.bfloat16)
    tables = {
        "time / copy of the input": ratios(
            lambda: into.copy_(x), encode_cases(x) | decode_cases(x), options.rounds
        ),
        "time / torch bfloat16 matmul": ratios(
            lambda: a @ b.t(), gemm_cases(options.gemm), options.rounds
        ),
    }
    for title, rows in tables.items():
        print(f"\n{title} (median of {options.rounds}, low .. high)")
        for label, value in rows.items():
            print(
                f"  {label:<48} {value['median']:8.2f}  {value['low']:.2f} .. {value['high']:.2f}"
            )
    core = hybridq.kernels.backend_cpu.core
    result = {
        "machine": cpu_name(),
        "threads": options.threads,
        "shape": [options.rows, options.cols],
        "gemm": options.gemm,
        "versions": {"hybridq": hybridq.__version__, "torch": torch.__version__},
        "variant": core.variant() if core is not None else None,
        "command": f"python benchmarks/quantize.py --threads {options.threads}",
        "tables": tables,
    }
    machine = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    day = datetime.date.today().isoformat()
    file = Path(__file__).parent / "results" / f"quantize-{machine}-{options.threads}t-{day}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nkept in {file}")


if __name__ == "__main__":
    main()
