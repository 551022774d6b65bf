"""Launches of kernels that Triton has compiled, without its Python around them.

Each call of a Triton kernel finds anew, argument by argument, for which of the compiled kernels it
is. Who launches the same kernel again knows: what is asked of an argument is kept beside the kernel
(`kind_of`), and where nothing differs the kernel's own launcher is called with addresses.

Source: `JITFunction.run` and `CompiledKernel.run` of Triton 3.6 to 3.9: what a kernel is compiled
for (a pointer's element and whether it is a multiple of 16; a descriptor's element and tile; a
number that is 1, is a multiple of 16, fits into 32 bits), and the launcher's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..inputs import made
from .plan_parts import Tiled

__all__ = ["ALIGNED", "Direct", "is_launchable", "kind_of"]

#: What Triton asks of an address.
ALIGNED: Final = 16
_HALF: Final = 1 << 31
#: What the launcher of a compiled kernel is given beside the arguments of the kernel.
_PARTS: Final = ("run", "function", "packed_metadata")


def kind_of(given: Any) -> Any:
    """Return what a compiled kernel depends on of one argument that is no constant of it.

    Args:
        given: a tensor, a matrix that a kernel takes tiles of, or a number.
    """
    if type(given) is int:
        # Never equal to 1, which is a kind of its own.
        return 1 if given == 1 else (4 if given % ALIGNED else 2) + (not -_HALF <= given < _HALF)
    if isinstance(given, Tiled):
        return given.tensor.dtype, given.block
    if isinstance(given, torch.Tensor):
        return given.dtype, made(given) % ALIGNED == 0
    return type(given), given


def is_launchable(kernel: Any) -> bool:
    """Return whether Triton returned a kernel whose launcher is known here.

    Args:
        kernel: what a launch returned; None of the interpreter.
    """
    return all(getattr(kernel, name, None) is not None for name in _PARTS)


class Direct:
    """Launches one compiled kernel.

    Args:
        kernel: as Triton returned it, for which `is_launchable` holds.
        grid: number of programs per axis.
    """

    __slots__ = ("_grid", "_kernel")

    def __init__(self, kernel: Any, grid: tuple[int, ...]) -> None:
        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]

    def __call__(self, arguments: Sequence[Any], stream: int) -> None:
        """Launch it, while nobody has asked Triton to be told of launches.

        Args:
            arguments: of the kernel in its order, tensors as addresses on the current device,
                descriptors of tiles as Triton has them.
            stream: handle of a stream of that device.
        """
        kernel = self._kernel
        # No metadata and no hooks: those are for whoever is told.
        own = (kernel.function, kernel.packed_metadata, None, None, None)
        kernel.run(*self._grid, stream, *own, *arguments)
