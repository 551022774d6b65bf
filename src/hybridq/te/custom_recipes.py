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
from .quantizers import Float8CurrentScalingQuantizer, NVFP4Quantizer

__all__ = [
    "nvfp4_linear_fp8_dpa_factory",
    "quantizer_factories",
    "quantizer_factory_zoo",
    "reference",
]


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


def nvfp4_linear_fp8_dpa_factory(role: Any) -> Any:
    """Return NVFP4 for linear modules, and FP8 for attention: its softmax by delayed scaling.

    Args:
        role: QuantizerRole of the slot, or None.
    """
    role = QuantizerRole() if role is None else role
    if role.module_type in ("linear", "grouped_linear"):
        return quantizer_factories.nvfp4_factory(role)
    if role.module_type == "dpa" and role.tensor_type in ("s", "dp"):
        return scaling.DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    is_dpa = role.module_type == "dpa" or role.name.endswith(("dpa_output", "dpa_grad_input"))
    if not is_dpa:
        return quantizer_factories.nvfp4_factory(role)
    is_gradient = role.tensor_type in ("do", "dqkv") or role.name.endswith("dpa_grad_input")
    return Float8CurrentScalingQuantizer("e5m2" if is_gradient else "e4m3")


#: One format for every slot.
quantizer_factories: Final = _module("quantizer_factories", factories)
#: Another format for each direction of a tensor.
quantizer_factory_zoo: Final = _module("quantizer_factory_zoo", zoo)
nvfp4_linear_fp8_dpa_factory.qfactory_key = (  # type: ignore[attr-defined]
    f"{__name__}.nvfp4_linear_fp8_dpa_factory",
    1,
)
setattr(quantizer_factory_zoo, nvfp4_linear_fp8_dpa_factory.__name__, nvfp4_linear_fp8_dpa_factory)
quantizer_factory_zoo.__all__.append(nvfp4_linear_fp8_dpa_factory.__name__)


def nvfp4_ref_rht_2d_factory(role: Any) -> Any:
    """Return NVFP4: 16x16 blocks of weights, the transform and 1x16 blocks of all else.

    Args:
        role: QuantizerRole of the slot, or None.
    """
    if role is not None and role.tensor_type == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)


def current_scaling_ref_factory(role: Any) -> Any:
    """Return FP8 with one scale per tensor: E5M2 of gradients, E4M3 of all else.

    Args:
        role: QuantizerRole of the slot, or None.
    """
    is_gradient = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer("e5m2" if is_gradient else "e4m3")


def _references() -> ModuleType:
    made = ModuleType(f"{__name__}.reference", "Factories of Transformer Engine's references.")
    for factory in (nvfp4_ref_rht_2d_factory, current_scaling_ref_factory):
        own: Any = factory
        own.qfactory_key = (f"{__name__}.{factory.__name__}", 1)
        setattr(made, factory.__name__, factory)
    made.__all__ = ["current_scaling_ref_factory", "nvfp4_ref_rht_2d_factory"]  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    return made


#: What Transformer Engine computes in plain PyTorch; here by the quantizers as they are.
reference: Final = _references()
