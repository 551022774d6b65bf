"""Planes of matrices that lie on several ranks: who encodes, sends and receives what."""

from __future__ import annotations

from .cut import Cut, common_unit, encode_cut
from .plane_memory import memories, refill
from .plane_shards import Piece, PlaneShards
from .reduction import MAXIMA_AT_ONCE, reduce_maxima
from .row_shards import Shards
from .row_sums import SumInFlight, send_sum
from .storage_shards import StorageShards
from .strided_copies import Places, Targets
from .token_gather import Arriving, OwnPlane, TokenGather
from .uniform_shards import UniformShards, encoded

__all__ = [
    "MAXIMA_AT_ONCE",
    "Arriving",
    "Cut",
    "OwnPlane",
    "Piece",
    "Places",
    "PlaneShards",
    "Shards",
    "StorageShards",
    "SumInFlight",
    "Targets",
    "TokenGather",
    "UniformShards",
    "common_unit",
    "encode_cut",
    "encoded",
    "memories",
    "reduce_maxima",
    "refill",
    "send_sum",
]
