"""GEMM of any planes: both decoded exactly, then torch's own product, or on a CPU the core's.

BF16 operands are exact (docs/reference/numerics.md, "Operands of a GEMM"), so the product's only
errors are FP32 accumulation and the rounding of the result. On a CPU torch's BF16 product rounds to
BF16; where the result needs FP32 before that (a factor that is no power of two, bias, accumulation,
FP32 out) the core's own product makes it, and on CPUs that have none torch's FP32 product. Where
BF16 cannot hold an operand the product is made in FP32 everywhere.

Up to `SKINNY_ROWS` rows of `a` on a CPU read the codes of `b` as they lie in memory, which are half
or a quarter of the bytes that BF16 has, and nothing decoded of `b` is made or kept (ADR 82). Where
the CPU has a BF16 product its bits are those of the decoded plane's.

On CUDA nothing is read back: whether an operand leaves BF16's normal range is not asked, factors
are applied by the device, and the product has an FP32 result only where something follows it. What
leaves the range adds at most `K * 2^-134 * max|b|` to the error (an operand below 2^-133 may become
zero); above BF16's maximum the operand is inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from ... import settings
from ...formats import PlaneSpec
from ..choice import GemmArgs, Operand, OpQuery, cached_choice
from ..cpu import (
    SKINNY_ROWS,
    CodesProduct,
    PlanesProduct,
    codes_reason,
    multiply,
    planes_reason,
    product_reason,
    tiles_reason,
)
from ..inputs import has_autocast, without_autocast
from ..scaled_mm import finish
from .block_scales import BlocksProduct, blocks_reason
from .code_reasons import no_codes_reason, no_planes_reason
from .decoded_sides import Side, fp32_reason, row_factors, side_decoder
from .factored_gemm import factored_gemm, rounded_operand
from .plain_gemm import is_slow, plain_product, slow_reason

__all__ = [
    "dtype_reason",
    "exact_gemm",
    "is_power_of_two",
    "multiplier",
    "multiply_sides",
    "product_notes",
]


#: An operand that meets fewer rows is decoded once and kept; a product with more takes so long
#: that decoding it each time does not show, and FP32 values are four times the bytes of codes.
_KEPT_ROWS: Final = 256

#: From so many rows on FP32 is faster where a CPU's BF16 instruction is slow: fewer rows are bound
#: by what is read of the other operand, of which BF16 is half.
_MANY_ROWS: Final = 64


def dtype_reason(query: OpQuery) -> str | None:
    """Return None if a result of this dtype can be made, else why not."""
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"makes float32, bfloat16 and float16, got {query.dtype}"
    return None


def is_power_of_two(factor: torch.Tensor | None) -> bool:
    """Whether scaling a rounded product by `factor` rounds nothing; its values, read on CPU."""
    if factor is None:
        return True
    mantissa, exponent = torch.frexp(factor)
    return bool((mantissa == 0.5).all() and (exponent.abs() < 100).all())


def _identity_product(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
    """Return the product that nn.Linear would make of two plain tensors, or None: it has none."""
    if not (a.spec.format.is_identity and b.spec.format.is_identity):
        return None
    left, right = a.buffers[0], b.buffers[0]
    if args.accumulate_into is not None:
        return None
    if not left.dtype == right.dtype == args.out_dtype:
        return None
    if args.bias is not None and args.bias.dtype != args.out_dtype:
        return None
    return plain_product(left, right, args.bias)


def exact_gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    """Return `a @ b.T`: operands exact, sums in FP32, with what follows the product."""
    device = a.buffers[0].device.type
    if not has_autocast(device):
        return _any_gemm(a, b, args, device)
    with without_autocast(device):
        return _any_gemm(a, b, args, device)


def _any_gemm(a: Operand, b: Operand, args: GemmArgs, device: str) -> torch.Tensor:
    made = None if device != "cuda" else factored_gemm(a, b, args)
    if made is not None:
        return made
    return multiplier(
        _resolved(a),
        _resolved(b),
        args.out_dtype,
        args.bias is None and args.accumulate_into is None,
        device,
    )(a, b, args)


def _resolved(operand: Operand) -> PlaneSpec:
    """Return the operand's spec; an open identity dtype is that of its data."""
    spec = operand.spec
    return spec.resolve(operand.buffers[0].dtype) if spec.format.is_identity else spec


class _ExactProduct:
    """How planes of two specs are multiplied: what follows from all but their values.

    Args:
        a, b: the operands' specs, without an open dtype.
        out_dtype: dtype of the result.
        is_alone: nothing is added to the product.
        device: type of the operands' device.
    """

    __slots__ = (
        *("_blocks", "_both_plain", "_by_row", "_codes", "_left", "_planes", "_planes_from"),
        *("_rest", "_right"),
    )

    def __init__(
        self, a: PlaneSpec, b: PlaneSpec, out_dtype: torch.dtype, is_alone: bool, device: str
    ) -> None:
        keep_transformed = a.signs == b.signs
        forced = settings.current().backend
        self._both_plain = a.format.is_identity and b.format.is_identity
        #: The specs, where scales may be those of whole rows, and all else that it was made for.
        self._by_row = (a, b) if any(row_factors(spec, 1) is not spec for spec in (a, b)) else None
        self._rest = (out_dtype, is_alone, device)
        in_bf16 = fp32_reason(a, b, device, out_dtype, is_alone) is None
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        self._left, self._right = (
            side_decoder(spec, keep_transformed, dtype, device, forced) for spec in (a, b)
        )
        #: Of few rows with the codes of b; None: b is decoded for any number.
        self._codes = None
        #: Of any number of rows, decoded on their way into the product; None: before it.
        self._planes = None
        #: Of codes, whose sums are multiplied by scales of blocks; None: there are no such.
        self._blocks = None
        if device == "cpu" and not in_bf16 and blocks_reason(a, b) is None:
            self._blocks = BlocksProduct(a, b)
        #: As many rows of a as it needs.
        self._planes_from = 0
        if device == "cpu":
            if no_codes_reason(a, b) is None:
                self._codes = CodesProduct(b)
            if no_planes_reason(a, b, in_bf16) is None:
                self._planes = PlanesProduct(a, b, in_bf16)
            elif in_bf16 and no_planes_reason(a, b, in_bf16=False) is None:
                self._planes = PlanesProduct(a, b, in_bf16=False)
                self._planes_from = _MANY_ROWS

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        if self._both_plain:
            plain = _identity_product(a, b, args)
            if plain is not None:
                return plain
        if self._by_row is not None:
            first, second = (row_factors(spec, a.cols) for spec in self._by_row)
            if (first, second) != self._by_row:
                run = multiplier(first, second, *self._rest)
                return run(a._replace(spec=first), b._replace(spec=second), args)
        has_few_rows = self._codes is not None and 0 < a.rows <= SKINNY_ROWS
        if self._planes is not None and a.rows >= self._planes_from and not has_few_rows:
            product = None if self._gains_by_keeping(a, b) else self._planes(a, b, args)
            if product is not None:
                return product
        if self._blocks is not None and not has_few_rows and 0 not in (a.rows, b.rows, a.cols):
            product = self._blocks(a, b, args)
            if product is not None:
                return product
        left = self._left.ready(a) or self._left.decode(a)
        if self._codes is not None and has_few_rows:
            matrix = left.matrix
            if matrix.dtype is torch.float16:
                matrix = matrix.to(torch.float32)
            made = self._codes(matrix, left.factor, b, args)
            if made is not None:
                return made
        right = self._right.ready(b) or self._right.decode(b)
        return multiply_sides(left, right, args)

    def _gains_by_keeping(self, a: Operand, b: Operand) -> bool:
        """Whether an operand can be kept decoded and meets so few rows that this is worth it.

        Never where codes become BF16 on their way: they are decoded about as fast as what is
        kept is read. Nor where fewer rows have another product.
        """
        if self._planes is None or self._planes.in_bf16 or self._planes_from:
            return False
        return (b.cache is not None and a.rows < _KEPT_ROWS) or (
            a.cache is not None and b.rows < _KEPT_ROWS
        )


def multiplier(
    a: PlaneSpec, b: PlaneSpec, out_dtype: torch.dtype, is_alone: bool, device: str
) -> Callable[[Operand, Operand, GemmArgs], torch.Tensor]:
    """Return what multiplies operands of two specs where torch.autocast is off.

    Args:
        a, b: the operands' specs, without an open dtype.
        out_dtype: dtype of the result.
        is_alone: nothing is added to the product.
        device: type of the operands' device.
    """
    # All else that a product asks for: with other answers it is another one.
    asked = (
        product_reason() is None,
        codes_reason() is None,
        planes_reason() is None,
        tiles_reason() is None,
        is_slow(torch.bfloat16, device),
        settings.current().backend,
    )
    return _exact_product(a, b, out_dtype, is_alone, device, *asked)


@cached_choice
def _exact_product(
    a: PlaneSpec,
    b: PlaneSpec,
    out_dtype: torch.dtype,
    is_alone: bool,
    device: str,
    *asked: object,
) -> _ExactProduct:
    del asked
    return _ExactProduct(a, b, out_dtype, is_alone, device)


def _plain_notes(row: PlaneSpec, col: PlaneSpec, query: OpQuery) -> tuple[str, ...]:
    """Return how two plain tensors of the result's dtype are multiplied; empty: they are not."""
    if not (row.format.is_identity and col.format.is_identity):
        return ()
    if {(spec.format.storage_dtype or query.dtype) for spec in (row, col)} != {query.dtype}:
        return ()
    name = str(query.dtype).removeprefix("torch.")
    if not is_slow(query.dtype, query.device):
        return (f"operands as they are, torch's {name} product",)
    way = f"operands as they are, FP32 product, rounded once to {name}"
    return (way, str(slow_reason(query.dtype)))


def product_notes(query: OpQuery) -> tuple[str, ...]:
    """Return how two planes are multiplied, one line each, for `explain`."""
    if query.row is None or query.col is None:
        return ()
    plain = _plain_notes(query.row, query.col, query)
    if plain:
        return plain
    own = (query.row, query.col, query)
    if query.sizes is not None:
        depth = query.sizes[2]
        own = (row_factors(query.row, depth), row_factors(query.col, depth), query)
    return (*_many_rows_notes(*own), *_few_rows_notes(*own), *_row_notes(*own))


def _row_notes(a: PlaneSpec, b: PlaneSpec, query: OpQuery) -> tuple[str, ...]:
    """Return what becomes of scales that may serve whole rows; sizes tell, and specs do not."""
    if all(row_factors(spec, 1) is spec for spec in (a, b)):
        return ()
    if query.sizes is not None:
        return ()
    a, b = row_factors(a, 1), row_factors(b, 1)
    way = _many_rows_notes(a, b, replace(query, row=a, col=b))[0]
    return (f"a scale that serves a whole row is a factor of the result, and then: {way}",)


def _few_rows_notes(a: PlaneSpec, b: PlaneSpec, query: OpQuery) -> tuple[str, ...]:
    """Return how few rows are multiplied where that is another way."""
    if query.device != "cpu" or no_codes_reason(a, b) is not None:
        return ()
    return (
        f"up to {SKINNY_ROWS} rows of a: the codes of b are read as they lie in memory, nothing "
        "decoded is kept",
    )


def _precision_notes() -> tuple[str, ...]:
    """Return what torch's own setting lets its FP32 products do to operands."""
    own = torch.get_float32_matmul_precision()
    if own == "highest":
        return ()
    return (
        f"torch.set_float32_matmul_precision is {own!r}: torch's FP32 products may cut operands to "
        "TF32 or BF16",
    )


def _many_rows_notes(a: PlaneSpec, b: PlaneSpec, query: OpQuery) -> tuple[str, ...]:
    """Return how planes are multiplied that are decoded first."""
    reason = fp32_reason(a, b, query.device, query.dtype, is_alone=True)
    rounded = rounded_operand(query)
    if reason is not None and rounded is not None:
        return (
            f"operands decoded to BF16, operand {'ab'[rounded]} rounded once: that adds as much as "
            "the rounding of the result (precision 'exact' does not); BF16 product with FP32 "
            "accumulation",
        )
    if reason is not None:
        if query.device == "cpu" and no_planes_reason(a, b, in_bf16=False) is None:
            return ("the core's FP32 product, operands decoded exactly as it reads them", reason)
        if query.device == "cpu" and blocks_reason(a, b) is None:
            return (
                "the core's BF16 product of codes, FP32 accumulation; scales multiply the sums of "
                "each block, in FP32",
            )
        return ("operands decoded exactly, FP32 product", reason, *_precision_notes())
    if query.device == "cpu" and no_planes_reason(a, b, in_bf16=True) is None:
        return ("the core's BF16 product, FP32 accumulation; codes become BF16 as it reads them",)
    made = "operands decoded exactly to BF16, BF16 product with FP32 accumulation"
    if rounded is not None:
        return (
            f"{made}; one operand takes the factors of both planes before it is rounded, which "
            "adds as much as the rounding of the result (precision 'exact' does not)",
        )
    if query.device != "cpu":
        return (made,)
    if product_reason() is None:
        few = "the core's product of few rows and where anything follows before the rounding, else "
        if no_planes_reason(a, b, in_bf16=False) is not None:
            return (made, f"{few}torch's")
        return (
            made,
            f"{few}torch's",
            f"from {_MANY_ROWS} rows of a the core's FP32 product, operands decoded exactly as it "
            "reads them: this CPU's BF16 instruction is slower, and there are no tiles (`hybridq "
            "doctor`)",
        )
    if any(spec.needs_amax for spec in (a, b)):
        return (made, "FP32 product where a tensor's or a row's factor is no power of two")
    return (made,)


def _rounds_once(precision: str) -> bool:
    """Whether CUDA's BF16 product may be trusted to round only its result.

    Unless told otherwise, torch lets cuBLAS add the parts of a split contraction in BF16. That is
    the product that `nn.Linear` makes as well, but no sum in FP32.
    """
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return precision != "exact" or not allowed


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix in FP32; even the call that finds it so costs as much as a small kernel."""
    return matrix if matrix.dtype is torch.float32 else matrix.to(torch.float32)


def _product(left: Side, right: Side, is_last: bool, args: GemmArgs) -> torch.Tensor:
    """Return the product of two decoded operands, in FP32 if anything follows it."""
    a, b = left.matrix, right.matrix
    if not (left.is_bf16 and right.is_bf16 and a.device.type == "cuda"):
        return torch.mm(_wide(a), _wide(b).t())
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if is_last and args.out_dtype == torch.bfloat16 and _rounds_once(args.precision):
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def multiply_sides(left: Side, right: Side, args: GemmArgs) -> torch.Tensor:
    """Return the result of two decoded operands."""
    a, b, factors = left.matrix, right.matrix, (left.factor, right.factor)
    is_alone = args.bias is None and args.accumulate_into is None
    if a.is_cpu and left.is_bf16 and right.is_bf16 and a.dtype is b.dtype is torch.bfloat16:
        has_product = product_reason() is None
        # Few rows go to the core in any case: what has a bias and what has none shall not differ
        # in more than that, and `few_rows` multiplies both in one call.
        is_cores = has_product and a.shape[0] <= SKINNY_ROWS
        is_torchs = is_alone and args.out_dtype == torch.bfloat16 and not is_cores
        if is_torchs and _torch_rounds_once(factors):
            # Its own BF16 product, which nothing follows that would round again.
            return finish(_mm(a, b.t(), args.place), *factors, args)
        if has_product:
            return multiply(a, b, *factors, args)
    is_last = is_alone and left.factor is None and right.factor is None
    bounds = (left.bound, right.bound)
    return finish(_product(left, right, is_last, args), *factors, args, bounds)


def _mm(a: torch.Tensor, b: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if place is None else torch.mm(a, b, out=place)


def _torch_rounds_once(factors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch's BF16 product on this CPU serves, if nothing is added to it."""
    if is_slow(torch.bfloat16):
        return False
    if product_reason() is None:  # needs no look at the factors
        return all(factor is None for factor in factors)
    return all(is_power_of_two(factor) for factor in factors)
