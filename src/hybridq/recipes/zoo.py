"""Hybrid factories for linear modules, and others with their slots: a format per direction.

Written `row | col` below: the rowwise plane feeds the forward GEMM (for a gradient: dgrad), the
columnwise plane the backward ones (for a gradient: wgrad).

Which source a columnwise plane has: a forward operand whose backward format differs is encoded
from the decoded rowwise plane (`rowwise_dequantized`), so that the backward differentiates the
function that the forward computed. Gradients, and inputs that pass the Hadamard transform, are
encoded from the original.

Source: Transformer Engine's `custom_recipes/quantizer_factory_zoo.py` (names, slots and column
sources of the factories that it has); `nvfp4_fwd_mxfp8_bwd_factory` and
`fp8_block_fwd_mxfp8_bwd_factory` are ours by the same rule. Transformer Engine's know its own kinds
of modules alone; here one of a user's gets the formats of a linear module.
"""

from __future__ import annotations

from typing import Final

from ..quantizers import (
    Float8BlockQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .factories import nvfp4_factory, reads_no_names
from .roles import GRAD_OUTPUT, INPUT, WEIGHT, QuantizerRole

__all__ = [
    "fp8_block_fwd_mxfp8_bwd_factory",
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_fwd_mxfp8_bwd_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]

#: No kind of modules that multiplies an input and a weight: not known, and attention.
_OTHERS: Final = ("", "dpa")
_DECODED: Final = "rowwise_dequantized"


def _mxfp8() -> Quantizer:
    return MXFP8Quantizer("e4m3")


def _nvfp4() -> Quantizer:
    """Plain NVFP4: 1x16, no transform, nearest even."""
    return NVFP4Quantizer()


def _row_scaled() -> Quantizer:
    """Plain NVFP4 with one FP32 amax per row."""
    return NVFP4Quantizer(row_scaled_nvfp4=True)


def _hybrid(row: Quantizer, col: Quantizer, source: str = "original") -> Quantizer:
    return HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source
    )


def _slot(role: QuantizerRole) -> str:
    """Return the tensor type, of a user's own kind of modules too; of attention's nothing."""
    return "" if role.module_type in _OTHERS else role.tensor_type


@reads_no_names
def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return `identity | MXFP8` for every slot but gradients: MXFP8."""
    if _slot(role) == GRAD_OUTPUT:
        return _mxfp8()
    return _hybrid(IdentityQuantizer(), _mxfp8())


@reads_no_names
def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return MXFP8 for the forward, NVFP4 for the backward.

    Input `MXFP8 | NVFP4 with transform` (original), weight `MXFP8 | plain NVFP4` (decoded row),
    gradient NVFP4 with transform and stochastic rounding; MXFP8 elsewhere.
    """
    slot = _slot(role)
    if slot == INPUT:
        return _hybrid(_mxfp8(), NVFP4Quantizer(with_rht=True, with_post_rht_amax=True))
    if slot == WEIGHT:
        return _hybrid(_mxfp8(), _nvfp4(), _DECODED)
    if slot == GRAD_OUTPUT:
        return nvfp4_factory(role)
    return _mxfp8()


@reads_no_names
def nvfp4_1d_weight_factory(role: QuantizerRole) -> Quantizer:
    """Return NVFP4 with weights in 1x16 blocks, the backward's made of the decoded forward's."""
    if _slot(role) == WEIGHT:
        return _hybrid(_nvfp4(), _nvfp4(), _DECODED)
    return nvfp4_factory(role)


@reads_no_names
def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return `MXFP8 | identity` (decoded row) for inputs and weights, gradients as they are."""
    slot = _slot(role)
    if slot in (INPUT, WEIGHT):
        return _hybrid(_mxfp8(), IdentityQuantizer(), _DECODED)
    return IdentityQuantizer() if slot == GRAD_OUTPUT else _mxfp8()


@reads_no_names
def nvfp4_fwd_mxfp8_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return `plain NVFP4 | MXFP8` (decoded row) for inputs and weights, MXFP8 elsewhere."""
    if _slot(role) in (INPUT, WEIGHT):
        return _hybrid(_nvfp4(), _mxfp8(), _DECODED)
    return _mxfp8()


@reads_no_names
def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return, for grouped linear modules only, row-scaled NVFP4 forward and MXFP8 backward.

    Input `row-scaled NVFP4 | MXFP8`, weight `plain NVFP4 | MXFP8` (decoded row); MXFP8 for
    gradients and for every slot of other modules, plain linear ones included. One amax per row
    keeps the rows of different experts, and padding, out of each other's scales.
    """
    if role.module_type != "grouped_linear":
        return _mxfp8()
    if role.tensor_type == INPUT:
        return _hybrid(_row_scaled(), _mxfp8(), _DECODED)
    if role.tensor_type == WEIGHT:
        return _hybrid(_nvfp4(), _mxfp8(), _DECODED)
    return _mxfp8()


@reads_no_names
def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return row-scaled NVFP4 forward, high precision backward, for linear and grouped modules.

    Input `row-scaled NVFP4 | identity`, weight `plain NVFP4 | identity` (decoded row), gradients as
    they are; plain NVFP4 elsewhere.
    """
    slot = _slot(role)
    if slot == INPUT:
        return _hybrid(_row_scaled(), IdentityQuantizer(), _DECODED)
    if slot == WEIGHT:
        return _hybrid(_nvfp4(), IdentityQuantizer(), _DECODED)
    return IdentityQuantizer() if slot == GRAD_OUTPUT else _nvfp4()


@reads_no_names
def fp8_block_fwd_mxfp8_bwd_factory(role: QuantizerRole) -> Quantizer:
    """Return `blockwise FP8 | MXFP8` (decoded row) for inputs and weights, MXFP8 elsewhere.

    The forward's blocks are 1x128 for inputs and 128x128 for weights.
    """
    slot = _slot(role)
    if slot not in (INPUT, WEIGHT):
        return _mxfp8()
    dim = 2 if slot == WEIGHT else 1
    block = Float8BlockQuantizer("e4m3", rowwise=True, columnwise=True, block_scaling_dim=dim)
    return _hybrid(block, _mxfp8(), _DECODED)
