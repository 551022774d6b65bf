"""Planes of matrices whose rows lie on several ranks: who encodes, sends and receives what."""

from __future__ import annotations

from .plane_memory import memories, refill
from .plane_shards import Piece, PlaneShards
from .row_shards import Shards
from .storage_shards import StorageShards
from .strided_copies import Places, Targets

__all__ = [
    "Piece",
    "Places",
    "PlaneShards",
    "Shards",
    "StorageShards",
    "Targets",
    "memories",
    "refill",
]
