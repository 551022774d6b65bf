"""What `make gpu` does, step by step: everything in one call, or the first hour in three.

A plan is a function from a place to its steps, so that it can be read and tested without a GPU.
Limits are what a step may take at most; a run has its own, and leaves out what no longer fits.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from .steps import Step

__all__ = ["FACTS", "PLANS", "SECTIONS", "TEST_FILES", "Place"]

#: The order of tests: what all else stands on first; what compiles and what is large last.
TEST_FILES = (
    *("each_kernel", "kernels", "library", "gemm", "row_scales", "linear", "streams"),
    *("many", "prologue", "ragged", "offload", "graphs", "large"),
)
#: Tests that the third call of the first hour is for.
_LATE = ("graphs", "large", "offload", "ragged", "streams")
#: Sections of benchmarks, with their seconds.
SECTIONS = {
    "cast": 90,
    "gemm": 90,
    "linear": 60,
    "host": 20,
    "grouped": 40,
    "small_m": 30,
    "peer": 30,
}
#: Parts of the facts, with their seconds.
FACTS = {"copy": 20, "scaled": 60, "power": 40, "casts": 40, "triton": 60, "pipes": 60}
#: Warps that tile kernels leave room for, beside the one of every build.
WARPS = (8, 16, 32)
#: Casts that launch bounds are compared by.
_COMPARED = "encode (mxfp8|fp8_1x128|fp8_e4m3|nvfp4) (row|col|both)$|encode .*rht"
#: Kernels that ncu looks at: a name, the case that launches it and the kernel.
_PROFILED = (
    ("MXFP8 both", "cast", "encode mxfp8 both$", "EncodeTile"),
    ("NVFP4 stochastic", "cast", r"encode nvfp4 sr \| nvfp4 rht sr$", "EncodeTile"),
    ("fold", "cast", "fold mxfp8$", "FoldAligned"),
)


@dataclass(frozen=True)
class Place:
    """Where a run is and what it may use.

    Args:
        results: what is to be kept.
        parts: each process that measures has a folder here, in `bench` or `facts`.
        outcomes: a line of JSON per test.
        site: where the package is installed.
        build: the build's folder.
        arch: of the GPU, `"90a"`.
        prebuilt: the kernels as a library, or None to compile them.
        wheel: the package as a wheel that was built before, or None to build it.
        pytest_args, bench_args: the user's own.
    """

    results: Path
    parts: Path
    outcomes: Path
    site: Path
    build: Path
    arch: str
    prebuilt: Path | None = None
    wheel: Path | None = None
    pytest_args: tuple[str, ...] = ()
    bench_args: tuple[str, ...] = ()


def build(place: Place, warps: int = 0) -> Step:
    """Return the step that installs the package, with tile kernels for `warps` if it is not 0."""
    defines = {
        # Not AUTO, which would build without kernels where it finds no compiler.
        "HYBRIDQ_CUDA": "ON",
        "HYBRIDQ_CUDA_ARCHS": f"{place.arch}-real",
        "HYBRIDQ_CUDA_LIBRARY": str(place.prebuilt) if place.prebuilt and not warps else "",
        "HYBRIDQ_TILE_WARPS": str(warps or ""),
    }
    command: tuple[str, ...] = (
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-build-isolation", "--no-deps", "--no-index", "--upgrade", "--no-compile"),
        *("--root-user-action=ignore", "--target", str(_site(place, warps))),
    )
    if place.wheel is not None and not warps:
        return Step("install", (*command, str(place.wheel)), 60, least=10, is_needed=True)
    command = (
        *command,
        *(f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()),
        f"--config-settings=build-dir={place.build}",
        ".",
    )
    name = f"build, {warps} warps" if warps else "build"
    return Step(name, command, 240, least=30, is_needed=not warps)


def _site(place: Place, warps: int) -> Path:
    return place.site.with_name(f"{place.site.name}-{warps}") if warps else place.site


def _workers() -> tuple[str, ...]:
    """Return pytest's option for several processes: half of a test's time is the CPU's side."""
    if find_spec("xdist") is None:
        return ()
    return ("-n", str(max(1, min(12, (os.cpu_count() or 2) - 2))))


def tests(place: Place, names: Sequence[str] = TEST_FILES, seconds: float = 120) -> list[Step]:
    """Return a step for each file of tests; one that hangs costs the others nothing."""
    return [together(place, name, (name,), seconds) for name in names]


def together(place: Place, what: str, names: Sequence[str], seconds: float) -> Step:
    """Return one step for files of tests: processes that start once, where time is short."""
    return Step(
        f"tests {what}",
        (
            *(sys.executable, "-m", "pytest", "-q", "-m", "gpu"),
            *(f"tests/gpu/test_gpu_{name}.py" for name in names),
            *(f"--gpu-outcomes={place.outcomes}", *_workers()),
            # What has not begun by then is skipped; what hangs is ended.
            f"--gpu-seconds={0.8 * seconds:.0f}",
            *place.pytest_args,
        ),
        seconds,
    )


def sanitizer(tool: str, seconds: float = 75) -> Step:
    """Return the test of each kernel under a tool of compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    return Step(
        f"compute-sanitizer {tool}",
        (
            *(program or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--gpu-no-profiler"),
            *("-m", "gpu", "tests/gpu/test_gpu_each_kernel.py"),
        ),
        seconds,
        least=30,
        reason=None if program else "compute-sanitizer is not on PATH",
    )


def section(place: Place, name: str, seconds: float, *more: str, what: str = "") -> Step:
    """Return the step that measures one section, in a process of its own."""
    folder = place.parts / "bench" / f"{name}{f'-{what}' if what else ''}"
    return Step(
        f"measure {name}{f', {what}' if what else ''}",
        (
            *(sys.executable, "benchmarks/gpu.py", "--sections", name),
            *("--budget", f"{0.8 * seconds:.0f}", "--results", str(folder), *more),
            *place.bench_args,
        ),
        seconds,
        least=15,
    )


def facts(place: Place, names: Sequence[str] = tuple(FACTS)) -> list[Step]:
    """Return a step for each part of the facts."""
    return [
        Step(
            f"facts {name}",
            (
                *(sys.executable, "benchmarks/gpu_facts.py", "--only", name),
                *("--budget", f"{FACTS[name]}", "--results", str(place.parts / "facts" / name)),
                *place.bench_args,
            ),
            1.5 * FACTS[name],
            least=15,
        )
        for name in names
    ]


def variants(place: Place, seconds: float = 45) -> list[Step]:
    """Return the builds with other launch bounds, and the casts of each at three sizes."""
    found = []
    for warps in WARPS:
        label = f", {warps} warps"
        measure = section(
            place, "cast", seconds, "--cases", _COMPARED, "--label", label, what=f"{warps} warps"
        )
        path = {"PYTHONPATH": str(_site(place, warps))}
        found += [build(place, warps), replace(measure, environment=path)]
    return found


def profiles(place: Place, seconds: float = 40) -> list[Step]:
    """Return ncu's sections of three kernels; its tables are in the log."""
    program = shutil.which("ncu")
    return [
        Step(
            f"ncu {name}",
            (
                *(program or "ncu", "--clock-control", "none", "--set", "detailed"),
                *("--kernel-name", f"regex:{kernel}", "--launch-skip", "3", "--launch-count", "1"),
                *(sys.executable, "benchmarks/gpu.py", "--quick", "--rounds", "2"),
                *("--sections", where, "--cases", case, "--results", str(place.parts / "ncu")),
            ),
            seconds,
            least=20,
            reason=None if program else "ncu is not on PATH",
        )
        for name, where, case, kernel in _PROFILED
    ]


def everything(place: Place) -> list[Step]:
    """All tests, then every section, in one call."""
    return [
        build(place),
        *tests(place, seconds=60),
        *(section(place, name, seconds) for name, seconds in SECTIONS.items()),
    ]


def only_facts(place: Place) -> list[Step]:
    """What the chip itself does."""
    return [build(place), *facts(place)]


def first_bits(place: Place) -> list[Step]:
    """The first call: does every kernel run, is it right, and what does the chip do?"""
    early = [name for name in TEST_FILES[1:] if name not in _LATE]
    return [
        build(place),
        *tests(place, TEST_FILES[:1]),
        sanitizer("memcheck"),
        sanitizer("racecheck"),
        *tests(place, early, 90),
        *facts(place, ("copy", "scaled", "power")),
    ]


def first_speed(place: Place) -> list[Step]:
    """The second call: casts under several launch bounds, products, layers, the host, ncu."""
    return [
        build(place),
        section(place, "cast", 60, "--cases", _COMPARED),
        section(place, "gemm", 80),
        section(place, "linear", 60),
        section(place, "host", 20),
        *variants(place),
        *profiles(place),
    ]


def first_rest(place: Place) -> list[Step]:
    """The third call: graphs, large and ragged tensors, two streams, groups, peers, the table."""
    return [
        build(place),
        *tests(place, _LATE, 90),
        section(place, "grouped", 50),
        section(place, "small_m", 40),
        section(place, "peer", 40),
        *facts(place, ("triton", "pipes")),
        section(place, "cast", 60),
        section(place, "gemm", 60, "--quick"),
    ]


def short_bits(place: Place) -> list[Step]:
    """Five minutes: is every kernel right, is what stands on it, and how fast is what most use?"""
    return [
        build(place),
        together(place, "kernels", TEST_FILES[:3], 90),
        together(place, "products and layers", TEST_FILES[3:], 110),
        *facts(place, ("copy",)),
        section(place, "cast", 40, "--quick"),
        section(place, "gemm", 40, "--quick"),
        section(place, "linear", 40),
        section(place, "host", 15),
    ]


def short_speed(place: Place) -> list[Step]:
    """Five minutes: how fast are casts, products, groups, layers and peers?"""
    return [
        build(place),
        section(place, "cast", 60),
        section(place, "gemm", 70),
        section(place, "grouped", 40),
        section(place, "linear", 40),
        section(place, "host", 15),
        section(place, "small_m", 30),
        section(place, "peer", 25),
    ]


#: Name and part to the steps.
PLANS: dict[tuple[str, int], Callable[[Place], list[Step]]] = {
    ("all", 1): everything,
    ("facts", 1): only_facts,
    ("first", 1): first_bits,
    ("first", 2): first_speed,
    ("first", 3): first_rest,
    ("short", 1): short_bits,
    ("short", 2): short_speed,
}
