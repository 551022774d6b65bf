"""What is known of one parameter that is gathered: its gathers, its planes, its amaxes."""

from __future__ import annotations

from .gather_call import GatherCall, Ranks
from .gathered_parameter import GatheredParameter
from .gathered_storage import GatheredStorage
from .quantized_rows import QuantizedRows
from .quantized_shard import QuantizedGatherCall, QuantizedShard
from .quantized_stack_shard import QuantizedStackShard
from .senders import Sender
from .stack_storage import StackStorage
from .stacked_parameter import StackedGatherCall, StackedParameter

__all__ = [
    "GatherCall",
    "GatheredParameter",
    "GatheredStorage",
    "QuantizedGatherCall",
    "QuantizedRows",
    "QuantizedShard",
    "QuantizedStackShard",
    "Ranks",
    "Sender",
    "StackStorage",
    "StackedGatherCall",
    "StackedParameter",
]
