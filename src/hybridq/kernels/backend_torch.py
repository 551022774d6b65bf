"""GEMM by torch: both planes decoded exactly, then torch's own product.

BF16 operands are exact (docs/numerics.md, "Operands of a GEMM"), so the product's only errors are
FP32 accumulation and the rounding of the result. Where BF16 cannot hold an operand, or the result
needs FP32 before it is rounded (a factor that is no power of two, bias, accumulation, FP32 out),
the product is made in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..formats import PlaneSpec
from ..reference import tensor_factor
from .device import without_autocast
from .registry import Backend, Call, register_backend, select
from .types import GemmArgs, Operand

__all__ = ["TORCH", "product_notes"]


@lru_cache(maxsize=1)
def _cpu_has_bf16() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(probe is not None and probe())


def _supports(call: Call) -> str | None:
    if call.device == "meta":
        return "needs data, got a meta tensor"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"makes float32, bfloat16 and float16, got {call.dtype}"
    return None


@dataclass(frozen=True)
class _Side:
    """A decoded operand: `matrix * factor`; `is_bf16` if the matrix is exact in BF16."""

    matrix: torch.Tensor
    factor: torch.Tensor | None
    is_bf16: bool


def _prepare(operand: Operand, keep_turned: bool, dtype: torch.dtype) -> _Side:
    """Decode `operand` to `dtype`, or to FP32 where BF16 turns out not to hold it."""
    spec, buffers = operand.spec, operand.buffers
    if spec.format.is_identity:
        matrix = buffers[0]
        return _Side(matrix, None, matrix.dtype == torch.bfloat16)
    device = buffers[0].device.type
    if spec.signs is not None and not keep_turned:
        backend = select(Call("decode", device, torch.float32, spec))
        matrix = backend.ops["decode"](buffers, spec, operand.rows, operand.cols, torch.float32)
        return _Side(matrix, None, False)
    backend = select(Call("operand", device, dtype, spec))
    run = backend.ops["operand"]
    matrix, is_outside = run(buffers, spec, operand.rows, operand.cols, dtype)
    if is_outside and dtype == torch.bfloat16:
        matrix, _ = run(buffers, spec, operand.rows, operand.cols, torch.float32)
    exact = spec.format.is_bf16_exact and not is_outside
    return _Side(matrix, tensor_factor(buffers, spec), exact)


def _is_power_of_two(factor: torch.Tensor | None) -> bool:
    """Whether scaling a rounded product by `factor` rounds nothing; its values, read on CPU."""
    if factor is None:
        return True
    mantissa, exponent = torch.frexp(factor)
    return bool((mantissa == 0.5).all() and (exponent.abs() < 100).all())


def _fp32_product(a: _Side, b: _Side) -> torch.Tensor:
    if a.matrix.device.type == "cuda" and a.is_bf16 and b.is_bf16:
        left, right = a.matrix.to(torch.bfloat16), b.matrix.to(torch.bfloat16)
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return torch.mm(a.matrix.to(torch.float32), b.matrix.to(torch.float32).t())


def _identity_product(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
    """Return nn.Linear's own product of two plain tensors, or None where it has none."""
    both = (a.spec.format.is_identity, b.spec.format.is_identity)
    left, right = a.buffers[0], b.buffers[0]
    if both != (True, True) or args.accumulate_into is not None:
        return None
    if not left.dtype == right.dtype == args.out_dtype:
        return None
    if args.bias is not None and args.bias.dtype != args.out_dtype:
        return None
    return torch.nn.functional.linear(left, right, args.bias)


def _gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
    device = a.buffers[0].device.type
    with without_autocast(device):
        plain = _identity_product(a, b, args)
        return _exact_gemm(a, b, args, device) if plain is None else plain


def _fp32_reason(
    a: PlaneSpec, b: PlaneSpec, device: str, out_dtype: torch.dtype, only_product: bool
) -> str | None:
    """Return None if torch's BF16 product keeps the rules, as far as specs tell; else why not."""
    if device == "cpu" and not _cpu_has_bf16():
        return "this CPU has no BF16 instructions"
    for name, spec in (("a", a), ("b", b)):
        if not spec.format.is_bf16_exact:
            return f"BF16 does not hold operand {name} exactly ({spec.format})"
    if a.signs != b.signs:
        return "one operand is transformed and the other is not, so it is turned back in FP32"
    if device != "cpu":
        return None  # there a BF16 product has an FP32 result
    if out_dtype != torch.bfloat16:
        return f"torch's BF16 product on a CPU rounds to BF16, and the result is {out_dtype}"
    if not only_product:
        return "bias and accumulation are added before the result is rounded"
    return None


def product_notes(
    a: PlaneSpec, b: PlaneSpec, device: str, out_dtype: torch.dtype
) -> tuple[str, ...]:
    """Return how this backend multiplies two planes, one line each, for `explain`.

    Args:
        a, b: specs of the operands.
        device: type of the device.
        out_dtype: of the product.
    """
    reason = _fp32_reason(a, b, device, out_dtype, only_product=True)
    if reason is not None:
        return ("operands decoded exactly, FP32 product", reason)
    notes = ["operands decoded exactly to BF16, BF16 product with FP32 accumulation"]
    if device == "cpu" and any(spec.needs_amax for spec in (a, b)):
        notes.append("FP32 product where a tensor's or a row's factor is no power of two")
    return tuple(notes)


def _exact_gemm(a: Operand, b: Operand, args: GemmArgs, device: str) -> torch.Tensor:
    keep_turned = a.spec.signs == b.spec.signs
    only_product = args.bias is None and args.accumulate_into is None
    in_bf16 = _fp32_reason(_resolved(a), _resolved(b), device, args.out_dtype, only_product) is None
    if in_bf16 and device == "cpu":
        factors = (tensor_factor(operand.buffers, operand.spec) for operand in (a, b))
        in_bf16 = all(_is_power_of_two(factor) for factor in factors)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    left, right = _prepare(a, keep_turned, dtype), _prepare(b, keep_turned, dtype)
    if in_bf16 and left.is_bf16 and right.is_bf16 and device == "cpu":
        product = torch.mm(left.matrix, right.matrix.t())
    else:
        product = _fp32_product(left, right)
    # One value, or one per row of the operand: a's rows are the product's, b's its columns.
    for factor, shape in ((left.factor, (-1, 1)), (right.factor, (1, -1))):
        if factor is not None:
            product = product * factor.to(product.dtype).view(shape)
    if args.bias is not None:
        product = product + args.bias.to(product.dtype)
    if args.accumulate_into is not None:
        product = product + args.accumulate_into.to(product.dtype)
    return product.to(args.out_dtype)


def _resolved(operand: Operand) -> PlaneSpec:
    """Return the operand's spec; an open identity dtype is that of its data."""
    return operand.spec.resolve(operand.buffers[0].dtype)


#: The backend of torch's own products.
TORCH = register_backend(Backend("torch", _supports, {"gemm": _gemm}))
