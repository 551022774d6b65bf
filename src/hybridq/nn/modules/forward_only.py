"""ForwardOnly: modules that were given a recipe of their own, and run forwards alone under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ... import settings
from ...errors import warn_once
from ...recipes import STATIC, Plan, Recipe, forward_plan
from ..delayed_scaling import Scales

__all__ = ["ForwardOnly"]

#: Follows the part in the name of a buffer that holds the amax of a part's inputs.
_AMAX = "input_amax"
#: Before the name of such a buffer in a state_dict that has them.
_PREFIX = "static_scaling."


class ForwardOnly(nn.Module):
    """Base of `QuantizedModule`: its own recipe, in the place of that of `hybridq.autocast`."""

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    #: The recipe that `bind_forward` gave it; None: that of `hybridq.autocast`.
    bound_recipe: Recipe | None = None
    _inputs: str = ""
    #: Of `QuantizedModule`.
    parts_of: Callable[[Recipe], tuple[str, ...]]
    plan_of: Callable[[Recipe, str], Plan]
    scaled_weights: Callable[[], list[tuple[str, torch.Tensor]]]

    def bind_forward(
        self, recipe: Recipe, inputs: str, amaxes: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Have the module run forwards under a recipe, with and without `hybridq.autocast`.

        Args:
            recipe: its forward, and nothing of its backward, holds from now on.
            inputs: `"dynamic"`: quantized by their own statistics; `"high_precision"`: as they are.
            amaxes: FP32 `[1]` by part, the statistic of a part's inputs that are quantized by it.
                They are buffers beside the weights, FP32 whatever the module becomes, and no part
                of its state_dict.
        """
        self.__dict__["bound_recipe"], self.__dict__["_inputs"] = recipe, inputs
        self.__dict__.pop("_bound", None)
        for name in [name for name in self._buffers if name.endswith(_AMAX)]:
            del self._buffers[name]
        for part, amax in (amaxes or {}).items():
            self.register_buffer(_amax_name(part), amax, persistent=False)

    def _bound_inputs(self, part: str) -> str:
        """Return how inputs of a part are quantized, for `forward_plan`; empty: not bound."""
        return STATIC if _amax_name(part) in self._buffers else self._inputs

    def _bound_plan(self, plan: Plan, part: str) -> Plan:
        """Return the plan of a part of a module as `bind` made it, or its forward alone."""
        inputs = self._bound_inputs(part)
        return forward_plan(plan, inputs) if inputs else plan

    def static_amax(self, part: str) -> torch.Tensor | None:
        """Return the amax, FP32 `[1]`, that quantizes a part's inputs; None: their own does.

        Args:
            part: of the module; of one matrix of several, whose inputs may share one.
        """
        own = self._buffers.get(_amax_name(part))
        return own if own is not None else self._buffers.get(_amax_name(part.rpartition(".")[0]))

    def static_state(self) -> dict[str, torch.Tensor]:
        """Return the static amaxes that `state_dict_with_history` saves, by keys in the module."""
        own = {name: one for name, one in self._buffers.items() if name.endswith(_AMAX)}
        return {f"{_PREFIX}{name}": one.clone() for name, one in own.items() if one is not None}

    def _load_static(
        self, state_dict: Mapping[str, Any], prefix: str, unexpected: list[str], errors: list[str]
    ) -> None:
        """Take the static amaxes of a state_dict, if the module runs forwards alone.

        Args:
            state_dict: with or without them.
            prefix: of the module's keys.
            unexpected: keys that nothing took, of which those taken here are removed.
            errors: to which what is wrong is added.
        """
        own, recipe = prefix + _PREFIX, self.bound_recipe
        found = {key: value for key, value in state_dict.items() if key.startswith(own)}
        if not found or recipe is None:
            return
        unexpected[:] = [key for key in unexpected if key not in found]
        known = {_amax_name(part): part for part in self.parts_of(recipe)}
        for key, value in found.items():
            part = known.get(key[len(own) :])
            takes = part is not None and self._inputs == "dynamic"
            if part is None or not (takes and self.plan_of(recipe, part).input.takes_static):
                errors.append(f"{key}: {recipe!r} takes no static scale there")
            elif not _is_amax(value):
                errors.append(f"{key}: must be FP32 [1], finite and not negative, got {value!r}")
            else:
                devices = (one.device for _, one in self.scaled_weights())
                amax = value.detach().to(next(devices, value.device), copy=True)
                self.register_buffer(_amax_name(part), amax, persistent=False)
        self.__dict__.pop("_bound", None)

    def _static_scales(self, part: str) -> Scales | None:
        """Return what a forward takes of the amax that was given; None: there is none."""
        amax = self.static_amax(part)
        return None if amax is None else Scales(amax, None, amax, None, None)

    def _own_recipe(self) -> Recipe | None:
        """Return the bound recipe; raise where this would be a training forward."""
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"hybridq.{type(self).__name__}: a model of hybridq.quantize_model has no "
                "backward, got a forward in training mode with gradients; call model.eval() or "
                "torch.no_grad(), or, to train on quantized weights, convert the model inside "
                "hybridq.quantized_model_init(recipe, frozen=True)"
            )
        if not torch.compiler.is_compiling():
            other: Any = settings.current().recipe
            if other is not None and other is not self.bound_recipe and other != self.bound_recipe:
                warn_once(
                    "forward_only.autocast",
                    "hybridq.autocast: modules that hybridq.quantize_model gave a recipe keep it, "
                    f"got {other!r} where they have {self.bound_recipe!r}; quantize_model(model, "
                    "recipe) gives another",
                )
        return self.bound_recipe

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: one for name, one in self._buffers.items() if name.endswith(_AMAX)}
        made = super()._apply(fn, recurse)
        for name, amax in kept.items():
            moved = self._buffers[name]
            if amax is not None and moved is not None and moved.dtype != amax.dtype:
                self._buffers[name] = amax.to(moved.device)  # FP32 as scales are
        return made


def _is_amax(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != (1,) or value.dtype != torch.float32:
        return False
    return bool(torch.isfinite(value) & (value >= 0.0))


def _amax_name(part: str) -> str:
    return f"{part.replace('.', '_')}_{_AMAX}" if part else _AMAX
