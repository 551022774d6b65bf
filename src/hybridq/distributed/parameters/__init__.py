"""What is known of one parameter that is gathered: its gathers, its planes, its amaxes."""

from __future__ import annotations

from .gather_call import GatherCall, Ranks
from .gathered_parameter import GatheredParameter
from .quantized_shard import QuantizedGatherCall, QuantizedRows, QuantizedShard
from .senders import Sender
from .stacked_parameter import StackedGatherCall, StackedParameter

__all__ = [
    "GatherCall",
    "GatheredParameter",
    "QuantizedGatherCall",
    "QuantizedRows",
    "QuantizedShard",
    "Ranks",
    "Sender",
    "StackedGatherCall",
    "StackedParameter",
]
