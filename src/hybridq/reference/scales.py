"""Scale rules: from the amax of blocks to stored scales and multipliers. All FP32.

Every rule is a function of the blocks' amax; a new rule is a new entry of `_RULES`. What needs the
blocks' values too (four-over-six) stands in a module of its own.

Source: docs/reference/numerics.md, one section per rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..formats import ELEMENTS, PlaneSpec
from .elements import cast, decode_codes
from .rounding import one_nan

__all__ = [
    "FP32_MAX",
    "BlockScales",
    "block_scales",
    "two_level_encode",
    "two_level_multiplier",
]

FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BlockScales:
    """The scales of a plane's blocks.

    Args:
        stored: what the `scale` buffer holds, uint8 or float32.
        multiplier: FP32, what a value is multiplied with before the cast.
    """

    stored: torch.Tensor
    multiplier: torch.Tensor


def block_scales(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    """Return the scales that `spec`'s rule gives to blocks of the given amax.

    Args:
        amax: FP32, any shape; NaN where a block holds one, inf where a block holds one. For one
            scale per tensor it may be the multiplier, negative (docs/reference/numerics.md,
            "Per-tensor FP8, delayed scaling").
        spec: the plane's spec.
        tensor_amax: FP32 of one value per tensor or per row of blocks, broadcastable to `amax`,
            for rules that need it.
        input_max: largest finite value of the encoded tensor's dtype.
    """
    return _RULES[spec.format.rule](amax, spec, tensor_amax, input_max)


def _amax_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    fmt = spec.format
    given = amax
    # Filled on the device: a copy from the host would wait for it.
    fmax = torch.full_like(amax, fmt.element.max if fmt.element else 1.0, dtype=torch.float32)
    eps = torch.full_like(fmax, fmt.eps)
    amax = torch.maximum(amax.clamp(max=FP32_MAX), eps)
    encode = fmax / amax
    overflow = FP32_MAX if fmt.is_tensor_scaled else input_max
    encode = torch.where(encode.isinf(), overflow, encode)
    encode = torch.where(amax == 0.0, 1.0, encode)
    if fmt.power_of_two:
        cleared = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, cleared)
    if fmt.is_tensor_scaled:  # a negative statistic is a multiplier that was fixed before
        encode = torch.where(given < 0.0, -given, encode)
    return BlockScales(one_nan(1.0 / encode), encode)


def _rceil_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    element = spec.format.element
    inverse = torch.tensor(
        1.0 / (element.max if element else 1.0), dtype=torch.float32, device="cpu"
    )
    ratio = amax * inverse.to(amax.device)
    bits = ratio.view(torch.int32).to(torch.int64)
    byte = (bits >> 23) + (bits & 0x7FFFFF != 0)
    byte = torch.where(bits <= 0x400000, 0, byte)  # up to 2^-127, the smallest scale
    return _e8m0_scales(torch.where(ratio.isnan(), 0xFF, byte.clamp(max=0xFE)))


def _folded_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    # The largest of four bytes is the byte of the largest amax.
    made = _rceil_rule(amax, spec, tensor_amax, input_max)
    return BlockScales(decode_codes(made.stored, ELEMENTS["e8m0"]), made.multiplier)


def _floor_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    return _exponent_scales(amax, amax.view(torch.int32).to(torch.int64) >> 23, spec)


def _ceil_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    bits = amax.view(torch.int32).to(torch.int64)
    return _exponent_scales(amax, (bits >> 23) + (bits & 0x7FFFFF != 0), spec)


def _even_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    mantissa_bits = spec.format.element.mantissa_bits if spec.format.element else 0
    # Adding half a unit is enough: rounding carries into the exponent only from a mantissa of all
    # ones, which is odd, so that a tie goes up.
    half = 1 << (23 - mantissa_bits - 1)
    bits = amax.view(torch.int32).to(torch.int64)
    return _exponent_scales(amax, (bits + half) >> 23, spec)


def _exponent_scales(amax: torch.Tensor, exponent: torch.Tensor, spec: PlaneSpec) -> BlockScales:
    """Return the scales `2^(exponent - 127 - emax(element))`, kept within E8M0."""
    emax = spec.format.element.emax if spec.format.element else 0
    byte = (exponent - emax).clamp(min=0, max=0xFE)
    byte = torch.where(amax == 0.0, 0, byte)
    byte = torch.where(amax.isinf(), 0xFE, byte)
    return _e8m0_scales(torch.where(amax.isnan(), 0xFF, byte))


def _e8m0_scales(byte: torch.Tensor) -> BlockScales:
    # 2^(127 - byte): exponent field 254 - byte, and the subnormal 2^-127 for byte 254.
    inverse_bits = torch.where(byte == 0xFE, 0x400000, (254 - byte) << 23)
    inverse_bits = torch.where(byte == 0xFF, 0x7FC00000, inverse_bits)
    multiplier = inverse_bits.to(torch.int32).view(torch.float32)
    return BlockScales(byte.to(torch.uint8), multiplier)


def _two_level_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    fmax = spec.format.element.max if spec.format.element else 1.0
    encode = two_level_encode(amax if tensor_amax is None else tensor_amax, spec)
    inverse_fmax = torch.tensor(1.0 / fmax, dtype=torch.float32, device=amax.device)
    scale = (amax * (encode * inverse_fmax)).clamp(max=FP32_MAX)
    stored = cast(scale, ELEMENTS["e4m3"])
    return BlockScales(stored, two_level_multiplier(stored, encode))


def two_level_encode(tensor_amax: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
    """Return `(tensor_bound * fmax) / amax` within FP32; 1 for amax 0 or a quotient of 0."""
    fmax = spec.format.element.max if spec.format.element else 1.0
    whole = tensor_amax.clamp(max=FP32_MAX)
    bound = torch.tensor(spec.tensor_bound * fmax, dtype=torch.float32, device=whole.device)
    encode = (bound / whole).clamp(max=FP32_MAX)
    return torch.where((whole == 0.0) | (encode == 0.0), 1.0, encode)


def two_level_multiplier(stored: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    """Return `1 / (scale * (1 / encode))` within FP32 for E4M3 scale bytes."""
    decoded = decode_codes(stored, ELEMENTS["e4m3"])
    return (1.0 / (decoded * (1.0 / encode))).clamp(max=FP32_MAX)


_RULES: dict[str, Callable[[torch.Tensor, PlaneSpec, torch.Tensor | None, float], BlockScales]] = {
    "amax": _amax_rule,
    "rceil": _rceil_rule,
    "floor": _floor_rule,
    "ceil": _ceil_rule,
    "even": _even_rule,
    "two_level": _two_level_rule,
    "folded": _folded_rule,
}
