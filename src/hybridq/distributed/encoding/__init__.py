"""Encoding the rows of one rank, of many weights together."""

from __future__ import annotations

from .cpu_shard_encoder import ShardEncoder
from .cpu_stack_encoder import StackEncoder
from .mesh_part import MeshPart, PartSizes
from .shard_work import Maxima, ShardWork, encode_shards
from .unit_payload import Passing, UnitPayload, zeros

__all__ = [
    "Maxima",
    "MeshPart",
    "PartSizes",
    "Passing",
    "ShardEncoder",
    "ShardWork",
    "StackEncoder",
    "UnitPayload",
    "encode_shards",
    "zeros",
]
