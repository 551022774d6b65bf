"""Products of FP8 codes with block scales by the core's kernel for Hopper's matrix units."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch

from ..choice import BlockSide, GemmArgs, GroupedArgs
from ..inputs import addresses as memory

__all__ = ["HOPPER", "multiply_blocks", "multiply_pair"]

#: The compute capability whose matrix units the kernel is written for.
HOPPER: Final = (9, 0)
_STEP: Final = 4  # a stack's matrices have multiples of so many rows
_SQUARE: Final = 128  # rows and columns that share a square's scale


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the emulator, which runs one block of threads after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def multiply_blocks(
    kernels: Any, a: BlockSide, b: BlockSide, args: GroupedArgs, is_stack: bool
) -> torch.Tensor:
    """Return the product of each group: sums of 128 products, scaled and added in FP32.

    Args:
        kernels: `backend.GpuKernels`.
        a: tokens, or a padded plane `[M, tokens]`.
        b: one matrix per group (is_stack), or a padded plane `[N, tokens]`.
        args: groups, of which there is one, bias, what to add, dtype of the result.
        is_stack: rows of a are tokens; else the contraction runs over them.

    Returns:
        `[T, N]` or `[G, M, N]`; rows of no group, and groups without tokens, are zeros. No exact
        product: docs/reference/gemm.md, "Precision".
    """
    groups = args.offsets.shape[0]
    shape = (a.rows, b.rows) if is_stack else (groups, a.rows, b.rows)
    padded = args.offsets if args.padded is None else args.padded
    with kernels.launch(a.codes.device) as stream:
        ends = kernels.pointer(args.offsets), 0 if is_stack else kernels.pointer(padded), groups
        return _launched(kernels, a, b, args, shape, ends, args.tokens, stream)


def multiply_pair(kernels: Any, a: BlockSide, b: BlockSide, args: GemmArgs) -> torch.Tensor:
    """Return `multiply_blocks` of two matrices, `[M, N]`, as one group of rows.

    Args:
        kernels: `backend.GpuKernels`.
        a, b: the operands.
        args: bias, what to add, dtype of the result.
    """
    bias = None if args.bias is None else args.bias.view(1, -1)
    with kernels.launch(a.codes.device) as stream:
        own = args._replace(bias=bias)
        return _launched(kernels, a, b, own, (a.rows, b.rows), (0, 0, 1), a.rows, stream)


def _launched(
    kernels: Any,
    a: BlockSide,
    b: BlockSide,
    args: GroupedArgs | GemmArgs,
    shape: tuple[int, ...],
    ends: tuple[int, int, int],
    tokens: int,
    stream: int,
) -> torch.Tensor:
    """Return the result, `shape`, of groups with `ends`, as the module takes them."""
    device, dtype, pointer = a.codes.device, args.out_dtype, kernels.pointer
    bias, into, added, more = args.bias, args.accumulate_into, None, None
    result = torch.empty(shape, dtype=dtype, device=device)
    if bias is not None:
        bias = bias if bias.dtype in memory.DTYPES else bias.to(torch.float32)
        bias = bias if bias.stride(1) == 1 else bias.contiguous()
        added = (pointer(bias), memory.DTYPES[bias.dtype], bias.stride(0))
    if into is not None:
        into = into if into.dtype is dtype else into.to(dtype)
        more = (pointer(into), *into.stride()[-2:], _group_stride(into))
    pitch = -(-b.rows // _STEP) * _STEP
    kernels.module.multiply_blocks(
        _side(kernels, a),
        _side(kernels, b),
        _one(kernels, a, pitch),
        _one(kernels, b, pitch),
        ends,
        (tokens, a.rows, b.rows, pitch, a.codes.shape[1]),
        added,
        more,
        (pointer(result, True), memory.DTYPES[dtype], b.rows, _group_stride(result)),
        _processors(device),
        stream,
    )
    return result


def _side(kernels: Any, side: BlockSide) -> tuple[Any, ...]:
    codes, scale = side.codes, side.scale
    own = (kernels.pointer(scale), scale.shape[1]) if side.per == "row" else (0, 0)
    return (kernels.pointer(codes), codes.shape[0], *own, side.element)


def _one(kernels: Any, side: BlockSide, pitch: int) -> tuple[int, ...] | None:
    """Return scales that are not those of rows, with their strides."""
    if side.per == "row":
        return None
    scale = side.scale
    if side.per == "group":
        return kernels.pointer(scale), 0 if scale.numel() == 1 else scale.stride(0), 0, 0
    row, block = scale.stride()
    return kernels.pointer(scale), pitch // _SQUARE * row, row, block


def _group_stride(result: torch.Tensor) -> int:
    return result.stride(0) if result.dim() == 3 else 0
