"""Which GPUs the kernels of a build run on, and what they take."""

from __future__ import annotations

from collections.abc import Sequence

from ..choice import OpQuery
from ..cpu import core_spec
from ..inputs import Chip, described
from ..inputs import addresses as memory
from .block_product import HOPPER
from .plane_forms import as_known

__all__ = ["chip_reason", "spec_reason"]


def chip_reason(chip: Chip | None, built: Sequence[str]) -> str | None:
    """Return None if kernels were compiled for a GPU, else what they are for.

    Args:
        chip: the GPU; None: the current one.
        built: what they were compiled for, such as `"sm_90a"`.
    """
    if chip is None:
        chip = described("cuda")
    if chip.is_rocm:
        return "the kernels are for NVIDIA GPUs, and this torch is built for ROCm"
    if chip.capability is None or any(_runs_on(text, *chip.capability) for text in built):
        return None
    major, minor = chip.capability
    return f"built for {', '.join(built)}, and this GPU is sm_{major}{minor}"


def spec_reason(query: OpQuery) -> str | None:
    """Return None if the core has kernels for the dtypes and specs of `query`, else why not."""
    is_product = query.op in ("multiply_blocks", "multiply_pair")
    if is_product and (query.chip is None or query.chip.capability != HOPPER):
        return f"multiplies on sm_90 only, got {query.chip}"
    if query.dtype not in memory.DTYPES and query.op not in ("transpose", "swizzle"):
        return f"takes float32, bfloat16 and float16, got {query.dtype}"
    for spec in (query.row, query.col):
        if spec is not None and (query.op != "amax" or spec.row_scaled):
            known = as_known(query.op, spec)
            reason = core_spec(known)[1] if known else f"has no {query.op} of {spec}"
            if reason is not None:
                return reason
    return None


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code for `architecture`, such as "sm_90a", runs on a chip: see CUDA's guide, 5.1.

    Code for one chip runs on later minor revisions of the same generation; with the suffix "a" on
    that chip alone.
    """
    number = architecture.removeprefix("sm_")
    if number.endswith("a"):
        return int(number[:-1]) == 10 * major + minor
    return int(number) // 10 == major and int(number) % 10 <= minor
