"""How the kernels see a plane: the numbers by which its codes and scales are decoded.

A kernel knows no format by name. It is compiled for a `Form`, all of whose numbers follow from the
format's record, so that a format that is registered later needs no kernel of its own.

This module imports no Triton: backends are asked for their reasons on machines without it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...formats import Element, PlaneSpec
from .ptx import decode_asm

__all__ = ["VALUES", "WIDE_VALUES", "Code", "Form", "form_of", "form_reason", "portable_form"]

_SIGN = 1 << 31


class Code(NamedTuple):
    """A scalar code as a kernel decodes it to FP32: shift it into place, mask, multiply.

    Args:
        bits: width of the code; 16: BF16 bits; 32: FP32; 0: there is none.
        up: left shift that brings the sign to bit 31.
        down: right shift (arithmetic, so bit 31 stays) that brings the exponent to bit 23.
        mask: keeps sign, exponent and mantissa, as a signed 32-bit number; 0: no sign and no
            mantissa, the code is an exponent (E8M0).
        factor: what the exponents' biases differ by; the product is exact.
        limit: from this magnitude on a value is special; 0: none is.
        asm: PTX that decodes two codes at once (see `ptx`); "": plain operations do.
    """

    bits: int
    up: int = 0
    down: int = 0
    mask: int = 0
    factor: float = 1.0
    limit: float = 0.0
    asm: str = ""


class Form(NamedTuple):
    """A plane as a kernel decodes it.

    Args:
        code: what the data are.
        scale: what the block scales are; bits 0: none.
        block_rows, block_cols: one scale per block of so many rows and codes.
        per_unit: codes in one element of data, a byte or a 16-bit word, the lower index in the
            lower bits.
        is_odd: rows end within a unit.
        bound: the plane has a factor that the product is multiplied with: its scale (1.0), or its
            amax divided by this; 0.0: it has none.
        has_row_factors: one factor per row instead of one for all.
        is_wide: BF16 does not hold the values: the product is one of FP32 operands, or the values
            are rounded once.
    """

    code: Code
    scale: Code
    block_rows: int = 1
    block_cols: int = 1
    per_unit: int = 1
    is_odd: bool = False
    bound: float = 0.0
    has_row_factors: bool = False
    is_wide: bool = False


_NONE = Code(0)
#: BF16 values, as their bits.
VALUES = Form(Code(16), _NONE)
#: FP32 or FP16 values, as themselves.
WIDE_VALUES = Form(Code(32), _NONE, is_wide=True)


def _code(element: Element) -> Code:
    if element.bits > 8:
        return Code(element.bits)
    if element.mantissa_bits == 0:
        return Code(element.bits)
    magnitude = (1 << (element.bits - 1)) - 1
    mask = magnitude << (23 - element.mantissa_bits) | _SIGN
    limit = 0.0
    top = float(2.0 ** ((1 << element.exponent_bits) - 1 - element.bias))
    if element.specials == "fn":
        limit = top * (2.0 - 2.0**-element.mantissa_bits)
    elif element.specials == "ieee":
        limit = top
    return Code(
        bits=element.bits,
        up=32 - element.bits,
        down=8 - element.exponent_bits,
        mask=mask - (1 << 32),
        factor=2.0 ** (127 - element.bias),
        limit=limit,
        asm=decode_asm(element),
    )


def portable_form(form: Form) -> Form:
    """Return the form as it is decoded on GPUs that have no PTX, with the same bits."""
    return form._replace(code=form.code._replace(asm=""))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@lru_cache(maxsize=1024)
def form_reason(spec: PlaneSpec, takes_wide: bool = False) -> str | None:
    """Return None if the kernels decode planes of `spec`, else why not.

    Args:
        spec: of an operand.
        takes_wide: whether values that BF16 does not hold may be multiplied in FP32, or rounded.
    """
    fmt = spec.format
    if spec.scale_layout == "tiles":
        return f"scales are read row by row, got tiles of them ({spec})"
    if fmt.is_identity:
        if fmt.element is None:
            return "plain operands must have a dtype, got an open one"
        if fmt.element.name != "bf16" and not takes_wide:
            return f"plain operands must be bf16, got {fmt.element}"
        return None
    if not (spec.is_bf16_exact or takes_wide):
        return f"BF16 does not hold {fmt} exactly"
    if fmt.element is None or fmt.scale is None:
        return f"{fmt} has no codes"
    if fmt.element.codes_per_byte == 2 and fmt.element.bits != 4:
        return f"packed codes must have 4 bits, got {fmt.element}"
    if not (0 <= fmt.element.bias < 254 and 4 <= fmt.element.bits <= 8):
        return f"codes must have 4 to 8 bits and a bias of 0 to 253, got {fmt.element!r}"
    if spec.has_scales_as_factors:
        return None
    if fmt.block is not None and not (_is_power_of_two(fmt.block[1]) and fmt.block[1] >= 2):
        return f"blocks must be a power of two long, got {fmt.block}"
    return None


@lru_cache(maxsize=1024)
def form_of(spec: PlaneSpec) -> Form:
    """Return the Form of planes of `spec`, for which `form_reason` is None."""
    fmt = spec.format
    if fmt.is_identity or fmt.element is None or fmt.scale is None:
        is_bf16 = fmt.element is not None and fmt.element.name == "bf16"
        return VALUES if is_bf16 else WIDE_VALUES
    per_unit = fmt.element.codes_per_byte
    has_row_scales = spec.has_scales_as_factors
    if fmt.block is None or has_row_scales:  # the scale of it all is a factor of the product
        return Form(
            _code(fmt.element),
            _NONE,
            per_unit=per_unit,
            bound=1.0,
            has_row_factors=has_row_scales,
        )
    bound = spec.tensor_bound * fmt.element.max if spec.needs_amax else 0.0
    return Form(
        _code(fmt.element),
        _code(fmt.scale),
        *fmt.block,
        per_unit,
        False,
        bound,
        spec.row_scaled,
        not fmt.is_bf16_exact,
    )
