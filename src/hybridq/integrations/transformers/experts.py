"""Experts of transformers' models, for `hybridq.convert`.

A class of experts that transformers marks (`use_experts_implementation`) says by five flags how it
holds them; what it makes of gate and up is a method of its own. Other classes are known by name.

Source: transformers 5.23, integrations/moe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers.integrations import moe

from ...converters import Converter
from ...moe import Experts, ExpertsLayout, as_experts, reason_against

__all__ = ["CONVERTERS", "after_convert", "layout_of"]

#: What a marked class gives each of its modules.
_FLAGS: Final = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
#: Activations of torch and transformers that are those of hybridq, by the class.
_ACTIVATIONS: Final = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu",
    "NewGELUActivation": "gelu",
    "QuickGELUActivation": "qgelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "srelu",
}
_HOMES: Final = ("torch.nn.modules.activation", "transformers.activations")


def _is_marked(module: nn.Module) -> bool:
    """Return whether a module is of a class that transformers marks."""
    return all(hasattr(module, flag) for flag in _FLAGS) and hasattr(module, "_apply_gate")


def _own_gate(module: Any, h: torch.Tensor) -> torch.Tensor:
    """Return what the module makes of gate and up."""
    made: torch.Tensor = module._apply_gate(h)
    return made


def _own_activation(module: Any, h: torch.Tensor) -> torch.Tensor:
    """Return the module's activation of up."""
    made: torch.Tensor = module.act_fn(h)
    return made


def _activation(module: nn.Module, has_gate: bool) -> str | Callable[[Any, Any], torch.Tensor]:
    """Return the activation, by a name where it is one of hybridq's."""
    own = _own_gate if has_gate else _own_activation
    gate = getattr(type(module), "_apply_gate", None)
    if has_gate and gate is not None and gate is not getattr(moe, "_default_apply_gate", None):
        return own
    kind = type(getattr(module, "act_fn", None))
    return _ACTIVATIONS.get(kind.__name__, own) if kind.__module__ in _HOMES else own


def layout_of(module: nn.Module) -> ExpertsLayout:
    """Return how a module of a class that transformers marks holds its experts.

    Args:
        module: not converted.
    """
    flags: Any = module
    name = "gate_up_proj" if flags.has_gate else "up_proj"
    return ExpertsLayout(
        gate_up=name,
        gate_up_bias=f"{name}_bias" if flags.has_bias else None,
        down_bias="down_proj_bias" if flags.has_bias else None,
        is_transposed=flags.is_transposed,
        is_concatenated=flags.is_concatenated,
        has_gate=flags.has_gate,
        activation=_activation(module, flags.has_gate),
        post_norm="post_expert_norm" if flags.has_post_expert_norm else None,
    )


def _llama4(module: nn.Module) -> ExpertsLayout:
    activation = _activation(module, True)
    if not isinstance(activation, str):  # of a first half, multiplied with the second
        activation = _halves
    return ExpertsLayout(is_transposed=True, activation=activation, takes="batches")


def _halves(module: Any, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    made: torch.Tensor = up * module.act_fn(gate)
    return made


def _step3(module: nn.Module) -> ExpertsLayout:
    del module
    return ExpertsLayout(activation=_own_gate)


def _jetmoe(module: nn.Module) -> ExpertsLayout:
    """Return the layout of one product of all experts; what is between two is the block's own."""
    del module
    return ExpertsLayout(None, "weight", has_gate=False, takes="sizes")


def _longcat(module: nn.Module) -> ExpertsLayout:
    activation = _activation(module, True)
    return ExpertsLayout(
        activation=activation if isinstance(activation, str) else _halves, passes_others=True
    )


def _dbrx(module: nn.Module) -> ExpertsLayout:
    from .dbrx import RowsLayout  # which imports the model

    kind = type(getattr(module, "activation_fn", None))
    name = _ACTIVATIONS.get(kind.__name__) if kind.__module__ in _HOMES else None
    return RowsLayout(activation=_dbrx_gate if name is None else name)


def _dbrx_gate(module: Any, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    made: torch.Tensor = module.activation_fn(gate) * up
    return made


_DBRX: Final = ("transformers.models.dbrx.modeling_dbrx", "DbrxExpertGLU")
#: Classes that are not marked: module and name, and how they hold their experts.
_NAMED: Final[dict[tuple[str, str], Callable[[nn.Module], ExpertsLayout]]] = {
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): _llama4,
    ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): _jetmoe,
    ("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): _longcat,
    _DBRX: _dbrx,
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): _step3,
}


def _layout(module: nn.Module) -> ExpertsLayout | None:
    """Return how a module holds its experts; None: it is none that is known."""
    if _is_marked(module):
        return layout_of(module)
    kind = type(module)
    make = _NAMED.get((kind.__module__, kind.__name__))
    return None if make is None else make(module)


def _takes(module: nn.Module) -> bool:
    return _layout(module) is not None


def _keeps(module: nn.Module) -> str | None:
    layout = _layout(module)
    return None if layout is None else reason_against(module, layout)


def _apply(module: nn.Module) -> None:
    layout: Any = _layout(module)
    if (type(module).__module__, type(module).__name__) == _DBRX:
        from .dbrx import convert_dbrx

        convert_dbrx(module, layout)
    elif layout is not None:
        as_experts(module, layout)


def after_convert(model: nn.Module) -> None:
    """Let what calls converted experts one by one call them once.

    Args:
        model: after `convert`.
    """
    if any(type(module).__name__ == "DbrxExperts" for module in model.modules()):
        from .dbrx import route_dbrx

        route_dbrx(model)


def _features(module: Any) -> tuple[int, int] | None:
    layout: Any = module.experts_layout if isinstance(module, Experts) else _layout(module)
    made: tuple[int, int] | None = layout.features(module)
    return made


CONVERTERS: Final = (
    Converter(
        "experts of transformers",
        _takes,
        Experts,
        _apply,
        weights=("gate_up_proj", "up_proj", "down_proj", "weight", "w1", "v1", "w2"),
        features=_features,
        keeps=_keeps,
        layout=_layout,
    ),
)
