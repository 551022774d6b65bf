"""Amaxes of a calibration by the layers of a cache: which attention module has which number.

In a decoder behind an encoder two modules have the number of a layer: self-attention, and
cross-attention, whose keys and values are of the encoder's states. Each has a cache of its own.

Source: transformers 5.23 and 5.24: what models call their attention modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ...calibration import Calibration
from ...calibration.caches import attentions
from ...errors import warn
from ...serving import static_amax

__all__ = ["Amaxes", "by_layer", "has_two_caches", "name_missed", "parted_by_layer"]

#: FP32 `[1]` of keys and of values.
Amaxes = tuple[torch.Tensor, torch.Tensor]
#: In the name of a module of cross-attention, behind the number of its layer: `encoder_attn`,
#: `EncDecAttention`, `crossattention.self`, `cross_attn`.
_CROSS: Final = re.compile("cross|enc", re.IGNORECASE)


def has_two_caches(model: Any) -> bool:
    """Return whether a model takes an EncoderDecoderCache: of self- and of cross-attention.

    Args:
        model: anything; False of what is no model of transformers.
    """
    config: Any = getattr(model, "config", None)
    if not (isinstance(model, nn.Module) and hasattr(config, "get_text_config")):
        return False
    for one in (config, config.get_text_config(decoder=True)):
        if getattr(one, "is_encoder_decoder", False) or getattr(one, "add_cross_attention", False):
            return True
    if not getattr(config, "is_decoder", False):
        return False
    numbers = [getattr(one, "layer_idx", None) for one in attentions(model).values()]
    return len(numbers) > len(set(numbers))


def by_layer(model: nn.Module, calibration: Calibration) -> dict[int, Amaxes]:
    """Return the amaxes of keys and values by the number of the layer.

    Args:
        model: of which each layer has one module of attention.
        calibration: that has seen it.

    Raises:
        ValueError: two modules that it has seen have one number.
    """
    return _one_each(_seen(model, calibration))


def parted_by_layer(
    model: nn.Module, calibration: Calibration
) -> tuple[dict[int, Amaxes], dict[int, Amaxes]]:
    """Return the amaxes of self-attention and those of cross-attention, by the layer's number.

    Args:
        model: of an encoder and a decoder.
        calibration: that has seen it.

    Raises:
        ValueError: the names of modules do not say which is which.
    """
    own: dict[str, tuple[int, Amaxes]] = {}
    cross: dict[str, tuple[int, Amaxes]] = {}
    for name, seen in _seen(model, calibration).items():
        (cross if _CROSS.search(_in_layer(name)) else own)[name] = seen
    return _one_each(own), _one_each(cross)


def name_missed(found: Mapping[int, Amaxes], count: int, what: str = "") -> None:
    """Warn of layers that a calibration has no amaxes of.

    Args:
        found: by the number of the layer.
        count: of layers.
        what: of the layers is held in the cache; `""`: all.
    """
    missed = [number for number in range(count) if number not in found]
    if missed:
        shown = ", ".join(map(str, missed[:8]))
        warn(
            f"HybridQCache: the calibration has no amaxes of keys and values of {what}layers "
            f"{shown}{' and more' if len(missed) > 8 else ''}: their rows have their own",
        )


def _seen(model: nn.Module, calibration: Calibration) -> dict[str, tuple[int, Amaxes]]:
    """Return number and amaxes of each module that the calibration has keys and values of."""
    found: dict[str, tuple[int, Amaxes]] = {}
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        k, v = static_amax(calibration, name, "k"), static_amax(calibration, name, "v")
        if number is not None and k is not None and v is not None:
            found[name] = (number, (k, v))
    return found


def _in_layer(name: str) -> str:
    """Return what stands behind the last number in the name of a module."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[last + 1 :])


def _one_each(seen: Mapping[str, tuple[int, Amaxes]]) -> dict[int, Amaxes]:
    """Return amaxes by number.

    Raises:
        ValueError: two modules have one number.
    """
    names: dict[int, str] = {}
    for name, (number, _) in seen.items():
        other = names.setdefault(number, name)
        if other != name:
            raise ValueError(
                "HybridQCache: a layer of the cache must be of one module of the calibration, got "
                f"{other} and {name} for layer {number}; leave the calibration out, so that rows "
                "have amaxes of their own"
            )
    return dict(seen.values())
