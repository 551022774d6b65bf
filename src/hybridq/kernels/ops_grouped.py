"""Grouped GEMM as operators: tokens sorted by group, every group with a product of its own.

| product | a | b | result |
| --- | --- | --- | --- |
| rows of tokens (fprop, dgrad) | one plane `[T, K]` | a stack of G planes `[N, K]` | `[T, N]` |
| contraction over tokens (wgrad) | one plane `[M, T]` | one plane `[N, T]` | `[G, M, N]` |

`offsets` stays on its device. A group may be empty; tokens of no group give zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from ..formats import PlaneSpec
from .derivatives import refuse
from .device import chip_of
from .ops import HIGH_PRECISION, LIBRARY
from .precision import check_precision
from .ragged import capacity, padded_offsets
from .registry import Call, select
from .types import GroupedArgs, GroupedOperand

__all__: list[str] = []

_OPERANDS = (
    "Tensor[] a, str a_spec, SymInt[2] a_shape, Tensor[] b, str b_spec, SymInt[2] b_shape, "
    "Tensor offsets, SymInt tokens, Tensor? bias=None, *, bool is_stack, bool a_padded=False, "
    "bool b_padded=False"
)
_GROUPED = f"grouped_gemm({_OPERANDS}, ScalarType out_dtype, str precision='auto') -> Tensor"
_GROUPED_INTO = (
    f"grouped_gemm_(Tensor(out!) out, {_OPERANDS}, bool accumulate=False, str precision='auto') "
    "-> ()"
)
for _schema in (_GROUPED, _GROUPED_INTO):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _check_plane(operand: GroupedOperand, groups: int, name: str) -> None:
    """Raise unless the buffers are those of the plane, or of one per group."""
    expected = operand.spec.buffers(operand.rows, operand.cols)
    if len(operand.buffers) != len(expected):
        raise ValueError(
            f"grouped_gemm: {operand.spec} has {len(expected)} buffers, got {name} with "
            f"{len(operand.buffers)}"
        )
    for buffer, want in zip(operand.buffers, expected, strict=True):
        shape = (groups, *want.shape) if operand.is_stack else tuple(want.shape)
        if tuple(buffer.shape) != shape or (want.dtype and buffer.dtype != want.dtype):
            raise ValueError(
                f"grouped_gemm: {want.name} of {name} ({operand.spec}) must be {want.dtype} "
                f"{shape}, got {buffer.dtype} {tuple(buffer.shape)}"
            )


def _check(
    a: GroupedOperand,
    b: GroupedOperand,
    offsets: torch.Tensor,
    tokens: int,
    bias: torch.Tensor | None,
) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(
            f"grouped_gemm: offsets must be int32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    groups = offsets.shape[0]
    _check_plane(a, groups, "a")
    _check_plane(b, groups, "b")
    for tensor in (*a.buffers, *b.buffers, bias):
        if tensor is not None and tensor.device != offsets.device:
            raise ValueError(
                f"grouped_gemm: all tensors must be on one device, got {offsets.device} and "
                f"{tensor.device}"
            )
    if bias is not None and (not b.is_stack or tuple(bias.shape) != (groups, b.rows)):
        raise ValueError(
            f"grouped_gemm: a bias goes with rows of tokens and is [G, N], got {tuple(bias.shape)}"
        )
    if b.is_stack:
        if a.cols != b.cols or a.rows != tokens or a.is_padded or b.is_padded:
            raise ValueError(
                "grouped_gemm: a must be [tokens, K] and every plane of b [N, K], got "
                f"[{a.rows}, {a.cols}] for {tokens} tokens and [{b.rows}, {b.cols}]"
            )
        return
    for name, operand in (("a", a), ("b", b)):
        if not operand.is_padded and not operand.spec.format.is_identity:
            raise ValueError(
                f"grouped_gemm: a quantized {name} that is contracted over tokens must be padded "
                f"(pad_tokens), since its blocks must not lie in two groups, got {operand.spec}"
            )
        want = capacity(tokens, groups) if operand.is_padded else tokens
        if operand.cols != want:
            raise ValueError(
                f"grouped_gemm: {name} must have {want} columns for {tokens} tokens in {groups} "
                f"groups, got {operand.cols}"
            )


def _prepared(
    a: list[torch.Tensor],
    a_spec: str,
    a_shape: list[int],
    b: list[torch.Tensor],
    b_spec: str,
    b_shape: list[int],
    offsets: torch.Tensor,
    tokens: int,
    bias: torch.Tensor | None = None,
    *,
    is_stack: bool,
    a_padded: bool = False,
    b_padded: bool = False,
) -> tuple[GroupedOperand, GroupedOperand, torch.Tensor, int, torch.Tensor | None]:
    rows, cols = a_shape
    left = GroupedOperand(a, PlaneSpec.parse(a_spec), rows, cols, False, a_padded)
    rows, cols = b_shape
    right = GroupedOperand(b, PlaneSpec.parse(b_spec), rows, cols, is_stack, b_padded)
    _check(left, right, offsets, tokens, bias)
    return left, right, offsets, tokens, bias


def _run(
    out_dtype: torch.dtype,
    precision: str,
    into: torch.Tensor | None,
    *operands: Any,
    **options: Any,
) -> torch.Tensor:
    check_precision(precision, "grouped_gemm")
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"grouped_gemm: out dtype must be float32, bfloat16 or float16, got {out_dtype}"
        )
    left, right, offsets, tokens, bias = _prepared(*operands, **options)
    padded = padded_offsets(offsets, tokens) if left.is_padded or right.is_padded else None
    args = GroupedArgs(offsets, tokens, padded, bias, into, out_dtype)
    device, sizes, chip, groups = offsets.device, None, None, None
    if device.type != "cpu":
        sizes, chip = (left.rows, right.rows, left.cols), chip_of(device)
        groups = offsets.shape[0]
    call = Call(
        "grouped_gemm",
        device.type,
        out_dtype,
        left.spec,
        right.spec,
        precision,
        sizes,
        chip,
        is_alone=bias is None and into is None,
        groups=groups,
    )
    return select(call).ops["grouped_gemm"](left, right, args)


def _grouped(
    *operands: Any, out_dtype: torch.dtype, precision: str = "auto", **options: Any
) -> torch.Tensor:
    return _run(out_dtype, precision, None, *operands, **options)


def _shape(options: dict[str, Any], *operands: Any) -> tuple[int, ...]:
    rows, columns = operands[2][0], operands[5][0]
    return (rows, columns) if options["is_stack"] else (operands[6].shape[0], rows, columns)


def _grouped_fake(
    *operands: Any, out_dtype: torch.dtype, precision: str = "auto", **options: Any
) -> torch.Tensor:
    check_precision(precision, "grouped_gemm")
    return operands[6].new_empty(_shape(options, *operands), dtype=out_dtype)


def _check_out(out: torch.Tensor, options: dict[str, Any], *operands: Any) -> None:
    shape = _shape(options, *operands)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"grouped_gemm: out must be {tuple(shape)}, got {tuple(out.shape)}")


def _grouped_into(
    out: torch.Tensor,
    *operands: Any,
    accumulate: bool = False,
    precision: str = "auto",
    **options: Any,
) -> None:
    _check_out(out, options, *operands)
    into = out if accumulate else None
    out.copy_(_run(out.dtype, precision, into, *operands, **options))


def _grouped_into_fake(
    out: torch.Tensor,
    *operands: Any,
    accumulate: bool = False,
    precision: str = "auto",
    **options: Any,
) -> None:
    check_precision(precision, "grouped_gemm")
    _check_out(out, options, *operands)


for _name, _implementation, _fake in (
    ("grouped_gemm", _grouped, _grouped_fake),
    ("grouped_gemm_", _grouped_into, _grouped_into_fake),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridq::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "hybridq::grouped_gemm", refuse("hybridq::grouped_gemm"), lib=LIBRARY
)
