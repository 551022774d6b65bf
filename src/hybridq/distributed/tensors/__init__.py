"""The tensors that FSDP2 shards, and the hooks that it calls."""

from __future__ import annotations

from .gather_hooks import late_parallel
from .gathered_weight import GatheredWeight
from .quantized_weight import QuantizedWeight

__all__ = [
    "GatheredWeight",
    "QuantizedWeight",
    "late_parallel",
]
