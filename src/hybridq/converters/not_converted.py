"""Why a module that multiplies is not converted, and what would convert it: a value."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..nn.modules import is_linear, reason_against_class, reason_against_patches
from .converter import Converter
from .exclusions import REASONS, reason_by_name

__all__ = [
    *("LEFT_ALONE", "NO_PRODUCT", "UNKNOWN", "NotConverted"),
    *(
        "as_it_is",
        "by_filter",
        "left",
        "matrices",
        "of_another_class",
        "originals",
        "overlapping",
        "of_unknown_class",
    ),
]

#: What a module is that is not converted, by the words of reports.
LEFT_ALONE: Final = "left alone"
#: A class that multiplies, and that no converter knows.
UNKNOWN: Final = "not known"
#: A class with matrices that are not multiplied with.
NO_PRODUCT: Final = "no product"
#: Names of classes that pick the experts of a mixture, whatever their modules are called.
_ROUTERS: Final = re.compile(r".*(Router|RouterGate|MoEGate|TopKGate|TopKGating)")


@dataclass(frozen=True)
class NotConverted:
    """What is to be said of a module that `convert` does not turn.

    Args:
        name: qualified.
        kind: its class.
        state: `"left alone"`, though of a kind that is converted, or known by its name for what
            keeps its precision; `"not known"` to any converter; `"no product"`: a convolution whose
            windows overlap.
        reason: one of `convert(also=)`'s; `"filter_fn"`; `"as it is"`: a converter refuses this one
            module; `"own class"`: it derives from a class that is converted, and is more; `"own
            forward"`, and does something else; `"unknown class"`; `"convolution"`.
        text: the reason in words.
        helps: what would convert it; empty: nothing that hybridq has.
    """

    name: str
    kind: str
    state: str
    reason: str
    text: str
    helps: str = ""

    def __str__(self) -> str:
        helped = f"; converted with {self.helps}" if self.helps else ""
        text = f"{self.kind}, {self.text}" if self.state == UNKNOWN else self.text
        return f"{self.state:<11} {self.name}: {text}{helped}"


def matrices(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters of two or more dimensions, by name.

    Args:
        module: any; of one that makes a parameter when it is read (torch's parametrizations), what
            it is made of.
    """
    own = {**dict(module.named_parameters(recurse=False)), **originals(module)}
    return {
        name: one
        for name, one in own.items()
        if not is_lazy(one) and one.dim() >= 2 and one.is_floating_point()
    }


def originals(module: Any) -> dict[str, torch.Tensor]:
    """Return what a module's parameters that are made when they are read are made of, by name.

    Args:
        module: any; only one with torch's parametrizations has such parameters.
    """
    if not parametrize.is_parametrized(module):
        return {}
    return {
        name if key == "original" else f"{name}.{key}": one
        for name, made in module.parametrizations.items()
        for key, one in made.named_parameters(recurse=False)
    }


def left(
    module: nn.Module, name: str, reason: str, how: str, features: tuple[int, int] | None
) -> NotConverted:
    """Return what is said of a module that a rule of `convert` leaves alone.

    Args:
        module: of a kind that is converted.
        name: qualified.
        reason: of `convert(also=)`.
        how: how it is known.
        features: input and output features.
    """
    helps = f'also=["{reason}"]'
    if reason == "narrow" and features is not None:
        helps = f"least_width={min(features)}"
    return _made(module, name, LEFT_ALONE, reason, f"{reason}, {how}", helps)


def by_filter(module: nn.Module, name: str) -> NotConverted:
    """Return what is said of a module that the caller's filter leaves alone.

    Args:
        module, name: as for `left`.
    """
    helps = "a filter_fn that returns True for it"
    return _made(module, name, LEFT_ALONE, "filter_fn", "filter_fn", helps)


def as_it_is(module: nn.Module, name: str, why: str, kind: Converter) -> NotConverted:
    """Return what is said of a module that its converter refuses.

    Args:
        module, name: as for `left`.
        why: the converter's own word.
        kind: the converter.
    """
    helps = ""
    if kind.layout is not None and any(word in why for word in ("it has no ", " must be ")):
        helps = _experts_help(module)
    elif type(module) is not nn.Linear and is_linear(module) and "forward" not in vars(module):
        own = type(module).__name__
        made = f'hybridq.register_converter(Converter("{own}", {own}, hybridq.Linear))'
        helps = f"{made}, which makes it a hybridq.Linear and no {own}"
    return _made(module, name, LEFT_ALONE, "as it is", why, helps)


def of_another_class(module: nn.Module, name: str) -> NotConverted:
    """Return what is said of a module that derives from a class that is converted.

    Args:
        module, name: as for `left`.
    """
    named = _by_name(module, name, f"{_own_help(module)}, ")
    if named is not None:
        return named
    text = reason_against_class(module) if isinstance(module, nn.Linear) else None
    if type(module).forward is nn.Linear.forward and text is not None:
        is_child = type(module) is NonDynamicallyQuantizableLinear
        helps = "hybridq.convert before it is parametrized" if originals(module) else ""
        reason = "own forward" if is_child else "own class"
        return _made(module, name, LEFT_ALONE, reason, text, helps)
    text = f"{type(module).__name__} has a forward of its own"
    return _made(module, name, LEFT_ALONE, "own forward", text, _own_help(module))


def of_unknown_class(module: nn.Module, name: str, word: str | None = None) -> NotConverted:
    """Return what is said of a module with matrices that no converter takes.

    Args:
        module, name: as for `left`.
        word: the list of a model that keeps it in FP32; None: there is none.
    """
    helps = _help_for(module)
    named = _by_name(module, name, f"{helps}, ")
    if named is not None:
        return named if helps else replace(named, helps="")
    if word is not None:
        also = helps and f'{helps}, also=["kept_in_fp32"]'
        return _made(module, name, LEFT_ALONE, "kept_in_fp32", f"kept_in_fp32, {word}", also)
    kind = type(module).__name__
    if _ROUTERS.fullmatch(kind):
        also = helps and f'{helps}, also=["routers"]'
        return _made(module, name, LEFT_ALONE, "routers", f"routers, the class {kind}", also)
    return _made(module, name, UNKNOWN, "unknown class", "no converter takes the class", helps)


def overlapping(module: Any, name: str) -> NotConverted:
    """Return what is said of a convolution that is no product of patches.

    Args:
        module, name: as for `left`.
    """
    is_plain = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    why = reason_against_patches(module) if is_plain else None
    why = f"the class {type(module).__name__}" if why is None else why
    text = f"a convolution that is no product: {why}"
    return _made(module, name, NO_PRODUCT, "convolution", text)


def _by_name(module: nn.Module, name: str, before: str) -> NotConverted | None:
    """Return what is said of a module whose name says that its precision matters most, or None."""
    reason = reason_by_name(name)
    if reason is None or reason not in REASONS:
        return None
    helps = f'{before}also=["{reason}"]'
    return _made(module, name, LEFT_ALONE, reason, f"{reason}, the name {name}", helps)


def _made(
    module: nn.Module, name: str, state: str, reason: str, text: str, helps: str = ""
) -> NotConverted:
    return NotConverted(name, type(module).__name__, state, reason, text, helps)


def _own_help(module: nn.Module) -> str:
    weight = matrices(module).get("weight")
    is_matrix = weight is not None and weight.dim() == 2
    base = "ForeignLinear" if is_matrix else "QuantizedModule"
    if isinstance(module, nn.Embedding):
        base = "Embedding"
    return f"hybridq.register_converter, of a hybridq.nn.{base}"


def _help_for(module: nn.Module) -> str:
    """Return what would convert a module of a class that no converter takes; `""`: nothing would.

    A stack of one matrix is what is added to others or scales them: positions, factors of heads.
    """
    every = list(matrices(module).values())
    own = [one for one in every if one.dim() < 3 or one.shape[0] > 1]
    is_torchs = type(module).__module__.split(".")[0] == "torch"
    if any(one.dim() == 3 for one in own) and not is_torchs:
        return _experts_help(module)
    return _own_help(module) if own or not every else ""


def _experts_help(module: nn.Module) -> str:
    kind = type(module).__name__
    return f"hybridq.converters.register_experts({kind}, ExpertsLayout(...)), if it holds experts"
