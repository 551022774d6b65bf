"""Addresses for kernels about to be launched: `memory`, and what is told of each to a launcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...formats import PlaneSpec
from ..inputs import addresses as memory

__all__ = ["Addresses"]


class Addresses:
    """How `GpuKernels` takes addresses; the emulator's kernels hear of each by `pointer`."""

    def pointer(self, tensor: torch.Tensor | None, written: bool = False) -> int:
        """Return the tensor's address for the kernel about to be launched, 0 for None.

        Args:
            tensor: made for the launch, or checked by one of the functions below.
            written: the kernel writes it.
        """
        return 0 if tensor is None else memory.made(tensor)

    def pointers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the addresses of tensors that are read, which were made or checked.

        Args:
            tensors: on one device.
        """
        return [*map(memory.made, tensors)]

    def given(
        self,
        what: str,
        tensor: torch.Tensor | None,
        dtype: torch.dtype,
        count: int,
        device: torch.device,
    ) -> int:
        """Return `memory.given` of what the kernel reads, 0 for None."""
        if tensor is not None:
            memory.given(what, tensor, dtype, count, device)
        return self.pointer(tensor)

    def place(
        self,
        what: str,
        out: torch.Tensor,
        dtype: torch.dtype,
        count: int,
        device: torch.device,
    ) -> int:
        """Return `memory.given` of what the kernel writes."""
        memory.given(what, out, dtype, count, device)
        return self.pointer(out, True)

    def along(
        self, what: str, values: torch.Tensor | None, count: int, device: torch.device
    ) -> tuple[int, int, str] | None:
        """Return address, step and dtype of `count` values or of one for all, None for None.

        Args:
            what: of which function it is what, for the error.
            values: `[count]` or `[1]`, of any step.
            count: length of the axis that they lie along.
            device: where they must be.

        Raises:
            ValueError: there are not as many, or they are elsewhere or of no such dtype.
        """
        if values is None:
            return None
        name, size = memory.DTYPES.get(values.dtype), values.numel()
        if name is None or values.device != device or size not in (1, count) or values.dim() != 1:
            raise ValueError(
                f"{what} must be [{count}] or [1] in float32, bfloat16 or float16 on {device}, got "
                f"{values.dtype} {tuple(values.shape)} on {values.device}"
            )
        return self.pointer(values), 0 if size == 1 else values.stride(0), name

    def matrix(
        self, what: str, x: torch.Tensor, device: torch.device, only: str | None = None
    ) -> tuple[int, str]:
        """Return `memory.matrix` of what the kernel reads."""
        _, name = memory.matrix(what, x, device, only=only)
        return self.pointer(x), name

    def plane(
        self,
        what: str,
        buffers: list[torch.Tensor],
        spec: PlaneSpec,
        rows: int,
        cols: int,
        device: torch.device,
    ) -> list[int]:
        """Return `memory.plane` of what the kernel reads."""
        memory.plane(what, buffers, spec, rows, cols, device)
        return [*map(self.pointer, buffers), *[0] * (3 - len(buffers))]

    def statistic(
        self,
        spec: PlaneSpec,
        rows: int,
        stat: torch.Tensor | None,
        is_new: bool,
        device: torch.device,
        groups: int | None = None,
    ) -> int:
        """Return the address of a plane's amax: new memory that is written, or what was given.

        Args:
            spec: of the plane.
            rows: of the plane's own matrix.
            stat: the memory.
            is_new: it is written.
            device: where it must be.
            groups: how many have one of their own, or None: it is of the tensor or its rows.
        """
        if is_new:
            return self.pointer(stat, True)
        count = spec.stat_shape(rows)[0] if groups is None else groups
        return self.given("encode: a statistic", stat, torch.float32, count, device)

    def seed(self, spec: PlaneSpec, seed: torch.Tensor | None, device: torch.device) -> int:
        """Return the address of the seed of one plane, 0 where nothing is stochastic."""
        seed = seed if spec.stochastic else None
        return self.given("encode: seed", seed, torch.int64, 1, device)
