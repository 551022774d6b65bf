"""hybridq.quantized_model_init: modules whose weights are quantized tensors from the start."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ... import settings
from ..._log import log_once
from ...direction import COLUMNWISE
from ...formats import PlaneSpec
from ...quantizers import Quantizer
from ...recipes import Recipe, SlotPlan, bind, default_recipe, get
from ...recipes.module_types import module_type
from ...tensor import is_quantized
from ...tensor.initial import keep_initial
from .foreign import foreign_weight
from .pretrained import decode_state, saves_decoded
from .replaced import replaced

__all__ = [
    "check_weights",
    "dequantized_state_dict",
    "fp8_model_init",
    "plain_weights",
    "quantize_weights",
    "quantized_model_init",
    "tell_values",
    "weights_given_later",
    "would_quantize",
]

#: What can be quantized.
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
#: Where a tensor has the hooks on its gradient.
_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _ModelInit(NamedTuple):
    """What a `quantized_model_init` says to the modules inside."""

    recipe: Recipe
    preserves: bool
    is_frozen: bool
    wraps_plain: bool
    given_later: Container[str] = ()


def quantized_model_init(
    recipe: Recipe | str | None = None,
    *,
    enabled: bool = True,
    preserve_high_precision_init_val: bool = False,
    frozen: bool = False,
    wraps_plain: bool = False,
) -> AbstractContextManager[None]:
    """Context: the weights of hybridq's modules that are made inside live in low precision.

    `Linear`, `GroupedLinear`, `LayerNormLinear`, `RMSNormLinear`, `LayerNormMLP` and what is built
    of them draw their initial values as ever, and then hold each weight as a parameter that is a
    QuantizedTensor: the planes of the recipe's weight slot, one of them only where it determines
    the other. Biases and norms stay as they are, and so do weights that the recipe leaves alone.
    `hybridq.convert` inside the context quantizes the weights of the modules that it turns.

    Under `hybridq.autocast` with that recipe the planes are used as they are; under another one
    they are decoded and quantized again.

    Args:
        recipe: a Recipe or the name of one; None takes that of `hybridq.autocast` without a name.
            A recipe that reads names is asked by the `name=` of the module's constructor. With
            delayed scaling, weights have the scale of their own amax.
        enabled: False: modules inside keep high precision, also within another such context.
        preserve_high_precision_init_val: each quantized parameter has
            `get_high_precision_init_val()`, which returns its initial value before quantization, on
            the CPU, and `clear_high_precision_init_val()`, which frees it: the first then returns
            None. A write to the parameter frees it too, and the parameter no longer has the first.
        frozen: the weights are not trained: `requires_grad` is False, and they hold the rowwise
            plane alone. Where the gradient of an input needs the columnwise plane, the backward
            encodes it of what the rowwise one decodes to, and frees it: the bits of a recipe with
            `columnwise_source="rowwise_dequantized"`. A weight whose rowwise plane the recipe
            leaves in high precision stays plain.
        wraps_plain: weights that the recipe leaves alone are IdentityTensors of their own values.

    Modules on the meta device get planes there; after `to_empty`, `reset_parameters` fills them.

    Raises:
        TypeError: `recipe` is no recipe, or a flag is no bool.
        ValueError: no recipe has that name.

    Source: Transformer Engine's `quantized_model_init` (names and meaning).

    Example:
        >>> import torch, hybridq
        >>> with hybridq.quantized_model_init("mxfp8_fwd_nvfp4_bwd"):
        ...     layer = hybridq.Linear(64, 32)
        >>> type(layer.weight).__name__, layer.weight.nbytes < 64 * 32 * 2
        ('HybridQuantizedTensor', True)
    """
    chosen = default_recipe() if recipe is None else get(recipe)
    preserves = preserve_high_precision_init_val
    flags = (
        ("enabled", enabled),
        ("preserve_high_precision_init_val", preserves),
        ("frozen", frozen),
        ("wraps_plain", wraps_plain),
    )
    for name, flag in flags:
        given: object = flag
        if not isinstance(given, bool):
            got = type(given).__name__
            raise TypeError(f"quantized_model_init: {name} must be a bool, got {got}")
    return _inside(_ModelInit(chosen, preserves, frozen, wraps_plain) if enabled else None)


@contextmanager
def _inside(init: _ModelInit | None) -> Iterator[None]:
    state = settings.current()
    previous, state.model_init = state.model_init, init
    hook = register_module_module_registration_hook(_know_model)
    try:
        yield
    finally:
        state.model_init = previous
        hook.remove()


@contextmanager
def weights_given_later(names: Container[str]) -> Iterator[None]:
    """Context: a `quantized_model_init` around it says nothing of weights that are given planes.

    Args:
        names: of parameters in their model, which a file has planes of.
    """
    state = settings.current()
    previous: Any = state.model_init
    if previous is not None:
        state.model_init = previous._replace(given_later=names)
    try:
        yield
    finally:
        state.model_init = previous


def _know_model(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Have a model that is built here save what its quantized parameters hold."""
    saves_decoded(type(module))


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """Return `quantized_model_init`: Transformer Engine's older name and order of arguments.

    Args:
        enabled, recipe, preserve_high_precision_init_val: as there; not of FP8 alone.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.fp8_model_init(enabled=True, recipe="fp8_current"):
        ...     layer = hybridq.Linear(64, 32)
        >>> type(layer.weight).__name__
        'Float8Tensor'
    """
    return quantized_model_init(
        recipe, enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val
    )


def _slot_quantizer(slot: SlotPlan, is_frozen: bool, is_transposed: bool) -> Quantizer:
    """Return the quantizer of a weight's slot."""
    row, col = PlaneSpec.parse(slot.row.spec), PlaneSpec.parse(slot.col.spec)
    derives = row == col and row.is_derivable and slot.col_source == "original"
    derives = derives and not slot.is_pair
    # The transpose of a pair has no source of its own: the backward makes the second plane.
    makes_late = is_transposed and slot.col_source != "original" and slot.can_encode_late
    is_one = derives or slot.saves_row or is_frozen or makes_late
    # A plane that there is not is made of nothing, so that the transposed quantizer exists.
    source = "original" if is_one and is_transposed else slot.col_source
    group = slot.amax_group or None
    made = Quantizer(row, col, source, amax_group=group, is_pair=slot.is_pair)
    return made.with_usage(columnwise=False) if is_one else made


def quantize_weights(module: Any, weights: Iterable[tuple[str, str]]) -> None:
    """Quantize a module's weights, if it is made inside `quantized_model_init`.

    Args:
        module: a QuantizedModule that is otherwise made.
        weights: names of its weights, and the part that each belongs to.
    """
    for name, part, weight, quantizer, reason in _wanted(module, weights):
        if reason:
            full = _full_name(module, part, name)
            log_once(
                f"quantized_model_init:{full}",
                f"quantized_model_init: {full} {list(weight.shape)} stays in high precision: "
                f"{reason}",
            )
            continue
        init: Any = settings.current().model_init
        made = _quantized(weight, quantizer, init.preserves, module.holds_transposed)
        module._parameters[name] = made.requires_grad_(made.requires_grad and not init.is_frozen)
        replaced(weight, "quantized_model_init", "hybridq.convert")


def check_weights(module: Any, weights: Iterable[tuple[str, str]]) -> None:
    """Raise where `quantize_weights` would, and change nothing.

    Args:
        module: a QuantizedModule that is otherwise made.
        weights: names of its weights, and the part that each belongs to.

    Raises:
        TypeError: a weight is of a dtype that is not quantized.
        RecipeError: the recipe's factory fails.
    """
    for _ in _wanted(module, weights):
        pass


def would_quantize(module: Any, weights: Iterable[tuple[str, str]]) -> bool:
    """Return whether `quantize_weights` would quantize one of the weights; never raise for them.

    Args:
        module: a QuantizedModule that is otherwise made.
        weights: names of its weights, and the part that each belongs to.

    Raises:
        RecipeError: the recipe's factory fails.
    """
    plain = [
        (name, part)
        for name, part in weights
        if (weight := module._parameters.get(name)) is not None
        and weight.dtype in _DTYPES
        and foreign_weight(weight) is None
    ]
    return any(not reason for *_, reason in _wanted(module, plain))


def _wanted(
    module: Any, weights: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str, nn.Parameter, Quantizer, str | None]]:
    """Yield what is to be quantized: name, part, weight, quantizer, and why it must not be."""
    init = settings.current().model_init
    if not isinstance(init, _ModelInit):
        return
    for name, part in weights:
        weight = module._parameters.get(name)
        if weight is None or is_quantized(weight):
            continue
        foreign = foreign_weight(weight)
        if foreign is not None:
            full = _full_name(module, part, name)
            raise TypeError(
                "quantized_model_init: weights must be in high precision, got "
                f"{foreign} of {full}, which is quantized already; "
                "leave its module out with a filter"
            )
        plan = bind(init.recipe, module.part_name(part), module.module_type)
        # What reads no columnwise plane, an embedding, has one plane, as frozen weights have.
        reads = {(slot, of) for _, slot, of in module_type(module.module_type).needs}
        is_frozen = init.is_frozen or ("weight", COLUMNWISE) not in reads
        is_plain = plan.weight.row.is_plain and (plan.weight.col.is_plain or is_frozen)
        if is_plain and not init.wraps_plain:
            continue
        quantizer = _slot_quantizer(plan.weight, is_frozen, module.holds_transposed)
        quantizer, split = module.part_quantizer(part, plan, quantizer)
        reason = split or _reason_against(weight, quantizer, module.holds_transposed)
        if reason is None and weight.dtype not in _DTYPES:
            full = _full_name(module, part, name)
            raise TypeError(
                "quantized_model_init: weights must be float32, bfloat16 or float16, got "
                f"{weight.dtype} of {full}; cast it, or leave its "
                "module out with a filter"
            )
        yield name, part, weight, quantizer, reason


def _full_name(module: Any, part: str, name: str) -> str:
    """Return what messages call a parameter; of a module without a name its own alone."""
    return f"{module.part_name(part)}.{name}".lstrip(".")


def tell_values(module: Any, reasons: Mapping[str, str]) -> None:
    """Say why weights stay in high precision, if a module is made inside `quantized_model_init`.

    Args:
        module: a QuantizedModule that is otherwise made.
        reasons: by the weight's name.
    """
    init = settings.current().model_init
    if not isinstance(init, _ModelInit) or not reasons:
        return
    parts = module.parts_of(init.recipe)
    if all(bind(init.recipe, module.part_name(one), module.module_type).is_plain for one in parts):
        return  # as the recipe has it
    for name, reason in reasons.items():
        weight = module._parameters.get(name)
        if weight is not None and not is_quantized(weight):
            full = _full_name(module, "", name)
            if full in init.given_later:
                continue
            log_once(
                f"quantized_model_init:{full}",
                f"quantized_model_init: {full} {list(weight.shape)} stays in high precision: "
                f"{reason}; products under the recipe quantize it in each forward",
            )


def _reason_against(weight: nn.Parameter, quantizer: Quantizer, is_transposed: bool) -> str | None:
    """Return why a weight cannot live in low precision as its slot asks; None: it can.

    Of several matrices each has planes of its own.
    """
    own = quantizer.mirrored() if is_transposed else quantizer
    if own is None:
        return (
            "it is [in, out], and its recipe makes one plane of the other by a history or the "
            "amax of a process group, which a backward cannot"
        )
    return None if weight.dim() == 2 or weight.shape[0] else "it has no matrix"


def _quantized(
    weight: nn.Parameter, quantizer: Quantizer, preserves: bool, is_transposed: bool
) -> nn.Parameter:
    """Return a weight quantized; one that is `[in, out]` as the transpose of what is quantized."""
    values = weight.detach()
    matrix = values.mT if is_transposed else values
    made: torch.Tensor
    if values.dim() == 3:
        made = quantizer.quantize_stack(matrix)
    elif values.is_meta:
        made = quantizer.make_empty(matrix.shape, dtype=values.dtype, device="meta")
    else:
        made = quantizer.quantize(matrix)
    made = made.mT if is_transposed else made
    parameter = nn.Parameter(made, requires_grad=weight.requires_grad)
    if preserves:
        keep_initial(parameter, None if values.is_meta else values)
    for name, value in vars(weight).items():
        setattr(parameter, name, value)  # what an init_method has put on it
    for name in _HOOKS:  # the mapping itself, so that handles remove them from here too
        if getattr(weight, name, None):
            setattr(parameter, name, getattr(weight, name))
    return parameter


@contextmanager
def plain_weights(module: Any) -> Iterator[None]:
    """Let a module's weights be plain inside; afterwards they are quantized once.

    So that initial values are those of high precision, however many operations make them.

    Args:
        module: whose quantized parameters are written inside, all of each.
    """
    own = {name: one for name, one in module._parameters.items() if _is_low(module, name, one)}
    for name, parameter in own.items():
        plain = torch.empty_like(parameter.detach())
        if is_quantized(parameter):
            plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        module._parameters[name] = nn.Parameter(plain, parameter.requires_grad)
    try:
        yield
        made: dict[str, Any] = {name: module._parameters[name] for name in own}
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(made[name])
            if not is_quantized(parameter):
                module.prepared_weights[name].keep_initial(parameter, made[name])
            elif parameter.initial_value is not None:
                keep_initial(parameter, made[name])


def _is_low(module: nn.Module, name: str, parameter: Any) -> bool:
    """Return whether a parameter is quantized, or a DTensor whose shards are."""
    prepared = getattr(module, "prepared_weights", {}).get(name)
    return is_quantized(parameter) or (prepared is not None and prepared.is_held)


def dequantized_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return `module.state_dict()` with quantized tensors decoded: a checkpoint for anyone.

    Args:
        module: any module.

    Returns:
        Plain tensors of the parameters' nominal dtypes; what was not quantized is not copied, and
        what has two names is one tensor.

    Raises:
        TypeError: it is no module.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.quantized_model_init("mxfp8"):
        ...     layer = hybridq.Linear(64, 32)
        >>> plain = torch.nn.Linear(64, 32)
        >>> plain.load_state_dict(hybridq.dequantized_state_dict(layer))
        <All keys matched successfully>
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"dequantized_state_dict: module must be an nn.Module, got {type(given).__name__}"
        )
    state = module.state_dict()
    decode_state(state)
    return state
