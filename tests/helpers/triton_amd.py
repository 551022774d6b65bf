"""Launches compiled ahead of time for AMD's chips, which Triton does without one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import triton_launches
from hybridq.kernels.triton.form import Form, portable_form

#: Lanes of a warp.
_WARP = 64


@dataclass
class CompiledAmd:
    """What Triton and LLVM made of one launch.

    Args:
        registers: vector registers of a lane, those of accumulators included.
        spilled: registers that do not fit, and bytes of a lane's private memory.
        shared: bytes of a program's shared memory.
        products: matrix instructions, by name.
        size: instructions.
    """

    registers: int
    spilled: int
    shared: int
    products: Counter[str]
    size: int


def compile_launch(launch: Any, arch: str) -> CompiledAmd:
    """Return what a launch of `hybridq.kernels.triton.plan` compiles to for `gfx942` or such."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from hybridq.kernels.triton.launch import KERNELS, arguments, options

    class _Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("hip", arch, _WARP)

        def get_current_device(self) -> int:
            return int(arch.removeprefix("gfx"))  # Triton keeps compiled kernels by device

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(_Driver())  # type: ignore[arg-type]
    forms = {
        name: portable_form(given) if isinstance(given, Form) else given
        for name, given in launch.arguments.items()
    }
    launch = replace(launch, arguments=forms, num_warps=launch.num_warps // 2 or 1, num_stages=2)
    kernel = KERNELS[launch.kernel]
    made = kernel.run(grid=launch.grid, warmup=True, **arguments(launch), **options(launch))
    text: str = made.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

    names = re.findall(r"^\s+([vsdb]\w+)(?=\s)", text, re.M)
    return CompiledAmd(
        number("vgpr_count") + number("agpr_count"),
        number("vgpr_spill_count") + number("private_segment_fixed_size"),
        made.metadata.shared,
        Counter(name for name in names if "mfma" in name),
        len(names),
    )


def compiled(arch: str, function: str, *args: Any) -> CompiledAmd:
    """Return what a function of `triton_launches` launches, for an AMD chip."""
    found: list[CompiledAmd] = []
    own = triton_launches._compile
    triton_launches._compile = lambda launch, *_: found.append(compile_launch(launch, arch))  # type: ignore[assignment,func-returns-value]
    try:
        getattr(triton_launches, function)(None, 0, *args)
    finally:
        triton_launches._compile = own
    return found[0]
