"""weights: named tensors in a reader's layout, made from the planes of the trainer's forward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import settings
from .._log import log_once
from ..calibration.batches import unwrapped
from ..converters import adapted
from ..errors import RecipeError, warn_once
from ..kernels.inputs import has_autocast
from ..layouts import Layout, Scheme, check_inputs_are_plain, get, siblings
from ..nn import QuantizedModule
from ..nn.modules.parallel_weights import first_own_part
from ..recipes import Recipe
from ..recipes.autocast import autocast
from ..recipes.named import source
from ..recipes.recipe import RecipeSource
from ..tensor import is_quantized
from .matrices import Matrix, Weight, bias_parts, weights_of

__all__ = ["quantization_config", "weights"]

_SUFFIX = ".weight"


def weights(
    model: nn.Module,
    layout: str | Layout,
    *,
    recipe: RecipeSource | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    first_expert: int = 0,
    rename: Callable[[str], str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model as a reader's layout names them, for a server to take.

    A weight that the forward quantizes becomes its rowwise plane: the one that the parameter is, or
    that FSDP2 gathers, or else that the module's quantizer makes of the same values in the same
    dtype. No value is rounded by another rule, and no file is written. All other parameters
    and buffers come as they are. One matrix is made after the other. Of a model that FSDP2 shards,
    one unit is gathered after the other, its weights as planes (`prepare_fsdp2`); all ranks must
    take all tensors, whoever uses them.

    Args:
        model: that is trained, with hybridq's modules (`hybridq.convert`).
        layout: name of a layout in `hybridq.layouts`, or one.
        recipe: of the forward; None: that of `hybridq.autocast` around this call, or else that of
            the last training forward.
        dtype: in which the forward takes weights of hybridq's modules; None: that of
            `torch.autocast` around this call, or of FSDP2's `MixedPrecisionPolicy`, or their own.
        first_expert: number of the first of the model's experts, where each rank has others.
        rename: makes a reader's name out of the name of a weight, parameter or buffer.

    Returns:
        An iterator of names and tensors. What is a plane's own memory changes with the next step
        of the optimizer: a receiver copies it.

    Raises:
        TypeError: `model` is no module.
        RecipeError: no recipe is known.
        SpecError: the layout cannot hold what the recipe makes of a weight, or it is rounded
            stochastically.
        NotImplementedError: a weight is split by tensor parallelism.
        CheckpointError: a module scales its input first, which no reader does.

    Siblings that readers multiply as one (q, k and v) have each their own second-level scale here,
    as the trainer computes them; a reader that takes one for all computes something else, which a
    warning says. Formats with scales of blocks alone (MXFP8, FP8 in blocks) have no such scale.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)))
        >>> pushed = dict(hybridq.rollout.weights(model, "modelopt", recipe="mxfp8"))
        >>> {name: list(tensor.shape) for name, tensor in pushed.items()}
        {'0.weight': [32, 64], '0.weight_scale': [32, 2], '0.bias': [32]}
    """
    model = _whole("rollout.weights", model)
    part = first_own_part(model)
    if part is not None:
        raise NotImplementedError(
            f"rollout.weights: {part} is made for one rank of several (tp_group= or tp_size=), and "
            "its parameters are parts; load the parts into a whole model first"
        )
    own, chosen = _asked("rollout.weights", model, layout, recipe)
    cast = _autocast_dtype(model) if dtype is None else dtype
    _tell_of_siblings(own, _schemes(model, own, chosen, cast, first_expert))
    names = rename or (lambda name: name)
    return _tensors(model, own, chosen, cast, first_expert, names)


def quantization_config(
    model: nn.Module,
    layout: str | Layout,
    *,
    recipe: RecipeSource | str | os.PathLike[str] | None = None,
    inputs: str = "",
    first_expert: int = 0,
    rename: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """Return the entry `quantization_config` with which a server expects what `weights` yields.

    Args:
        model, layout, recipe, first_expert, rename: as `weights` takes them.
        inputs: how the server quantizes inputs: one that the layout's schemes have.

    Raises:
        TypeError, RecipeError, SpecError: as `weights`.
        CheckpointError: as `Layout.quantization_config`.
    """
    model = _whole("rollout.quantization_config", model)
    own, chosen = _asked("rollout.quantization_config", model, layout, recipe)
    names = rename or (lambda name: name)
    found = _schemes(model, own, chosen, _autocast_dtype(model), first_expert)
    schemes = {names(name).removesuffix(_SUFFIX): one for name, (one, _) in found.items()}
    kept = [
        names(f"{path}{_SUFFIX}").removesuffix(_SUFFIX)
        for path, module in model.named_modules()
        if getattr(module, "weight", None) is not None
        and isinstance(module, nn.Linear)
        and f"{path}{_SUFFIX}" not in found
    ]
    return own.quantization_config(schemes, kept, inputs=inputs)


def _whole(where: str, model: nn.Module) -> nn.Module:
    """Return the model itself of one that torch.compile or DistributedDataParallel was given."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"{where}: model must be an nn.Module, got {type(given).__name__}")
    return unwrapped(model)


def _asked(
    where: str,
    model: nn.Module,
    layout: str | Layout,
    recipe: RecipeSource | str | os.PathLike[str] | None,
) -> tuple[Layout, Recipe]:
    """Return the layout and the recipe of a call."""
    check_inputs_are_plain(name for name, _ in model.named_buffers())
    if adapters := adapted(model):
        log_once(
            "rollout.adapters",
            f"{where}: {adapters[0]} and {len(adapters) - 1} more have adapters beside them: names "
            "are PEFT's, and weights without their adapters unless those are merged; give rename= "
            "to a server that takes adapters by themselves, else merge_adapter() comes first",
        )
    if recipe is not None:
        return get(layout), source(recipe).current
    now = settings.current().recipe
    if isinstance(now, Recipe):
        return get(layout), now
    found = []
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            last = module.bound_recipe or (module.last_recipe[0] if module.last_recipe else None)
            if last is not None and last not in found:
                found.append(last)
    if len(found) != 1:
        raise RecipeError(
            f"{where}: the recipe of the forward must be known, got {len(found)} of earlier "
            "forwards; call it inside hybridq.autocast, or give recipe="
        )
    return get(layout), found[0]


def _autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return what torch.autocast casts weights to now; None: nothing."""
    first = next(model.parameters(), None)
    kind = "cpu" if first is None else first.device.type
    return torch.get_autocast_dtype(kind) if has_autocast(kind) else None


def _schemes(
    model: nn.Module, layout: Layout, recipe: Recipe, dtype: torch.dtype | None, first_expert: int
) -> dict[str, tuple[Scheme, Matrix]]:
    """Return the scheme of each weight that will be pushed, and its matrix, by name."""
    found: dict[str, tuple[Scheme, Matrix]] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            for weight in weights_of(module, path, recipe, first_expert).values():
                own: Any = module._parameters[weight.parameter]
                for one, matrix in weight.stored(layout, own.dtype if dtype is None else dtype):
                    found[one.name] = (one.scheme, matrix)
    return found


def _tell_of_siblings(layout: Layout, found: dict[str, tuple[Scheme, Matrix]]) -> None:
    for name, (scheme, _) in found.items():
        others = [one for one in siblings(name) if one in found]
        # Rows of one matrix have one scale.
        if scheme.shares_scale and len({id(found[one][1]) for one in others}) > 1:
            warn_once(
                f"rollout siblings {layout.name} {scheme.name}",
                f"rollout.weights: {' and '.join(others)} have each a scale of their own, as in "
                f"the trainer's forward, and readers of {layout.name} that multiply them as one "
                "take one scale for all; take a recipe whose weights have scales of blocks alone, "
                "or one fused weight",
            )
            return


# ---- the walk over the model


def _tensors(
    model: nn.Module,
    layout: Layout,
    recipe: Recipe,
    dtype: torch.dtype | None,
    first_expert: int,
    names: Callable[[str], str],
) -> Iterator[tuple[str, torch.Tensor]]:
    tied = _tied(model)
    for unit, modules in _units(model):
        with _gathered(unit, recipe):
            for path, module in modules:
                found: dict[str, Weight] = {}
                if isinstance(module, QuantizedModule):
                    found = weights_of(module, path, recipe, first_expert)
                for name, value in _own(module):
                    whole = f"{path}.{name}" if path else name
                    if whole in tied:
                        continue
                    if name not in found:
                        with torch.no_grad():
                            plain = _plain(value)
                        parts = bias_parts(module, name, found, layout)
                        for own, expert, columns in parts:
                            yield names(own), plain[expert, columns]
                        if not parts:
                            yield names(whole), plain
                        continue
                    _check_whole(value, whole)
                    for make in found[name].tensors(layout, dtype, names):
                        with torch.no_grad():
                            made = make()
                        yield from made.items()


def _tied(model: nn.Module) -> set[str]:
    """Return the names of what has another name before; asked while nothing is gathered."""
    first: dict[int, str] = {}
    found = set()
    for path, module in model.named_modules():
        for name, value in _own(module):
            whole = f"{path}.{name}" if path else name
            if first.setdefault(id(value), whole) != whole:
                found.add(whole)
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters, and its buffers that are saved."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a parameter or buffer that nothing quantizes, whole and in high precision."""
    value = value.detach()
    if _is_split(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    return value.dequantize() if is_quantized(value) else value


def _check_whole(value: torch.Tensor, name: str) -> None:
    if _is_split(value):
        raise NotImplementedError(
            f"rollout.weights: {name} must be whole or sharded by FSDP2, got a DTensor of "
            "another kind; gather it first"
        )


def _is_split(value: torch.Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _units(model: nn.Module) -> Iterator[tuple[Any, list[tuple[str, nn.Module]]]]:
    """Yield each unit of FSDP2, or None, with the modules whose parameters it gathers."""
    kind: Any = ()
    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule as kind
    units: dict[int, tuple[Any, list[tuple[str, nn.Module]]]] = {}
    of: dict[str, Any] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0] if path else None
        unit = module if isinstance(module, kind) else None if parent is None else of[parent]
        of[path] = unit
        units.setdefault(id(unit), (unit, []))[1].append((path, module))
    yield from units.values()


def _gathered(unit: Any, recipe: Recipe) -> AbstractContextManager[Any]:
    """Return a context in which a unit's parameters are whole, as in a forward under the recipe."""
    if unit is None or not any(_is_split(one) for one in unit.parameters()):
        return nullcontext()
    stack = ExitStack()
    # Not around what is yielded: a recipe in force there would be the caller's too.
    with torch.no_grad(), autocast(recipe=recipe):
        unit.unshard()
    stack.callback(unit.reshard)
    return stack
