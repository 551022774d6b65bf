"""What the tests on a GPU share."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

import hybridq
from hybridq.storage import Plane


def to_cpu(plane: Plane) -> Plane:
    """Return the plane with its buffers on the CPU."""
    buffers = {name: buffer.cpu() for name, buffer in plane.buffers.items()}
    return Plane(plane.spec, plane.direction, plane.rows, plane.cols, buffers)


def takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def exact_gemm() -> dict[str, str]:
    """Arguments of `hybridq.gemm` that ask for exact operands and FP32 sums."""
    return {"precision": "exact"} if takes(hybridq.gemm, "precision") else {}


def exactly(recipe: Any) -> Any:
    """Return `recipe` with GEMMs of exact operands, where that can be said."""
    made = hybridq.recipes.get(recipe)
    return made.with_precision("exact") if hasattr(made, "with_precision") else made


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Let any call inside that makes the host wait for the GPU raise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_storages(got: Any, want: Any) -> None:
    """Assert equal specs and bytes of both planes of two quantized tensors, wherever they are."""
    for direction in ("rowwise", "columnwise"):
        first, second = getattr(got, direction), getattr(want, direction)
        assert (first is None) == (second is None), direction
        if first is None:
            continue
        assert first.spec == second.spec and first.matrix == second.matrix
        for name, buffer in first.buffers.items():
            # Flat: an empty matrix is contiguous with strides in which bytes are no view.
            left = buffer.cpu().flatten().view(torch.uint8)
            right = second.buffers[name].cpu().flatten().view(torch.uint8)
            assert torch.equal(left, right), (direction, name, str(first.spec))
