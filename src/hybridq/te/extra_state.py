"""What Transformer Engine's modules have in a state_dict beside parameters: `_extra_state`.

It is bytes of a pickle, as there, since Megatron-Core takes it apart and puts it together by itself
for experts. Here it is read by an unpickler that calls nothing but what makes tensors: of every
other name in it, of functions too, nothing is left but a record of what was given.

Source: key, form and names of the entries: Transformer Engine's `get_extra_state`.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch

from .. import nn
from .._log import log_once
from .._torch_private import rebuild_tensor
from .common.recipe import DelayedScaling

__all__ = ["ExtraState", "WithoutExtraState", "plain_recipe"]

_KEY: Final = "_extra_state"
#: The entry with histories by hybridq's own names, which say more than the others.
_OWN: Final = "hybridq"
#: How entries of the forward and of the backward end, and the slots of each GEMM, those with a
#: history first.
_SIDES: Final = (("fwd", 3, ("input", "weight")), ("bwd", 2, ("grad_output",)))
#: The largest finite values of the elements of recipes.
_ELEMENTS: Final = {448.0: "e4m3", 57344.0: "e5m2"}
_Tensors: TypeAlias = dict[str, torch.Tensor]


class WithoutExtraState:
    """Loads checkpoints of Transformer Engine without the `_extra_state` that it has none of."""

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        own = [key for key in state_dict if key.startswith(prefix) and key.endswith(_KEY)]
        for key in own:
            place = key[len(prefix) :].removesuffix(_KEY).removesuffix(".")
            if not isinstance(_child(self, place), ExtraState):
                _tell_if_any(key, state_dict.pop(key))
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class ExtraState:
    """A module whose histories of delayed scaling are in its state_dict, as `_extra_state`.

    The key is there once a forward has run under delayed scaling, or histories were loaded; always,
    if empty, in a subclass with a `sharded_state_dict`, as Megatron-Core's modules are: a state
    that says what to load names it before.
    """

    #: What was loaded, until a forward runs under a recipe.
    _given_state: torch.Tensor | None = None

    def get_extra_state(self: Any) -> torch.Tensor:
        """Return scales and histories as bytes, uint8 `[n]` on the CPU; none without a history."""
        has_run = bool(self.last_recipe) and self.last_recipe[0] is not None
        if self._given_state is not None and not has_run:
            return self._given_state
        histories = nn.history_of(self)
        if not histories and not (has_run and hasattr(self, "_split_extra_state")):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return _written({**_by_slots(self), _OWN: histories})

    def set_extra_state(self: Any, state: Any) -> None:
        """Take scales and histories, this module's or those of one of Transformer Engine.

        Args:
            state: what `get_extra_state` returned; None or empty: none.

        Raises:
            RuntimeError: they do not fit to the module.
        """
        found = _histories(self, state)
        wrong = nn.take_history(self, found)
        if wrong:
            raise RuntimeError(f"set_extra_state: {'; '.join(wrong)}")
        if found and isinstance(state, torch.Tensor):
            self._given_state = state.detach().cpu()

    def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        key = f"{prefix}{_KEY}"
        is_split = any(hasattr(self, name) for name in ("sharded_state_dict", "_split_extra_state"))
        if key in destination and not destination[key].numel() and not is_split:
            del destination[key]

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        missing: list[str] = args[-3]
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        missing[:] = [one for one in missing if one != f"{prefix}{_KEY}"]
        if any(key.startswith(f"{prefix}scaling.") for key in state_dict):
            self._given_state = None  # of `state_dict_with_history`, whose keys are taken last


def _child(module: Any, place: str) -> Any:
    """Return the module at a place, None where there is none."""
    for name in place.split(".") if place else ():
        module = getattr(module, "_modules", {}).get(name)
    return module


def _tell_if_any(key: str, value: Any) -> None:
    """Say once that an extra state is not taken over, if it holds anything."""
    if value is None or (isinstance(value, torch.Tensor) and not value.numel()):
        return
    log_once(
        "te.extra_state",
        f"load_state_dict: {key} and its like hold scales in a form that is not taken over here; "
        "delayed scaling begins at 1",
    )


# ---- written


class _Writer(pickle.Pickler):
    """Writes tensors as their values alone: of one module always as many bytes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.FloatTensor, (value.detach().cpu().tolist(),)
        return NotImplemented


def _written(state: Mapping[str, Any]) -> torch.Tensor:
    held = io.BytesIO()
    _Writer(held, protocol=4).dump(dict(state))
    return torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8)


def _by_slots(module: Any) -> dict[str, Any]:
    """Return a module's state as Transformer Engine has it, by slots.

    Of several groups all inputs come first, then weights, then outputs, as Megatron-Core divides
    them.
    """
    meta, groups = module.fp8_meta, len(module.groups_of_scales())
    count = len(_parts(module))
    state: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": count}}
    state["recipe"] = plain_recipe(meta["recipe"])
    for short, _, _ in _SIDES:
        tensors = meta.get(f"scaling_{short}")
        if tensors is None:
            continue
        scale, history = tensors.scale, tensors.amax_history
        if groups > 1:
            history = history.view(history.shape[0], groups, -1).mT.reshape(history.shape[0], -1)
            scale = scale.view(groups, -1).mT.reshape(-1)
        state[f"scale_{short}"], state[f"amax_history_{short}"] = scale, history
    return state


def plain_recipe(recipe: Any) -> DelayedScaling | None:
    """Return a recipe of plain fields alone, which any process can read; None of any other kind.

    Args:
        recipe: any.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    made = DelayedScaling(
        recipe.margin,
        recipe.fp8_format,
        recipe.amax_history_len,
        reduce_amax=recipe.reduce_amax,
        fp8_dpa=recipe.fp8_dpa,
        fp8_mha=recipe.fp8_mha,
    )
    if isinstance(recipe.amax_compute_algo, str):
        made.amax_compute_algo = recipe.amax_compute_algo
    return made


# ---- read


class _Record:
    """What a pickle would have made by a call: the name is not looked at, nothing is called."""

    args: tuple[Any, ...]
    #: The module of the name.
    origin = ""

    def __new__(cls, *args: Any) -> _Record:
        made = object.__new__(cls)
        made.args = args
        return made


def _floats(values: Any) -> torch.Tensor:
    if not isinstance(values, list):
        raise pickle.UnpicklingError("a tensor must be written as a list of its values")
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _storage(held: bytes) -> Any:
    return torch.load(io.BytesIO(held), weights_only=True, map_location="cpu")


_READ: Final = {
    ("torch", "FloatTensor"): _floats,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _READ.get((module, name))
        return type("_Record", (_Record,), {"origin": module}) if known is None else known

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("an extra state refers to nothing outside of it")


def _read(value: Any) -> dict[str, Any] | None:
    """Return the entries of an extra state, None of what is none."""
    if isinstance(value, io.BytesIO):  # of Transformer Engine 1
        held = value.getvalue()
    elif isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        held = value.detach().cpu().numpy().tobytes()
    else:
        return None
    try:
        is_file = held[:2] == b"PK"  # of torch.save
        found = _storage(held) if is_file else _Reader(io.BytesIO(held)).load()
    except Exception:  # bytes of anybody's: a pickle fails in any way
        return None
    return found if isinstance(found, dict) else None


def _histories(module: Any, value: Any) -> _Tensors:
    """Return an extra state's histories by the names of `state_dict_with_history`.

    Args:
        module: that they are for.
        value: the state.
    """
    if value is None or (isinstance(value, torch.Tensor) and not value.numel()):
        return {}
    state = _read(value)
    own = None if state is None else state.get(_OWN)
    if isinstance(own, dict) and all(_is_of(module, name) for name in own):
        return own
    if state is not None and set(state) <= {"recipe", "extra_fp8_variables"}:
        return {}  # of a recipe without histories
    found = None if state is None else _named(module, state)
    if found is None:
        _tell_if_any(_KEY, value)
    return found or {}


def _parts(module: Any) -> list[str]:
    """Return the names of what has scales of its own."""
    return [part for part, _ in module.scaled_weights()]


def _is_of(module: Any, name: Any) -> bool:
    """Return whether a key of `state_dict_with_history` is one of a part that a module has."""
    parts = str(name).split(".")
    return ".".join(parts[1:-3]) in _parts(module)


def _named(module: Any, state: Mapping[str, Any]) -> _Tensors | None:
    """Return histories that stand by slots, under their names; None if they do not fit.

    Args:
        module: that they are for.
        state: of Transformer Engine, or of this package, put together by Megatron-Core.
    """
    parts, recipe = _parts(module), state.get("recipe")
    by_slots = len(module.groups_of_scales()) > 1
    elements = _elements(recipe)
    # The order of Transformer Engine's own groups was another one in each of two versions.
    if elements is None or (by_slots and not getattr(recipe, "origin", "").startswith("hybridq")):
        return None
    made: _Tensors = {}
    for (short, count, slots), element in zip(_SIDES, elements, strict=True):
        scale, history = state.get(f"scale_{short}"), state.get(f"amax_history_{short}")
        if not (isinstance(scale, torch.Tensor) and isinstance(history, torch.Tensor)):
            return None
        if scale.numel() != count * len(parts) or history.shape[1:] != (scale.numel(),):
            return None
        for i, part in enumerate(parts):
            for slot, what in enumerate(slots):
                at = slot * len(parts) + i if by_slots else i * count + slot
                one, past = scale.reshape(-1)[at], history[:, at]
                if one == 1.0 and not past.any():
                    continue  # nothing was recorded
                name = ".".join(n for n in ("scaling", part, what, element) if n)
                made[f"{name}.scale"] = one.reshape(1).float()
                made[f"{name}.history"] = past.float().contiguous()
    return made


def _elements(recipe: Any) -> tuple[str, str] | None:
    """Return the elements of the forward and of the backward, None if they are not known.

    Args:
        recipe: as it was read; None: of Transformer Engine 1, whose state had none.
    """
    if recipe is None:
        return "e4m3", "e5m2"
    largest = getattr(vars(recipe).get("fp8_format"), "args", ())
    limits = getattr(largest[0], "args", largest[0]) if largest else ()
    found = tuple(_ELEMENTS.get(one) for one in limits)
    return found if len(found) == 2 and None not in found else None  # type: ignore[return-value]
