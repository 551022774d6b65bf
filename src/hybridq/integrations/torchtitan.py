"""torchtitan: its training under a recipe, and its experts for `hybridq.convert`.

Classes are known by their names, and parameters by what they are called in versions up to 0.2
(`w1`) and from 0.3 on (`w1_EFD`): nothing of torchtitan is imported. Its
`Linear` is converted as any class derived from `nn.Linear`.

The layers of its `LoRAConverter` are converted too: their frozen weight is multiplied under the
recipe, their two factors in high precision.

Source: torchtitan 0.3, models/common/moe.py, models/gpt_oss/moe.py and components/lora.py; 0.2,
    models/moe/moe.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from .._log import log_once
from ..converters import Converter, convert
from ..distributed import prepare_fsdp2
from ..moe import Experts, ExpertsLayout, as_experts, reason_against
from ..nn import Linear
from ..nn.modules import clash, made_class
from ..recipes.named import source
from ..recipes.recipe import RecipeSource
from .forward import run_under

__all__ = ["CONVERTERS", "AdaptedLinear", "layout_of", "parallelize_under"]

#: Classes derived from them have a forward of their own.
_NAMES: Final = ("GroupedExperts", "GptOssGroupedExperts")
#: GPT-OSS multiplies the gate by this inside of its sigmoid.
_ALPHA: Final = 1.702


def _gpt_oss_gate(module: Any, h: torch.Tensor) -> torch.Tensor:
    """Return `(up + 1) gate sigmoid(alpha gate)` of clamped values, which alternate in `h`."""
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=module.swiglu_limit)
    up = up.clamp(-module.swiglu_limit, module.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(_ALPHA * gate)


def layout_of(module: nn.Module) -> ExpertsLayout:
    """Return how a module of torchtitan's experts holds them.

    Args:
        module: a GroupedExperts or GptOssGroupedExperts.
    """
    # The name is followed by what the axes are, if by anything.
    full = {name.rpartition("_")[0]: name for name in module._parameters if "_" in name}

    def named(name: str) -> str:
        return name if name in module._parameters else full.get(name, name)

    if type(module).__name__ == "GroupedExperts":
        return ExpertsLayout((named("w1"), named("w3")), named("w2"), takes="sizes")
    return ExpertsLayout(
        gate_up=named("mlp1_weight"),
        gate_up_bias=named("mlp1_bias"),
        down=named("mlp2_weight"),
        down_bias=named("mlp2_bias"),
        activation=_gpt_oss_gate,
        takes="sizes",
    )


def _takes(module: nn.Module) -> bool:
    """Return whether a module is exactly of one of these classes of torchtitan."""
    kind = type(module)
    return kind.__name__ in _NAMES and kind.__module__.partition(".")[0] == "torchtitan"


def _convert(module: nn.Module) -> None:
    as_experts(module, layout_of(module))


def _features(module: Any) -> tuple[int, int] | None:
    layout = module.experts_layout if isinstance(module, Experts) else layout_of(module)
    return layout.features(module)


class AdaptedLinear(Linear):
    """What a layer of torchtitan's `LoRAConverter` becomes, together with its own class."""

    lora_a: nn.Module
    lora_b: nn.Module
    _lora_scaling: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return `input @ weight.T + bias + scaling lora_b(lora_a(input))`.

        Args:
            input: `[..., in_features]`.

        Returns:
            `[..., out_features]`, in the input's dtype or torch.autocast's.

        Raises:
            RuntimeError, TypeError: as `hybridq.Linear`.

        Source: torchtitan 0.3, components/lora.py.
        """
        made: torch.Tensor = Linear.forward(self, input)
        return made + self._lora_scaling * self.lora_b(self.lora_a(input))


def _has_adapter(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with an adapter, but of a quantized class."""
    kind = type(module)
    if kind.__module__ != "torchtitan.components.lora" or "lora_b" not in module._modules:
        return False
    base = kind.__base__
    return base is not None and getattr(base, "forward", None) is nn.Linear.forward


def _convert_adapted(module: nn.Module) -> None:
    module.__class__ = made_class(AdaptedLinear, type(module))


def _reason_against_adapted(module: nn.Module) -> str | None:
    reason = clash(Linear, module, nn.Linear)
    return None if reason is None else f"its class cannot be kept: {reason}"


#: For the table of converters.
CONVERTERS: Final = (
    Converter(
        "LoRA of torchtitan",
        _has_adapter,
        AdaptedLinear,
        apply=_convert_adapted,
        features=lambda one: (one.in_features, one.out_features),
        keeps=_reason_against_adapted,
    ),
    Converter(
        "experts of torchtitan",
        _takes,
        Experts,
        apply=_convert,
        weights=(),
        features=_features,
        keeps=lambda module: reason_against(module, layout_of(module)),
        layout=layout_of,
    ),
)


def parallelize_under(
    parallelize_fn: Callable[..., nn.Module], recipe: RecipeSource | str, **options: Any
) -> Callable[..., nn.Module]:
    """Return a `parallelize_fn` of a torchtitan `ModelSpec` that trains under a recipe.

    The model is converted first. Its weights are prepared to travel as planes under FSDP2
    (`hybridq.distributed.prepare_fsdp2`), after tensor and expert parallelism have split them; with
    these they do so under `spmd_backend="partial_dtensor"` alone, which a line of the log says.
    Then its forwards run under the recipe, in training; the backward, recomputation and compiled
    blocks need nothing.

    Args:
        parallelize_fn: the spec's own.
        recipe: a recipe, the name of one, or a `RecipeSchedule`, asked in each forward.
        options: of `hybridq.convert`.

    Raises:
        TypeError: `parallelize_fn` cannot be called.
        ValueError: no recipe has that name.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> from hybridq.integrations.torchtitan import parallelize_under
        >>> fn = parallelize_under(lambda model, **given: model, "mxfp8")  # spec.parallelize_fn
        >>> model = fn(nn.Sequential(nn.Linear(32, 32)))
        >>> isinstance(model[0], hybridq.Linear)
        True

    Source: torchtitan 0.3, models/llama3/parallelize.py: `model.parallelize(...)`, where it is
        called, comes before `fully_shard`.
    """
    if not callable(parallelize_fn):
        raise TypeError(
            "parallelize_under: parallelize_fn must be callable, spec.parallelize_fn, got "
            f"{type(parallelize_fn).__name__}"
        )
    given = source(recipe)

    @functools.wraps(parallelize_fn)
    def parallelize(model: Any, *args: Any, **settings: Any) -> nn.Module:
        convert(model, **options)
        dims, over = settings.get("parallel_dims"), settings.get("parallelism")
        backend = getattr(over, "spmd_backend", "partial_dtensor")
        if max(getattr(dims, name, 1) for name in ("tp", "ep")) == 1:
            prepare_fsdp2(model)
        elif backend == "partial_dtensor":
            model.parallelize = _then_prepares(model)
        else:
            _tell(
                f"their planes do not travel under spmd_backend={backend!r} with tensor or expert "
                "parallelism; they do under 'partial_dtensor'"
            )
        made = parallelize_fn(model, *args, **settings)
        if vars(model).pop("parallelize", None) is not None:  # nobody called it
            _tell(
                "there is tensor or expert parallelism, and the parallelize_fn did not call "
                "model.parallelize, after which they are prepared; call prepare_fsdp2(model) in "
                "it, before fully_shard"
            )
        run_under(made, given)
        return made

    return parallelize


def _tell(why: str) -> None:
    text = "torchtitan: weights are gathered in high precision and quantized after: "
    log_once(f"torchtitan:{why}", text + why)


def _then_prepares(model: Any) -> Callable[..., None]:
    """Return a `model.parallelize` that prepares the parameters that it makes anew."""
    split = model.parallelize

    def parallelize(*args: Any, **settings: Any) -> None:
        del model.parallelize  # its class's again
        split(*args, **settings)
        prepare_fsdp2(model)

    return parallelize
