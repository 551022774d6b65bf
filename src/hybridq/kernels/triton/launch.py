"""The one module that imports Triton: runs what `plan` has decided. Imported on first use."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .block import block_kernel
from .dense import decode_kernel, dense_kernel, reduce_kernel
from .grouped import grouped_kernel
from .grouped_block import grouped_block_kernel
from .plan_parts import Launch, Tiled

__all__ = ["KERNELS", "arguments", "options", "run"]

KERNELS: Final[dict[str, Any]] = {
    "block": block_kernel,
    "decode": decode_kernel,
    "dense": dense_kernel,
    "grouped": grouped_kernel,
    "grouped_block": grouped_block_kernel,
    "reduce": reduce_kernel,
}


def arguments(launch: Launch) -> dict[str, Any]:
    """Return a kernel's arguments as Triton takes them."""
    return {
        name: _described(given) if isinstance(given, Tiled) else given
        for name, given in launch.arguments.items()
    }


def _described(given: Tiled) -> TensorDescriptor:
    tensor = given.tensor
    # Rows that are only one have any stride.
    strides = [tensor.shape[1], 1]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(given.block))


def options(launch: Launch) -> dict[str, Any]:
    """Return what Triton takes beside the arguments.

    No contraction of a product and a sum into one operation: docs/reference/numerics.md rounds
    each.
    """
    return {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }


def run(launches: tuple[Launch, ...], device: torch.device) -> None:
    """Launch kernels one after the other on torch's current stream of `device`."""
    guard: Any = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        for launch in launches:
            KERNELS[launch.kernel][launch.grid](**arguments(launch), **options(launch))
