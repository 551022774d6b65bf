"""Dense products of FP8 planes by the core's kernel, where it has one and cuBLASLt's is no gain.

A call of cuBLASLt's product takes a host about 80 us, most of it to choose a kernel anew, and one
of the core's a fraction. So the core makes those that a chip has done before a host could say more.

Source: ours; docs/adr/0212-small-fp8-products-are-the-cores.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from ...reference import FOLD_WIDTH
from ..choice import BlockSide, GemmArgs, Operand
from ..inputs import Chip, begins_at
from .chip_gates import core_product

__all__ = ["block_side", "core_gemm", "core_reason", "fits_core"]

#: Bytes at a multiple of which codes, and rows of codes and of scales, begin.
_ALIGNMENT: Final = 16
#: Rows of an operand with a scale for each of them.
_STEP: Final = 4
#: Multiplications that a host is slower to ask for by cuBLASLt than a chip is to make.
_SMALL: Final = 1 << 33
#: Codes of a second operand that are read in no time, however few tiles read them.
_SHORT: Final = 1 << 22
#: Tiles of 128 x 128 that keep a Hopper busy; with fewer cuBLASLt divides the contraction.
_ENOUGH_TILES: Final = 128
_KINDS: Final = ("tensor", "block")


def core_reason(chip: Chip | None, kind: str, sizes: tuple[int, int, int]) -> str | None:
    """Return None if the core makes a product that nothing is added to, else why not.

    Args:
        chip: where the operands are.
        kind: of scaling, a key of `KIND_NAMES`.
        sizes: M, N, K.
    """
    m, n, k = sizes
    if kind not in _KINDS or chip is None or core_product("multiply_pair", chip) is None:
        return "the core has no such product here"
    tiles = -(-m // FOLD_WIDTH) * -(-n // FOLD_WIDTH)
    if 0 in sizes or m * n * k > _SMALL or (n * k > _SHORT and tiles < _ENOUGH_TILES):
        return "cuBLASLt's is faster from some size on"
    return None


def block_side(operand: Operand) -> BlockSide | None:
    """Return an FP8 operand with one scale, those of 1x128 or squares, as the core takes it.

    None: its codes or scales lie otherwise.

    Args:
        operand: an FP8 plane.
    """
    codes, scale = operand.buffers[:2]
    rows, block = operand.rows, operand.spec.format.block
    fits = codes.is_contiguous() and (begins_at(codes) | codes.shape[1]) % _ALIGNMENT == 0
    if not fits or codes.shape[0] != rows:
        return None
    codes, element = codes.view(torch.uint8), str(operand.spec.format.element)
    if operand.spec.format.is_tensor_scaled:
        return BlockSide(codes, scale.reshape(-1), element, rows, "group")
    if rows % _STEP:
        return None
    if block == (FOLD_WIDTH, FOLD_WIDTH):
        return BlockSide(codes, scale, element, rows, "square") if rows % FOLD_WIDTH == 0 else None
    laid = scale.t()
    if block != (1, FOLD_WIDTH) or not laid.is_contiguous() or begins_at(laid) % _ALIGNMENT:
        return None
    return BlockSide(codes, laid, element, rows)


def fits_core(left: BlockSide, right: BlockSide) -> bool:
    """Whether the core multiplies two operands, by what has a scale of its own in each.

    Args:
        left, right: the operands.
    """
    return left.per != "square" and (left.per == "row" or right.per != "row")


def core_gemm(a: Operand, b: Operand, args: GemmArgs, chip: Chip, kind: str) -> torch.Tensor | None:
    """Return the product of two FP8 planes by the core's kernel; None: it is not for it.

    Args:
        a, b: the operands.
        args: bias, what to add, dtype of the result.
        chip: where they are.
        kind: of scaling, a key of `KIND_NAMES`.
    """
    sizes, adds = (a.rows, b.rows, a.cols), args.accumulate_into is not None
    is_small = core_reason(chip, kind, sizes) is None
    # What is added is a pass of its own for cuBLASLt, which with scales of rows is no faster.
    if not is_small and not (adds and kind == "block" and 0 not in sizes):
        return None
    run: Callable[..., torch.Tensor] | None = core_product("multiply_pair", chip)
    left, right = block_side(a), block_side(b)
    if run is None or left is None or right is None or not fits_core(left, right):
        return None
    return run(left, right, args) if is_small or right.per == "row" else None
