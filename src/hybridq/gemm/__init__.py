"""GEMM over planes: which plane meets which, and the call."""

from __future__ import annotations

from .contract import CONTRACT, Gemm
from .dispatch import gemm_planes

__all__ = ["CONTRACT", "Gemm", "gemm_planes"]
