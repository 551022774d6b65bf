"""The state of delayed scaling: histories of modules, their owners, and when they are updated."""

from __future__ import annotations

from .groups import has_own_group, reduce_over
from .held import hold_history
from .places import Scales, places_of, reduces_by_default
from .state import ScalingState, states_of
from .state_dict import history_of, load_history, state_dict_with_history, take_history
from .update import (
    misses_step,
    num_updates,
    scales_of,
    take_step,
    update_scaling,
    update_states,
    watch_steps,
)

__all__ = [
    "Scales",
    "ScalingState",
    "has_own_group",
    "history_of",
    "hold_history",
    "load_history",
    "misses_step",
    "num_updates",
    "places_of",
    "reduce_over",
    "reduces_by_default",
    "scales_of",
    "state_dict_with_history",
    "states_of",
    "take_history",
    "take_step",
    "update_scaling",
    "update_states",
    "watch_steps",
]
