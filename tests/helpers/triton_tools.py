"""Triton without a GPU: kernels in the interpreter, and compiled ahead of time.

The interpreter has to be chosen before Triton is imported, and torch.compile imports Triton too: so
interpreted kernels run in a process of their own, which lives as long as its `Worker`.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MISSING = None if find_spec("triton") else "triton is not installed (pip install triton)"


def interpreter_reason() -> str | None:
    """Return None if the installed Triton's interpreter can run loops, else why not."""
    import numpy

    new = tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 7)
    if new or tuple(int(part) for part in numpy.__version__.split(".")[:2]) < (2, 4):
        return None
    return "Triton's interpreter before 3.7 reads scalars in a way that NumPy 2.4 has removed"


def _enter(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import numpy as np

    np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of inf and NaN


def _call(module: str, function: str, args: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(module), function)(*args)


class Worker:
    """A process with environment variables of its own, set before Triton is imported there."""

    def __init__(self, **environment: str) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_enter, initargs=(environment,)
        )

    def __call__(self, module: str, function: str, *args: Any) -> Any:
        """Return what `module.function(*args)` returns there."""
        return self._pool.submit(_call, module, function, args).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


@dataclass
class Compiled:
    """What Triton and ptxas made of one launch."""

    ptx: str
    cubin: bytes
    folder: Path
    codes: int = 0  # of the left operand, per thread and turn of the main loop

    def read(self) -> None:
        """Run the binary tools, so that another process need not have them."""
        _ = self.usage, self.sass

    @cached_property
    def usage(self) -> dict[str, int]:
        """Registers and memory, by the names that cuobjdump gives them."""
        text = _binutil("cuobjdump", "--dump-resource-usage", self._file)
        line = next(line for line in text.splitlines() if "REG:" in line)
        return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}

    @cached_property
    def _file(self) -> str:
        path = self.folder / "kernel.cubin"
        path.write_bytes(self.cubin)
        return str(path)

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.usage["REG"]

    @property
    def spilled(self) -> int:
        """Bytes of stack and local memory per thread."""
        return self.usage["STACK"] + self.usage["LOCAL"]

    @cached_property
    def sass(self) -> list[str]:
        """Machine instructions without addresses and predicates, and labels (`.L_x_1:`)."""
        found = []
        for line in _binutil("nvdisasm", "-c", self._file).splitlines():
            label = re.match(r"(\.L\w+):", line)
            code = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
            if label:
                found.append(f"{label[1]}:")
            elif code:
                found.append(re.sub(r"^@!?U?P\w+\s+", "", code[1]))
        return found

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each opcode stands in the code, by its first name."""
        return Counter(line.split()[0].split(".")[0] for line in self.sass)

    @cached_property
    def loop(self) -> list[str]:
        """Instructions of the shortest loop that holds a tensor core instruction."""
        labels, found = {}, []
        for i, line in enumerate(self.sass):
            if line.endswith(":"):
                labels[line[:-1]] = i
            back = re.match(r"BRA.*`\((\.L\w+)\)", line)
            if back and back[1] in labels:
                body = [one for one in self.sass[labels[back[1]] : i + 1] if not one.endswith(":")]
                if any("MMA" in inner for inner in body):
                    found.append(body)
        return min(found, key=len)

    @property
    def loop_size(self) -> int:
        """How many they are."""
        return len(self.loop)


def _binutil(name: str, *args: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *args], capture_output=True, text=True, check=True).stdout


def compile_for(launch: Any, capability: int, folder: Path) -> Compiled:
    """Return what a launch of `hybridq.kernels.triton.plan` compiles to, as on a GPU.

    Triton's own launch path runs, with a driver that only says which GPU there is: arguments are
    specialized (alignment, ones) exactly as in a real launch.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from hybridq.kernels.triton.launch import KERNELS, arguments, options

    class _Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # Triton keeps compiled kernels by device

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(_Driver())  # type: ignore[arg-type]
    kernel = KERNELS[launch.kernel]
    made = kernel.run(grid=launch.grid, warmup=True, **arguments(launch), **options(launch))
    return Compiled(made.asm["ptx"], made.asm["cubin"], folder)
