"""Sharded training on torch's engine: planes of tensors that lie on several ranks.

Rooms, each of which imports only those before it: `agreement`, `encoding`, `parameters`, `units`,
`tensors`; then `attachment`, `fsdp2`, `scaling_history`, `collectives`, `sequence`, `flat`,
`pipelines`, `separate_state`, `sequence_gradients`, `token_sums`, `part_planes`, `token_styles` and
`fused_style`.
What estimates runs without running them (`plan`, ...) is in `hybridq.estimate`; its names are found
here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ..shards import PlaneShards, Shards, StorageShards
from .agreement import check_ranks
from .collectives import (
    CollectiveHandle,
    ErrorFeedback,
    Residual,
    all_gather,
    all_reduce,
    all_to_all,
    ddp_hook,
    parallel_cross_entropy,
    quantized_reduce_scatter,
    reduce_scatter,
)
from .flat import FlatCodes, post_all_gather_processing, quantize_master_weights
from .fsdp2 import prepare_fsdp2, wire_nbytes
from .pipelines import pipeline_stage
from .scaling_history import ScalingHistory
from .separate_state import joined_state, separate_state
from .sequence import context_parallel, sequence_loss, sequence_parallel, shard_sequence
from .sequence_gradients import reduce_sequence_parallel_gradients
from .tensors import GatheredWeight, QuantizedWeight
from .token_sums import quantize_token_sums

__all__ = [
    "CollectiveHandle",
    "ErrorFeedback",
    "FlatCodes",
    "GatheredWeight",
    "PlaneShards",
    "QuantizedWeight",
    "Residual",
    "ScalingHistory",
    "Shards",
    "StorageShards",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "check_ranks",
    "context_parallel",
    "ddp_hook",
    "joined_state",
    "parallel_cross_entropy",
    "pipeline_stage",
    "post_all_gather_processing",
    "prepare_fsdp2",
    "quantize_master_weights",
    "quantize_token_sums",
    "quantized_reduce_scatter",
    "reduce_scatter",
    "reduce_sequence_parallel_gradients",
    "separate_state",
    "sequence_loss",
    "sequence_parallel",
    "shard_sequence",
    "wire_nbytes",
]

#: Names of `hybridq.estimate`, which stands to the right of this package and is loaded when asked.
_ALIASES: Final = (
    *("DenseShape", "Held", "Moved", "RunPlan", "Sharding", "Traffic", "count_traffic", "plan"),
    *("Axes", "AxesPlan", "plan_axes"),
)


#: Classes of torch's that are derived from, which are loaded when asked too.
_STYLES: Final = {
    "ColwiseParallel": ".token_styles",
    "RowwiseParallel": ".token_styles",
    "FusedParallel": ".fused_style",
}


def __getattr__(name: str) -> Any:
    if name in _ALIASES:
        return getattr(import_module("hybridq.estimate"), name)
    if name in _STYLES:
        return getattr(import_module(_STYLES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ALIASES, *_STYLES})
