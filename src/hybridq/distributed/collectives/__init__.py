"""Collectives whose messages are quantized: public, differentiable, and as gradient reduction."""

from __future__ import annotations

from .ddp_hook import ddp_hook
from .error_feedback import ErrorFeedback, Residual
from .formats import formats_of_directions
from .handle import CollectiveHandle
from .public import all_gather, all_reduce, all_to_all, reduce_scatter
from .reduce_scatter_comm import quantized_reduce_scatter
from .vocabulary_loss import parallel_cross_entropy

__all__ = [
    "CollectiveHandle",
    "ErrorFeedback",
    "Residual",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "ddp_hook",
    "formats_of_directions",
    "parallel_cross_entropy",
    "quantized_reduce_scatter",
    "reduce_scatter",
]
