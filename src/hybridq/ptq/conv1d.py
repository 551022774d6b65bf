"""Weights that a model keeps as `[in, out]`: those of GPT-2's `Conv1D` and its kin.

Everywhere else a linear weight is `[out, in]`, and a plane for the forward has its blocks along
`in`. Of a weight that is kept the other way round, that is the columnwise plane.

Source: transformers, `pytorch_utils.Conv1D`, and the models that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .header import Entry

__all__ = ["are_transposed", "is_module_of_kind", "uses_conv1d"]

#: `model_type` of the models that use it.
_MODELS: Final = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp_decoder"}
#: The modules that are of that kind there, by the last part of their names.
_MODULES: Final = {"c_attn", "q_attn", "c_proj", "c_fc"}
_SUFFIX: Final = ".weight"
#: How many matrices of the layer's width a module makes at once.
_FACTORS: Final = {"c_attn": (2, 3), "c_fc": (4,)}


def uses_conv1d(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration, or a part of it, names a model that uses Conv1D.

    Args:
        config: what `config.json` holds.
    """
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    return config.get("model_type") in _MODELS or any(map(uses_conv1d, parts))


def are_transposed(entries: Iterable[Entry], is_known: bool) -> bool:
    """Return whether the weights of such modules are kept as `[in, out]`.

    Their shapes say it where they can: `c_attn` and `c_fc` make more than they take. Where they say
    nothing, the configuration does.

    Args:
        entries: of the whole checkpoint, those of quantized weights with the weights' own shapes.
        is_known: `uses_conv1d` of the model's configuration.
    """
    votes = [vote for entry in entries if (vote := _vote(entry)) is not None]
    return all(votes) if votes else is_known


def _module(entry: Entry) -> str:
    return entry.name.removesuffix(_SUFFIX).rpartition(".")[2]


def is_module_of_kind(entry: Entry) -> bool:
    """Return whether an entry is a matrix under the name of such a module's weight.

    Args:
        entry: of a checkpoint.
    """
    is_matrix = len(entry.shape) == 2 and entry.name.endswith(_SUFFIX)
    return is_matrix and _module(entry) in _MODULES


def _vote(entry: Entry) -> bool | None:
    """Return whether an entry's shape says that it is `[in, out]`; None: it says nothing."""
    if not is_module_of_kind(entry):
        return None
    rows, cols = entry.shape
    for factor in _FACTORS.get(_module(entry), ()):
        if rows and cols == factor * rows:
            return True
        if cols and rows == factor * cols:
            return False
    return None
