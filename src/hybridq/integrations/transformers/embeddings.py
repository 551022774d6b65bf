"""Embeddings of transformers that multiply what they look up, for `hybridq.convert`."""

from __future__ import annotations

from typing import Final

from torch import nn

from ...converters import Converter
from ...nn import Embedding
from ...nn.modules import made_class

__all__ = ["CONVERTERS", "ScaledEmbedding"]


class ScaledEmbedding(Embedding):
    """Base of the classes that are made of transformers' `...ScaledWordEmbedding`.

    Their own forward looks rows up as `nn.Embedding` does, which decodes them where they are
    quantized, and multiplies them.
    """

    #: Transformers' own class.
    plain_class: type[nn.Module]


def _is_scaled(module: nn.Module) -> bool:
    """Return whether a module is one, with the table as its only parameter."""
    kind = type(module)
    is_named = kind.__name__.endswith("ScaledWordEmbedding")
    of_transformers = kind.__module__.startswith("transformers.models.")
    return is_named and of_transformers and set(module._parameters) == {"weight"}


def _change(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = made_class(ScaledEmbedding, kind, kind.__name__)


#: For the table of converters.
CONVERTERS: Final = (
    Converter(
        "ScaledWordEmbedding", _is_scaled, ScaledEmbedding, apply=_change, only_with="embeddings"
    ),
)
