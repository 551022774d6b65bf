"""GEMM of any planes: both decoded exactly, then torch's own product, or on a CPU the core's.

BF16 operands are exact (docs/numerics.md, "Operands of a GEMM"), so the product's only errors are
FP32 accumulation and the rounding of the result. On a CPU torch's BF16 product rounds to BF16;
where the result needs FP32 before that (a factor that is no power of two, bias, accumulation, FP32
out) the core's own product makes it, and on CPUs that have none torch's FP32 product. Where BF16
cannot hold an operand the product is made in FP32 everywhere.

On CUDA nothing is read back: whether an operand leaves BF16's normal range is not asked, factors
are applied by the device, and the product has an FP32 result only where something follows it. What
leaves the range adds at most `K * 2^-134 * max|b|` to the error (an operand below 2^-133 may become
zero); above BF16's maximum the operand is inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..formats import PlaneSpec
from ..reference import tensor_factor
from .device import has_autocast, without_autocast
from .epilogue import finish, only_product
from .plain import is_slow, plain_product, slow_reason
from .product import FEW_ROWS, multiply, product_reason
from .registry import Call, operation
from .types import GemmArgs, Operand

__all__ = [
    "Side",
    "decode_side",
    "dtype_reason",
    "exact_gemm",
    "fp32_reason",
    "is_power_of_two",
    "multiply_sides",
    "product_notes",
]


def dtype_reason(call: Call) -> str | None:
    """Return None if a result of this dtype can be made of data on this device, else why not."""
    if call.device == "meta":
        return "needs data, got a meta tensor"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"makes float32, bfloat16 and float16, got {call.dtype}"
    return None


class Side(NamedTuple):
    """A decoded operand: `matrix * factor`; `is_bf16` if the matrix is exact in BF16."""

    matrix: torch.Tensor
    factor: torch.Tensor | None
    is_bf16: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The matrix and, if there is one, the factor."""
        return [self.matrix] if self.factor is None else [self.matrix, self.factor]


def decode_side(operand: Operand, keep_turned: bool, dtype: torch.dtype) -> Side:
    """Return `operand` decoded to `dtype`, or to FP32 where BF16 turns out not to hold it.

    Args:
        operand: any plane.
        keep_turned: leave a transform in, since the other operand has the same.
        dtype: BF16 or FP32.
    """
    if operand.spec.format.is_identity:
        matrix = operand.buffers[0]
        return Side(matrix, None, matrix.dtype == torch.bfloat16)
    if operand.kept is None:
        return _decode_side(operand, keep_turned, dtype)
    return operand.kept.get(
        _form(keep_turned, dtype),
        operand.buffers,
        lambda: _decode_side(operand, keep_turned, dtype),
    )


@lru_cache(maxsize=16)
def _form(keep_turned: bool, dtype: torch.dtype) -> str:
    return f"decoded {dtype}{'' if keep_turned else ' turned back'}"


def _decode_side(operand: Operand, keep_turned: bool, dtype: torch.dtype) -> Side:
    spec, buffers = operand.spec, operand.buffers
    device = buffers[0].device.type
    if spec.signs is not None and not keep_turned:
        decode = operation("decode", device, torch.float32, spec)
        matrix = decode(buffers, spec, operand.rows, operand.cols, torch.float32)
        return Side(matrix, None, False)
    run = operation("operand", device, dtype, spec)
    # An answer from a GPU would have to be waited for.
    asks = device == "cpu" and dtype == torch.bfloat16
    matrix, is_outside = run(buffers, spec, operand.rows, operand.cols, dtype, asks)
    if is_outside:
        matrix, _ = run(buffers, spec, operand.rows, operand.cols, torch.float32, False)
    return Side(matrix, tensor_factor(buffers, spec), not is_outside and _is_exact(spec))


@lru_cache(maxsize=4096)
def _is_exact(spec: PlaneSpec) -> bool:
    return spec.format.is_bf16_exact


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
    plain = _identity_product(a, b, args)
    return _exact_gemm(a, b, args, device) if plain is None else plain


def fp32_reason(
    a: PlaneSpec, b: PlaneSpec, device: str, out_dtype: torch.dtype, is_alone: bool
) -> str | None:
    """Return None if a BF16 product keeps the rules, as far as specs tell; else why not.

    Args:
        a, b: the operands' specs.
        device: type of their device.
        out_dtype: dtype of the result.
        is_alone: nothing is added to the product.
    """
    if is_slow(torch.bfloat16, device) and product_reason() is not None:
        return slow_reason(torch.bfloat16)
    has_fp32_result = device != "cpu" or product_reason() is None
    return _fp32_reason(a, b, has_fp32_result, out_dtype, is_alone)


@lru_cache(maxsize=4096)
def _fp32_reason(
    a: PlaneSpec, b: PlaneSpec, has_fp32_result: bool, out_dtype: torch.dtype, is_alone: bool
) -> str | None:
    for name, spec in (("a", a), ("b", b)):
        if not spec.format.is_bf16_exact:
            return f"BF16 does not hold operand {name} exactly ({spec.format})"
    if a.signs != b.signs:
        return "one operand is transformed and the other is not, so it is turned back in FP32"
    if has_fp32_result:
        return None  # of the BF16 product
    if out_dtype != torch.bfloat16:
        return f"torch's BF16 product on a CPU rounds to BF16, and the result is {out_dtype}"
    if not is_alone:
        return "bias and accumulation are added before the result is rounded"
    return None


def _plain_notes(row: PlaneSpec, col: PlaneSpec, call: Call) -> tuple[str, ...]:
    """Return how two plain tensors of the result's dtype are multiplied; empty: they are not."""
    if not (row.format.is_identity and col.format.is_identity):
        return ()
    if {(spec.format.storage_dtype or call.dtype) for spec in (row, col)} != {call.dtype}:
        return ()
    name = str(call.dtype).removeprefix("torch.")
    if not is_slow(call.dtype, call.device):
        return (f"operands as they are, torch's {name} product",)
    way = f"operands as they are, FP32 product, rounded once to {name}"
    return (way, str(slow_reason(call.dtype)))


def product_notes(call: Call) -> tuple[str, ...]:
    """Return how two planes are multiplied, one line each, for `explain`."""
    if call.row is None or call.col is None:
        return ()
    plain = _plain_notes(call.row, call.col, call)
    if plain:
        return plain
    reason = fp32_reason(call.row, call.col, call.device, call.dtype, is_alone=True)
    if reason is not None:
        return ("operands decoded exactly, FP32 product", reason)
    made = "operands decoded exactly to BF16, BF16 product with FP32 accumulation"
    if call.device != "cpu":
        return (made,)
    if product_reason() is None:
        return (
            made,
            "the core's product of few rows and where anything follows before the rounding, else "
            "torch's",
        )
    if any(spec.needs_amax for spec in (call.row, call.col)):
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


def _exact_gemm(a: Operand, b: Operand, args: GemmArgs, device: str) -> torch.Tensor:
    keep_turned = a.spec.signs == b.spec.signs
    specs = (_resolved(a), _resolved(b))
    in_bf16 = fp32_reason(*specs, device, args.out_dtype, only_product(args)) is None
    if in_bf16 and device == "cpu" and product_reason() is not None:
        factors = (tensor_factor(operand.buffers, operand.spec) for operand in (a, b))
        in_bf16 = all(is_power_of_two(factor) for factor in factors)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    left, right = decode_side(a, keep_turned, dtype), decode_side(b, keep_turned, dtype)
    return multiply_sides(left, right, args)


def multiply_sides(left: Side, right: Side, args: GemmArgs) -> torch.Tensor:
    """Return the result of two decoded operands."""
    factors, is_alone = (left.factor, right.factor), only_product(args)
    if left.matrix.device.type == "cpu" and _both_bf16(left, right):
        # Few rows go to the core in any case: what has a bias and what has none shall not differ
        # in more than that, and `few_rows` multiplies both in one call.
        is_cores = left.matrix.shape[0] <= FEW_ROWS and product_reason() is None
        is_torchs = is_alone and args.out_dtype == torch.bfloat16 and not is_cores
        if is_torchs and _torch_rounds_once(factors):
            # Its own BF16 product, which nothing follows that would round again.
            product = torch.mm(left.matrix, right.matrix.t())
            return finish(product, *factors, args)
        if product_reason() is None:
            return multiply(left.matrix, right.matrix, *factors, args)
    is_last = is_alone and left.factor is None and right.factor is None
    return finish(_product(left, right, is_last, args), *factors, args)


def _both_bf16(left: Side, right: Side) -> bool:
    return all(side.is_bf16 and side.matrix.dtype == torch.bfloat16 for side in (left, right))


def _torch_rounds_once(factors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch's BF16 product on this CPU serves, if nothing is added to it."""
    if is_slow(torch.bfloat16):
        return False
    if product_reason() is None:  # needs no look at the factors
        return all(factor is None for factor in factors)
    return all(is_power_of_two(factor) for factor in factors)


def _resolved(operand: Operand) -> PlaneSpec:
    """Return the operand's spec; an open identity dtype is that of its data."""
    if not operand.spec.format.is_identity:
        return operand.spec
    return operand.spec.resolve(operand.buffers[0].dtype)
