"""Embeddings of transformers that multiply what they look up, for `hybridq.convert`."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from ...converters import Converter
from ...nn import Embedding

__all__ = ["CONVERTERS", "ScaledEmbedding"]


class ScaledEmbedding(Embedding):
    """Base of the classes that are made of transformers' `...ScaledWordEmbedding`.

    Their own forward looks rows up as `nn.Embedding` does, which decodes them where they are
    quantized, and multiplies them.
    """

    #: Transformers' own class.
    plain_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remade, (self.plain_class,), self.__getstate__()


def _is_scaled(module: nn.Module) -> bool:
    """Return whether a module is one, with the table as its only parameter."""
    kind = type(module)
    is_named = kind.__name__.endswith("ScaledWordEmbedding")
    of_transformers = kind.__module__.startswith("transformers.models.")
    return is_named and of_transformers and set(module._parameters) == {"weight"}


#: Of each class of transformers, that of converted modules.
_classes: Final[dict[type, type[nn.Module]]] = {}


def _class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted modules of a class of transformers; made once."""
    made = _classes.get(plain)
    if made is None:
        about = {"__module__": __name__, "__doc__": plain.__doc__, "plain_class": plain}
        made = _classes[plain] = type(plain.__name__, (ScaledEmbedding, plain), about)
    return made


def _remade(plain: type[nn.Module]) -> nn.Module:
    """Return an empty module of the class that is made of `plain`."""
    kind = _class(plain)
    return kind.__new__(kind)


def _change(module: nn.Module) -> None:
    module.__class__ = _class(type(module))


#: For the table of converters.
CONVERTERS: Final = (
    Converter(
        "ScaledWordEmbedding", _is_scaled, ScaledEmbedding, apply=_change, only_with="embeddings"
    ),
)
