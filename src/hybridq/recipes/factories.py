"""Plain factories: one format for every slot. Starting points for factories of one's own.

Source: Transformer Engine's `custom_recipes/quantizer_factories.py` (names and slots).
"""

from __future__ import annotations

from ..quantizers import DelayedScalingRequest, IdentityQuantizer, Quantizer
from .builtin import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .roles import QuantizerRole

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
    "reads_no_names",
]


def reads_no_names(factory):  # type: ignore[no-untyped-def]
    """Mark `factory` as one that never looks at `role.name`; see CustomRecipe."""
    factory.reads_names = False
    return factory


@reads_no_names
def high_precision_factory(role: QuantizerRole) -> Quantizer:
    """Return the quantizer that leaves every slot alone."""
    return IdentityQuantizer()


@reads_no_names
def current_scaling_factory(role: QuantizerRole) -> Quantizer:
    """Return per-tensor FP8: E4M3, and E5M2 for gradients."""
    return Float8CurrentScaling().quantizer(role)


@reads_no_names
def delayed_scaling_factory(role: QuantizerRole) -> DelayedScalingRequest:
    """Return per-tensor FP8 with a history of amaxes: E4M3, and E5M2 for gradients."""
    return DelayedScalingRequest()


@reads_no_names
def float8_block_scaling_factory(role: QuantizerRole) -> Quantizer:
    """Return blockwise FP8 (E4M3): 1x128, and 128x128 for weights."""
    return Float8BlockScaling().quantizer(role)


@reads_no_names
def mxfp8_factory(role: QuantizerRole) -> Quantizer:
    """Return MXFP8 (E4M3) for every slot."""
    return MXFP8BlockScaling().quantizer(role)


@reads_no_names
def nvfp4_factory(role: QuantizerRole) -> Quantizer:
    """Return NVFP4: 16x16 weights, transformed inputs and gradients, stochastic gradients."""
    return NVFP4BlockScaling().quantizer(role)
