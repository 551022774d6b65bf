"""Weights: their cached planes, their gradients, and how they are initialized, loaded and saved."""

from __future__ import annotations

from .foreign import foreign_weight
from .late_gradients import GradientQueue
from .main_grad import (
    Into,
    accumulate,
    accumulate_groups,
    adds_to,
    given_to_autograd,
    part_of,
    target_of,
    watch_optimizers,
)
from .moved import unmoved
from .other_planes import planes_held, say_in_graph
from .pretrained import saves_decoded
from .quantized_init import (
    check_weights,
    dequantized_state_dict,
    fp8_model_init,
    plain_weights,
    quantize_weights,
    quantized_model_init,
    tell_values,
    would_quantize,
)
from .replaced import replaced
from .separate_names import separate_names, takes_separate_names
from .weight_cache import (
    Buffers,
    CachedWeight,
    PrequantizedWeight,
    cached_weight,
    prequantized_weight,
    versions_of,
)

__all__ = [
    "Buffers",
    "CachedWeight",
    "GradientQueue",
    "Into",
    "PrequantizedWeight",
    "accumulate",
    "accumulate_groups",
    "adds_to",
    "cached_weight",
    "check_weights",
    "dequantized_state_dict",
    "foreign_weight",
    "fp8_model_init",
    "given_to_autograd",
    "part_of",
    "plain_weights",
    "planes_held",
    "prequantized_weight",
    "quantize_weights",
    "quantized_model_init",
    "replaced",
    "saves_decoded",
    "say_in_graph",
    "separate_names",
    "takes_separate_names",
    "target_of",
    "tell_values",
    "unmoved",
    "versions_of",
    "watch_optimizers",
    "would_quantize",
]
