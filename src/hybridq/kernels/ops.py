"""The operations, registered with torch.library: plain tensors and spec texts in and out.

So `torch.compile(fullgraph=True)` sees ordinary operators and autograd saves ordinary tensors.
Every operation returns new tensors; sharing and identity are made above, in `storage`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..direction import COLUMNWISE, DIRECTIONS
from ..formats import BufferSpec, PlaneSpec
from .checks import (
    HIGH_PRECISION,
    check_encode,
    check_matrix,
    check_place,
    check_seed,
    check_tensor,
    spec_of,
)
from .device import chip_of
from .encode import run_encode
from .precision import check_precision
from .registry import Call, operation, select
from .tangents import Library
from .types import GemmArgs, Operand
from .watch import nothing_watches

__all__ = [
    "LIBRARY",
    "encode",
    "run_checked_gemm",
    "run_gemm",
    "sum_of_rows",
]

#: The operators `torch.ops.hybridq.*`; their arguments are stated in this module.
LIBRARY = Library("hybridq", "DEF")

_ENCODE = (
    "encode(Tensor x, str row, str col, Tensor? row_stat=None, Tensor? col_stat=None, "
    "Tensor? seed=None, *, str col_source='original', bool keep_row=True, SymInt row0=0, "
    "SymInt col0=0, int row_stream=0, int col_stream=1) -> Tensor[]"
)
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

for _schema in (_ENCODE, _AMAX, _DECODE, _TRANSPOSE, _GEMM, _GEMM_INTO, _BIAS_GRAD, _ROUND):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _encode(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    row0: int = 0,
    col0: int = 0,
    row_stream: int = 0,
    col_stream: int = 1,
) -> list[torch.Tensor]:
    check_matrix(x, "encode")
    row_spec, col_spec = spec_of(row, x.dtype), spec_of(col, x.dtype)
    check_encode(x, (row_spec, col_spec), (row_stat, col_stat), seed, col_source)
    check_place("encode", row0, col0, row_stream, col_stream)
    return run_encode(
        x,
        row,
        col,
        row_stat,
        col_stat,
        seed,
        col_source == "rowwise_dequantized",
        keep_row,
        (row0, col0, row_stream, col_stream),
    )


def encode(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None,
    col_stat: torch.Tensor | None,
    seed: torch.Tensor | None,
    is_decoded: bool = False,
    keep_row: bool = True,
    row_stream: int = 0,
    col_stream: int = 1,
    direct: bool = False,
) -> list[torch.Tensor]:
    """Return what `torch.ops.hybridq.encode` returns, past the dispatcher where nothing watches.

    For callers above, whose specs and options are right; x and the seed may come from a user.

    Args:
        x, row, col, row_stat, col_stat, seed: as the operator takes them.
        is_decoded: `col_source` is `"rowwise_dequantized"`.
        keep_row, row_stream, col_stream: as the operator takes them.
        direct: the caller has checked x and the seed, and that nothing watches them.
    """
    if direct or nothing_watches(x, row_stat, col_stat, seed):
        if not direct:
            check_matrix(x, "encode")
            if seed is not None:
                check_seed(seed, x, "encode")
        place = (0, 0, row_stream, col_stream)
        return run_encode(x, row, col, row_stat, col_stat, seed, is_decoded, keep_row, place)
    return torch.ops.hybridq.encode(
        x,
        row,
        col,
        row_stat,
        col_stat,
        seed,
        col_source="rowwise_dequantized" if is_decoded else "original",
        keep_row=keep_row,
        row_stream=row_stream,
        col_stream=col_stream,
    )


def _encode_fake(
    x: torch.Tensor,
    row: str,
    col: str,
    row_stat: torch.Tensor | None = None,
    col_stat: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    col_source: str = "original",
    keep_row: bool = True,
    **_: object,
) -> list[torch.Tensor]:
    check_matrix(x, "encode")
    row_spec, col_spec = spec_of(row, x.dtype), spec_of(col, x.dtype)
    check_encode(x, (row_spec, col_spec), (row_stat, col_stat), seed, col_source)
    rows, cols = x.shape
    specs: list[BufferSpec] = []
    if row_spec is not None and keep_row:
        specs += row_spec.buffers(rows, cols)
    if col_spec is not None:
        specs += col_spec.buffers(cols, rows)
    return [x.new_empty(spec.shape, dtype=spec.dtype or x.dtype) for spec in specs]


def _amax(x: torch.Tensor, spec: str, direction: str) -> torch.Tensor:
    check_matrix(x, "amax")
    if direction not in DIRECTIONS:
        raise ValueError(f"amax: direction must be rowwise or columnwise, got {direction!r}")
    own = x.t() if direction == COLUMNWISE else x
    parsed = PlaneSpec.parse(spec)
    return select(Call("amax", x.device.type, x.dtype, parsed)).ops["amax"](own, parsed)


def _decode(
    buffers: list[torch.Tensor], spec: str, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    parsed = PlaneSpec.parse(spec)
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"decode: dtype must be float32, bfloat16 or float16, got {dtype}")
    _check_buffers(buffers, parsed, rows, cols, "decode")
    if parsed.format.is_identity:
        return buffers[0].to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    return operation("decode", buffers[0].device.type, dtype, parsed)(
        buffers, parsed, rows, cols, dtype
    )


def _check_buffers(
    buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int, where: str
) -> None:
    """Raise unless `buffers` are those of a plane; a kernel reads them by pointer."""
    expected = spec.buffers(rows, cols)
    if len(buffers) != len(expected):
        raise ValueError(f"{where}: {spec} has {len(expected)} buffers, got {len(buffers)}")
    home = None
    for buffer, want in zip(buffers, expected, strict=True):
        if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:
            break
        if buffer.shape != want.shape or buffer.dtype is not (want.dtype or buffer.dtype):
            break
        home = home or buffer.device
        if buffer.device != home:
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
    backend = select(Call("transpose", data.device.type, data.dtype))
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

    Callers that have a plane's `Kept` come here, past torch's dispatcher.

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
        _check_buffers(operand.buffers, operand.spec, operand.rows, operand.cols, "gemm")
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
    kind, chip = "cpu", None
    if a[0].is_cpu:
        sizes = None  # there is one way on a CPU, whatever the sizes; a GPU has several
    else:
        device = a[0].device
        kind, chip = device.type, chip_of(device)
        sizes = sizes or (left.rows, right.rows, left.cols)
        args = args._replace(chip=chip)
    specs = (left.spec, right.spec)
    run = operation("gemm", kind, args.out_dtype, *specs, args.precision, sizes, chip)
    return run(left, right, args)


def _gemm(*operands: Any, out_dtype: torch.dtype, precision: str = "auto") -> torch.Tensor:
    bias = operands[7] if len(operands) > 7 else None
    args = GemmArgs(bias, None, out_dtype, precision)
    return run_gemm(*_operand_pair(*operands[:7]), args)


def _gemm_fake(
    a: list[torch.Tensor],
    a_spec: str,
    a_rows: int,
    b: list[torch.Tensor],
    b_spec: str,
    b_rows: int,
    *_: object,
    out_dtype: torch.dtype,
    precision: str = "auto",
) -> torch.Tensor:
    check_precision(precision, "gemm")
    return a[0].new_empty((a_rows, b_rows), dtype=out_dtype)


def _gemm_into(
    out: torch.Tensor, *operands: Any, accumulate: bool = False, precision: str = "auto"
) -> None:
    bias = operands[7] if len(operands) > 7 else None
    args = GemmArgs(bias, out if accumulate else None, out.dtype, precision)
    out.copy_(run_gemm(*_operand_pair(*operands[:7]), args))


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
    backend = select(Call("round_stochastic", x.device.type, dtype))
    return backend.ops["round_stochastic"](x, seed, dtype, stream, row0, col0)


def _round_stochastic_fake(
    x: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, *_: object, **__: object
) -> torch.Tensor:
    _check_round(x, seed, dtype)
    return x.new_empty(x.shape, dtype=dtype)


for _name, _implementation, _fake in (
    ("encode", _encode, _encode_fake),
    ("amax", _amax, _amax_fake),
    ("decode", _decode, _decode_fake),
    ("transpose", _transpose, _transpose_fake),
    ("gemm", _gemm, _gemm_fake),
    ("gemm_", _gemm_into, _gemm_into_fake),
    ("bias_grad", _bias_grad, _bias_grad_fake),
    ("round_stochastic", _round_stochastic, _round_stochastic_fake),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridq::{_name}", _fake, lib=LIBRARY)
