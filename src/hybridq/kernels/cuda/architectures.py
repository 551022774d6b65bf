"""Which GPUs the kernels of a build run on."""

from __future__ import annotations

from collections.abc import Sequence

from ..inputs import Chip, described

__all__ = ["chip_reason"]


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


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code for `architecture`, such as "sm_90a", runs on a chip: see CUDA's guide, 5.1.

    Code for one chip runs on later minor revisions of the same generation; with the suffix "a" on
    that chip alone.
    """
    number = architecture.removeprefix("sm_")
    if number.endswith("a"):
        return int(number[:-1]) == 10 * major + minor
    return int(number) // 10 == major and int(number) % 10 <= minor
