"""The histories of delayed scaling in a state_dict: only where somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from .state import ScalingState, states_of

__all__ = ["history_of", "load_history", "state_dict_with_history", "take_history"]

_PREFIX: Final = "scaling."
#: The key of what modules of `hybridq.te` have beside weights, histories in a form of theirs.
_EXTRA: Final = "_extra_state"
#: What activation checkpointing calls the module that it wraps.
_CHECKPOINTED: Final = "_checkpoint_wrapped_module"


def state_dict_with_history(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `model.state_dict()` and, beside it, what scales follow from: histories and amaxes.

    For every place that has recorded something there are two keys, `.history` and `.scale` of
    `"<module>.scaling.<place>.<element>"`, or of `"<module>.scaling.<part>.<place>.<element>"`
    where a module has several linear parts. A history is FP32 `[length]`, slot 0 what was recorded
    since the last update, a scale FP32 `[1]`. `load_state_dict` of a model with modules of hybridq
    takes both kinds, with and without them; one without them leaves the histories as they are.
    An `_extra_state` of `hybridq.te`'s modules is read by these alone.

    Of a model of `hybridq.quantize_model` that was given a calibration there is a key for each
    static scale, `"<module>.static_scaling.input_amax"`, or `"...<part>_input_amax"` of modules
    with several parts: FP32 `[1]`. A model that `quantize_model` has made, with a calibration or
    without, takes them by `load_state_dict`; to all others such keys are unexpected.

    Args:
        model: any module.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        >>> with hybridq.autocast(recipe="fp8_delayed"):
        ...     y = model(torch.ones(4, 8))
        >>> sorted(set(hybridq.state_dict_with_history(model)) - set(model.state_dict()))[:2]
        ['0.scaling.input.e4m3.history', '0.scaling.input.e4m3.scale']
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"state_dict_with_history: model must be an nn.Module, got {type(given).__name__}"
        )
    made: dict[str, torch.Tensor] = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        # As in the keys of a state_dict, from which torch's wrapper takes its own name.
        name = ".".join(one for one in path.split(".") if one != _CHECKPOINTED)
        made.update(history_of(module, f"{name}." if name else ""))
        static: dict[str, torch.Tensor] = getattr(module, "static_state", dict)()
        made.update({f"{name}.{key}" if name else key: tensor for key, tensor in static.items()})
    return made


def history_of(module: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the histories of a module alone, by the keys of `state_dict_with_history`.

    Args:
        module: any.
        prefix: of the keys.
    """
    return {
        _prefix(prefix, part) + key: tensor
        for part, state in states_of(module).items()
        # What knows of nothing is not read: that would wait for its device, which may be meta.
        if state.device.type != "meta" and (state.histories or state.has_recorded)
        for key, tensor in state.exported().items()
    }


def _prefix(module: str, part: str) -> str:
    """Return what the keys of a module's part begin with."""
    return f"{module}{_PREFIX}{part}." if part else module + _PREFIX


def load_history(
    states: Mapping[str, ScalingState],
    state_dict: dict[str, Any],
    prefix: str,
    unexpected: list[str],
    errors: list[str],
    has_weights: bool,
) -> None:
    """Let a module's states take their part of a state_dict: the end of `_load_from_state_dict`.

    Args:
        states: of the module, by part.
        state_dict: with or without histories.
        prefix: of the module's keys.
        unexpected: keys that nothing took, of which those taken here are removed.
        errors: to which what is wrong is added.
        has_weights: the state_dict has weights of the module.
    """
    unexpected[:] = [key for key in unexpected if key != prefix + _EXTRA]
    for part, state in states.items():
        own = _prefix(prefix, part)
        found = {key[len(own) :]: value for key, value in state_dict.items() if key.startswith(own)}
        if found:
            errors += [f"scaling of {prefix or 'the module'}: {line}" for line in state.load(found)]
            unexpected[:] = [key for key in unexpected if not key.startswith(own)]
        elif has_weights:
            state.note_weights()


def take_history(module: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Let a module take what `history_of` gave; return what is wrong with it, one line each.

    Args:
        module: of hybridq.
        tensors: by key. A place that is not named keeps what it has.
    """
    errors: list[str] = []
    states, unexpected = states_of(module), list(tensors)
    for part, weight in module.scaled_weights():
        states[part].move(weight.device)  # what is moved from the meta device begins anew
    load_history(states, dict(tensors), "", unexpected, errors, has_weights=False)
    return errors + [f"unknown key {key!r}" for key in unexpected]
