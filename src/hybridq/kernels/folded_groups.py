"""Products of groups of tokens on FP8 tensor cores: MX planes folded, others with their scales.

The grouped form of `folded_backend`. What multiplies is a kernel of ours, the core's on Hopper and
Triton's elsewhere, which takes FP8 codes with FP32 scales of 1x128 and reads the group ends on the
device. Three products: rows of
tokens by a stack of matrices (forward, gradient of the input), and a contraction over the tokens of
each group (gradient of the weight), whose planes are padded per group to 128 tokens: so no 1x128
block lies in two groups, and a plane is folded as if it had none.

Source: ours; docs/reference/gemm.md, "Groups of tokens".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from ..formats import PlaneSpec
from ..reference import FOLD_WIDTH, Folded, fold_element
from .choice import BlockSide, GroupedArgs, GroupedOperand, Operand, OpQuery
from .decoded import fp32_reason
from .inputs import Chip, begins_at, chip_of
from .ragged import group_of_tokens, of_group, one_of, stacked
from .scaled_mm import (
    ENOUGH_TOKENS,
    block_scales,
    ceil_to,
    core_product,
    fp8_codes,
    is_foldable,
    lies_down,
    pad_codes,
)
from .triton import block_gemm_reason, grouped_block_gemm

__all__ = [
    "few_tokens_reason",
    "groups_reason",
    "is_bf16_product",
    "multiply_groups",
    "planned_groups",
]

_pad = torch.nn.functional.pad
#: Folds a plane to FP8 with scales of 1x128.
Fold = Callable[[Operand], Folded]

#: Codes and scales begin, row by row, at multiples of so many bytes.
_ALIGNMENT: Final = 16
_STEP: Final = 4  # FP32 scales in them


def _element(spec: PlaneSpec) -> str:
    """Return the name of the FP8 element that the codes of `spec` have or fit into."""
    return "no codes" if spec.format.element is None else str(fold_element(spec.format.element))


def groups_reason(query: OpQuery) -> str | None:
    """Return None if the groups of a query are multiplied here, else why not.

    Args:
        query: a grouped GEMM of two planes that are, or fold to, FP8 with scales of 1x128.
    """
    if query.row is None or query.col is None or query.chip is None:
        return "needs two operands"
    elements = _element(query.row), _element(query.col)
    reason = None
    if _by_core(query.chip) is None:
        reason = block_gemm_reason(elements, query.chip, is_grouped=True)
    if reason is not None or query.chip.capability is None:
        return reason
    if query.precision == "fast" or query.chip.capability[0] == 9 or not is_bf16_product(query):
        return None
    return "FP8 products of groups are for precision 'fast' but on sm_90 until they were measured"


def _by_core(chip: Chip) -> Callable[..., torch.Tensor] | None:
    """Return the core's kernel, where it has one for a chip."""
    return core_product("multiply_blocks", chip)


def multiply_sides(a: BlockSide, b: BlockSide, args: GroupedArgs, is_stack: bool) -> torch.Tensor:
    """Return the product of each group, by the core's kernel or Triton's.

    Args:
        a, b, args, is_stack: as `grouped_block_gemm` takes them.
    """
    run = _by_core(chip_of(a.codes.device)) or grouped_block_gemm
    made: torch.Tensor = run(a, b, args, is_stack)
    return made


def is_bf16_product(query: OpQuery) -> bool:
    """Whether the exact way is a BF16 product and not an FP32 one, many times as slow."""
    if query.row is None or query.col is None:
        return False
    return fp32_reason(query.row, query.col, query.device, query.dtype, is_alone=True) is None


def few_tokens_reason(query: OpQuery) -> str | None:
    """Return why a grouped query is left to a product that decodes operands, or None."""
    got = query.tokens_per_group
    if got is None or got >= ENOUGH_TOKENS or not is_bf16_product(query):
        return None
    return f"a stack is folded for {ENOUGH_TOKENS} tokens per group and more, got {got} on average"


def multiply_groups(
    a: GroupedOperand, b: GroupedOperand, args: GroupedArgs, fold: Fold
) -> torch.Tensor:
    """Return the product of every group: `[T, N]` if b is a stack, else `[G, M, N]`.

    Args:
        a, b, args: as every backend takes them.
        fold: folds a plane to FP8 with scales of 1x128.
    """
    groups, into = args.offsets.shape[0], args.accumulate_into
    shape = (a.rows, b.rows) if b.is_stack else (groups, a.rows, b.rows)
    if 0 in (groups, *shape):  # nothing, or tokens of no group
        made = a.buffers[0].new_zeros(shape, dtype=args.out_dtype)
        return made if into is None else made.copy_(into)
    by_core = _by_core(chip_of(a.buffers[0].device)) is not None
    if by_core and _has_one_scale(b):
        left = _side_of_groups(a) if _has_one_scale(a) else _side(a, fold)
        return multiply_sides(left, _side_of_groups(b), args, b.is_stack)
    left, right = (_side(_spread(one, args, b.is_stack), fold) for one in (a, b))
    return multiply_sides(left, right, args, b.is_stack)


def _has_one_scale(operand: GroupedOperand) -> bool:
    """Whether an FP8 plane, or a matrix of a stack, or a group of one plane, has one scale."""
    return operand.spec.format.is_tensor_scaled


def _side_of_groups(operand: GroupedOperand) -> BlockSide:
    """Return an operand of `_has_one_scale` with the scale of each group, or of all."""
    if operand.cache is None or not operand.is_list:
        return _with_one_scale(stacked(operand))

    def make() -> _Kept:
        return _Kept(_with_one_scale(stacked(operand)))

    form = f"stack of one scale {operand.rows} {operand.cols}"
    return operand.cache.get(form, operand.buffers, make).side


def _with_one_scale(operand: GroupedOperand) -> BlockSide:
    codes, scale = operand.buffers[:2]
    rows = operand.rows * (codes.shape[0] if operand.is_stack else 1)
    if operand.cols == 0:  # a sum of nothing is one of zeros
        laid = codes.new_zeros((rows, _ALIGNMENT), dtype=torch.uint8)
    else:
        laid = _laid_codes(_own_codes(operand, rows), operand)
    return BlockSide(laid, scale.reshape(-1), _element(operand.spec), operand.rows, "group")


def _spread(operand: GroupedOperand, args: GroupedArgs, is_stack: bool) -> GroupedOperand:
    """Return a plane with the scales of groups as those of rows or columns; any other as it is.

    Args:
        operand: one plane, or a stack.
        args: with the group ends.
        is_stack: rows are tokens, and else columns are.
    """
    if not operand.by_group or operand.is_stack or not _has_one_scale(operand):
        return operand
    codes, scale = operand.buffers[0], operand.buffers[1].view(-1)
    if is_stack:
        wide = of_group(scale, group_of_tokens(args.offsets, args.tokens), 1.0)[:, None]
    else:
        first = torch.arange(0, codes.shape[1], FOLD_WIDTH, device=codes.device, dtype=torch.int32)
        ends = args.offsets if args.padded is None else args.padded[1:]
        wide = of_group(scale, torch.searchsorted(ends, first, right=True), 1.0)[None]
    return replace(operand, buffers=[codes, wide], by_group=False)


@dataclass(frozen=True)
class _Kept:
    """A side that is kept."""

    side: BlockSide

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.side.codes, self.side.scale]


def _side(operand: GroupedOperand, fold: Fold) -> BlockSide:
    """Return an operand as the product takes it, kept where it is a list of planes that are."""
    if operand.cache is None:
        return _made_side(stacked(operand), fold)

    def make() -> _Kept:
        return _Kept(_made_side(stacked(operand), fold))

    form = f"folded stack {operand.rows} {operand.cols}"
    return operand.cache.get(form, operand.buffers, make).side


def _made_side(operand: GroupedOperand, fold: Fold) -> BlockSide:
    rows = operand.rows * (operand.buffers[0].shape[0] if operand.is_stack else 1)
    if operand.cols == 0:  # a sum of nothing is one of zeros
        codes = operand.buffers[0].new_zeros((rows, _ALIGNMENT), dtype=torch.uint8)
        scale = codes.new_zeros((rows, 1), dtype=torch.float32)
    elif is_foldable(operand.spec):
        codes, scale = _folded(operand, rows, fold)
    elif _has_squares(operand):
        codes, scale = _laid_codes(_own_codes(operand, rows), operand), operand.buffers[1]
        squares = scale.reshape(-1, scale.shape[-1])
        return BlockSide(codes, squares, _element(operand.spec), operand.rows, "square")
    else:
        codes, scale = _own_codes(operand, rows), _own_scales(operand)
    laid, extra = scale.t(), -operand.rows % _STEP
    if extra:  # rows of each matrix are made a multiple of 4
        laid = _pad(laid.unflatten(1, (-1, operand.rows)), (0, extra)).flatten(1)
    codes = _laid_codes(codes, operand)
    laid = laid.contiguous()  # no copy where it lies so already
    laid = laid if begins_at(laid) % _ALIGNMENT == 0 else laid.clone()
    return BlockSide(codes, laid, _element(operand.spec), operand.rows)


def _has_squares(operand: GroupedOperand) -> bool:
    """Whether each 128x128 of a stack's matrices has a scale of its own."""
    is_square = operand.spec.format.block == (FOLD_WIDTH, FOLD_WIDTH)
    return is_square and operand.is_stack and operand.rows % FOLD_WIDTH == 0


def _own_codes(operand: GroupedOperand, rows: int) -> torch.Tensor:
    """Return the codes `[rows, K]` of an FP8 plane, or of all matrices of a stack."""
    data = operand.buffers[0].reshape(rows, -1)
    flat = Operand([data], operand.spec, rows, operand.cols)
    return fp8_codes(flat, rows, _ALIGNMENT).view(torch.uint8)


def _laid_codes(codes: torch.Tensor, operand: GroupedOperand) -> torch.Tensor:
    """Return codes with rows of a stack's matrices and columns as `BlockSide` has them."""
    extra = -operand.rows % _STEP
    if extra and operand.is_stack:
        codes = _pad(codes.unflatten(0, (-1, operand.rows)), (0, 0, 0, extra)).flatten(0, 1)
    return pad_codes(codes, codes.shape[0], ceil_to(codes.shape[1], _ALIGNMENT))


def _folded(operand: GroupedOperand, rows: int, fold: Fold) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `[rows, K]` and scales of a plane, or of all matrices of a stack."""
    spec, buffers = operand.spec, operand.buffers
    if operand.is_stack and operand.rows % (spec.format.block or (1, 1))[0]:
        # A square would lie in two matrices.
        made = [fold(one_of(operand, group)) for group in range(buffers[0].shape[0])]
        return torch.cat([one.codes for one in made]), torch.cat([one.scale for one in made])
    if operand.is_stack:
        buffers = [buffer.flatten(0, 1) for buffer in buffers]
    whole = fold(Operand(buffers, spec, rows, operand.cols))
    return whole.codes, whole.scale


def _own_scales(operand: GroupedOperand) -> torch.Tensor:
    """Return the FP32 scales `[rows, ceil(K / 128)]` of an FP8 plane, or of all of a stack."""
    spec = operand.spec
    width = ceil_to(spec.padded(operand.cols), FOLD_WIDTH) // FOLD_WIDTH
    if operand.buffers[1].dim() == 2 and _has_one_scale(operand) and not operand.is_stack:
        return operand.buffers[1].expand(operand.rows, width)  # by `_spread`
    if operand.is_stack and spec.format.block is None:
        scale = operand.buffers[1].reshape(-1, 1, 1).expand(-1, operand.rows, width)
    else:
        one = Operand(operand.buffers, spec, operand.rows, operand.cols)
        scale, _ = block_scales(one, False)
    return scale.flatten(0, 1) if operand.is_stack else scale


#: Returns the side that an operand is, of an element by its name; None: it lies otherwise.
_Lying = Callable[[GroupedOperand, str], BlockSide | None]


class _Planned:
    """A grouped product of planes that lie as it reads them, in any number of tokens.

    Args:
        elements: names of the operands' FP8 elements.
        sides: make a side of each operand.
        chip: where they are.
        general: what multiplies operands that lie another way.
    """

    __slots__ = ("_elements", "_general", "_run", "_sides")

    def __init__(
        self,
        elements: tuple[str, str],
        sides: tuple[_Lying, _Lying],
        chip: Chip,
        general: Callable[[GroupedOperand, GroupedOperand, GroupedArgs], torch.Tensor],
    ) -> None:
        self._elements, self._sides, self._general = elements, sides, general
        self._run = _by_core(chip) or grouped_block_gemm

    def __call__(self, a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
        """Return what `multiply_groups` does, with its bits."""
        left = self._sides[0](a, self._elements[0])
        right = self._sides[1](b, self._elements[1])
        if left is None or right is None:
            return self._general(a, b, args)
        return self._run(left, right, args, b.is_stack)


def _lying_side_of_groups(operand: GroupedOperand, element: str) -> BlockSide | None:
    """Return the side that an operand of `_has_one_scale` is; None: it lies otherwise."""
    codes, scale = operand.buffers
    rows, width = operand.rows * (codes.shape[0] if operand.is_stack else 1), codes.shape[-1]
    if not codes.is_contiguous() or (begins_at(codes) | width) % _ALIGNMENT:
        return None
    return BlockSide(codes.view(rows, width), scale.reshape(-1), element, operand.rows, "group")


def _lying_side(operand: GroupedOperand, element: str) -> BlockSide | None:
    """Return the side that an operand is, its scales column by column; None: it lies otherwise."""
    codes, scale = operand.buffers
    rows = operand.rows * (codes.shape[0] if operand.is_stack else 1)
    pitch, blocks = scale.stride(-1), scale.shape[-1]
    fits = scale.stride(-2) == 1 and pitch % _STEP == 0 and pitch >= rows
    fits = fits and (not operand.is_stack or scale.stride(0) == operand.rows)
    if not (fits and codes.is_contiguous()) or (begins_at(codes) | begins_at(scale)) % _ALIGNMENT:
        return None
    laid = scale.as_strided((blocks, pitch), (pitch, 1))
    return BlockSide(codes.view(rows, codes.shape[-1]), laid, element, operand.rows)


def _side_of_squares(operand: GroupedOperand, element: str) -> BlockSide | None:
    """Return the side that a stack is whose scales are those of squares of 128x128.

    None: a square would lie in two matrices.
    """
    codes, scale = operand.buffers
    groups, rows, width = codes.shape
    if not codes.is_contiguous() or rows % FOLD_WIDTH or begins_at(codes) % _ALIGNMENT:
        return None
    squares = scale.reshape(-1, scale.shape[-1])  # no copy where matrices lie behind each other
    return BlockSide(codes.view(groups * rows, width), squares, element, operand.rows, "square")


def planned_groups(
    query: OpQuery,
    general: Callable[[GroupedOperand, GroupedOperand, GroupedArgs], torch.Tensor],
) -> _Planned | None:
    """Return what multiplies planes that are encoded as the product takes them, or None.

    Args:
        query: of two planes, whose product is multiplied here.
        general: multiplies planes that lie another way.
    """
    a, b, sizes = query.row, query.col, query.sizes
    if a is None or b is None or sizes is None or query.chip is None or 0 in sizes:
        return None
    if is_foldable(a) or is_foldable(b):
        return None
    sides = _sides_of(a, b, query.chip, query.tokens_per_group is not None)
    if sides is None or sizes[1] % _STEP or sizes[2] % _ALIGNMENT:
        return None
    return _Planned((_element(a), _element(b)), sides, query.chip, general)


def _sides_of(
    a: PlaneSpec, b: PlaneSpec, chip: Chip, is_stack: bool
) -> tuple[_Lying, _Lying] | None:
    """Return what makes sides of planes of two specs, or None: they are laid out first."""
    has_one = b.format.is_tensor_scaled
    if is_stack and b.format.block == (FOLD_WIDTH, FOLD_WIDTH):
        right: _Lying = _side_of_squares
    elif has_one and _by_core(chip) is not None:
        right = _lying_side_of_groups
    elif lies_down(b):
        right = _lying_side
    else:
        return None
    if lies_down(a):
        return _lying_side, right
    return (_lying_side_of_groups, right) if has_one and a.format.is_tensor_scaled else None
