"""Encoding the rows of one rank, of many weights together."""

from __future__ import annotations

from .cpu_shard_encoder import ShardEncoder
from .shard_work import Maxima, ShardWork, encode_shards

__all__ = [
    "Maxima",
    "ShardEncoder",
    "ShardWork",
    "encode_shards",
]
