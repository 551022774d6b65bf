"""A result: the record of a run, its check, and the one table that is printed."""

from __future__ import annotations

import datetime
import math
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .steps import write_json

__all__ = ["SCHEMA", "check", "file_name", "machine", "merge", "render", "save", "versions"]

#: Raised when a field changes its meaning, or comes in.
SCHEMA = 2

_TEXT, _NUMBER = (str,), (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))
#: Fields of a case that was measured, and their types.
_MEASURED: dict[str, tuple[type, ...]] = {
    "section": _TEXT,
    "name": _TEXT,
    "shape": (list,),
    "dtype": _TEXT,
    "time_us": _NUMBER,
    "low_us": _NUMBER,
    "high_us": _NUMBER,
    "rounds": (int,),
    "buffers": (int,),
    "baseline": _TEXT,
    "ratio": _OPTIONAL_NUMBER,
    "goal": _OPTIONAL_NUMBER,
    "floor_us": _OPTIONAL_NUMBER,
    "predicted_us": _OPTIONAL_NUMBER,
    "formula": _TEXT,
    "nbytes": (int,),
    "tb_per_s": _OPTIONAL_NUMBER,
    "tflops": _OPTIONAL_NUMBER,
    "host_limited": (bool,),
    "is_headline": (bool,),
    "kernels": (dict,),
    "backend": _TEXT,
    "note": _TEXT,
}
#: Fields of a case that was not.
_LEFT_OUT = {"section": _TEXT, "name": _TEXT, "shape": (list,), "dtype": _TEXT, "reason": _TEXT}
_TOP: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "date": _TEXT,
    "command": _TEXT,
    "machine": (dict,),
    "versions": (dict,),
    "cases": (list,),
    "left_out": (list,),
    "tests": (dict, type(None)),
}


def machine(device: str) -> dict[str, Any]:
    """Return what ran: the GPU's name and sizes, or the processor's name on a dry run."""
    if device != "cuda":
        return {"name": platform.processor() or platform.machine(), "device": device}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "device": device,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_nbytes": properties.total_memory,
        # Where torch does not say, as much as the largest chips have.
        "l2_nbytes": getattr(properties, "L2_cache_size", 128 << 20),
        "driver": _driver(),
        "gpus": torch.cuda.device_count(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def versions() -> dict[str, str]:
    """Return the versions of what was measured, and of the tools that built it."""
    # Not at the top: what starts the build reads results, and has no package yet.
    import hybridq
    from hybridq.kernels.cpu import backend as backend_cpu

    found = {
        "hybridq": hybridq.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }
    for name in ("triton", "torchao", "transformer_engine", "deep_gemm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    core = backend_cpu.core
    if core is not None:
        info = core.build_info()
        found["kernels"] = f"{info.get('cuda_version')} for {info.get('cuda_architectures')}"
    return found


def _wrong(record: Any, fields: dict[str, tuple[type, ...]], where: str) -> list[str]:
    if not isinstance(record, dict):
        return [f"{where}: must be an object, got {type(record).__name__}"]
    found = [f"{where}: {name} is missing" for name in fields if name not in record]
    for name, types in fields.items():
        value = record.get(name)
        if name not in record:
            continue
        # bool is an int to Python, and no number to us.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            found.append(f"{where}: {name} must be {types[0].__name__}, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{where}: {name} must be finite, got {value}")
    return found


def check(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a result's fields, nothing if it is as it should be."""
    found = _wrong(result, _TOP, "result")
    if found:
        return found
    if result["schema"] != SCHEMA:
        return [f"result: schema must be {SCHEMA}, got {result['schema']}"]
    for i, case in enumerate(result["cases"]):
        found += _wrong(case, _MEASURED, f"case {i}")
    for i, case in enumerate(result["left_out"]):
        found += _wrong(case, _LEFT_OUT, f"left out {i}")
    names = [
        (case.get("section"), case.get("name"), *case.get("shape", ()), case.get("dtype"))
        for case in result["cases"]
    ]
    found += [f"case {name} is there twice" for name in set(names) if names.count(name) > 1]
    return found


def file_name(result: dict[str, Any], kind: str = "gpu") -> str:
    """Return `gpu-<machine>-<date>.json`."""
    name = re.sub(r"[^a-z0-9]+", "-", result["machine"]["name"].lower()).strip("-")
    return f"{kind}-{name}-{result['date'][:10]}.json"


def today() -> str:
    """The date and time of a result."""
    return datetime.datetime.now().isoformat(timespec="seconds")


def save(result: dict[str, Any], folders: Iterable[Path], kind: str = "gpu") -> list[Path]:
    """Write a result into each folder; return the files."""
    files = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / file_name(result, kind)
        write_json(file, result)
        files.append(file)
    return files


def merge(parts: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return the result of several processes as one: their cases, or their facts.

    Args:
        parts: results of one machine, at least one.
        command: what started them all.
    """
    made = {**parts[0], "command": command, "date": min(part["date"] for part in parts)}
    for name in ("cases", "left_out"):
        if name in made:
            made[name] = [case for part in parts for case in part[name]]
    if "facts" in made:
        made["facts"] = {name: fact for part in parts for name, fact in part["facts"].items()}
    return made


def _cells(case: dict[str, Any]) -> tuple[str, ...]:
    ratio, goal = case["ratio"], case["goal"]
    if case["section"] == "host" and ratio is not None:
        ratio = 1 / ratio  # how many times nn.Linear's host time: the goal is an upper limit
    mark = ""
    if ratio is not None and goal is not None:
        is_met = ratio <= goal if case["section"] == "host" else ratio >= goal
        mark = "ok" if is_met else "below" if case["section"] != "host" else "above"
    rate = case["tb_per_s"], case["tflops"]
    return (
        case["section"],
        case["name"] + (" *" if case["host_limited"] else ""),
        "x".join(str(size) for size in case["shape"]),
        f"{case['time_us']:.1f}",
        f"{rate[0]:.2f} TB/s" if rate[0] else f"{rate[1]:.0f} TFLOP/s" if rate[1] else "",
        "" if ratio is None else f"{ratio:.2f}",
        "" if goal is None else f"{goal:.2f}",
        mark,
        *(
            "" if time is None else f"{time:.1f}"
            for time in (case["floor_us"], case["predicted_us"])
        ),
    )


def render(result: dict[str, Any], limit: int = 90) -> str:
    """Return the short table of a result: its headlines."""
    head = ("what", "case", "shape", "us", "rate", "ratio", "goal", "", "floor", "predicted")
    rows = [head, *(_cells(case) for case in result["cases"] if case["is_headline"])]
    cut = len(rows) - 1 - limit
    rows = rows[: limit + 1]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if cut > 0:
        lines.append(f"and {cut} more in the file")
    lines.append(
        f"{result['machine']['name']}: {len(result['cases'])} cases measured, "
        f"{len(result['left_out'])} left out"
    )
    if any(case["predicted_us"] is not None for case in result["cases"]):
        lines.append("predicted: calculated before the run, from the formula in the file")
    if any(case["host_limited"] for case in result["cases"]):
        lines.append("* the host may have been slower than the device")
    tests = result["tests"]
    if tests is not None:
        counts = ", ".join(f"{tests[name]} {name}" for name in ("passed", "failed", "skipped"))
        lines.append(f"tests: {counts}{'' if tests['is_complete'] else '; not finished in time'}")
    return "\n".join(lines)
