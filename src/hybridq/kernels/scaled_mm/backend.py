"""GEMM by the chip's own scaled products: `torch.nn.functional.scaled_mm`.

Any shape works: K and N are padded to what cuBLASLt wants, in the operands, and cut from the
result. What a chip takes is decided before the call (`chip_gates`). Groups of tokens have a
product of their own (`grouped`).

Source: layouts: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...errors import BackendError
from ...formats import PlaneSpec
from ...formats.elements import E4M3
from ...reference import factor_bound, factor_of
from ..choice import (
    ALIGNMENT,
    Backend,
    DeviceSupport,
    GemmArgs,
    Operand,
    OpQuery,
    Place,
    added_error,
    cached_choice,
    choose,
    register_backend,
)
from ..inputs import Chip, begins_at, chip_of, is_current, stream_of
from .chip_gates import ENOUGH_TOKENS, GATES, KIND_NAMES, core_product, exact_reason
from .core_sides import core_gemm, core_reason
from .cublas_probe import block_takes_bias
from .epilogue import finish, only_product
from .grouped import grouped_gemm, grouped_kind
from .operand_layout import ceil_to
from .operand_views import (
    FP8,
    KINDS,
    TILED_SCALES,
    Scaled,
    laid_down,
    lies_down,
    lies_in_squares,
    pair_reason,
    rows_later,
    tiled,
    tiled_view,
    two_levels,
    unit_blocks,
    view_reason,
)
from .refusals import REFUSALS, Trial, or_next_way, refusal

__all__ = ["NATIVE", "multiply", "native_kind", "planned_product"]

#: Bytes at a multiple of which the codes of an operand begin.
_ALIGNMENT = 16

_SQUARES = "BlockWise128x128"
_BLOCK_RECIPES = (_SQUARES, "BlockWise1x128")

#: Of all sizes of a product whose operands are encoded with scales in tiles.
_TILE = 128

scaled_mm: Any = getattr(torch.nn.functional, "scaled_mm", None)
#: The product before it, which multiplies E5M2 with block scales; the newer one refuses that.
older_scaled_mm: Any = getattr(torch, "_scaled_mm", None)


@cached_choice
def native_kind(a: PlaneSpec, b: PlaneSpec, chip: Chip, k: int | None) -> tuple[str | None, str]:
    """Return the kind of scaling in which `chip` multiplies two planes, or None and the reason.

    Args:
        a, b: specs of the operands.
        chip: what multiplies them.
        k: length of the contraction, or None where it is not known.

    Returns:
        `(kind, "")`, or `(None, reason)`. Kinds are tensor, row, block, nvfp4 and mx.
    """
    reason = pair_reason(a, b)
    if reason is not None:
        return None, reason
    misfits, lacks = [], []
    for name, gate in GATES.items():
        misfit = view_reason(KINDS[name], a, b, k)
        lack = gate.reason(name, chip)
        if misfit is None and lack is None:
            return name, ""
        if misfit is None and lack is not None:
            lacks.append(lack)
        elif misfit is not None and lack is None:
            misfits.append(misfit)
    # What the chip lacks for planes that would fit says more than planes that fit no kind it has.
    return None, "; ".join(lacks) or misfits[
        -1
    ] if misfits or lacks else f"no scaled product takes them on {chip}"


def _supports(query: OpQuery) -> str | None:
    reason = exact_reason(query)
    if reason is not None:
        return reason
    if query.op == "grouped_gemm":
        return grouped_kind(query)[1] or None
    if scaled_mm is None:
        return "this torch has no torch.nn.functional.scaled_mm"
    if query.row is None or query.col is None or query.chip is None:
        return "needs two operands"
    kind, reason = native_kind(query.row, query.col, query.chip, _depth(query))
    return reason if kind is None else refusal(query, kind)


def _leaves(query: OpQuery) -> str | None:
    """Return why groups are left to the core's kernel, or None."""
    is_grouped = query.op == "grouped_gemm" and query.chip is not None
    if not is_grouped or core_product("multiply_blocks", query.chip) is None:
        return None
    few = query.tokens_per_group
    if few is not None and few < ENOUGH_TOKENS:  # which `fold` leaves in turn
        return None
    if any(s is None or not s.format.is_tensor_scaled for s in (query.row, query.col)):
        return None  # a scale for each row of any length is nobody else's
    return "the core's own product of groups is faster"


def _depth(query: OpQuery) -> int | None:
    return None if query.sizes is None else query.sizes[2]


def _notes(query: OpQuery) -> tuple[str, ...]:
    if query.row is None or query.col is None or query.chip is None:
        return ()
    error = added_error(query.chip.capability, is_folded=False)
    if query.op == "grouped_gemm":
        kind, _ = grouped_kind(query)
        ends = "group ends stay on the device; groups without tokens give zeros"
        return (f"{KIND_NAMES[kind or 'row']}, by torch's scaled grouped product", ends, error)
    kind, _ = native_kind(query.row, query.col, query.chip, _depth(query))
    is_cores = query.sizes and core_reason(query.chip, kind or "", query.sizes) is None
    by = "the core's kernel" if is_cores else "cuBLASLt"
    return (f"{KIND_NAMES[kind or 'tensor']}, by {by}", error)


def _view(operand: Operand, kind: str, rows: int, is_square: bool) -> Scaled:
    def make() -> Scaled:
        return KINDS[kind].view(operand, rows, is_square)

    if operand.cache is None:
        return make()
    return operand.cache.get(f"native {kind} {rows} {is_square}", operand.buffers, make)


def multiply(a: Operand, b: Operand, args: GemmArgs, kind: str) -> torch.Tensor:
    """Return `a @ b.T` of two planes that can be viewed as `kind`, with what follows it.

    Args:
        a, b: the operands.
        args: bias, what to add, dtype of the result.
        kind: a kind of scaling that `native_kind` returns.

    Returns:
        `[M, N]`, contiguous.
    """
    m, n = a.rows, b.rows
    if 0 in (m, n, a.cols):
        empty = a.buffers[0].new_zeros((m, n), dtype=torch.float32)
        return finish(empty, None, None, args)
    rows = (ceil_to(m, KINDS[kind].rows), ceil_to(n, 16))
    right = _view(b, kind, rows[1], True)
    left = _view(a, kind, rows[0], "BlockWise128x128" not in right.recipes)
    if kind == "row" and not (args.out_dtype == torch.bfloat16 and only_product(args)):
        # That product rounds to BF16, so that nothing may follow it.
        left, right = rows_later(left, m), rows_later(right, n)
    if kind == "nvfp4" and not (a.spec.row_scaled or b.spec.row_scaled):
        left, right = two_levels(left), two_levels(right)
    has_factor = left.factor is not None or right.factor is not None
    # cuBLASLt adds a bias of the result's dtype in FP32, before the one rounding.
    bias = args.bias
    takes_bias = (
        kind != "row"
        and not has_factor
        and args.accumulate_into is None
        and bias is not None
        and bias.dtype == args.out_dtype != torch.float32
        and (kind != "block" or _block_takes_bias(left, right, args.out_dtype))
    )
    is_done = not has_factor and (only_product(args) or takes_bias)
    if takes_bias and bias is not None and rows[1] != n:
        bias = torch.nn.functional.pad(bias, (0, rows[1] - n))
    product = _scaled_mm(
        left,
        right,
        bias.contiguous() if takes_bias and bias is not None else None,
        args.out_dtype if is_done else torch.float32,
    )[:m, :n]
    if is_done:
        return product.contiguous()
    return finish(product, left.factor, right.factor, args).contiguous()


def planned_product(
    left: Scaled, right: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the product of two views with block scales that need no padding, or None.

    Args:
        left, right: the views.
        bias: contiguous `[N]` of the result's dtype, or None.
        dtype: of the result, BF16 or FP16.

    Returns:
        `[M, N]`; None where cuBLASLt takes no bias there.
    """
    if bias is not None and not _block_takes_bias(left, right, dtype):
        return None
    return _scaled_mm(left, right, bias, dtype)


def _block_takes_bias(left: Scaled, right: Scaled, dtype: torch.dtype) -> bool:
    recipes = (left.recipes[0], right.recipes[0])

    def product(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return _scaled_mm(unit_blocks(a, recipes[0]), unit_blocks(b, recipes[1]), bias, dtype)

    return block_takes_bias(left.data.device, recipes, dtype, product)


@lru_cache(maxsize=64)
def _named(enum: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(getattr(torch.nn.functional, enum), name) for name in names)


def _scaled_mm(
    left: Scaled, right: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if left.recipes[0] in _BLOCK_RECIPES and torch.float8_e5m2 in (
        left.data.dtype,
        right.data.dtype,
    ):
        return _e5m2_blocks(left, right, bias, dtype)
    right_scales = [
        scale.t() if recipe == "RowWise" else scale
        for scale, recipe in zip(right.scales, right.recipes, strict=True)
    ]
    return scaled_mm(
        left.data,
        right.data.t(),
        list(left.scales),
        list(_named("ScalingType", left.recipes)),
        right_scales,
        list(_named("ScalingType", right.recipes)),
        swizzle_a=list(_named("SwizzleType", left.swizzles)) or None,
        swizzle_b=list(_named("SwizzleType", right.swizzles)) or None,
        bias=bias,
        output_dtype=dtype,
        # Partial sums are added in FP32 on the way; without that the error is ten times as large.
        use_fast_accum=False,
    )


def _e5m2_blocks(
    left: Scaled, right: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product with block scales where a side has E5M2 codes."""
    blocks = -(-left.data.shape[1] // _TILE)
    # Of squares [rows, blocks] without what fills their rows up.
    first, second = (
        side.scales[0][:blocks].t() if side.recipes[0] == _SQUARES else side.scales[0]
        for side in (left, right)
    )
    return older_scaled_mm(
        left.data,
        right.data.t(),
        first,
        second.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )


def _operands(query: OpQuery) -> tuple[PlaneSpec, PlaneSpec]:
    """Return the specs of both operands with scales that lie as the product reads them."""
    row, col = query.row, query.col
    if row is None or col is None or query.chip is None:
        raise ValueError(f"native: operands of a product on a known chip, got {query}")
    kind, _ = native_kind(row, col, query.chip, _depth(query))
    if kind == "block":
        return laid_down(row), laid_down(col)
    # Tiles of 128 rows by 64 or 128 values: of edges, which take padding, the swizzle makes them.
    if kind in ("mx", "nvfp4") and query.sizes and not any(size % _TILE for size in query.sizes):
        return tiled(row), tiled(col)
    return row, col


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    chip = args.chip or chip_of(a.buffers[0].device)
    kind, reason = native_kind(a.spec, b.spec, chip, a.cols)
    if kind is None:
        raise BackendError(f"gemm: the native backend was chosen but cannot: {reason}")
    made = core_gemm(a, b, args, chip, kind)
    if made is not None:
        return made
    args = args._replace(chip=chip)
    return or_next_way(lambda: multiply(a, b, args, kind), kind, (a.spec, b.spec), a, b, args)


class _Planned:
    """`_gemm` of one query, whose kind of scaling is found once.

    Args:
        query: of two planes and sizes, on a chip.
        kind: what `native_kind` says of it.

    Attributes:
        room: bytes that factors of two levels take, a multiple of `ALIGNMENT`.
    """

    __slots__ = (
        *("_chip", "_factors", "_is_known", "_is_small", "_kind", "_trial", "_ways"),
        "room",
    )

    def __init__(self, query: OpQuery, kind: str) -> None:
        self._kind, self._is_known = kind, False
        #: Where the core makes small products, and such that something is added to; or None.
        self._chip = None
        if query.chip is not None and core_product("multiply_pair", query.chip) is not None:
            self._chip = query.chip
        self._is_small = core_reason(query.chip, kind, query.sizes or (0, 0, 0)) is None
        #: How both operands are taken as they lie, or None.
        self._ways = _ways_as_they_lie(query, kind)
        #: What makes factors of their amaxes at once; None: there are none, or nothing does.
        self._factors = None
        if self._ways is not None and all(way[2] for way in self._ways):
            found = choose(OpQuery("two_factors", query.device, torch.float32)).chosen
            self._factors = None if found is None else found.ops["two_factors"]
        self.room = 0 if self._factors is None else ALIGNMENT
        specs = [spec for spec in (query.row, query.col) if spec is not None]
        self._trial = Trial(query.chip, kind, specs[0], specs[1], query.dtype)

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        """Return what `_gemm` does."""
        if self._chip is not None and (self._is_small or args.accumulate_into is not None):
            by_core = core_gemm(a, b, args, self._chip, self._kind)
            if by_core is not None:
                return by_core
        try:
            made = self._as_they_lie(a, b, args)
            if made is None:
                made = multiply(a, b, args, self._kind)
        except REFUSALS as error:
            return self._trial.next_way(error, a, b, args)
        if not self._is_known:
            self._trial.worked()
            self._is_known = True
        return made

    def _as_they_lie(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
        """Return the product of codes and scales that need no padding; None: not done."""
        if self._ways is None or args.accumulate_into is not None:
            return None
        bias, views = args.bias, []
        if bias is not None and not (bias.dtype is args.out_dtype and bias.is_contiguous()):
            return None
        factors = None if self._factors is None else self._both_factors(a, b, args.work)
        for i, (operand, (dtype, recipe, bound)) in enumerate(zip((a, b), self._ways, strict=True)):
            data, scale = operand.buffers[:2]
            if not (data.is_contiguous() and begins_at(data) % _ALIGNMENT == 0):
                return None
            if recipe in TILED_SCALES:
                if not (scale.is_contiguous() and begins_at(scale) % _ALIGNMENT == 0):
                    return None
                factor = None if factors is None else factors[i]
                if factor is None and bound:
                    factor = factor_of(operand.buffers, bound)
                views.append(tiled_view(scale, data.view(dtype), recipe, factor))
                continue
            if recipe != "TensorWise":
                own = scale if recipe == _SQUARES else scale.t()
                if not (own.is_contiguous() and begins_at(scale) % _ALIGNMENT == 0):
                    return None  # on its way it was given other strides
                scale = own.t()
            views.append(Scaled(data.view(dtype), (scale,), (recipe,)))
        if self._kind == "block":
            return planned_product(views[0], views[1], bias, args.out_dtype)
        return _scaled_mm(views[0], views[1], bias, args.out_dtype)

    def _both_factors(
        self, a: Operand, b: Operand, work: Place | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both planes' factors in memory that dies with the product; None: one by one."""
        if self._factors is None or not is_current(a.buffers[0].device):
            return None
        amaxes = (a.buffers[2], b.buffers[2])
        if work is None or work.memory.numel() - work.at < self.room:
            memory = torch.empty(self.room, dtype=torch.uint8, device=amaxes[0].device)
            work = Place(memory, 0, stream_of(memory.device))
        bounds = [way[2] for way in self._ways or ()]
        made: tuple[torch.Tensor, torch.Tensor] = self._factors(amaxes, bounds, work)
        return made


def _ways_as_they_lie(query: OpQuery, kind: str) -> list[tuple[torch.dtype, str, float]] | None:
    """Return how the product takes FP8 planes that need no copy, or None.

    They have one scale each, or those of 1x128, which lie down; the second may have those of
    128x128, whose rows have no gap. Or their scales are in tiles, of FP4 planes too.

    Returns:
        Of each operand torch's dtype of its codes, the name of its scaling, and what the amax of a
        second level is divided by, 0 where there is none.
    """
    a, b, sizes = query.row, query.col, query.sizes
    if a is None or b is None or sizes is None or query.dtype is torch.float32:
        return None
    m, n, k = sizes
    if 0 in sizes or n % 16 or k % 16 or m % KINDS[kind].rows:
        return None
    ways: list[tuple[torch.dtype, str, float]] = []
    for is_second, spec in enumerate((a, b)):
        element = spec.format.element
        if spec.padded(k) != k:
            return None
        if kind in ("mx", "nvfp4"):
            if spec.scale_layout != "tiles" or spec.row_scaled or m % _TILE or k % _TILE:
                return None
            is_fp4 = kind == "nvfp4"
            codes = torch.float4_e2m1fn_x2 if is_fp4 else FP8.get(element or E4M3)
            if codes is None:
                return None
            recipe = "BlockWise1x16" if is_fp4 else "BlockWise1x32"
            ways.append((codes, recipe, factor_bound(spec) or 0.0))
            continue
        if element not in FP8:
            return None
        if kind == "tensor":
            recipe = "TensorWise"
        elif kind == "block" and lies_down(spec):
            recipe = "BlockWise1x128"
        elif kind == "block" and is_second and lies_in_squares(spec, k):
            recipe = _SQUARES
        else:
            return None
        ways.append((FP8[element], recipe, 0.0))
    return ways


def _planner(query: OpQuery) -> _Planned | None:
    """Return what multiplies planes of a query's specs in its sizes, or None."""
    if query.row is None or query.col is None or query.chip is None:
        return None
    kind, _ = native_kind(query.row, query.col, query.chip, _depth(query))
    return None if kind is None else _Planned(query, kind)


#: The backend of the chip's own scaled products, on NVIDIA GPUs.
NATIVE = register_backend(
    Backend(
        "native",
        _supports,
        {"gemm": _gemm, "grouped_gemm": grouped_gemm},
        devices=DeviceSupport(("cuda",), (8, 9)),
        leaves=_leaves,
        priority=40,
        notes=_notes,
        planner=_planner,
        operands=_operands,
    )
)
