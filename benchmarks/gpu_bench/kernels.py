"""Which of the project's kernels a call launches: their names, and the profiler's word for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["ROOT", "kernels_of", "native_kernels", "split", "triton_kernels"]

ROOT = Path(__file__).resolve().parents[2]
_NATIVE = re.compile(r"^HQ_GLOBAL\s[^;{]*?(\w+)\((?:HQ_\w+\s+)?\w+ \w+\) \{", re.M)
_TRITON = re.compile(r"^@triton\.jit(?:\([^)]*\))?\ndef (\w+_kernel)\(", re.M)


def _found(folder: Path, pattern: str, names: re.Pattern[str]) -> dict[str, str]:
    found = {}
    for file in sorted(folder.glob(pattern)):
        for name in names.findall(file.read_text()):
            found[name] = str(file.relative_to(ROOT))
    return found


def native_kernels() -> dict[str, str]:
    """Return the CUDA kernels of the core: name to source file."""
    folder = ROOT / "csrc" / "cuda"
    found = _found(folder, "*.h", _NATIVE) | _found(folder, "*.cu", _NATIVE)
    return {name: file for name, file in found.items() if not file.endswith("/rt.h")}


def triton_kernels() -> dict[str, str]:
    """Return the Triton kernels: name to source file; those that a host launches."""
    return _found(ROOT / "src" / "hybridq" / "kernels" / "triton", "*.py", _TRITON)


def split(
    events: Iterable[tuple[str, float, float]], names: Sequence[str], known: set[str]
) -> dict[str, dict[str, float]]:
    """Return, for each call, its kernels and each one's share of the device time.

    Args:
        events: (name, start, time) of kernels; a spinning kernel goes before each call.
        names: of the calls, in their order.
        known: the project's kernels; others count as "other".

    Returns:
        Nothing at all where the profiler lost a marker.
    """
    found: list[dict[str, float]] = []
    for text, _, time in sorted(events, key=lambda event: event[1]):
        if "spin_kernel" in text:
            found.append({})
        elif found:
            name = next((word for word in re.findall(r"\w+", text) if word in known), "other")
            found[-1][name] = found[-1].get(name, 0.0) + time
    if len(found) != len(names):
        return {}
    return {
        name: {kernel: round(time / sum(times.values()), 3) for kernel, time in times.items()}
        for name, times in zip(names, found, strict=True)
        if sum(times.values())
    }


def kernels_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Return the kernels that each call launches on a GPU, in one session of the profiler."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls.values():
            torch.cuda._sleep(1000)
            call()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return split(events, list(calls), {*native_kernels(), *triton_kernels()})
