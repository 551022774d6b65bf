"""Products on a CPU of operands that BF16 holds but for FP32 scales of blocks along K.

FP8 with FP32 scales of 128x128, as DeepSeek-V3 is published, is no BF16 operand, and its codes are.
The scales of a block are the same for all of its K, so the core multiplies codes in BF16, and the
sums of each block by the scales, in FP32.

Source: ours; docs/adr/0234-scales-of-blocks-multiply-sums-on-a-cpu.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ...formats.elements import FP32
from ..choice import GemmArgs, Operand
from ..cpu import BlockScales, multiply, planes_reason, product_reason, tiles_reason
from .decoded_sides import Side, SideDecoder, side_decoder

__all__ = ["BlocksProduct", "blocks_reason"]

#: Columns of a block: parts of what the core's kernel takes of K at a time, and no fewer than pay.
_DEPTHS: Final = (64, 128, 256, 512, 1024, 2048, 4096)


class _Scaled(NamedTuple):
    """How an operand is read.

    Args:
        decoder: of the matrix; of codes where there are scales.
        block: rows and columns of a block; None: the operand has no such scales.
    """

    decoder: SideDecoder
    block: tuple[int, int] | None


def _block(spec: PlaneSpec) -> tuple[int, int] | None:
    """Return the blocks whose scales may multiply sums, or None."""
    fmt = spec.format
    if fmt.is_identity or spec.is_bf16_exact or spec.scale_layout or spec.signs is not None:
        return None
    if fmt.scale != FP32 or fmt.block is None or fmt.block[1] not in _DEPTHS:
        return None
    return fmt.block if _codes(spec).is_bf16_exact else None


def _codes(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec under which a plane's operand is its codes."""
    return replace(spec, format=replace(spec.format, block=None))


def blocks_reason(a: PlaneSpec, b: PlaneSpec) -> str | None:
    """Return None if the core multiplies codes and then scales of blocks, else why not.

    Args:
        a, b: the operands' specs.
    """
    reason = product_reason()
    if reason is not None:
        return reason
    if tiles_reason() is None or planes_reason() is None:
        return "this CPU's BF16 product of vectors is no faster than one in FP32"
    if a.signs is not None or b.signs is not None:
        return "scales belong to values before their transform"
    blocks = [_block(spec) for spec in (a, b)]
    for name, spec, block in zip("ab", (a, b), blocks, strict=True):
        if block is None and not spec.is_bf16_exact:
            return f"BF16 does not hold operand {name}, whose scales are not of 64 columns or more"
    depths = {block[1] for block in blocks if block is not None}
    if len(depths) != 1:
        return "blocks of the operands differ in width" if depths else "BF16 holds both operands"
    return None


class BlocksProduct:
    """Multiplies planes of two specs for which `blocks_reason` is None.

    Args:
        a, b: the specs.
    """

    __slots__ = ("_depth", "_sides")

    def __init__(self, a: PlaneSpec, b: PlaneSpec) -> None:
        forced = settings.current().backend
        self._sides: list[_Scaled] = []
        self._depth = 0
        for spec in (a, b):
            block = _block(spec)
            if block is not None:
                self._depth = block[1]
            own = spec if block is None else _codes(spec)
            self._sides.append(
                _Scaled(side_decoder(own, True, torch.bfloat16, "cpu", forced), block)
            )

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
        """Return `a @ b.T` with all that follows it, or None: a value leaves BF16's normal range.

        Args:
            a, b: planes of the specs on a CPU, none of them empty.
            args: bias, what is accumulated into, and the result's dtype.
        """
        sides: list[Side] = []
        scales: list[torch.Tensor | None] = []
        heights: list[int] = []
        for operand, (decoder, block) in zip((a, b), self._sides, strict=True):
            if block is None:
                side = decoder.ready(operand) or decoder.decode(operand)
                if not side.is_bf16:
                    return None
                sides.append(side)
                scales.append(None)
                heights.append(1)
                continue
            sides.append(_of_codes(operand, decoder))
            scales.append(operand.buffers[1].contiguous())
            heights.append(block[0])
        left, right = sides
        own = BlockScales(self._depth, scales[0], scales[1], heights[0], heights[1])
        return multiply(left.matrix, right.matrix, left.factor, right.factor, args, own)


def _of_codes(operand: Operand, decoder: SideDecoder) -> Side:
    """Return an operand's codes in BF16, kept where its decoded values would be."""

    def make() -> Side:
        codes, scale = operand.buffers
        side = decoder.decode(operand._replace(buffers=[codes, scale.flatten()[:1]], cache=None))
        return Side(side.matrix, None, True)

    if operand.cache is None:
        return make()
    return operand.cache.get("codes in BF16", operand.buffers, make)
