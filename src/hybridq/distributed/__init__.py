"""Sharded training on torch's engine: planes of tensors that lie on several ranks."""

from __future__ import annotations

from .checkpoint import ScalingHistory
from .fingerprint import check_ranks
from .fsdp2 import prepare_fsdp2, wire_nbytes
from .plan import plan
from .quantized_weight import QuantizedWeight
from .run_plan import Held, Moved, RunPlan, Sharding
from .shapes import DenseShape
from .shards import PlaneShards, Shards, StorageShards
from .traffic import Traffic, count_traffic
from .weight import GatheredWeight

__all__ = [
    "DenseShape",
    "GatheredWeight",
    "Held",
    "Moved",
    "PlaneShards",
    "QuantizedWeight",
    "RunPlan",
    "ScalingHistory",
    "Sharding",
    "Shards",
    "StorageShards",
    "Traffic",
    "check_ranks",
    "count_traffic",
    "plan",
    "prepare_fsdp2",
    "wire_nbytes",
]
