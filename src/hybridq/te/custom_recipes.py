"""Transformer Engine's factories, whose quantizers are those of `hybridq.te`.

`quantizer_factories` has one format for every slot, `quantizer_factory_zoo` another format for each
direction. Docstrings are those of `hybridq.recipes.factories` and `hybridq.recipes.zoo`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from ..quantizers import DelayedScalingRequest
from ..recipes import QuantizerRole, factories, zoo
from .common import scaling
from .hybrid import quantizer_of

__all__ = ["quantizer_factories", "quantizer_factory_zoo"]


def _for_te(factory: Callable[[QuantizerRole], Any]) -> Callable[[Any], Any]:
    """Return a factory that makes quantizers of te, for None too."""

    @functools.wraps(factory)
    def made(role: Any) -> Any:
        found = factory(QuantizerRole() if role is None else role)
        if isinstance(found, DelayedScalingRequest):
            return scaling.DelayedScalingRequest()
        return quantizer_of(found)

    made.qfactory_key = (f"{__name__}.{factory.__name__}", 1)  # type: ignore[attr-defined]
    return made


def _module(name: str, source: ModuleType) -> ModuleType:
    made = ModuleType(f"{__name__}.{name}", source.__doc__)
    names = [one for one in vars(source) if one.endswith("_factory")]
    for one in names:
        setattr(made, one, _for_te(getattr(source, one)))
    made.__all__ = names  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    return made


#: One format for every slot.
quantizer_factories: Final = _module("quantizer_factories", factories)
#: Another format for each direction of a tensor.
quantizer_factory_zoo: Final = _module("quantizer_factory_zoo", zoo)
