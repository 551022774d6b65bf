"""What an eager call costs beside its kernel: a tiny quantize, and Linear at batch 1.

    python benchmarks/host_overhead.py [--threads 1] [--rounds 300] [--parts quantize,linear]

All cases take turns, in chunks that are shorter than a scheduler's time slice, so that all meet the
same noise. Of every case its fastest and its median chunk are kept, and its ratio to a yardstick,
chunk by chunk in the same turn: of a quantize to an operator of torch.library that does nothing, of
a Linear to nn.Linear. The floor is what torch itself takes for the steps that a quantize cannot do
without. Writes benchmarks/results/host-<machine>-<threads>t-<date>.json, with the parts in its name
where they are not all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import machine_slug
from torch import nn

import hybridq
from hybridq.kernels.inputs.dispatch_bypass import can_bypass_dispatcher
from hybridq.report import diagnose

PARTS = ("quantize", "linear")
FORMATS = ("mxfp8", "nvfp4", "fp8_e4m3")
SIZES = (64, 256, 1024, 2048)
RECIPES = ("mxfp8", "nvfp4", "fp8_current")
#: Seconds that a chunk should take.
CHUNK = 2e-4


@dataclass
class Case:
    """Something to time.

    Args:
        name: what it is called in the table.
        run: one call.
        yardstick: name of the case that it is compared with.
        recipe: of the `hybridq.autocast` that it runs under; empty: it runs under none.
        grads: autograd is on.
    """

    name: str
    run: Callable[[], object]
    yardstick: str
    recipe: str = ""
    grads: bool = True


class _Wrapper(torch.Tensor):
    """A wrapper subclass that does nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class _Pass(torch.autograd.Function):
    """A function of autograd that does nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


_LIBRARY = torch.library.Library("hybridq_bench", "DEF")
_LIBRARY.define("nothing(Tensor x) -> Tensor")
_LIBRARY.impl("nothing", torch.empty_like, "CompositeExplicitAutograd")


def floor(x: torch.Tensor) -> list[Case]:
    """Return what torch takes for the steps of a quantize of x."""
    rows, cols = x.shape
    device = torch.device("cpu")
    sizes = ((rows, cols), (rows, 1), (cols, rows), (cols, 1))
    leaf = x.clone().requires_grad_()
    wrapper = torch.Tensor._make_wrapper_subclass

    def empties() -> object:
        return [torch.empty(*size, dtype=torch.uint8, device=device) for size in sizes]

    return [
        Case("a torch.library operator that makes one tensor", _nothing(x), "operator"),
        Case("torch.empty, 4 buffers", empties, "operator"),
        Case(
            "_make_wrapper_subclass",
            lambda: wrapper(_Wrapper, (rows, cols), dtype=x.dtype, device=device),
            "operator",
        ),
        Case(
            "hybridq's question whether anything watches",
            lambda: can_bypass_dispatcher(x),
            "operator",
        ),
        Case("autograd.Function.apply", lambda: _Pass.apply(leaf), "operator"),
    ]


def _nothing(x: torch.Tensor) -> Callable[[], object]:
    operator = torch.ops.hybridq_bench.nothing.default
    return lambda: operator(x)


def quantizes(x: torch.Tensor) -> list[Case]:
    """Return quantize of x in some formats."""
    cases = []
    for name in FORMATS:
        both = hybridq.quantizers.quantizer(name)
        row = both.with_usage(columnwise=False)
        cases.append(Case(f"{name}, both planes", lambda q=both: q.quantize(x), "operator"))
        cases.append(Case(f"{name}, rowwise", lambda q=row: q.quantize(x), "operator"))
    by_name = Case('hybridq.quantize(x, "mxfp8")', lambda: hybridq.quantize(x, "mxfp8"), "operator")
    return [*cases, by_name]


def linears(size: int) -> list[Case]:
    """Return Linear at batch 1 beside nn.Linear of the same parameters."""
    plain = nn.Linear(size, size, dtype=torch.bfloat16)
    x = torch.randn(1, size, dtype=torch.bfloat16)
    ours = _linear(plain)
    cases = []
    for grads, mode in ((True, "grad"), (False, "no_grad")):
        base = f"nn.Linear {size}, {mode}"
        cases += [
            Case(base, lambda: plain(x), base, grads=grads),
            Case(f"Linear {size}, {mode}, no recipe", lambda: ours(x), base, grads=grads),
        ]
        for recipe in RECIPES:
            # Layers of their own: a step of one must not meet what another has left in caches.
            every, kept = _linear(plain), _linear(plain)
            name = f"Linear {size}, {mode}, {recipe}"
            cases += [
                Case(name, lambda m=every: m(x), base, recipe, grads),
                Case(
                    f"{name}, weight kept",
                    lambda m=kept: m(x, is_first_microbatch=False),
                    base,
                    recipe,
                    grads,
                ),
            ]
    return cases


def _linear(plain: nn.Linear) -> hybridq.Linear:
    made = hybridq.Linear(plain.in_features, plain.out_features, dtype=torch.bfloat16)
    made.load_state_dict(plain.state_dict())
    return made


def seconds(case: Case, count: int) -> float:
    """Time of one call, of `count` in a row after one that is not timed: caches are its own."""
    recipe = hybridq.autocast(recipe=case.recipe) if case.recipe else nullcontext()
    with torch.set_grad_enabled(case.grads), recipe:
        case.run()
        clock = _clock()
        start = clock()
        for _ in range(count):
            case.run()
        return (clock() - start) / count


def _clock() -> Callable[[], float]:
    """Return the thread's processor time, if there is one thread: others' work is not in it."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def measure(cases: list[Case], rounds: int) -> list[dict[str, object]]:
    """Return fastest and median time of every case, and its ratios to its yardstick."""
    counts = {}
    for case in cases:
        seconds(case, 10)
        once = min(seconds(case, 3) for _ in range(5))
        counts[case.name] = max(1, min(100, int(CHUNK / once)))
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            times[case.name].append(seconds(case, counts[case.name]))
    rows: list[dict[str, object]] = []
    for case in cases:
        mine, theirs = times[case.name], times[_named(case, cases)]
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "case": case.name,
                "yardstick": _named(case, cases),
                "fastest_us": round(min(mine) * 1e6, 2),
                "median_us": round(statistics.median(mine) * 1e6, 2),
                "ratio_of_fastest": round(min(mine) / min(theirs), 2),
                "ratio": round(middle, 2),
                "quartiles": [round(low, 2), round(high, 2)],
            }
        )
    return rows


def _named(case: Case, cases: list[Case]) -> str:
    return cases[0].name if case.yardstick == "operator" else case.yardstick


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    found = diagnose("cpu")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    groups = []
    if "quantize" in parts:
        groups.append([*floor(x), *quantizes(x)])
    if "linear" in parts:
        groups += [linears(size) for size in SIZES]
    rows = [row for group in groups for row in measure(group, options.rounds)]
    for row in rows:
        print(
            f"{row['case']:<52} {row['fastest_us']:>9} us  median {row['median_us']:>9} us  "
            f"{row['ratio_of_fastest']:>6}x of fastest, {row['ratio']:>6}x {row['quartiles']}"
        )
    result = {
        "what": "time of one eager call, and its ratio to the yardstick of the same turn",
        "clock": "processor time of the thread" if options.threads == 1 else "wall",
        "machine": found.machine.cpu,
        "versions": {key: found.versions[key] for key in ("hybridq", "torch", "python")},
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 1),
        "shape": [16, 32],
        "recipes": RECIPES,
        "rounds": options.rounds,
        "cases": rows,
    }
    day = datetime.date.today().isoformat()
    name = machine_slug()
    which = "" if set(parts) == set(PARTS) else "-".join(parts) + "-"
    path = Path(__file__).parent / "results" / f"host-{which}{name}-{options.threads}t-{day}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
