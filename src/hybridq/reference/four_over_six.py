"""Four over six: NVFP4 blocks that take the better of two scales.

E2M1 has no value between 4 and 6, so a block whose amax maps to 4 instead of 6 may round better.
Both candidates are quantized, and the one with less error wins; a tie goes to the six.

Source: docs/reference/numerics.md, "NVFP4"; arXiv:2512.02010; Transformer Engine,
`nvfp4_use_4over6`.
"""

from __future__ import annotations

import torch

from ..formats import ELEMENTS, PlaneSpec
from .elements import cast, decode_codes
from .scales import FP32_MAX, BlockScales, two_level_encode, two_level_multiplier

__all__ = ["four_over_six_scales"]


def _errors(
    blocks: torch.Tensor,
    scales: BlockScales,
    spec: PlaneSpec,
    tensor_amax: torch.Tensor,
    by_columns: bool,
) -> torch.Tensor:
    """Return FP32 `[R, C]`: the error of every block, added in the order of the rules."""
    fmt = spec.format
    element = fmt.element or ELEMENTS["e2m1"]
    codes = cast(blocks * scales.multiplier[:, None, :, None], element)
    scale = decode_codes(scales.stored, ELEMENTS["e4m3"])[:, None, :, None]
    bound = torch.tensor(spec.tensor_bound * element.max, dtype=torch.float32, device=blocks.device)
    amax = tensor_amax[:, None, None, None] if spec.row_scaled else tensor_amax
    error = ((decode_codes(codes, element) * scale) * amax / bound - blocks).abs()
    if spec.four_over_six == "mse":
        error = error * error
    # The elements of a row of the block one after the other, then its rows as a tree. In a
    # columnwise plane the block lies transposed: its columns are the rows of the rowwise one.
    error = error.permute(0, 2, 3, 1) if by_columns else error.permute(0, 2, 1, 3)
    sums = torch.zeros_like(error[..., 0])
    for part in error.unbind(-1):
        sums = sums + part
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def four_over_six_scales(
    blocks: torch.Tensor, spec: PlaneSpec, tensor_amax: torch.Tensor, by_columns: bool
) -> BlockScales:
    """Return the scales of FP32 `blocks`, each the better one of its two candidates.

    Args:
        blocks: `[R, block_rows, C, block_cols]`, zero-padded.
        spec: the plane's spec.
        tensor_amax: FP32 `[1]`, or `[R]` if the spec is row-scaled.
        by_columns: the plane is columnwise: errors are added in the order of the rowwise one, so
            that square blocks decide alike in both.
    """
    e4m3 = ELEMENTS["e4m3"]
    element = spec.format.element or ELEMENTS["e2m1"]
    amax = blocks.abs().amax(dim=(1, 3))
    whole = tensor_amax.clamp(max=FP32_MAX)
    encode = two_level_encode(whole[:, None] if spec.row_scaled else whole, spec)
    base = amax / torch.tensor(element.max, dtype=torch.float32, device=amax.device) * encode
    candidates = []
    for stretch in (1.0, 1.5):
        stored = cast((base * stretch).clamp(max=e4m3.max), e4m3)
        candidates.append(BlockScales(stored, two_level_multiplier(stored, encode)))
    six, four = candidates
    is_square = spec.format.is_square
    errors = [
        _errors(blocks, scales, spec, whole, by_columns and is_square) for scales in candidates
    ]
    takes_four = errors[1] < errors[0]
    return BlockScales(
        torch.where(takes_four, four.stored, six.stored),
        torch.where(takes_four, four.multiplier, six.multiplier),
    )
