"""GEMM over planes: which plane meets which, the call, and operands that are kept."""

from __future__ import annotations

from .contract import CONTRACT, Gemm
from .dispatch import gemm_planes
from .grouped import grouped_planes
from .prepare import forget, prepare

__all__ = ["CONTRACT", "Gemm", "forget", "gemm_planes", "grouped_planes", "prepare"]
