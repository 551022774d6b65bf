"""Sharded training on torch's engine: planes of tensors that lie on several ranks."""

from __future__ import annotations

from .shards import PlaneShards, Shards, StorageShards

__all__ = ["PlaneShards", "Shards", "StorageShards"]
