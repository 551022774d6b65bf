"""Fold: an MX plane as FP8 with one FP32 scale per 128 values, for tensor cores that want that.

The four 1x32 scales of a group of 128 are powers of two. Their largest becomes the group's, and the
differences move into the codes: a code is multiplied by `2^(e_i - E)` and rounded to nearest even
again. The multiplication shifts the exponent only, so a code changes only where it falls into the
target's subnormals.

How far can one be off? A code that changes lies in the subnormals, where neighbours are
`s = min_subnormal` apart, so it moves by at most `s / 2`, in units of the group's scale. Some block
has that scale, and with round-up scales its amax is more than half the largest code times it. So
the error is at most `s / max` of the group's amax: for E4M3 `2^-9 / 448 = 2^-17.8`, for E5M2
`2^-16 / 57344 = 2^-31.8`. With a group's amax A for operand a and B for b, a product moves by at
most

    sum over groups: 2^-17.8 * (A * sum|b| + B * sum|a|) + 2^-35.6 * 128 * A * B

which `tests/kernels/choice/test_precision_error.py` holds it to, beside the measured error
(docs/reference/gemm.md). Where scales come from the rule `ceil`, an amax may be half as large, and
the bound is twice that. Where they belong to squares of 32x32, A is the amax of the squares that
the group cuts, not of the row: a row that is tiny beside its neighbours may lose more than it would
by rounding to BF16.

Source: ours; docs/reference/numerics.md, "Fold".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..formats import Element, PlaneSpec
from ..formats.elements import E4M3, E5M2, E8M0
from .elements import cast, decode_codes, power_of_two, unpack

__all__ = ["FOLD_WIDTH", "Folded", "fold_element", "fold_lift", "fold_plane"]

#: Values along K that share a scale afterwards.
FOLD_WIDTH = 128


@dataclass(frozen=True)
class Folded:
    """A folded plane: an FP8 plane with power-of-two FP32 scales of `height x 128` blocks.

    Args:
        codes: uint8 `[rows, K]` of `fold_element(...)`.
        scale: FP32 `[ceil(rows / height), ceil(K / 128)]`, any strides.
        changed: int64 `[1]`: finite codes whose value is not the plane's own.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    changed: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The three tensors."""
        return [self.codes, self.scale, self.changed]


def fold_element(element: Element) -> Element:
    """Return the FP8 element that codes of `element` become: E5M2 stays, others fit into E4M3."""
    return element if element == E5M2 else E4M3


def fold_lift(element: Element) -> int:
    """Return by how many binades codes are raised: the room above `element` in its target.

    A narrow element so keeps clear of the target's subnormals: E2M1 is raised by 6, and folds
    exactly while the scales of a group are less than 2^15 apart.
    """
    return math.floor(math.log2(fold_element(element).max / element.max))


def fold_plane(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, height: int = 1
) -> Folded:
    """Return the plane `[rows, cols]` of E8M0 blocks, folded to blocks of `height x 128`.

    `E` = the largest scale byte of a group, NaN bytes (0xFF) left out, 0 if all are; the group's
    scale is `2^(E - 127 - lift)`, a code becomes `cast(code * 2^(e_i - E + lift))`. NaN codes and
    all codes of a block with a NaN scale become the NaN code; infinities of E5M2 stay; zeros keep
    their signs, and so does what is rounded to zero.

    Args:
        buffers: data and scale of a plane with E8M0 scales, blocks of 32 (or a divisor of 128).
        spec: its spec.
        rows, cols: its own matrix; a transform's padding is included in the result.
        height: rows that share a scale: 1, or 128 for weights.

    Returns:
        Codes, scales and the number of codes whose value changed.

    Raises:
        ValueError: the spec has no codes or no blocks.
    """
    fmt = spec.format
    if fmt.element is None or fmt.block is None:
        raise ValueError(f"fold_plane: needs blocks of codes, got {spec}")
    target, lift, width = fold_element(fmt.element), fold_lift(fmt.element), spec.padded(cols)
    codes = unpack(buffers[0], fmt.element, width)
    values = decode_codes(codes, fmt.element)
    exponent = buffers[1].to(torch.int32)
    is_nan = exponent == 255
    exponent = torch.where(is_nan, 0, exponent)
    exponent = exponent.repeat_interleave(fmt.block[0], 0)[:rows]
    exponent = exponent.repeat_interleave(fmt.block[1], 1)[:, :width]
    is_nan = is_nan.repeat_interleave(fmt.block[0], 0)[:rows]
    is_nan = is_nan.repeat_interleave(fmt.block[1], 1)[:, :width] | values.isnan()
    top = _group_max(exponent, height)
    largest = top.repeat_interleave(height, 0)[:rows].repeat_interleave(FOLD_WIDTH, 1)[:, :width]
    # FP64 holds every product: values have at most 4 bits, and exponents stay within 300.
    shifted = values.to(torch.float64) * power_of_two(exponent - largest + lift)
    # cast takes FP32; what FP32 flushes is far below half the target's smallest step.
    made = cast(torch.where(is_nan, torch.nan, shifted).to(torch.float32), target)
    made = torch.where(values.isinf() & ~is_nan, codes, made)
    again = decode_codes(made, target).to(torch.float64)
    changed = (again != shifted) & shifted.isfinite() & ~is_nan
    # Assembled in FP64 and exact in FP32: down to 2^-133, a subnormal.
    scale = power_of_two(top - (E8M0.bias + lift)).to(torch.float32)
    return Folded(made, scale, changed.sum(dtype=torch.int64).reshape(1))


def _group_max(exponent: torch.Tensor, height: int) -> torch.Tensor:
    rows, width = exponent.shape
    down, right = -(-rows // height), -(-width // FOLD_WIDTH)
    padded = torch.nn.functional.pad(
        exponent, (0, right * FOLD_WIDTH - width, 0, down * height - rows)
    )
    if padded.numel() == 0:
        return exponent.new_zeros((down, right))
    return padded.reshape(down, height, right, FOLD_WIDTH).amax(dim=(1, 3))
