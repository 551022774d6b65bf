"""Modules of transformers that multiply and are no `nn.Linear`, for `hybridq.convert`.

Classes are known by their names: nothing of transformers is imported before a model has one of
them. Of each, a class of this module is made, whose name is that of transformers' own, so that
modules can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

from torch import nn

from ...converters import Converter
from ...nn import ForeignLinear, QuantizedModule
from .blocks import BlockLinear, GatedBlocks, HeadProjections, SharedExperts, features_of_heads

__all__ = ["CONVERTERS"]


class _Kind(NamedTuple):
    """A class of transformers.

    Attributes:
        module: where it is defined.
        holds_transposed, adds_bias_later: as `ForeignLinear` has them.
        keeps: why a module of it stays as it is, or None.
        base: what a converted module of it derives from, before its own class.
        weights: names of its matrices.
        features: of a module, where they are not those of the first weight's last two axes.
    """

    module: str
    holds_transposed: bool = False
    adds_bias_later: bool = False
    keeps: Callable[[Any], str | None] | None = None
    base: type[QuantizedModule] = ForeignLinear
    weights: tuple[str, ...] = ("weight",)
    features: Callable[[Any], tuple[int, int] | None] | None = None


def _is_decoupled(module: Any) -> str | None:
    """Return why a linear layer with rows for additional tokens stays."""
    if module.out_additional_features:
        return f"a product of its own makes {module.out_additional_features} more features"
    return None


_KINDS: Final = {
    "Conv1D": _Kind("transformers.pytorch_utils", holds_transposed=True),
    "FalconLinear": _Kind("transformers.models.falcon.modeling_falcon", adds_bias_later=True),
    "IdeficsDecoupledLinear": _Kind(
        "transformers.models.idefics.modeling_idefics", keeps=_is_decoupled
    ),
    "DeepseekV4GroupedLinear": _Kind(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", base=BlockLinear
    ),
    "InklingSharedExperts": _Kind(
        "transformers.models.inkling.modeling_inkling",
        base=SharedExperts,
        weights=tuple(SharedExperts.weight_parts),
    ),
    "RecurrentGemmaRglru": _Kind(
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma",
        holds_transposed=True,
        base=GatedBlocks,
        weights=tuple(GatedBlocks.weight_parts),
    ),
    "XLNetRelativeAttention": _Kind(
        "transformers.models.xlnet.modeling_xlnet",
        base=HeadProjections,
        weights=("q", "k", "v", "r", "o"),
        features=features_of_heads,
    ),
}
#: What all modules of a kind derive from, whether or not transformers' own class was imported.
_BASES: Final = {
    name: type(
        f"{name}Base",
        (kind.base,),
        {
            "__module__": __name__,
            "__repr__": nn.Module.__repr__,  # some of these classes print another name
            "holds_transposed": kind.holds_transposed,
            **({"adds_bias_later": True} if kind.adds_bias_later else {}),
        },
    )
    for name, kind in _KINDS.items()
}


def _is_of(name: str) -> Callable[[nn.Module], bool]:
    """Return the question whether a module is exactly of a class of transformers."""
    place = (_KINDS[name].module, name)
    return lambda module: (type(module).__module__, type(module).__qualname__) == place


def _changes_to(name: str) -> Callable[[nn.Module], None]:
    """Return what gives a module the class that is made of transformers' own."""

    def change(module: nn.Module) -> None:
        module.__class__ = _class(name)

    return change


@cache
def _class(name: str) -> type[nn.Module]:
    """Return the class that is made of transformers' of this name."""
    plain = getattr(import_module(_KINDS[name].module), name)
    about: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"transformers' `{name}` that computes under the recipe of `hybridq.autocast`.",
    }
    if plain.extra_repr is nn.Module.extra_repr and "weight" in _KINDS[name].weights:
        about["extra_repr"] = _features
    return type(name, (_BASES[name], plain), about)


def __getattr__(name: str) -> Any:
    """Return a class by its name, for files that refer to it."""
    if name not in _KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class(name)


def _features(module: Any) -> str:
    """Return what `print` says of a layer whose class says nothing."""
    into, out = module.weight.shape if module.holds_transposed else module.weight.shape[::-1]
    return f"in_features={into}, out_features={out}, bias={module.bias is not None}"


#: For the table of converters.
CONVERTERS: Final = tuple(
    Converter(
        name,
        _is_of(name),
        _BASES[name],
        apply=_changes_to(name),
        weights=kind.weights,
        features=kind.features,
        is_in_out=kind.holds_transposed,
        keeps=kind.keeps,
    )
    for name, kind in _KINDS.items()
)
