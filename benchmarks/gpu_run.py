"""`make gpu`: build for this machine's GPU, test on it, benchmark, one table; under nine minutes.

The package goes into a folder of its own (--site), with what the Python in use already has: no
network, no environment. Failing tests do not stop the benchmarks; the exit status tells of both.
Without a GPU: one line, and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Seconds: all of it, of tests at most, and what the benchmarks need at least.
TOTAL, TESTS, BENCHMARKS = 480, 210, 60
_NEEDED = ("pybind11", "scikit_build_core", "pytest", "hypothesis", "numpy")


def gpu_reason() -> str | None:
    """Return None if torch can use a GPU here, else why not, in one line."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error}); make gpu GPU_PYTHON=..."
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use was found"
    missing = [name for name in _NEEDED if find_spec(name) is None]
    return f"{sys.executable} lacks {', '.join(missing)}" if missing else None


def architecture() -> str:
    """Return the GPU's architecture as CMake names it; with its own instructions from 9.0 on."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}-real"


def build_command(site: Path, arch: str) -> list[str]:
    """Return the command that builds the package into `site`."""
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-build-isolation", "--no-deps", "--no-index", "--upgrade", "--no-compile"),
        *("--root-user-action=ignore", "--target", str(site)),
        # Not AUTO, which would build without kernels where it finds no compiler.
        "--config-settings=cmake.define.HYBRIDQ_CUDA=ON",
        f"--config-settings=cmake.define.HYBRIDQ_CUDA_ARCHS={arch}",
        f"--config-settings=build-dir={site.parent / 'gpu-build'}",
        ".",
    ]


def _workers() -> list[str]:
    """Return pytest's option for several processes: half of a test's time is the CPU's side."""
    if find_spec("xdist") is None:
        return []
    return ["-n", str(max(1, min(6, (os.cpu_count() or 2) // 2)))]


def read_tests(file: Path) -> dict[str, Any]:
    """Return what pytest's XML says: counts, the failures, and which kernels passed their test.

    It is written at the end: without it pytest did not come to its end.
    """
    found: dict[str, Any] = {
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "failures": [],
        "kernels": {},
        "is_complete": file.exists(),
    }
    if not file.exists():
        return found
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            found["failures"].append(f"{case.get('classname')}::{case.get('name')}"[:200])
        elif (skip := case.find("skipped")) is not None:
            outcome = "skipped"
            if "no time left" in (skip.get("message") or ""):
                found["is_complete"] = False
        found[outcome] += 1
        for item in case.iter("property"):
            if item.get("name") == "kernel":
                found["kernels"][item.get("value")] = outcome
    return found


def _run(command: list[str], seconds: float, environment: dict[str, str]) -> int:
    """Run a command from the root; 124 if it took too long."""
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, timeout=max(1.0, seconds), check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def _folders(given: str) -> list[str]:
    folders = [ROOT / "benchmarks" / "results", *([Path(given)] if given else [])]
    return [f"--results={folder.resolve()}" for folder in folders]


def main(arguments: list[str] | None = None) -> int:
    """Build, test, benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "gpu-site")
    parser.add_argument("--results", default="", help="a second folder for what is measured")
    parser.add_argument("--facts", action="store_true", help="the facts instead of the benchmarks")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--pytest-args", default="")
    parser.add_argument("--bench-args", default="")
    options = parser.parse_args(arguments)
    reason = gpu_reason()
    if reason is not None:
        print(f"gpu: needs an NVIDIA GPU and its tools: {reason}")
        return 2
    start = time.monotonic()

    def left() -> float:
        return TOTAL - (time.monotonic() - start)

    site = options.site.resolve()
    environment = dict(os.environ)
    status = _run(build_command(site, architecture()), left(), environment)
    print(f"gpu: built in {time.monotonic() - start:.0f} s, status {status}", flush=True)
    if status != 0:
        return 1
    environment["PYTHONPATH"] = str(site)
    statuses = []
    bench = [sys.executable, "benchmarks/gpu.py", *_folders(options.results)]
    if options.facts:
        bench[1] = "benchmarks/gpu_facts.py"
    elif not options.no_tests:
        report = site.parent / "gpu-tests.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", f"--junitxml={report}"]
        command += [*_workers(), *shlex.split(options.pytest_args)]
        seconds = max(0.0, min(TESTS, left() - BENCHMARKS))
        # What has not begun by then is skipped; what hangs is ended.
        command.append(f"--gpu-seconds={0.8 * seconds:.0f}")
        statuses.append(_run(command, seconds, environment))
        summary = report.with_suffix(".json")
        summary.write_text(json.dumps(read_tests(report)))
        bench.append(f"--tests={summary}")
    bench += [f"--budget={max(20.0, left() - 25):.0f}", *shlex.split(options.bench_args)]
    # More than it plans with: what is measured must not be lost to the last case.
    statuses.append(_run(bench, left() + 50, environment))
    print(f"gpu: {time.monotonic() - start:.0f} s in all; tests, benchmarks: {statuses}")
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
