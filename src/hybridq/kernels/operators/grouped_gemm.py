"""Grouped GEMM as operators: tokens sorted by group, every group with a product of its own.

| product | a | b | result |
| --- | --- | --- | --- |
| rows of tokens (fprop, dgrad) | one plane `[T, K]` | a stack of G planes `[N, K]` | `[T, N]` |
| contraction over tokens (wgrad) | one plane `[M, T]` | one plane `[N, T]` | `[G, M, N]` |

`offsets` stays on its device. A group may be empty; tokens of no group give zeros.

Tokens may be quantized by group (`group_loop`): then the buffer with the statistic has one axis
more, `[G, *shape]`, and rows of square blocks are padded. Planes `[N, K]` may come as a stack, each
buffer `[G, ...]`, or as a list, the buffers of one plane after those of another; a stack has three
axes in its first buffer, a list two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...formats import PlaneSpec
from ..choice import (
    Backend,
    GroupedArgs,
    GroupedOperand,
    OpQuery,
    check_precision,
    select,
    together,
)
from ..inputs import HIGH_PRECISION, OperandCache, chip_of
from ..ragged import capacity, padded_offsets, product_by_group
from .library import operator

__all__ = ["multiply", "run_grouped_gemm"]

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


def _check_plane(operand: GroupedOperand, groups: int, name: str) -> None:
    """Raise unless the buffers are those of the plane, or of one per group."""
    expected = operand.spec.buffers(operand.rows, operand.cols)
    count = len(expected) * groups if operand.is_list else len(expected)
    if len(operand.buffers) != count:
        raise ValueError(
            f"grouped_gemm: {operand.spec} has {len(expected)} buffers, got {name} with "
            f"{len(operand.buffers)}"
        )
    wanted = [(want, tuple(want.shape)) for want in expected]
    if operand.is_list:
        wanted = wanted * groups
    elif operand.is_stack:
        wanted = [(want, (groups, *shape)) for want, shape in wanted]
    elif operand.by_group:
        wanted[-1] = (wanted[-1][0], (groups, *wanted[-1][1]))
    for buffer, (want, shape) in zip(operand.buffers, wanted, strict=True):
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
        rows = capacity(tokens, groups) if a.is_padded else tokens
        if a.cols != b.cols or a.rows != rows or b.is_padded:
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


def _is_by_group(buffers: list[torch.Tensor], spec: PlaneSpec) -> bool:
    """Return whether the buffer with the statistic has an axis more, for the groups."""
    return spec.needs_amax and bool(buffers) and buffers[-1].dim() == 2


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
    cache: OperandCache | None = None,
) -> tuple[GroupedOperand, GroupedOperand, torch.Tensor, int, torch.Tensor | None]:
    left_spec, right_spec = PlaneSpec.parse(a_spec), PlaneSpec.parse(b_spec)
    # A stack of matrices has three axes; matrices one by one have two.
    is_list = is_stack and bool(b) and b[0].dim() == 2
    left = GroupedOperand(
        a, left_spec, a_shape[0], a_shape[1], False, a_padded, False, _is_by_group(a, left_spec)
    )
    by_group = not is_stack and _is_by_group(b, right_spec)
    right = GroupedOperand(
        b,
        right_spec,
        b_shape[0],
        b_shape[1],
        is_stack,
        b_padded,
        is_list,
        by_group,
        cache if is_list else None,
    )
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
    return multiply(
        left, right, GroupedArgs(offsets, tokens, padded, bias, into, out_dtype), precision
    )


def multiply(
    left: GroupedOperand, right: GroupedOperand, args: GroupedArgs, precision: str
) -> torch.Tensor:
    """Return the grouped product of operands that were made or checked.

    Args:
        left, right: the operands.
        args: groups, bias, what is added, dtype of the result.
        precision: of the product.
    """
    offsets, tokens = args.offsets, args.tokens
    chip, sizes = chip_of(offsets.device), (left.rows, right.rows, left.cols)
    groups = offsets.shape[0]
    query = OpQuery(
        "grouped_gemm",
        chip.kind,
        args.out_dtype,
        left.spec,
        right.spec,
        precision,
        sizes,
        chip,
        is_alone=args.bias is None and args.accumulate_into is None,
        is_biased=args.bias is not None
        and args.bias.dtype == args.out_dtype
        and args.accumulate_into is None,
        groups=groups,
        tokens_per_group=-(-tokens // groups) if right.is_stack and groups else None,
    )
    is_plain = not (left.by_group or right.by_group or right.is_list)
    if is_plain and not (left.is_padded and right.is_stack):
        return select(query).ops["grouped_gemm"](left, right, args)
    loop = query.of_op("grouped_loop")
    if together(loop, loop.parts()).chosen is not None:
        return select(query).ops["grouped_loop"](left, right, args)

    def choose(dtype: torch.dtype, is_alone: bool) -> Backend:
        is_biased = query.is_biased and not is_alone
        return select(replace(query, dtype=dtype, is_alone=is_alone, is_biased=is_biased))

    return product_by_group(choose, left, right, args)


def run_grouped_gemm(
    *operands: Any, out_dtype: torch.dtype, precision: str = "auto", **options: Any
) -> torch.Tensor:
    """Return the grouped product: what the operator runs.

    Callers that have the places of what is made of a list's planes come here, past torch's
    dispatcher.

    Args:
        operands, precision, options: as the operator takes them; `cache`: of a list of planes,
            where what is made of all of them is kept.
        out_dtype: of the result.

    Raises:
        ValueError, TypeError: an argument is wrong.
        BackendError: no backend can run it.
    """
    return _run(out_dtype, precision, None, *operands, **options)


def _shape(options: dict[str, Any], *operands: Any) -> tuple[int, ...]:
    rows, columns = operands[2][0], operands[5][0]
    if options["is_stack"]:  # rows of a may be padded
        return (operands[7] if options.get("a_padded") else rows, columns)
    return (operands[6].shape[0], rows, columns)


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


operator(_GROUPED, run_grouped_gemm, _grouped_fake)
operator(_GROUPED_INTO, _grouped_into, _grouped_into_fake)
