"""Sharded training on torch's engine: planes of tensors that lie on several ranks."""

from __future__ import annotations

from .fsdp2 import prepare_fsdp2, wire_nbytes
from .shards import PlaneShards, Shards, StorageShards
from .weight import GatheredWeight

__all__ = [
    "GatheredWeight",
    "PlaneShards",
    "Shards",
    "StorageShards",
    "prepare_fsdp2",
    "wire_nbytes",
]
