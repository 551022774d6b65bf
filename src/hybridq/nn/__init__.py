"""Modules: drop-in replacements of torch's whose GEMMs run between quantized planes."""

from __future__ import annotations

from .checkpoint import checkpoint
from .convert import convert, default_filter
from .linear import Linear

__all__ = ["Linear", "checkpoint", "convert", "default_filter"]
