"""What plans of launches are made of: a launch, its tiles by descriptor, arguments they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

__all__ = ["FP8", "Launch", "Tiled", "added_arguments", "bits_of", "processors"]

#: Elements of FP8 codes as torch has them, by name.
FP8: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Tiled(NamedTuple):
    """A matrix that a kernel takes tiles of, by a tensor descriptor.

    Args:
        tensor: two axes, contiguous; begins at 16 bytes, as do its rows.
        block: rows and columns of a tile.
    """

    tensor: torch.Tensor
    block: tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Args:
        kernel: name of the kernel, a key of `launch.KERNELS`.
        grid: number of programs per axis.
        arguments: by name; a `Tiled` becomes a tensor descriptor.
        num_warps, num_stages: as Triton takes them.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)
    num_warps: int = 4
    num_stages: int = 3


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return BF16 as its bits: the interpreter has no BF16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; of the CPU, what the interpreter walks with."""
    if device.type != "cuda":
        return 4  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def added_arguments(
    bias: torch.Tensor | None, into: torch.Tensor | None, out: torch.Tensor
) -> dict[str, Any]:
    """Return the arguments that say what is added to a product, and where it goes."""
    return {
        "bias": out if bias is None else bits_of(bias),
        "bias_stride": 0 if bias is None else bias.stride(-1),
        "into": out if into is None else bits_of(into),
        "out": out,
        "BIAS": bias is not None,
        "IS_ADDED": into is not None,
    }
