"""`make gpu`: build for this machine's GPU, test on it, benchmark; each call under ten minutes.

    make gpu                    # build, tests, benchmarks, one table
    make gpu PLAN=first PART=1  # the first hour on a chip, in three calls: PART=1, 2, 3
    make gpu STEPS="tests kernels|measure cast"  # of a plan the steps that match, and the build
    make gpu-facts              # what the chip itself does

The package goes into a folder of its own (--site), with what the Python in use already has: no
network, no environment. What is known is in --results after every test and every case, whatever
ends the run: `run.json` (which steps ended how), `log.txt`, `tests.xml` with tracebacks, and the
figures. Failing steps do not stop the others; the exit status tells of them. Without a GPU, or
without what a build needs: one line, and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_bench import outcomes, plans, prebuilt, result
from gpu_bench.steps import Outcome, Run, write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Seconds of a run at most.
TOTAL = 560
_NEEDED = ("pybind11", "scikit_build_core", "pytest", "hypothesis", "numpy")


def _nvcc() -> str | None:
    places = (os.environ.get("CUDACXX", ""), "nvcc", "/usr/local/cuda/bin/nvcc")
    return next((found for place in places if place and (found := shutil.which(place))), None)


def gpu_reason() -> str | None:
    """Return None if torch can use a GPU here and the package can be built, else why not."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}); make gpu GPU_PYTHON=..."
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use was found"
    missing = [name for name in _NEEDED if find_spec(name) is None]
    missing += [name for name in ("cmake", "ninja", "c++") if shutil.which(name) is None]
    if _nvcc() is None:
        missing.append("nvcc (on PATH, in CUDACXX or in /usr/local/cuda/bin)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        missing.append(f"{header}")
    return f"a build with {sys.executable} lacks {', '.join(missing)}" if missing else None


def architecture() -> str:
    """Return the GPU's architecture as CMake names it; with its own instructions from 9.0 on."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"


class Keeper:
    """Puts what the steps leave in pieces together, after each of them.

    Args:
        place: where the steps write, and where the results go.
        command: that started the run, for the results.
    """

    def __init__(self, place: plans.Place, command: str) -> None:
        self._place, self._command = place, command
        self._test_outcomes: list[Outcome] = []

    def __call__(self, outcome: Outcome) -> None:
        """Write all that is known now."""
        if outcome.name.startswith("tests "):
            self._test_outcomes.append(outcome)
        tests = None
        if self._place.outcomes.exists():
            known = outcomes.read(self._place.outcomes)
            outcomes.write_junit(known, self._place.results / "tests.xml")
            # One that failed came to its end; one that was ended did not.
            is_complete = all(one.what in ("ok", "failed") for one in self._test_outcomes)
            tests = outcomes.counts(known, is_complete)
            write_json(self._place.results / "tests.json", tests)
        for kind in ("gpu", "gpu-facts"):
            parts = self.parts(kind)
            if parts:
                made = result.merge(parts, self._command)
                if kind == "gpu":
                    made["tests"] = tests
                result.save(made, (self._place.results, RESULTS), kind)

    def parts(self, kind: str) -> list[dict[str, Any]]:
        """Return the results of the processes that have measured, in their order."""
        folder = self._place.parts / ("bench" if kind == "gpu" else "facts")
        files = sorted(folder.glob("*/*.json"), key=lambda file: file.stat().st_ctime)
        return [json.loads(file.read_text()) for file in files]


def main(arguments: list[str] | None = None) -> int:
    """Do the steps of a plan; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "gpu-site")
    parser.add_argument("--results", type=Path, help="default: build/gpu-results/<plan>")
    parser.add_argument("--plan", choices=sorted({name for name, _ in plans.PLANS}), default="all")
    parser.add_argument("--part", type=int, default=1, help="of a plan of several calls")
    parser.add_argument("--prebuilt", type=Path, help="the kernels: what make gpu-library made")
    parser.add_argument("--wheel", type=Path, help="the package: what make gpu-wheel made")
    parser.add_argument("--seconds", type=float, default=TOTAL)
    parser.add_argument("--steps", default="", help="a pattern: steps whose names have it")
    parser.add_argument("--pytest-args", default="")
    parser.add_argument("--bench-args", default="")
    options = parser.parse_args(arguments)
    plan = plans.PLANS.get((options.plan, options.part))
    if plan is None:
        known = sorted(part for name, part in plans.PLANS if name == options.plan)
        parser.error(f"--part: plan {options.plan} has {known}, got {options.part}")
    reason = gpu_reason()
    arch = "" if reason else architecture()
    if reason is None and options.prebuilt is not None:
        reason = prebuilt.reason(options.prebuilt.resolve(), arch)
    if reason is None and options.wheel is not None:
        reason = prebuilt.wheel_reason(options.wheel, arch)
    if reason is not None:
        print(f"gpu: needs an NVIDIA GPU and its tools: {reason}")
        return 2
    name = f"{options.plan}-{options.part}" if options.part > 1 else options.plan
    folder = (options.results or ROOT / "build" / "gpu-results" / name).resolve()
    work = options.site.resolve().parent / "gpu-work"
    shutil.rmtree(work, ignore_errors=True)
    place = plans.Place(
        results=folder,
        parts=work / "parts",
        outcomes=work / "outcomes.jsonl",
        site=options.site.resolve(),
        build=options.site.resolve().parent / "gpu-build",
        arch=arch,
        prebuilt=options.prebuilt.resolve() if options.prebuilt else None,
        wheel=options.wheel.resolve() if options.wheel else None,
        pytest_args=tuple(shlex.split(options.pytest_args)),
        bench_args=tuple(shlex.split(options.bench_args)),
    )
    place.parts.mkdir(parents=True)
    command = f"make gpu PLAN={options.plan} PART={options.part}"
    environment = {
        **os.environ,
        "CUDACXX": _nvcc() or "",
        "PYTHONPATH": str(place.site),
        "PYTHONUNBUFFERED": "1",
    }
    about = {
        "command": command,
        "date": result.today(),
        "machine": result.machine("cuda"),
        "sources of the kernels": prebuilt.sources(),
    }
    keeper = Keeper(place, command)
    run = Run(folder, ROOT, options.seconds, about, environment, keeper)
    steps = [s for s in plan(place) if s.is_needed or re.search(options.steps, s.name)]
    is_good = run.steps(steps)
    measured = keeper.parts("gpu")
    if measured:
        print(result.render(result.merge(measured, command)))
    print(f"gpu: kept in {folder}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
