"""Scales of activations in a checkpoint of another program, as a calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from ...calibration import Calibration
from ...layouts import Layout, StoredWeight

__all__ = ["calibration_of"]

_WEIGHT = ".weight"
#: The number of an expert in the name of its module.
_NUMBER = re.compile(r"\.(\d+)\.")


def calibration_of(
    layout: Layout,
    kv_cache: str,
    weights: Mapping[str, StoredWeight],
    scales: Mapping[str, torch.Tensor],
    target_of: Callable[[str], tuple[str, bool]],
) -> Calibration:
    """Return the amaxes that a checkpoint's scales of inputs and KV caches stand for.

    Args:
        layout: of the checkpoint.
        kv_cache: what its caches are held in: a key of `layout.kv`.
        weights: its quantized weights, by name: a scale means what its weight's scheme says.
        scales: the scales, by their names in the file.
        target_of: the parameter that a weight of the file goes to, by name, and whether others
            go to it as well: the experts' of a layer.
    """
    amaxes: dict[str, dict[str, torch.Tensor]] = {}
    tokens: dict[str, torch.Tensor] = {}
    each: dict[str, dict[int, torch.Tensor]] = {}
    for weight, stored in weights.items():
        part, module = stored.scheme.input, weight.removesuffix(_WEIGHT)
        value = None if part is None else scales.get(part.file_name(module))
        if part is None or value is None:
            continue
        amax = part.read(value).reshape(())
        target, is_shared = target_of(weight)
        if not is_shared:
            own = target.removesuffix(_WEIGHT)
            amaxes.setdefault(own, {})["input"] = amax
            tokens[own] = torch.zeros((), dtype=torch.int64, device="cpu")
            continue
        numbers = _NUMBER.findall(module + ".")
        expert = int(numbers[-1]) if numbers else 0
        known = each.setdefault(target, {})
        known[expert] = torch.maximum(known[expert], amax) if expert in known else amax
    for part in layout.kv.get(kv_cache, ()):
        for name, value in scales.items():
            attention = part.module_of(name)
            if attention is not None:
                own = target_of(attention + _WEIGHT)[0].removesuffix(_WEIGHT)
                amaxes.setdefault(own, {})[part.slot] = part.read(value).reshape(())
    for stack, known in each.items():
        values = torch.full((max(known) + 1,), -torch.inf, dtype=torch.float32, device="cpu")
        for expert, amax in known.items():
            values[expert] = amax
        amaxes[stack] = {"input": values.max(), "expert_input": values}
        tokens[stack] = torch.zeros(len(values), dtype=torch.int64, device="cpu")
    slots = sorted({slot for own in amaxes.values() for slot in own})
    return Calibration(amaxes, tokens, dict.fromkeys(slots, f"a {layout.name} checkpoint's scales"))
