"""Scale rules, one function each: from block amax to (stored scale, multiplier), all in FP32."""

from __future__ import annotations

import numpy as np

from .elements import ELEMENTS, OracleElement, cast_nearest, decode_codes
from .rounding import MAX

F32 = np.float32
F32_MAX = MAX["float32"]


def _bits(values) -> np.ndarray:
    return np.asarray(values, dtype=F32).view(np.uint32)


def finite_or_nan(amax: np.ndarray) -> np.ndarray:
    """amax as it is stored: inf becomes the FP32 maximum, NaN stays."""
    return np.minimum(amax, F32_MAX).astype(F32)


def amax_scale(
    amax: np.ndarray, element: OracleElement, power_of_two: bool, eps: float, overflow: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """(FP32 decode multiplier, FP32 encode multiplier) = (1 / s, s) with s = fmax / amax.

    `overflow` replaces a quotient that is inf: the FP32 maximum per tensor, the input type's
    maximum per block.
    """
    amax = np.maximum(finite_or_nan(amax), F32(eps))
    with np.errstate(all="ignore"):
        encode = F32(element.max) / amax
    encode = np.where(np.isinf(encode), overflow, encode)
    encode = np.where(amax == 0, F32(1), encode).astype(F32)
    if power_of_two:
        cleared = (_bits(encode) & np.uint32(0x7F800000)).view(F32)
        encode = np.where(np.isnan(encode), encode, cleared)
    with np.errstate(all="ignore"):
        return (F32(1) / encode).astype(F32), encode


def e8m0_round_up(ratio: np.ndarray) -> np.ndarray:
    """uint8: ceil(log2(ratio)) + 127 from the bits of non-negative float32 `ratio`."""
    bits = _bits(ratio).astype(np.int64)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    # Subnormals: 2^-127 is mantissa 0x400000, and byte 0 already stands for 2^-127.
    subnormal = (mantissa > 0x400000).astype(np.int64)
    byte = np.where(exponent == 0, subnormal, exponent + (mantissa > 0))
    byte = np.minimum(byte, 0xFE)
    return np.where(np.isnan(ratio), 0xFF, byte).astype(np.uint8)


def e8m0_value(byte: np.ndarray) -> np.ndarray:
    """float32 2^(byte - 127), from bits; byte 0 is the subnormal 2^-127, 0xFF is NaN."""
    byte = np.asarray(byte, dtype=np.uint32)
    bits = np.where(byte == 0, np.uint32(0x00400000), byte << np.uint32(23)).astype(np.uint32)
    return np.where(byte == 0xFF, F32(np.nan), bits.view(F32)).astype(F32)


def rceil_scale(amax: np.ndarray, element: OracleElement) -> tuple[np.ndarray, np.ndarray]:
    """(E8M0 byte, FP32 multiplier 2^(127 - byte)); byte 0xFF has the multiplier NaN."""
    with np.errstate(all="ignore"):
        ratio = np.asarray(amax, dtype=F32) * F32(1 / F32(element.max))
    byte = e8m0_round_up(ratio)
    inverse = e8m0_value(np.where(byte == 0xFF, 0xFF, 254 - byte.astype(np.int64)))
    return byte, inverse


def floor_log2(values: np.ndarray) -> np.ndarray:
    """int64 floor(log2(v)) of positive finite float32 values, subnormals included, exact."""
    _, exponent = np.frexp(np.asarray(values, dtype=np.float64))  # v = m * 2^e, m in [0.5, 1)
    return exponent.astype(np.int64) - 1


def exponent_scale(
    amax: np.ndarray, element: OracleElement, rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """(E8M0 byte, FP32 multiplier) of the rules floor, ceil and even of OCP MX blocks."""
    amax = np.asarray(amax, dtype=F32)
    plain = np.isfinite(amax) & (amax > 0)
    value = np.where(plain, amax, F32(1)).astype(np.float64)
    if rule == "even":
        # To nearest even with the element's mantissa bits; exact, both factors are powers of two.
        unit = 2.0 ** (floor_log2(value) - element.mantissa_bits)
        value = np.rint(value / unit) * unit
    exponent = floor_log2(value)
    if rule == "ceil":
        exponent = exponent + (value > 2.0**exponent)
    byte = np.clip(exponent - floor_log2(np.array(element.max)) + 127, 0, 254)
    byte = np.where(plain, byte, np.where(amax == 0, 0, np.where(np.isnan(amax), 255, 254)))
    byte = byte.astype(np.uint8)
    return byte, e8m0_value(np.where(byte == 0xFF, 0xFF, 254 - byte.astype(np.int64)))


def two_level_encode(tensor_amax: np.ndarray, element: OracleElement, bound: float) -> np.ndarray:
    """s_enc = bound * fmax / amax, capped at the FP32 maximum; 1 for amax 0 or a quotient of 0."""
    with np.errstate(all="ignore"):
        s_enc = np.minimum(F32(bound * element.max) / F32(tensor_amax), F32_MAX)
    return F32(1) if tensor_amax == 0 or s_enc == 0 else F32(s_enc)


def two_level_scale(
    amax: np.ndarray, tensor_amax: np.ndarray, element: OracleElement, bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 scale byte, FP32 multiplier) of blocks under one FP32 amax of the tensor."""
    e4m3 = ELEMENTS["e4m3"]
    s_enc = two_level_encode(tensor_amax, element, bound)
    with np.errstate(all="ignore"):
        wanted = amax.astype(F32) * (s_enc * F32(1 / F32(element.max)))
        byte = cast_nearest(np.minimum(wanted, F32_MAX), e4m3)
        decoded = decode_codes(byte, e4m3) * (F32(1) / s_enc)
        multiplier = np.minimum(F32(1) / decoded, F32_MAX).astype(F32)
    return byte, multiplier


def two_level_factor(tensor_amax: np.ndarray, element: OracleElement, bound: float) -> np.float32:
    """The decode factor of the tensor: amax / (bound * fmax)."""
    with np.errstate(all="ignore"):
        return F32(F32(tensor_amax) / F32(bound * element.max))
