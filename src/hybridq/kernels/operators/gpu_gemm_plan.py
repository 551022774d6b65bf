"""How planes of two specs are multiplied on a GPU: chosen once for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ..choice import GemmArgs, Operand, OpQuery, cached_choice, select
from ..inputs import Chip, chip_of

__all__ = ["GpuGemmPlan", "gpu_gemm_plan", "gpu_run"]


class GpuGemmPlan(NamedTuple):
    """How planes of two specs are multiplied on one device that is no CPU.

    Args:
        a, b: the operands' specs, of no open dtype.
        run: takes `(Operand, Operand, GemmArgs)`.
        chip: of the device, for the arguments.
        room: bytes that it takes in `GemmArgs.work`, a multiple of `ALIGNMENT`; 0: none.
    """

    a: PlaneSpec
    b: PlaneSpec
    run: Callable[[Operand, Operand, GemmArgs], torch.Tensor]
    chip: Chip
    room: int = 0


def gpu_gemm_plan(
    a: str,
    b: str,
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> GpuGemmPlan:
    """Return how planes that were made of tensors of one dtype are multiplied on a GPU.

    Args:
        a, b: spec strings of the operands.
        dtype: of the tensors and of the result.
        precision: `"auto"`, `"exact"` or `"fast"`.
        sizes: M, N and K.
        device: of the tensors.

    Raises:
        BackendError: no backend can multiply them.
    """
    return _by_texts(a, b, dtype, precision, sizes, device, settings.current().backend)


def gpu_run(
    a: PlaneSpec,
    b: PlaneSpec,
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> GpuGemmPlan:
    """Return `gpu_gemm_plan` of specs, whose open dtypes stay open.

    Args:
        a, b: specs of the operands.
        dtype, precision, sizes, device: as `gpu_gemm_plan` takes them.

    Raises:
        BackendError: no backend can multiply them.
    """
    return _by_specs(a, b, dtype, precision, sizes, device, settings.current().backend)


@cached_choice
def _by_texts(a: str, b: str, dtype: torch.dtype, *rest: object) -> GpuGemmPlan:
    left, right = (PlaneSpec.parse(text).resolve(dtype) for text in (a, b))
    return _by_specs(left, right, dtype, *rest)


@cached_choice
def _by_specs(
    a: PlaneSpec,
    b: PlaneSpec,
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int, int],
    device: torch.device,
    forced: str | None,
) -> GpuGemmPlan:
    del forced  # what `select` asks for
    chip = chip_of(device)
    query = OpQuery("gemm", device.type, dtype, a, b, precision, sizes, chip)
    backend = select(query)
    run = None if backend.planner is None else backend.planner(query)
    room: int = getattr(run, "room", 0)
    return GpuGemmPlan(a, b, run or backend.ops["gemm"], chip, room)
