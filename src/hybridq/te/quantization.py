"""Transformer Engine's contexts, in its order of arguments, and what scripts ask of the machine.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/quantization`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from .. import nn, recipes, settings
from .._torch_private import leave_frame_alone
from ..recipes import (
    QuantizerRole,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .common.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, Recipe
from .common.scaling import DelayedScalingRequest, QuantizerRequest
from .quantizers import Float8Quantizer
from .reading import SLOTS, remember_recipe, slot_quantizer
from .recipe_dtypes import (  # noqa: F401 (scripts import them from here)
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
)

__all__ = [
    "CustomRecipeState",
    "DelayedScalingRequest",
    "FP8GlobalStateManager",
    "QuantizerRequest",
    "QuantizerRole",
    "RecipeState",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


_F = TypeVar("_F", bound=Callable[..., Any])


class _Opened(threading.local):
    """What this thread is inside of."""

    def __init__(self) -> None:
        self.recipes: list[tuple[Any, Any]] = []
        self.inits: list[tuple[bool, bool]] = []
        self.num_calibrations = 0


_opened = _Opened()


def get_default_recipe() -> MXFP8BlockScaling:
    """Return the recipe of an `autocast` that names none: MXFP8, on every machine."""
    return MXFP8BlockScaling()


get_default_fp8_recipe = get_default_recipe  # its older name


def check_fp8_support() -> tuple[bool, str]:
    """Return `(True, "")`: every format runs on every machine."""
    return True, ""


check_mxfp8_support = check_nvfp4_support = check_fp8_support
check_fp8_block_scaling_support = check_fp8_support


def check_recipe_support(recipe: Any) -> None:
    """Raise unless a linear module can be run under `recipe`, forward and backward.

    Args:
        recipe: of `hybridq.te`, or of hybridq.
    """
    recipes.check_recipe_support(_ours(recipe))


def get_align_size_for_quantization(recipe: Any) -> int:
    """Return the multiple that Transformer Engine wants groups of tokens padded to.

    Args:
        recipe: of `hybridq.te`; one of hybridq gives 1. No module here needs it.
    """
    if not isinstance(recipe, Recipe):
        return recipes.get_align_size_for_quantization(recipe)
    if recipe.custom():
        return int(recipe.quantization_alignment)  # type: ignore[attr-defined]
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def _ours(recipe: Any) -> Any:
    return recipe.current if isinstance(recipe, Recipe) else recipe


class autocast(recipes.autocast):
    """`hybridq.autocast` with Transformer Engine's order of arguments.

    Args:
        enabled: False turns quantization off inside.
        calibrating: with `enabled=False`, inputs and weights of modules that run in high precision
            give a DelayedScaling its histories, and scales follow from them when the block is left
            (`hybridq.nn.recording_amaxes`); else it has no effect, as there.
        recipe: of `hybridq.te.common.recipe`, or whatever `hybridq.autocast` takes; None: MXFP8.
        amax_reduction_group: of DelayedScaling; other recipes reduce over their quantizers' groups.
        _graph: has no effect.

    Raises:
        ValueError, TypeError: as `hybridq.autocast`.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(64, 64)
        >>> with te.autocast(recipe=te.common.recipe.DelayedScaling(margin=1)):
        ...     y = layer(torch.ones(4, 64))
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self.te_recipe = get_default_recipe() if recipe is None else recipe
        self.amax_reduction_group = amax_reduction_group
        source = self.te_recipe
        if amax_reduction_group is not None and isinstance(source, DelayedScaling):
            source = source.attending(source.with_group(amax_reduction_group))
        super().__init__(enabled, source)
        self.calibrating = bool(calibrating) and not enabled
        self._calibrations: list[AbstractContextManager[None]] = []

    @leave_frame_alone  # as hybridq.autocast
    def __enter__(self) -> autocast:
        super().__enter__()
        if not torch.compiler.is_compiling():
            _opened.recipes.append((self.te_recipe, self.amax_reduction_group))
            if self.enabled and isinstance(self.te_recipe, Recipe):
                remember_recipe(settings.current().recipe.key, self.te_recipe)  # type: ignore[attr-defined]
            if self.calibrating:
                calibration = nn.recording_amaxes(self.recipe)
                calibration.__enter__()
                self._calibrations.append(calibration)
                _opened.num_calibrations += 1
        return self

    @leave_frame_alone
    def __exit__(self, *error: Any) -> None:
        if not torch.compiler.is_compiling():
            _opened.recipes.pop()
        super().__exit__(*error)
        if self._calibrations and not torch.compiler.is_compiling():
            _opened.num_calibrations -= 1
            self._calibrations.pop().__exit__(*error)

    def __call__(self, function: _F) -> _F:
        decorated = super().__call__(function)
        if not self.calibrating:
            return decorated

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.enabled, True, self.te_recipe, self.amax_reduction_group):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Return `autocast(enabled, calibrating, fp8_recipe, fp8_group)`: the older name.

    Args:
        enabled, calibrating: as there.
        fp8_recipe, fp8_group: as `recipe` and `amax_reduction_group` there.
        _graph: has no effect.
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Any = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Context: `hybridq.quantized_model_init` with Transformer Engine's order of arguments.

    Args:
        enabled: False: modules inside keep high precision.
        recipe: as for `autocast`.
        preserve_high_precision_init_val: as `hybridq.quantized_model_init` takes it.

    Example:
        >>> import hybridq.te as te
        >>> with te.quantized_model_init(recipe=te.common.recipe.Float8CurrentScaling()):
        ...     layer = te.Linear(64, 64)
        >>> type(layer.weight).__name__
        'Float8Tensor'
    """
    keeps = preserve_high_precision_init_val
    given: dict[str, Any] = {"enabled": enabled, "preserve_high_precision_init_val": keeps}
    with nn.quantized_model_init(_ours(recipe), **given, wraps_plain=True):
        _opened.inits.append((enabled, keeps))
        try:
            yield
        finally:
            _opened.inits.pop()


def fp8_model_init(
    enabled: bool = True,
    recipe: Any = None,
    preserve_high_precision_init_val: bool = False,
) -> Any:
    """Return `quantized_model_init` of these arguments: the older name.

    Args:
        enabled, recipe, preserve_high_precision_init_val: as there.
    """
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


class FP8GlobalStateManager:
    """What scripts ask of the contexts that they are inside of; there is no other state.

    Example:
        >>> import hybridq.te as te
        >>> with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
        ...     te.FP8GlobalStateManager.get_fp8_recipe().mxfp8()
        True
    """

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """Return True and no reason against: every format runs on every machine."""
        return True, ""

    is_mxfp8_available = is_nvfp4_available = is_fp8_available
    is_fp8_block_scaling_available = is_fp8_available

    @staticmethod
    def reset() -> None:
        """Do nothing: histories belong to modules, and contexts restore what was before."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return whether modules would compute under a recipe now."""
        return settings.current().recipe is not None

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return whether modules in high precision would record amaxes now."""
        return _opened.num_calibrations > 0

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Return whether modules made now would have quantized parameters."""
        return bool(_opened.inits) and _opened.inits[-1][0]

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Return whether these would keep their initial values, too."""
        return FP8GlobalStateManager.with_fp8_parameters() and _opened.inits[-1][1]

    @staticmethod
    def get_fp8_recipe() -> Any:
        """Return the recipe of the innermost `te.autocast`, else the default one."""
        return _opened.recipes[-1][0] if _opened.recipes else get_default_recipe()

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Return the key of a module's `fp8_meta` and `quantizers`.

        Args:
            forward: of the forward's slots, or the backward's.
        """
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fp8_group() -> Any:
        """Return the process group of the innermost `te.autocast`, or None."""
        return _opened.recipes[-1][1] if _opened.recipes else None


class AlignedByRecipe:
    """Takes a missing `align_size` from the first recipe that it is called under."""

    align_size: int | None

    def _padded(self, sizes: list[int]) -> list[int]:
        if self.align_size is None and FP8GlobalStateManager.is_fp8_enabled():
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            self.align_size = get_align_size_for_quantization(recipe)
        padded: list[int] = super()._padded(sizes)  # type: ignore[misc]
        return padded


class RecipeState:
    """The quantizers of a module's slots under a recipe, without a module.

    Args:
        recipe: of `hybridq.te`, or of hybridq.
        mode: `"forward"` or `"backward"`.
        num_quantizers: number of slots.
        roles: of each; a tensor type that is none of a linear module's (`input`, `weight`,
            `output`, or `grad_output`, `grad_input`), or none at all, is taken by the place: these
            over and over. A CustomRecipe is asked for a given role as it is.
        device: of the scales and histories of delayed scaling; None: torch's default.

    Attributes:
        scale: FP32 `[n]`, of the n slots of delayed scaling, which their quantizers see; or None.
        amax_history: FP32 `[length, n]`, whose slot 0 their quantizers write; or None.

    Raises:
        ValueError: another mode, or another number of roles.
    """

    scale: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None

    def __init__(
        self,
        recipe: Any,
        mode: str,
        num_quantizers: int = 1,
        roles: Sequence[Any] | None = None,
        device: Any = None,
    ) -> None:
        slots = SLOTS.get({"forward": "scaling_fwd", "backward": "scaling_bwd"}.get(mode, ""))
        if slots is None:
            raise ValueError(f"RecipeState: mode must be forward or backward, got {mode!r}")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"RecipeState: roles must be {num_quantizers}, got {len(roles)}")
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.device = device
        self._given, self._slots = roles, slots
        self.roles = [self._asked(i) for i in range(num_quantizers)]

    def _slot_role(self, i: int) -> QuantizerRole:
        """Return the role that was given for a slot, an empty one where none was."""
        return (self._given[i] if self._given else None) or QuantizerRole()

    def _slot_tensor_type(self, i: int) -> str:
        """Return a slot's tensor type, by its place where the role's is none of a linear module."""
        own: str = self._slot_role(i).tensor_type
        return own if own in self._slots else self._slots[i % len(self._slots)]

    def _asked(self, i: int) -> QuantizerRole:
        if self._given and isinstance(self.recipe, CustomRecipe):
            return self._given[i] or QuantizerRole("linear", self._slots[-1])  # asked with None
        role, own = self._slot_role(i), self._slot_tensor_type(i)
        return role if role.tensor_type == own else QuantizerRole("linear", own, role.name)

    @property
    def _has_delayed_scaling(self) -> bool:
        return self.scale is not None

    @staticmethod
    def create(
        recipe: Any,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Any = None,
        roles: Sequence[Any] | None = None,
    ) -> RecipeState:
        """Return the state of these slots.

        Args:
            recipe, mode, num_quantizers, roles: as of RecipeState.
            device: of the scales and histories of delayed scaling; None: torch's default.
        """
        kind = CustomRecipeState if isinstance(recipe, CustomRecipe) else RecipeState
        return kind(recipe, mode, num_quantizers, roles, device)

    def make_quantizers(self) -> list[Any]:
        """Return a quantizer of `hybridq.te` for each slot; those of delayed scaling share memory.

        Their scale is 1, and they write their amax into slot 0 of the history.
        """
        frozen = recipes.get(_ours(self.recipe))
        asked: list[Any] = [frozen.ask(role) for role in self.roles]
        delayed = [one for one in asked if one.is_delayed]
        if delayed:
            request = delayed[0].rowwise_delay or delayed[0].columnwise_delay
            own: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
            self.scale = torch.ones(len(delayed), **own)
            self.amax_history = torch.zeros(request.amax_history_len, len(delayed), **own)
        made: list[Any] = []
        at = 0
        for one in asked:
            if not one.is_delayed or self.scale is None or self.amax_history is None:
                made.append(slot_quantizer(one, {}, ""))
                continue
            spec = one.rowwise or one.columnwise
            parts = (self.scale[at : at + 1], self.amax_history[0, at : at + 1])
            made.append(Float8Quantizer(*parts, spec.format.element.name))
            at += 1
        return made


#: Each recipe's own name of the class.
Float8BlockScalingRecipeState = Float8CurrentScalingRecipeState = RecipeState
MXFP8BlockScalingRecipeState = NVFP4BlockScalingRecipeState = RecipeState
DelayedScalingRecipeState = RecipeState


class CustomRecipeState(RecipeState):
    """The quantizers of a module's slots under a CustomRecipe.

    Args:
        recipe, mode, num_quantizers, roles, device: as of RecipeState.
    """
