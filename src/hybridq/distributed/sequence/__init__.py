"""Long sequences: every rank holds a part of each, and attention sees the whole (Ulysses, ring)."""

from __future__ import annotations

from .batch import shard_sequence
from .comparison import Comparison
from .context import context_parallel
from .exchange import HeadExchange, copies_of_heads
from .loss import label_count, over_ranks, sequence_loss
from .mesh import exchange_of
from .sequence_parallel import sequence_parallel

__all__ = [
    "Comparison",
    "HeadExchange",
    "context_parallel",
    "copies_of_heads",
    "exchange_of",
    "label_count",
    "over_ranks",
    "sequence_loss",
    "sequence_parallel",
    "shard_sequence",
]
