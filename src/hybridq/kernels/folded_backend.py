"""GEMM of MX planes on FP8 tensor cores that know no 1x32 scales: fold, then multiply.

A folded plane is an FP8 plane with FP32 scales of 1x128 blocks (`reference.fold_plane` says how,
and how far off it is), so what multiplies it is the blockwise FP8 product. The other operand may be
any FP8 plane. Where cuBLASLt has no blockwise product, Triton's takes its place.

Both operands are folded to rows of 128. Squares of 128x128 of the second operand are the faster
kind (a quarter on an H100), but one large row of a square costs the others their small values: only
precision "fast" takes them.

Source: ours; docs/reference/gemm.md, "Fold".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..formats import PlaneSpec
from ..formats.elements import FP32
from ..reference import FOLD_WIDTH, Folded, fold_element
from .choice import (
    FOLD_LIMIT,
    Backend,
    BlockSide,
    DeviceSupport,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Operand,
    OpQuery,
    added_error,
    register_backend,
    select,
)
from .folded_groups import (
    few_tokens_reason,
    groups_reason,
    is_bf16_product,
    multiply_groups,
    planned_groups,
)
from .inputs import Chip, begins_at, chip_of, is_current, stream_of
from .scaled_mm import (
    FP8,
    GATES,
    KINDS,
    REFUSALS,
    Scaled,
    Trial,
    block_scales,
    block_side,
    core_product,
    exact_reason,
    fits_core,
    is_foldable,
    laid_down,
    multiply,
    or_next_way,
    planned_product,
    refusal,
    view_reason,
)
from .triton.backend import block_gemm, block_gemm_reason

__all__ = ["FOLD"]

_BLOCK = GATES["block"]


@lru_cache(maxsize=1024)
def folded_spec(spec: PlaneSpec, height: int = 1) -> PlaneSpec:
    """Return the spec of what a plane of `spec` becomes: FP8 with power-of-two FP32 scales."""
    element = spec.format.element
    made = replace(
        spec.format,
        element=None if element is None else fold_element(element),
        block=(height, FOLD_WIDTH),
        scale=FP32,
        rule="amax",
        family="float8_block",
        power_of_two=True,
    )
    return replace(spec, format=made)


def fold(operand: Operand, height: int = 1) -> Folded:
    """Return the operand folded, by the device's own kernel if it has one.

    Args:
        operand: a plane with E8M0 scales.
        height: rows that share a scale afterwards.
    """
    device = operand.buffers[0].device.type
    backend = select(OpQuery("fold", device, torch.float32, operand.spec))
    return backend.ops["fold"](operand.buffers, operand.spec, operand.rows, operand.cols, height)


def _after(spec: PlaneSpec, height: int = 1) -> PlaneSpec:
    return folded_spec(spec, height) if is_foldable(spec) else spec


def _height(spec: PlaneSpec, precision: str) -> int:
    """Return how many rows of the second operand share a scale once it is folded for cuBLASLt."""
    return FOLD_WIDTH if precision == "fast" and is_foldable(spec) else 1


def _supports(query: OpQuery) -> str | None:
    reason = exact_reason(query)
    if reason is not None:
        return reason
    if query.row is None or query.col is None or query.chip is None:
        return "needs two operands"
    specs = (_after(query.row), _after(query.col))
    sizes = query.sizes or (0, 0, 0)
    reason = view_reason(KINDS["block"], *specs, sizes[2] if query.sizes else None)
    if reason is not None:
        return reason
    folds = [spec for spec in (query.row, query.col) if is_foldable(spec) or _is_folded(spec)]
    if query.precision != "fast" and any((spec.format.block or (1,))[0] > 1 for spec in folds):
        return "a fold of squares is bounded by a square's amax and not a row's: precision 'fast'"
    if query.op == "grouped_gemm":
        return groups_reason(query)
    lack = _BLOCK.reason("block", query.chip)
    if lack is None:
        if not folds:
            return "neither operand has E8M0 scales to fold"
        return refusal(replace(query, row=specs[0], col=specs[1]), "block")
    reason = block_gemm_reason(_elements(*specs), query.chip)
    if reason is None and query.precision != "fast" and is_bf16_product(query):
        reason = "Triton's FP8 product is taken for precision 'fast' only until it was measured"
    return None if reason is None else f"{lack}; {reason}"


def _leaves(query: OpQuery) -> str | None:
    return few_tokens_reason(query) if query.op == "grouped_gemm" else None


def _is_folded(spec: PlaneSpec) -> bool:
    return spec.format.unfolded is not None


def _operands(query: OpQuery) -> tuple[PlaneSpec, PlaneSpec]:
    """Return the specs of both operands as cuBLASLt gets them, where encode can write them so."""
    row, col = query.row, query.col
    if row is None or col is None or query.chip is None:
        raise ValueError(f"fold: operands of a product on a known chip, got {query}")
    if query.op == "grouped_gemm":  # by Triton, from scales that lie as cuBLASLt reads them
        capability = query.chip.capability
        takes = capability is not None and capability[0] == 9
    else:
        # Triton's product wants other strides, and takes its place only where asked to.
        takes = _BLOCK.reason("block", query.chip) is None
        if takes and _height(col, query.precision) > 1:  # no kernel folds to squares on the way
            return _encoded(row), col
    return (_encoded(row), _encoded(col)) if takes else (row, col)


@lru_cache(maxsize=1024)
def _encoded(spec: PlaneSpec) -> PlaneSpec:
    made = spec.format.folded
    # What is transformed or rounded stochastically has no kernel that folds on the way.
    if made is None or spec.stochastic or spec.signs is not None:
        return laid_down(spec)
    return replace(spec, format=made)


def _elements(a: PlaneSpec, b: PlaneSpec) -> tuple[str, str]:
    return str(a.format.element), str(b.format.element)


def _notes(query: OpQuery) -> tuple[str, ...]:
    folded = [
        name for name, spec in (("a", query.row), ("b", query.col)) if spec and is_foldable(spec)
    ]
    if query.chip is None:
        return ()
    capability = query.chip.capability
    is_grouped = query.op == "grouped_gemm"
    is_cublas = _BLOCK.reason("block", query.chip) is None and not is_grouped
    kind = "1x128" if is_grouped else "1x128 or 128x128"
    how = f"FP8 with one scale per {kind}, by {_maker(query, query.chip, is_cublas)}"
    if is_grouped:
        how += "; group ends stay on the device, groups without tokens give zeros"
    if not folded:
        return (how, added_error(capability, is_folded=False))
    shape = "1x128"
    if is_cublas and query.col is not None and _height(query.col, query.precision) > 1:
        shape = "1x128, those of b of 128x128 (precision 'fast')"
    return (
        f"operand {' and '.join(folded)} folded to FP32 scales of {shape}; {how}",
        added_error(capability, is_folded=True),
        f"a folded E4M3 code is off by at most {FOLD_LIMIT:.1e} of its group's amax",
    )


def _maker(query: OpQuery, chip: Chip, is_cublas: bool) -> str:
    """Return the name of what multiplies a query's operands."""
    if query.op == "grouped_gemm":
        by_core = core_product("multiply_blocks", chip) is not None
    else:  # nothing is known to be added; large where no sizes are known
        by_core = query.sizes is not None and _by_core(chip, query.sizes, False) is not None
    return "the core's kernel" if by_core else "cuBLASLt" if is_cublas else "Triton"


@dataclass(frozen=True)
class _Plane:
    """A folded plane with a place to keep the padded form of it."""

    operand: Operand

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.operand.buffers


def _folded(operand: Operand, height: int = 1) -> Operand:
    if not is_foldable(operand.spec):
        return operand

    def make() -> _Plane:
        made = fold(operand, height)
        spec, width = folded_spec(operand.spec, height), operand.spec.padded(operand.cols)
        # Its rows are as long as the transform's padding: the spec pads no further.
        return _Plane(Operand([made.codes, made.scale], spec, operand.rows, width))

    if operand.cache is None:
        return make().operand
    form = "folded" if height == 1 else f"folded {height}"
    return operand.cache.get(form, operand.buffers, make).operand


#: Products of so many multiplications and more are cuBLASLt's: as fast, or 4% faster, on an H100.
_LARGE = 1 << 38
#: Bytes at a multiple of which codes, and rows of codes and of scales, begin.
_ALIGNMENT = 16


def _by_core(
    chip: Chip, sizes: tuple[int, int, int], adds: bool
) -> Callable[..., torch.Tensor] | None:
    """Return the core's own product, where it has one for a chip and cuBLASLt's is no faster.

    Args:
        chip: where the operands are.
        sizes: M, N, K.
        adds: something is added to the product, which cuBLASLt leaves to another pass.
    """
    m, n, k = sizes
    return core_product("multiply_pair", chip) if adds or m * n * k < _LARGE else None


def _core_gemm(left: Operand, right: Operand, args: GemmArgs, chip: Chip) -> torch.Tensor | None:
    """Return the product of two folded operands by the core's kernel; None: it is not for it."""
    sizes = (left.rows, right.rows, left.buffers[0].shape[1])
    run = _by_core(chip, sizes, args.accumulate_into is not None)
    if run is None or 0 in sizes:
        return None
    a, b = block_side(left), block_side(right)
    return run(a, b, args) if a is not None and b is not None and fits_core(a, b) else None


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    chip = args.chip or chip_of(a.buffers[0].device)
    is_cublas = chip.kind != "cuda" or _BLOCK.reason("block", chip) is None
    left, right = _folded(a), _folded(b, _height(b.spec, args.precision) if is_cublas else 1)
    made = _core_gemm(left, right, args, chip)
    if made is not None:
        return made
    if is_cublas:
        specs = (left.spec, right.spec)
        args = args._replace(chip=chip)
        return or_next_way(lambda: multiply(left, right, args, "block"), "block", specs, a, b, args)
    right_scale, is_square = block_scales(right, True)
    return block_gemm(
        left.buffers[0].contiguous(),
        block_scales(left, False)[0],
        right.buffers[0].contiguous(),
        right_scale,
        _elements(left.spec, right.spec),
        b_is_square=is_square,
        args=args,
    )


#: Rows of operands a and b, and columns of both, that need no padding.
_STEPS = (4, 16, 16)
#: Columns of a plane whose squares' scales need no padding: rows of them are of 16 bytes.
_WIDE = 4 * FOLD_WIDTH


def _has_no_gaps(operand: Operand, is_folded: bool) -> bool:
    """Return whether codes and scales lie as they are read: a folded plane's by columns."""
    data, scale = operand.buffers
    return data.is_contiguous() and (scale.t() if is_folded else scale).is_contiguous()


_RECIPES = {1: "BlockWise1x128", FOLD_WIDTH: "BlockWise128x128"}


def _after_both(query: OpQuery) -> list[PlaneSpec]:
    """Return the specs of both operands as cuBLASLt gets them."""
    if query.row is None or query.col is None:
        return []
    return [_after(query.row), _after(query.col, _height(query.col, query.precision))]


class _Planned:
    """A GEMM of two planes in one size, folded already or on the way, with all prepared.

    What it folds itself shares an allocation.

    Args:
        query: of two planes, whose product cuBLASLt makes, and which need no padding.
        folders: of the operands (`Backend.folder`); None of one that is folded.
    """

    __slots__ = (
        *("_by_core", "_dtype", "_elements", "_folders", "_is_known", "_names", "_nbytes"),
        *("_recipes", "_trial"),
    )

    def __init__(self, query: OpQuery, folders: Sequence[Any]) -> None:
        specs = _after_both(query)
        #: How torch names the scales of each.
        self._recipes = [_RECIPES[(spec.format.block or (1,))[0]] for spec in specs]
        self._elements = [FP8[spec.format.element] for spec in specs if spec.format.element]
        self._names = [str(spec.format.element) for spec in specs]
        #: The core's own product; None: cuBLASLt's.
        self._by_core = None
        if query.chip is not None and query.sizes is not None:
            self._by_core = _by_core(query.chip, query.sizes, False)
        self._folders, self._dtype = folders, query.dtype
        self._nbytes = sum(0 if folder is None else folder.nbytes for folder in folders)
        self._trial = Trial(query.chip, "block", specs[0], specs[1], query.dtype)
        self._is_known = False

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        """Return what `_gemm` does, with its bits."""
        bias, device = args.bias, a.buffers[0].device
        if a.cache is not None or b.cache is not None or args.accumulate_into is not None:
            return _gemm(a, b, args)  # an operand may be there
        if bias is not None and not (bias.dtype is self._dtype and bias.is_contiguous()):
            return _gemm(a, b, args)
        first, second = self._folders
        if not (
            is_current(device)
            and _has_no_gaps(a, first is None)
            and _has_no_gaps(b, second is None)
        ):
            return _gemm(a, b, args)
        memory, stream = None, 0
        if self._nbytes:
            memory = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
            stream = stream_of(device)
        lying, at = [], 0
        for i, operand in enumerate((a, b)):
            (codes, scale), fold_into = operand.buffers, self._folders[i]
            if fold_into is not None:
                codes, scale = fold_into(operand.buffers, memory, at, stream)
                at += fold_into.nbytes
            lying.append((codes, scale))
        if self._by_core is not None:
            left, right = (self._side(*one, i) for i, one in enumerate(lying))
            if left is not None and right is not None:
                return self._by_core(left, right, args)
        views = []
        for (codes, scale), element, recipe in zip(
            lying, self._elements, self._recipes, strict=True
        ):
            scale = scale.t() if recipe == _RECIPES[FOLD_WIDTH] else scale
            views.append(Scaled(codes.view(element), (scale,), (recipe,)))
        try:
            made = planned_product(views[0], views[1], bias, self._dtype)
        except REFUSALS as error:
            return self._trial.next_way(error, a, b, args)
        if made is None:
            return _gemm(a, b, args)
        if not self._is_known:
            self._trial.worked()
            self._is_known = True
        return made

    def _side(self, codes: torch.Tensor, scale: torch.Tensor, which: int) -> BlockSide | None:
        """Return an operand as the core takes it; None: it lies otherwise."""
        rows = codes.shape[0]
        if (begins_at(codes) | begins_at(scale)) % _ALIGNMENT or rows % 4:
            return None
        if self._recipes[which] == _RECIPES[1]:
            return BlockSide(codes, scale.t(), self._names[which], rows)
        if rows % FOLD_WIDTH:
            return None
        return BlockSide(codes, scale, self._names[which], rows, "square")


def _planner(query: OpQuery) -> _Planned | None:
    """Return what multiplies two planes, folded or foldable, that need no padding, or None."""
    specs, sizes, chip = (query.row, query.col), query.sizes, query.chip
    if sizes is None or chip is None or _BLOCK.reason("block", chip) is not None:
        return None
    if query.dtype is torch.float32 or 0 in sizes:
        return None
    m, n, k = sizes
    folders: list[Any] = []
    for spec, rows, step in zip(specs, (m, n), _STEPS, strict=False):
        if spec is None or rows % step or spec.padded(k) % _STEPS[2]:
            return None
        height = _height(spec, query.precision) if len(folders) else 1
        if height > 1 and spec.padded(k) % _WIDE:
            return None
        if _is_folded(spec):
            folders.append(None)
            continue
        if not is_foldable(spec):
            return None
        found = select(OpQuery("fold", query.device, torch.float32, spec)).folder
        if found is None:
            return None
        folders.append(found(spec, rows, k, height))
    return _Planned(query, folders)


def _grouped_gemm(a: GroupedOperand, b: GroupedOperand, args: GroupedArgs) -> torch.Tensor:
    return multiply_groups(a, b, args, fold)


def _group_planner(query: OpQuery) -> Any:
    return planned_groups(query, _grouped_gemm)


#: The backend that folds MX planes to FP8 with FP32 scales, on NVIDIA GPUs.
FOLD = register_backend(
    Backend(
        "fold",
        _supports,
        {"gemm": _gemm, "grouped_gemm": _grouped_gemm},
        devices=DeviceSupport(("cuda",), (8, 9)),
        leaves=_leaves,
        priority=20,
        op_priorities={"grouped_gemm": 35},  # before groups whose operands are decoded
        notes=_notes,
        planner=_planner,
        group_planner=_group_planner,
        operands=_operands,
        stacks_lists=True,
        takes_group_factors=True,
    )
)
