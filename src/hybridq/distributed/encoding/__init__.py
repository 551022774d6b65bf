"""Encoding the rows of one rank, of many weights together."""

from __future__ import annotations

from .cpu_shard_encoder import ShardEncoder
from .shard_work import MAXIMA_AT_ONCE, Maxima, ShardWork, encode_shards

__all__ = [
    "MAXIMA_AT_ONCE",
    "Maxima",
    "ShardEncoder",
    "ShardWork",
    "encode_shards",
]
