"""Encoding the rows of one rank, of many weights together."""

from __future__ import annotations

from .cpu_shard_encoder import Scratch, ShardEncoder
from .cpu_stack_encoder import StackEncoder
from .mesh_part import MeshPart, PartSizes
from .shard_work import Maxima, ShardWork, encode_shards

__all__ = [
    "Maxima",
    "MeshPart",
    "PartSizes",
    "Scratch",
    "ShardEncoder",
    "ShardWork",
    "StackEncoder",
    "encode_shards",
]
