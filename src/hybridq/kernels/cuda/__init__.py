"""The `cuda` backend: the compiled core's kernels on NVIDIA GPUs."""

from __future__ import annotations

from .backend import CUDA

__all__ = ["CUDA"]
