"""Planes of matrices that lie on several ranks: who encodes, sends and receives what."""

from __future__ import annotations

from .call_agreement import Facts, agree, compare, named_ranks, refuse
from .cut import Cut, common_unit, encode_cut
from .plane_memory import ALIGNMENT, memories, put_beside, refill
from .plane_shards import Piece, PlaneShards
from .reduction import MAXIMA_AT_ONCE, reduce_maxima
from .row_shards import Shards
from .row_sums import SumInFlight, send_sum
from .storage_shards import StorageShards
from .strided_copies import Copies, Places, Targets
from .token_gather import Arriving, OwnPlane, TokenGather
from .uniform_shards import UniformShards, encoded

__all__ = [
    "ALIGNMENT",
    "MAXIMA_AT_ONCE",
    "Arriving",
    "Copies",
    "Cut",
    "Facts",
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
    "agree",
    "common_unit",
    "compare",
    "encode_cut",
    "encoded",
    "memories",
    "named_ranks",
    "put_beside",
    "reduce_maxima",
    "refill",
    "refuse",
    "send_sum",
]
