"""What this machine and this installation have, found out without starting any device.

A CUDA context costs memory and hundreds of milliseconds, so GPUs are asked of the driver's own
tool and never through torch. Both parsers are a few lines and need no extra: py-cpuinfo takes 1.7 s
for the same name and flags that /proc/cpuinfo gives in 4 ms, and without nvidia-ml-py installed
`doctor` would not know which GPU to ask about.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..kernels.cpu import backend as backend_cpu

__all__ = ["Core", "Gpu", "Machine", "read_core", "read_machine", "versions"]

#: Packages that hybridq uses where they are there, and peers that it is compared with.
_PACKAGES = (
    *("torch", "numpy", "triton", "rich", "typer", "matplotlib", "safetensors", "ml_dtypes"),
    *("gfloat", "torchao", "transformer_engine"),
)
#: CPU flags that decide which variant of the core and which BF16 product run.
_FLAGS = (
    *("sse4_2", "f16c", "fma", "avx", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"),
    *("avx512_fp16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16", "i8mm"),
)
_QUERY = ("name", "compute_cap", "memory.total", "driver_version")


@dataclass(frozen=True)
class Core:
    """The compiled core.

    Args:
        is_built: whether it can be imported.
        error: why not, if it cannot.
        variant: the variant in use, or "".
        build: what it says of its build: compiler, CUDA, variants, thread runtime, ...
    """

    is_built: bool
    error: str
    variant: str
    build: dict[str, Any]


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver names it; all strings."""

    name: str
    compute_capability: str
    memory: str
    driver: str


@dataclass(frozen=True)
class Machine:
    """The machine.

    Args:
        system: operating system and architecture.
        cpu: the processor's name.
        capability: what torch calls the CPU's instruction set.
        flags: CPU features that matter here.
        cores: logical cores that this process may use.
        threads: threads that torch uses.
        gpus: GPUs that the driver lists.
        gpu_note: why the list is empty, or why torch cannot use it; "" otherwise.
        accelerator: the kind of device that torch is built for, if it is none of CUDA, as "mps";
            "" otherwise.
    """

    system: str
    cpu: str
    capability: str
    flags: tuple[str, ...]
    cores: int
    threads: int
    gpus: tuple[Gpu, ...]
    gpu_note: str
    accelerator: str = ""


def versions() -> dict[str, str]:
    """Return package name to version, "" for one that is not installed."""
    found = {"hybridq": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    found["torch"] = torch.__version__  # with the build's suffix
    return found


def read_core() -> Core:
    """Return what is known of the compiled core, which may be missing."""
    core = backend_cpu.core
    if core is None:
        return Core(False, backend_cpu.core_error, "", {})
    return Core(True, "", core.variant(), dict(core.build_info()))


def read_machine() -> Machine:
    """Return what this machine has."""
    name, flags = _cpu()
    gpus, note = _gpus()
    if gpus and torch.version.cuda is None and torch.version.hip is None:
        note = f"torch {torch.__version__} is built without CUDA and cannot use them"
    return Machine(
        f"{platform.system()} {platform.release()} {platform.machine()}",
        name,
        torch.backends.cpu.get_cpu_capability(),
        flags,
        _cores(),
        torch.get_num_threads(),
        gpus,
        note,
        _accelerator(),
    )


def _accelerator() -> str:
    own = torch.accelerator.current_accelerator()
    return "" if own is None or own.type == "cuda" else own.type


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and those of its features that matter here."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    have = set((fields.get("flags") or fields.get("features") or "").split())
    return name, tuple(flag for flag in _FLAGS if flag in have)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the NVIDIA GPUs that the driver lists, or none and the reason."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "none found: there is no nvidia-smi here"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"none found: nvidia-smi does not answer ({error})"
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip().splitlines()
        return (), f"none found: nvidia-smi says {text[0] if text else done.returncode!r}"
    gpus = []
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_QUERY):
            gpus.append(Gpu(*cells))
    return tuple(gpus), "" if gpus else "none found: nvidia-smi lists none"
