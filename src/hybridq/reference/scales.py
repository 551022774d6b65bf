"""Scale rules: from the amax of blocks to stored scales and multipliers. All FP32.

Every rule is a function of the blocks' amax; a new rule is a new entry of `_RULES`.

Source: docs/numerics.md, one section per rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..formats import ELEMENTS, PlaneSpec
from .elements import cast, decode_codes

__all__ = ["FP32_MAX", "BlockScales", "block_scales"]

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
        amax: FP32, any shape; NaN where a block holds one, inf where a block holds one.
        spec: the plane's spec.
        tensor_amax: FP32 `[1]`, for rules that need it.
        input_max: largest finite value of the encoded tensor's dtype.
    """
    return _RULES[spec.format.rule](amax, spec, tensor_amax, input_max)


def _amax_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    fmt = spec.format
    fmax = torch.tensor(fmt.element.max if fmt.element else 1.0, dtype=torch.float32)
    eps = torch.tensor(fmt.eps, dtype=torch.float32, device=amax.device)
    amax = torch.maximum(amax.clamp(max=FP32_MAX), eps)
    encode = fmax.to(amax.device) / amax
    overflow = FP32_MAX if fmt.is_tensor_scaled else input_max
    encode = torch.where(encode.isinf(), overflow, encode)
    encode = torch.where(amax == 0.0, 1.0, encode)
    if fmt.power_of_two:
        cleared = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, cleared)
    return BlockScales(1.0 / encode, encode)


def _rceil_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    element = spec.format.element
    inverse = torch.tensor(1.0 / (element.max if element else 1.0), dtype=torch.float32)
    ratio = amax * inverse.to(amax.device)
    bits = ratio.view(torch.int32).to(torch.int64)
    byte = (bits >> 23) + (bits & 0x7FFFFF != 0)
    byte = torch.where(bits <= 0x400000, 0, byte)  # up to 2^-127, the smallest scale
    byte = byte.clamp(max=0xFE)
    byte = torch.where(ratio.isnan(), 0xFF, byte)
    # 2^(127 - byte): exponent field 254 - byte, and the subnormal 2^-127 for byte 254.
    inverse_bits = torch.where(byte == 0xFE, 0x400000, (254 - byte) << 23)
    inverse_bits = torch.where(byte == 0xFF, 0x7FC00000, inverse_bits)
    multiplier = inverse_bits.to(torch.int32).view(torch.float32)
    return BlockScales(byte.to(torch.uint8), multiplier)


def _two_level_rule(
    amax: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor | None, input_max: float
) -> BlockScales:
    fmax = spec.format.element.max if spec.format.element else 1.0
    whole = amax if tensor_amax is None else tensor_amax.clamp(max=FP32_MAX)
    bound = torch.tensor(spec.tensor_bound * fmax, dtype=torch.float32, device=amax.device)
    encode = (bound / whole).clamp(max=FP32_MAX)
    encode = torch.where((whole == 0.0) | (encode == 0.0), 1.0, encode)
    inverse_fmax = torch.tensor(1.0 / fmax, dtype=torch.float32, device=amax.device)
    scale = (amax * (encode * inverse_fmax)).clamp(max=FP32_MAX)
    e4m3 = ELEMENTS["e4m3"]
    stored = cast(scale, e4m3)
    decoded = decode_codes(stored, e4m3)
    multiplier = (1.0 / (decoded * (1.0 / encode))).clamp(max=FP32_MAX)
    return BlockScales(stored, multiplier)


_RULES: dict[str, Callable[[torch.Tensor, PlaneSpec, torch.Tensor | None, float], BlockScales]] = {
    "amax": _amax_rule,
    "rceil": _rceil_rule,
    "two_level": _two_level_rule,
}
