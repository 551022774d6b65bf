"""quantize_model: a trained model becomes one that computes quantized forwards by itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from .._log import LOGGER
from ..calibration import Calibration
from ..converters import LEAST_WIDTH, check_made, warn_of_unfollowed
from ..converters.convert import convert_modules
from ..direction import COLUMNWISE, ROWWISE
from ..distributed.attachment import local_of
from ..errors import must_be_one_of, warn
from ..formats import PlaneSpec
from ..nn import QuantizedModule, quantized_model_init
from ..recipes import Recipe
from ..recipes.named import source
from ..recipes.recipe import RecipeSource
from ..tensor import is_quantized
from .static_amax import static_amax

__all__ = ["quantize_model"]

#: What is quantized beside weights, and how modules are told of it.
_ACTIVATIONS: Final = {"quantized": "dynamic", "high_precision": "high_precision"}


def quantize_model(
    model: nn.Module,
    recipe: RecipeSource | str | os.PathLike[str],
    calibration: Calibration | str | os.PathLike[str] | None = None,
    *,
    activations: str = "quantized",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> nn.Module:
    """Make a model one that runs quantized forwards by itself, in place; return it.

    The modules that `hybridq.convert` converts are converted. Each of their weights becomes the
    rowwise plane that the recipe has for it, one weight after the other, and planes of that format
    that are there already stay as they are. From then on `model(...)` quantizes inputs as the
    recipe's forward says, without `hybridq.autocast`, with the bits of one. The model is put into
    evaluation mode and none of its parameters needs a gradient; a training forward, and a backward
    of what needs a gradient all the same, raise.

    Args:
        model: any module.
        recipe: a recipe, the name of one, or the path of a TOML file; its forward is what counts.
            Scales that would follow from a history are those of the tensor at hand.
        calibration: what `hybridq.calibrate` found, or the path of its file: inputs have a static
            scale where the recipe has one amax for a tensor, FP8 `amax / 448`, NVFP4 the second
            level `amax / (6 * 448)`; what is larger saturates. The amaxes are kept beside the
            weights and are no part of the state_dict. None: every input has its own.
        activations: `"quantized"`; or `"high_precision"`: inputs stay as they are, and products
            take what the weights' planes decode to.
        filter_fn, also, least_width: as `hybridq.convert` takes them.

    Called again it gives the modules the new recipe; a weight whose planes are of another format is
    decoded and quantized again, which a warning says. Weights that stay in high precision (of
    convolutions, what several modules share) are quantized in each forward; the log says which, and
    a warning names those that are DTensors, of FSDP2 or tensor parallelism.
    `hybridq.summary(model)` shows all of it. Modules that the calibration does not know are named
    in a warning, and have dynamic scales.

    Raises:
        TypeError: `model` is no module, `recipe` no recipe, `calibration` neither a Calibration nor
            a path, a weight is FP64, or as `hybridq.convert`.
        ValueError: no recipe has that name, `activations` is none of these, activations in high
            precision are given a calibration, an amax is not finite, or as `hybridq.convert`.
        CheckpointError: the calibration's file cannot be read.

    Source: ours; static scales: the rules of docs/reference/numerics.md with the calibration's
        amax in the place of the tensor's.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        >>> model = hybridq.quantize_model(model, "mxfp8")
        >>> type(model[0].weight).__name__, model(torch.ones(2, 64)).requires_grad
        ('MXFP8Tensor', False)
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"quantize_model: model must be an nn.Module, got {type(given).__name__}")
    if not isinstance(activations, str) or activations not in _ACTIVATIONS:
        raise ValueError(f"quantize_model: activations {must_be_one_of(_ACTIVATIONS, activations)}")
    check_made("quantize_model", model)
    inputs = _ACTIVATIONS[activations]
    if calibration is not None and activations != "quantized":
        raise ValueError(
            "quantize_model: a calibration is of inputs that are quantized, got one with "
            f"activations={activations!r}; leave one of both out"
        )
    if isinstance(calibration, str | os.PathLike):
        calibration = Calibration.load(calibration)
    seen: object = calibration
    if seen is not None and not isinstance(seen, Calibration):
        raise TypeError(
            "quantize_model: calibration must be a hybridq.calibration.Calibration or the path of "
            f"its file, got {type(seen).__name__}"
        )
    if calibration is not None:
        for name in calibration.amaxes:  # raises now, and not when weights are planes
            static_amax(calibration, name, "input")
    chosen = source(recipe).current
    with quantized_model_init(chosen, frozen=True):
        stays = _stays(model)
        for one in model.modules():  # as `convert` does of others: before any weight is quantized
            if isinstance(one, QuantizedModule):
                one.check_initial_weights(but=stays)
        convert_modules(model, filter_fn, also=also, least_width=least_width)
        ours = [one for one in model.modules() if isinstance(one, QuantizedModule)]
        again = _quantize_weights(model, ours, chosen)
    warn_of_unfollowed("quantize_model", chosen, model)
    if again:
        warn(
            f"quantize_model: weights of other formats than {chosen!r} has for them were decoded "
            f"and quantized again: {_some(again)}",
        )
    missed: list[str] = []
    took = 0
    for module in ours:
        module.bind_forward(chosen, inputs)
        if calibration is not None:
            amaxes, without = _amaxes(module, chosen, calibration)
            module.bind_forward(chosen, inputs, amaxes)
            missed, took = missed + without, took + len(amaxes)
    model.requires_grad_(False)
    model.eval()
    plain = [name for module in ours for name in _plain_weights(module, chosen)]
    dealt = [name for name, one in model.named_parameters() if _is_dealt_out(one)]
    dealt = [name for name in dealt if name in plain]
    if dealt:
        warn(
            "quantize_model: weights that are DTensors stay in high precision, and are quantized "
            "in each forward; call quantize_model before fully_shard, and before "
            "parallelize_module with ColwiseParallel and RowwiseParallel of hybridq.distributed, "
            f"which cut planes: {_some(dealt)}",
        )
        plain = [name for name in plain if name not in dealt]
    if plain:
        LOGGER.info(f"quantize_model: weights quantized in each forward: {_some(plain)}")
    if missed:
        told = f"the calibration has no input amax of {len(missed)} modules, whose scales are "
        told += f"dynamic: {_some(missed)}"
    elif calibration is not None and not took:
        told = f"no input of {chosen!r} takes a static scale, blocks and rows have their own amax; "
        told += "leave the calibration out"
    else:
        return model
    warn(f"quantize_model: {told}")
    return model


def _quantize_weights(model: nn.Module, ours: list[QuantizedModule], recipe: Recipe) -> list[str]:
    """Quantize the weights of these modules, one after the other; keep planes that fit.

    Returns:
        The names of weights whose planes did not fit.
    """
    kept = _stays(model)
    again: list[str] = []
    for module in ours:
        for name, part in module.initial_weights():
            weight: Any = module._parameters.get(name)
            if weight is None or not is_quantized(weight) or id(weight) in kept:
                continue
            if not _fits(module, weight, recipe, part):
                again.append(f"{module.name}.{name}" if module.name else name)
                module._parameters[name] = nn.Parameter(weight.detach().dequantize(), False)
        module.quantize_initial_weights(but=kept)
    return again


def _stays(model: nn.Module) -> set[int]:
    """Return the ids of parameters that are not quantized: of several modules, or dealt out."""
    users = Counter(id(one) for m in model.modules() for one in m.parameters(recurse=False))
    return {one for one, count in users.items() if count > 1} | {
        id(one) for one in model.parameters() if _is_dealt_out(one)
    }


def _is_dealt_out(parameter: Any) -> bool:
    """Return whether ranks have parts of a parameter, in high precision, as a DTensor."""
    return hasattr(parameter, "device_mesh") and not is_quantized(local_of(parameter))


def _fits(module: QuantizedModule, weight: Any, recipe: Recipe, part: str) -> bool:
    """Return whether a weight has the recipe's rowwise plane; then it is left with that alone."""
    parts = module.matrix_parts(part, weight.shape[0], recipe) if weight.dim() == 3 else (part,)
    slots = {module.plan_of(recipe, one).weight.row for one in parts}
    if all(row.is_plain for row in slots):
        return True  # the recipe leaves them as they are: planes, too
    wanted = {PlaneSpec.parse(row.spec).resolve(weight.dtype) for row in slots}
    direction = COLUMNWISE if module.holds_transposed else ROWWISE
    if wanted != {weight.tensor_storage.spec(direction)}:
        return False
    weight.update_usage(direction == ROWWISE, direction == COLUMNWISE)
    return True


def _plain_weights(module: QuantizedModule, recipe: Recipe) -> list[str]:
    """Return the names of weights that are in high precision, though products take planes."""
    parts = module.parts_of(recipe)
    if all(module.plan_of(recipe, part).weight.row.is_plain for part in parts):
        return []
    weights = module.named_parameters(recurse=False)
    names = [name for name, one in weights if one.dim() > 1 and not is_quantized(one)]
    return [f"{module.name}.{name}" if module.name else name for name in names]


def _amaxes(
    module: QuantizedModule, recipe: Recipe, calibration: Calibration
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the static amax of each part's inputs, and the names of parts that have none."""
    found: dict[str, torch.Tensor] = {}
    missed = []
    for part in module.parts_of(recipe):
        if not module.plan_of(recipe, part).input.takes_static:
            continue
        name = module.part_name(part)
        amax = static_amax(calibration, name, "input")
        if amax is None:
            missed.append(name or type(module).__name__)
            continue
        device = next((one.device for _, one in module.scaled_weights()), amax.device)
        found[part] = amax.to(device)
    return found, missed


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
