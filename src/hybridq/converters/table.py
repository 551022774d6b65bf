"""The table of converters: the user's, those of libraries that are there, and the built-in ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Final

from torch import nn

from ..errors import warn_once
from ..nn import (
    Embedding,
    Linear,
    PatchConv,
    PatchConv1d,
    PatchConv2d,
    PatchConv3d,
    TorchMultiheadAttention,
)
from ..nn.modules import (
    convert_attention,
    convert_linear,
    is_linear,
    is_patch_conv,
    patch_features,
    reason_against_linear,
)
from ..nn.weights import foreign_weight
from .converter import Converter

__all__ = [
    "LINEAR",
    "converter_of",
    "converters",
    "converters_with",
    "library_module",
    "reason_to_leave",
    "register_converter",
    "tell_libraries",
]

LINEAR: Final = Converter(
    "nn.Linear",
    is_linear,
    Linear,
    apply=convert_linear,
    features=lambda one: (one.in_features, one.out_features),
    keeps=reason_against_linear,
)
_EMBEDDING: Final = Converter("nn.Embedding", nn.Embedding, Embedding, only_with="embeddings")


_ATTENTION: Final = Converter(
    "nn.MultiheadAttention",
    nn.MultiheadAttention,
    TorchMultiheadAttention,
    apply=convert_attention,
    weights=("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    features=lambda one: (min(one.embed_dim, one.kdim, one.vdim), one.embed_dim),
)


def _patch_conv(plain: type[nn.Module], makes: type[PatchConv]) -> Converter:
    """Return the converter of those convolutions of a class that are products."""
    return Converter(
        f"nn.{plain.__name__}",
        lambda module: type(module) is plain and is_patch_conv(module),
        makes,
        apply=lambda module: setattr(module, "__class__", makes),
        features=patch_features,
    )


#: Asked last, in this order.
_BUILT_IN: Final = (
    LINEAR,
    _EMBEDDING,
    _ATTENTION,
    _patch_conv(nn.Conv1d, PatchConv1d),
    _patch_conv(nn.Conv2d, PatchConv2d),
    _patch_conv(nn.Conv3d, PatchConv3d),
)
#: A library, and a module of hybridq whose `CONVERTERS` know its classes, whose
#: `after_convert(model)` is called at the end, and whose `adopts_forward(module)` says whether that
#: sees to a forward that the library has put into a module; it may lack each. The module is
#: imported when the library has been: without it there is no such module in any model.
_LIBRARIES: Final[list[tuple[str, str]]] = [
    ("transformers", "hybridq.integrations.transformers.linears"),
    ("transformers", "hybridq.integrations.transformers.embeddings"),
    ("transformers", "hybridq.integrations.transformers.experts"),
    ("transformers", "hybridq.integrations.transformers.tensor_parallel"),
    ("torchtitan", "hybridq.integrations.torchtitan"),
    ("peft", "hybridq.integrations.peft"),
    ("accelerate", "hybridq.integrations.accelerate_hooks"),
]
#: Of the user, by name.
_registered: Final[dict[str, Converter]] = {}


def register_converter(converter: Converter) -> Converter:
    """Let `hybridq.convert` turn another kind of module; return the converter.

    Converters are asked in this order: registered ones, the latest first; those of libraries that
    have been imported; built-in ones. The first that takes a module converts it.

    Args:
        converter: of the kind.

    Raises:
        TypeError: it is no Converter.
        ValueError: another one has its name.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> class Dense(nn.Linear):
        ...     "A linear layer with a forward that is torch's."
        >>> kind = hybridq.converters.Converter("Dense", Dense, hybridq.Linear)
        >>> kind = hybridq.register_converter(kind)
        >>> type(hybridq.convert(Dense(64, 32)))
        <class 'hybridq.nn.modules.linear.Linear'>
    """
    given: object = converter
    if not isinstance(given, Converter):
        raise TypeError(
            "register_converter: converter must be a hybridq.converters.Converter, got "
            f"{type(given).__name__}"
        )
    known = {one.name: one for one in converters()}.get(converter.name, converter)
    if known != converter:
        raise ValueError(
            f"register_converter: {converter.name!r} must be registered once, got another one, "
            f"which makes {converter.makes.__name__}"
        )
    _registered[converter.name] = converter
    return converter


def converters() -> tuple[Converter, ...]:
    """Return the converters, in the order in which they are asked.

    Example:
        >>> import hybridq
        >>> "nn.Linear" in [one.name for one in hybridq.converters.converters()]
        True
    """
    libraries = (one for library, name in _LIBRARIES for one in _of_library(library, name))
    return (*reversed(_registered.values()), *libraries, *_BUILT_IN)


def _of_library(library: str, name: str) -> tuple[Converter, ...]:
    """Return the converters that a module of hybridq has for a library's classes."""
    return getattr(library_module(library, name), "CONVERTERS", ())


def library_module(library: str, name: str) -> ModuleType | None:
    """Return the module of hybridq that knows a library; None where the library is not there.

    Args:
        library: its name; it is not imported.
        name: of the module of hybridq, which is imported when the library has been.
    """
    if library not in sys.modules:
        return None
    try:
        return import_module(name)
    except ImportError as error:  # another version than is known to work
        warn_once(f"convert {library}", f"convert: the modules of {library} are not known: {error}")
        return None


def tell_libraries(model: nn.Module) -> None:
    """Let what knows a library see to a model that was converted: wrappers around its modules.

    Args:
        model: after `convert`.
    """
    for library, name in _LIBRARIES:
        after = getattr(library_module(library, name), "after_convert", None)
        if after is not None:
            after(model)


def reason_to_leave(module: nn.Module, kind: Converter) -> str | None:
    """Return why `convert` leaves a module alone, whatever its name; None: nothing speaks for it.

    Args:
        module: not converted yet.
        kind: what takes it.
    """
    if "forward" in vars(module):  # which would be called instead of the one that it gets
        known = (getattr(library_module(*one), "adopts_forward", None) for one in _LIBRARIES)
        if not any(adopts(module) for adopts in known if adopts is not None):
            return "its forward was replaced by another one, which would be called; convert before"
    for weight in module._parameters.values():
        foreign = foreign_weight(weight)
        if foreign is not None:
            return f"its weight is quantized already, {foreign}"
    return None if kind.keeps is None else kind.keeps(module)


def converters_with(also: Iterable[str]) -> tuple[Converter, ...]:
    """Return the converters, but those of kinds that are converted only if they are named.

    Args:
        also: names of reasons.
    """
    named = frozenset(also)
    return tuple(one for one in converters() if one.only_with is None or one.only_with in named)


def converter_of(module: nn.Module, among: Iterable[Converter]) -> Converter | None:
    """Return the converter that converts a module, or None.

    Args:
        module: any.
        among: converters, in the order in which they are asked.
    """
    return next((one for one in among if one.takes_module(module)), None)
