"""What scripts read off a module: its quantizers, and the histories of delayed scaling."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, Final

import torch

from .. import nn
from ..recipes import QuantizerRole
from ..tensor import is_quantized
from .common.recipe import DelayedScaling
from .extra_state import ExtraState, plain_recipe
from .hybrid import quantizer_of
from .meta_device import GetsMemory
from .quantizers import Float8Quantizer

__all__ = ["SLOTS", "Readings", "remember_recipe", "slot_quantizer"]

#: Slots of each part of a linear module, by their key, those at its boundary last.
SLOTS: Final = {
    "scaling_fwd": ("input", "weight", "output"),
    "scaling_bwd": ("grad_output", "grad_input"),
}
#: The recipe of `hybridq.te` that a recipe of hybridq was made of, by the latter's key.
_recipes: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
#: What a DelayedScaling says, by the same key, also when its caller has it no more.
_delayed: dict[str, Any] = {}
_MOST_DELAYED: Final = 256


def remember_recipe(key: str, recipe: Any) -> None:
    """Let modules name the recipe of `hybridq.te` that they ran under.

    Args:
        key: of the frozen one.
        recipe: of `hybridq.te`.
    """
    _recipes[key] = recipe
    if isinstance(recipe, DelayedScaling) and key not in _delayed:
        if len(_delayed) >= _MOST_DELAYED:
            _delayed.clear()
        _delayed[key] = plain_recipe(recipe)


class Readings(GetsMemory, ExtraState):
    """Attributes of modules, made of the last forward's recipe whenever they are read."""

    #: As there: nobody needs to clear `main_grad` before the first microbatch of a step.
    first_overwrites = True
    #: Of no module: `FP8GlobalStateManager` knows what a region says.
    fp8_calibration = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: what a module knows of its scales is made with it, and by its forwards.

        Args:
            num_gemms: of the module; not looked at.
        """

    @property
    def quantizers(self: Any) -> dict[str, list[Any]]:
        """The quantizers of all slots, in the order of `FP8FwdTensorIdx` and `FP8BwdTensorIdx`.

        Of a `GroupedLinear` those of the first group, then of the second, and so on.
        They are copies: to change one changes nothing of the module.
        """
        made: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        recipe = self.last_recipe[0] if self.last_recipe else None
        if recipe is None:
            return made
        history = nn.history_of(self)
        for key, slots in SLOTS.items():
            parts = [(part, slot) for part in self.parts_of(recipe) for slot in slots]
            roles = list(zip(parts, _roles(self, recipe, slots), strict=True))
            for group in self.groups_of_scales():
                for (part, slot), given in roles:
                    role = given or QuantizerRole(self.module_type, slot, self.part_name(part))
                    quantizer = recipe.for_name(role.name).ask(role)
                    place = ".".join(one for one in ("scaling", part, group, slot) if one)
                    made[key].append(slot_quantizer(quantizer, history, place))
        return made

    def groups_of_scales(self) -> tuple[str, ...]:
        """Return the names of what has scales of its own in each part: one without a name."""
        return ("",)

    def get_quantizer_roles(self: Any, *, fwd: bool, num_quantizers: int) -> list[Any]:
        """Return the role of each slot, None at the module's boundary where nothing names one.

        Args:
            fwd: of the forward's slots, or the backward's.
            num_quantizers: how many; more than there are begin anew.
        """
        recipe = self.last_recipe[0] if self.last_recipe else None
        known = _roles(self, recipe, SLOTS["scaling_fwd" if fwd else "scaling_bwd"])
        return [known[i % len(known)] for i in range(num_quantizers)]

    @property
    def fp8_meta(self: Any) -> dict[str, Any]:
        """The recipe, and of delayed scaling the scales and histories: copies of all slots.

        `scaling_fwd` and `scaling_bwd` have `scale` and `scale_inv`, FP32 `[slots]`, and
        `amax_history`, FP32 `[length, slots]`; 1 and 0 where a slot has none. Before a forward
        under a recipe it is one dictionary, in which a checkpoint's recipe may be noted.
        """
        recipe = self.last_recipe[0] if self.last_recipe else None
        meta: dict[str, Any] = {"recipe": None, "fp8_group": None}
        if recipe is None:
            meta = self.__dict__.setdefault("_early_meta", meta)
        else:
            meta["recipe"] = _recipes.get(recipe.key, _delayed.get(recipe.key, recipe))
        meta["fp8_checkpoint"] = self._given_state is not None
        meta["num_gemms"] = len(self.parts_of(recipe)) * len(self.groups_of_scales())
        if recipe is None:
            return meta
        history = nn.history_of(self)
        for key, quantizers in self.quantizers.items():
            slots = [getattr(one, "history_name", "") for one in quantizers]
            meta[key] = _tensors(slots, history)
        return meta

    @property
    def primary_weights_in_fp8(self: Any) -> bool:
        """Whether a weight is held as planes."""
        return any(is_quantized(weight) for _, weight in self.scaled_weights())

    @property
    def fp8_meta_tensors_initialized(self: Any) -> bool:
        """Whether a forward has run under a recipe."""
        return bool(self.last_recipe) and self.last_recipe[0] is not None

    @property
    def fp8(self: Any) -> bool:
        """Whether the last forward ran under a recipe."""
        return bool(self.last_recipe) and self.last_recipe[0] is not None


def _roles(module: Any, recipe: Any, slots: tuple[str, ...]) -> list[QuantizerRole | None]:
    """Return the roles of a module's slots: what a part hands to the next one is of that one."""
    names = [module.part_name(part) for part in module.parts_of(recipe)]
    is_forward = "input" in slots
    ends = module.output_quantizer_role if is_forward else module.grad_input_quantizer_role
    made: list[QuantizerRole | None] = []
    for i, name in enumerate(names):
        made += [QuantizerRole(module.module_type, slot, name) for slot in slots[:-1]]
        other = i + 1 if is_forward else i - 1
        is_chained = module.module_type == "linear" and 0 <= other < len(names)
        own = QuantizerRole(module.module_type, slots[0], names[other]) if is_chained else ends
        made.append(own)
    return made


def _one() -> torch.Tensor:
    """Return the scale of a slot without a history."""
    return torch.ones(1, dtype=torch.float32, device="cpu")


def slot_quantizer(quantizer: Any, history: dict[str, Any], name: str) -> Any:
    """Return a slot's quantizer of te: of delayed scaling that with the module's scale.

    Args:
        quantizer: of hybridq.
        history: `nn.history_of` the module.
        name: of the slot in it.
    """
    if not quantizer.is_delayed:
        return quantizer_of(quantizer)
    element = quantizer.rowwise.format.element.name
    found = f"{name}.{element}"
    scale = history.get(f"{found}.scale", _one()).clone()
    made = Float8Quantizer(scale, torch.zeros_like(scale), element)
    made.history_name = found
    return made


def _tensors(slots: list[str], history: dict[str, Any]) -> SimpleNamespace:
    scales = [history.get(f"{slot}.scale", _one()) for slot in slots]
    scale = torch.cat([one.detach().cpu().float().view(1) for one in scales])
    amaxes = [history.get(f"{slot}.history") for slot in slots]
    length = max([one.numel() for one in amaxes if one is not None], default=1)
    columns = [
        torch.zeros(length, dtype=torch.float32, device="cpu")
        if one is None
        else one.detach().cpu()
        for one in amaxes
    ]
    return SimpleNamespace(scale=scale, scale_inv=1.0 / scale, amax_history=torch.stack(columns, 1))
