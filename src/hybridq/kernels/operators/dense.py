"""Operators on one matrix or two: amax, decode, transpose, gemm, rounding; encode has its own file.

They take and return plain tensors and spec strings.
So `torch.compile(fullgraph=True)` sees ordinary operators and autograd saves ordinary tensors.
Every operation returns new tensors; sharing and identity are made above, in `storage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import settings
from ...direction import COLUMNWISE, DIRECTIONS
from ...formats import PlaneSpec
from ..choice import (
    GemmArgs,
    Operand,
    OpQuery,
    cached_choice,
    check_precision,
    operation,
    select,
)
from ..inputs import (
    HIGH_PRECISION,
    check_matrix,
    check_place,
    check_seed,
    check_tensor,
)
from .derivatives import gemm_backward, gemm_setup
from .gpu_gemm_plan import gpu_run
from .library import operator

__all__ = [
    "GemmPlan",
    "check_buffers",
    "gemm_plan",
    "run_checked_gemm",
    "run_gemm",
    "sum_of_rows",
]

_AMAX = "amax(Tensor x, str spec, str direction) -> Tensor"
_DECODE = "decode(Tensor[] buffers, str spec, SymInt rows, SymInt cols, ScalarType dtype) -> Tensor"
_TRANSPOSE = "transpose(Tensor data, SymInt rows, SymInt cols, int bits) -> Tensor"
_OPERANDS = "Tensor[] a, str a_spec, SymInt a_rows, Tensor[] b, str b_spec, SymInt b_rows, SymInt k"
_GEMM = (
    f"gemm({_OPERANDS}, Tensor? bias=None, *, ScalarType out_dtype, str precision='auto') -> Tensor"
)
_GEMM_INTO = (
    f"gemm_(Tensor(out!) out, {_OPERANDS}, Tensor? bias=None, *, bool accumulate=False, "
    "str precision='auto') -> ()"
)

# The sum over tokens, as an operation of its own: a compiler that generates the loop itself adds in
# another order, and the bias's gradient would not be the eager one's bit for bit.
_BIAS_GRAD = "bias_grad(Tensor dy) -> Tensor"
_ROUND = (
    "round_stochastic(Tensor x, Tensor seed, ScalarType dtype, int stream=0, SymInt row0=0, "
    "SymInt col0=0) -> Tensor"
)


def _amax(x: torch.Tensor, spec: str, direction: str) -> torch.Tensor:
    check_matrix(x, "amax")
    if direction not in DIRECTIONS:
        raise ValueError(f"amax: direction must be rowwise or columnwise, got {direction!r}")
    own = x.t() if direction == COLUMNWISE else x
    parsed = PlaneSpec.parse(spec)
    return select(OpQuery("amax", x.device.type, x.dtype, parsed)).ops["amax"](own, parsed)


def _decode(
    buffers: list[torch.Tensor], spec: str, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    parsed = PlaneSpec.parse(spec)
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"decode: dtype must be float32, bfloat16 or float16, got {dtype}")
    check_buffers(buffers, parsed, rows, cols, "decode")
    if parsed.format.is_identity:
        return buffers[0].to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    return operation("decode", buffers[0].device.type, dtype, parsed)(
        buffers, parsed, rows, cols, dtype
    )


def check_buffers(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, where: str
) -> None:
    """Raise unless `buffers` are those of a plane; a kernel reads them by pointer.

    Args:
        buffers: what should be a plane.
        spec: of the plane.
        rows, cols: of its own matrix.
        where: the function that takes them, for the error.

    Raises:
        ValueError, TypeError: a buffer is missing, is no plain tensor, has another shape or dtype,
            or is elsewhere than the first.
    """
    expected = spec.buffers(rows, cols)
    if len(buffers) != len(expected):
        raise ValueError(f"{where}: {spec} has {len(expected)} buffers, got {len(buffers)}")
    home = None
    for buffer, want in zip(buffers, expected, strict=True):
        if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:
            break
        if buffer.shape != want.shape or buffer.dtype is not (want.dtype or buffer.dtype):
            break
        if home is None:
            home = buffer.device
        elif buffer.device != home:
            break
    else:
        return
    # Something differs from the common case: find out what, and whether it is wrong.
    for buffer, want in zip(buffers, expected, strict=True):
        check_tensor(buffer, where)
        if tuple(buffer.shape) != tuple(want.shape) or (
            want.dtype is not None and buffer.dtype != want.dtype
        ):
            raise ValueError(
                f"{where}: {want.name} of a [{rows}, {cols}] plane of {spec} must be "
                f"{want.dtype} {tuple(want.shape)}, got {buffer.dtype} {tuple(buffer.shape)}"
            )
        if buffer.device != buffers[0].device:
            raise ValueError(
                f"{where}: all buffers must be on one device, got {buffers[0].device} and "
                f"{buffer.device}"
            )


def _decode_fake(
    buffers: list[torch.Tensor], spec: str, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    return buffers[0].new_empty((rows, cols), dtype=dtype)


def _check_transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> None:
    """Raise unless `data` holds `rows x cols` codes; a kernel reads them by pointer."""
    check_tensor(data, "transpose")
    if bits not in (4, 8, 16, 32):
        raise ValueError(f"transpose: bits must be 4, 8, 16 or 32, got {bits}")
    width = -(-cols // 2) if bits == 4 else cols
    size = max(bits // 8, 1)
    fits = data.dtype == torch.uint8 if bits == 4 else data.dtype.itemsize == size
    if not fits or tuple(data.shape) != (rows, width):
        raise ValueError(
            f"transpose: data of a [{rows}, {cols}] matrix of {bits} bits must be "
            f"{'uint8' if bits == 4 else f'of {size} bytes'} and [{rows}, {width}], got "
            f"{data.dtype} {tuple(data.shape)}"
        )


def _transpose(data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    _check_transpose(data, rows, cols, bits)
    backend = select(OpQuery("transpose", data.device.type, data.dtype))
    return backend.ops["transpose"](data, rows, cols, bits)


def _transpose_fake(data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    return data.new_empty((cols, -(-rows // 2) if bits == 4 else rows))


def _operand_pair(
    a: list[torch.Tensor],
    a_spec: str,
    a_rows: int,
    b: list[torch.Tensor],
    b_spec: str,
    b_rows: int,
    k: int,
) -> tuple[Operand, Operand]:
    left = Operand(a, PlaneSpec.parse(a_spec), a_rows, k)
    return left, Operand(b, PlaneSpec.parse(b_spec), b_rows, k)


def run_gemm(
    left: Operand,
    right: Operand,
    args: GemmArgs,
    sizes: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Return `left @ right.T`, with what `args` says of the rest: what the operators run.

    Callers that have a plane's `OperandCache` come here, past torch's dispatcher.

    Args:
        left, right: the operands.
        args: the rest.
        sizes: (M, N, K) that the backend is chosen for; None: those of the operands.

    Raises:
        ValueError: buffers are not those of a plane, or tensors are on several devices.
        BackendError: no backend can run it.
    """
    a, b = left.buffers, right.buffers
    for operand in (left, right):
        check_buffers(operand.buffers, operand.spec, operand.rows, operand.cols, "gemm")
    for tensor in (b[0], args.bias, args.accumulate_into):
        if tensor is not None and tensor.device != a[0].device:
            raise ValueError(
                f"gemm: all tensors must be on one device, got {a[0].device} and {tensor.device}"
            )
    check_precision(args.precision, "gemm")
    return run_checked_gemm(left, right, args, sizes)


def run_checked_gemm(
    left: Operand,
    right: Operand,
    args: GemmArgs,
    sizes: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Return `run_gemm` of operands that were just encoded, and arguments that are right.

    Args:
        left, right, args, sizes: as `run_gemm` takes them.
    """
    a = left.buffers
    specs = (left.spec, right.spec)
    if not a[0].is_cpu:  # there is one way on a CPU, whatever the sizes; a GPU has several
        sizes = sizes or (left.rows, right.rows, left.cols)
        plan = gpu_run(*specs, args.out_dtype, args.precision, sizes, a[0].device)
        return plan.run(left, right, args._replace(chip=plan.chip))
    run = operation("gemm", "cpu", args.out_dtype, *specs, args.precision, None, None)
    return run(left, right, args)


class GemmPlan(NamedTuple):
    """How planes of two specs are multiplied on a CPU, where torch.autocast is off.

    Args:
        a, b: the operands' specs, of no open dtype.
        run: takes `(Operand, Operand, GemmArgs)`.
    """

    a: PlaneSpec
    b: PlaneSpec
    run: Callable[[Operand, Operand, GemmArgs], torch.Tensor]


def gemm_plan(a: str, b: str, dtype: torch.dtype, precision: str, is_alone: bool) -> GemmPlan:
    """Return how planes that were made of tensors of one dtype are multiplied on a CPU.

    A GPU has several ways, and which one it takes depends on the sizes too.

    Args:
        a, b: spec strings of the operands.
        dtype: of the tensors and of the result.
        precision: `"auto"`, `"exact"` or `"fast"`.
        is_alone: nothing is added to the product.

    Raises:
        BackendError: no backend can multiply them.
    """
    return _gemm_plan(a, b, dtype, precision, is_alone, settings.current().backend)


@cached_choice
def _gemm_plan(
    a: str, b: str, dtype: torch.dtype, precision: str, is_alone: bool, forced: str | None
) -> GemmPlan:
    del forced  # what `select` asks for
    left, right = (PlaneSpec.parse(text).resolve(dtype) for text in (a, b))
    backend = select(OpQuery("gemm", "cpu", dtype, left, right, precision))
    if backend.multiplier is None:
        return GemmPlan(left, right, backend.ops["gemm"])
    return GemmPlan(left, right, backend.multiplier(left, right, dtype, is_alone, "cpu"))


def _gemm(*operands: Any, out_dtype: torch.dtype, precision: str = "auto") -> torch.Tensor:
    bias = operands[7] if len(operands) > 7 else None
    args = GemmArgs(bias, None, out_dtype, precision)
    return run_gemm(*_operand_pair(*operands[:7]), args)


def _gemm_fake(*operands: Any, out_dtype: torch.dtype, precision: str = "auto") -> torch.Tensor:
    a, a_rows, b_rows = operands[0], operands[2], operands[5]
    check_precision(precision, "gemm")
    return a[0].new_empty((a_rows, b_rows), dtype=out_dtype)


def _gemm_into(
    out: torch.Tensor, *operands: Any, accumulate: bool = False, precision: str = "auto"
) -> None:
    bias = operands[7] if len(operands) > 7 else None
    args = GemmArgs(bias, out if accumulate else None, out.dtype, precision)
    if out.is_cuda:  # what follows the product there writes its result once
        args = args._replace(place=out)
    made = run_gemm(*_operand_pair(*operands[:7]), args)
    if made is not out:
        out.copy_(made)


def _gemm_into_fake(
    out: torch.Tensor, *operands: Any, accumulate: bool = False, precision: str = "auto"
) -> None:
    check_precision(precision, "gemm")


def _amax_fake(x: torch.Tensor, spec: str, direction: str) -> torch.Tensor:
    rows = x.shape[1] if direction == COLUMNWISE else x.shape[0]
    return x.new_empty(PlaneSpec.parse(spec).stat_shape(rows), dtype=torch.float32)


def sum_of_rows(dy: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first axis, what `bias_grad` runs.

    Args:
        dy: `[tokens, ...]`.
    """
    # With a dtype, since torch.autocast would make a sum FP32.
    return torch.sum(dy, 0, dtype=dy.dtype)


def _bias_grad(dy: torch.Tensor) -> torch.Tensor:
    check_tensor(dy, "bias_grad")
    if dy.dim() == 0:
        raise ValueError("bias_grad: dy must be [tokens, ...], got shape ()")
    return sum_of_rows(dy)


def _bias_grad_fake(dy: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(dy.shape[1:])


def _check_round(x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype) -> None:
    check_matrix(x, "round_stochastic")
    check_tensor(seed, "round_stochastic")
    check_seed(seed, x, "round_stochastic")
    if x.dtype != torch.float32:
        raise TypeError(f"round_stochastic: x must be float32, got {x.dtype}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"round_stochastic: dtype must be bfloat16 or float16, got {dtype}")


def _round_stochastic(
    x: torch.Tensor,
    seed: torch.Tensor,
    dtype: torch.dtype,
    stream: int = 0,
    row0: int = 0,
    col0: int = 0,
) -> torch.Tensor:
    _check_round(x, seed, dtype)
    check_place("round_stochastic", row0, col0, stream)
    backend = select(OpQuery("round_stochastic", x.device.type, dtype))
    return backend.ops["round_stochastic"](x, seed, dtype, stream, row0, col0)


def _round_stochastic_fake(
    x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, *_: object, **__: object
) -> torch.Tensor:
    _check_round(x, seed, dtype)
    return x.new_empty(x.shape, dtype=dtype)


operator(_AMAX, _amax, _amax_fake)
operator(_DECODE, _decode, _decode_fake)
operator(_TRANSPOSE, _transpose, _transpose_fake)
operator(_GEMM, _gemm, _gemm_fake, gemm_backward, gemm_setup)
operator(_GEMM_INTO, _gemm_into, _gemm_into_fake)
operator(_BIAS_GRAD, _bias_grad, _bias_grad_fake)
operator(_ROUND, _round_stochastic, _round_stochastic_fake)
