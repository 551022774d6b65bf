"""The grouped product of FP8 codes with 1x128 scales: which chips have it, its tiles, its launch.

| tile | warps | programs per multiprocessor | for |
| --- | --- | --- | --- |
| 64 x 128 | 4 | 4: some add while others multiply | sm_90, rows of tokens |
| 2 waves of 64 x 128 | 4 | 2 | sm_90, contractions over tokens |
| 128 x 128 | 8 | 1 | sm_100, where sums come from tensor memory |
| 128 x 64 | 8 | 1 | sm_120, with less shared memory and sums in registers |

Those of sm_90 are the fastest of 24 that were measured on an H100, the others follow from counts of
compiled code: docs/reference/gpu-status.md, "Groups of tokens".
No Triton is imported to decide them.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from ..choice import BlockSide, GroupedArgs
from .form import VALUES
from .plan_parts import FP8, Launch, Tiled, added_arguments, bits_of, processors

__all__ = ["grouped_block_gemm", "plan_grouped_block"]

_BLOCK: Final = 128


class _Shape(NamedTuple):
    """Rows and columns of a tile, and how a program works on it."""

    block_a: int
    block_b: int
    waves: int
    warps: int
    stages: int
    programs: int  # per multiprocessor
    band: int


_OF_TOKENS: Final = _Shape(64, 128, 1, 4, 3, 4, 16)
_OVER_TOKENS: Final = _Shape(64, 128, 2, 4, 3, 2, 8)
_OTHERS: Final = {10: _Shape(128, 128, 1, 8, 4, 1, 8), 12: _Shape(128, 64, 1, 8, 3, 1, 8)}


@lru_cache(maxsize=16)
def _major(device: torch.device) -> int:
    if device.type != "cuda":
        return 9  # Triton's interpreter
    return int(torch.cuda.get_device_capability(device)[0])


def _shape(device: torch.device, is_ragged_k: bool) -> _Shape:
    major = _major(device)
    if major != 9:
        return _OTHERS.get(major, _OTHERS[12])
    return _OVER_TOKENS if is_ragged_k else _OF_TOKENS


def plan_grouped_block(
    a: BlockSide, b: BlockSide, args: GroupedArgs, is_stack: bool
) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """Return an empty result, `[T, N]` or `[G, M, N]`, and the launch that writes it.

    There is a group, and nothing has a size of zero.
    """
    b = _by_rows(b)
    groups, k = args.offsets.shape[0], a.codes.shape[1]
    shape = (a.rows, b.rows) if is_stack else (groups, a.rows, b.rows)
    result, into = a.codes.new_empty(shape, dtype=args.out_dtype), args.accumulate_into
    own = _shape(result.device, not is_stack)
    out, added = bits_of(result), bits_of(result if into is None else into)
    arguments = {
        "a": Tiled(a.codes.view(FP8[a.element]), (own.block_a, _BLOCK)),
        "a_scale": Tiled(a.scale, (1, own.block_a)),
        "b": Tiled(b.codes.view(FP8[b.element]), (own.block_b, _BLOCK)),
        "b_scale": Tiled(b.scale, (1, own.block_b)),
        **added_arguments(args.bias, into, out),
        "bias_group_stride": 0 if args.bias is None else args.bias.stride(0),
        "offsets": args.offsets,
        "padded": args.offsets if args.padded is None else args.padded,
        "groups": groups,
        "tokens": args.tokens,
        "a_rows": a.rows,
        "b_rows": b.rows,
        "b_pitch": -(-b.rows // 4) * 4,
        "k_size": k,
        **_places("into", added, is_stack),
        **_places("out", out, is_stack),
        "PLAIN": VALUES,
        "IS_RAGGED_K": not is_stack,
        "GROUPS": 1 << groups.bit_length(),
        "BLOCK_A": own.block_a,
        "BLOCK_B": own.block_b,
        "WAVES": own.waves,
        "STAGES": own.stages,
        "BAND": own.band,
    }
    # At most so many tiles, whatever the offsets are.
    height = own.block_a * own.waves
    down = -(-args.tokens // height) + groups + 1 if is_stack else groups * -(-a.rows // height)
    programs = min(down * -(-b.rows // own.block_b), processors(result.device) * own.programs)
    return result, (Launch("grouped_block", (programs,), arguments, own.warps, own.stages),)


def _by_rows(side: BlockSide) -> BlockSide:
    """Return a side, of rows or squares, with the scales of rows."""
    if side.per == "row":
        return side
    wide = side.scale.t().unsqueeze(-1).expand(-1, -1, _BLOCK)
    return side._replace(scale=wide.flatten(1), per="row")


def _places(name: str, tensor: torch.Tensor, is_stack: bool) -> dict[str, Any]:
    return {
        f"{name}_stride": tensor.stride(-2),
        f"{name}_column_stride": tensor.stride(-1),
        f"{name}_group_stride": 0 if is_stack else tensor.stride(0),
    }


def grouped_block_gemm(
    a: BlockSide, b: BlockSide, args: GroupedArgs, is_stack: bool
) -> torch.Tensor:
    """Return the product of each group by FP8 tensor cores: sums of 128, scaled and added in FP32.

    Args:
        a: tokens, or a padded plane `[M, tokens]`.
        b: one matrix per group (is_stack), or a padded plane `[N, tokens]`.
        args: groups, bias, what to add, dtype of the result.
        is_stack: rows of a are tokens; else the contraction runs over them.

    Returns:
        `[T, N]` or `[G, M, N]`; rows of no group, and groups without tokens, are zeros. No exact
        product: docs/reference/gemm.md, "Precision".
    """
    result, launches = plan_grouped_block(a, b, args, is_stack)
    import_module(".launch", __package__).run(launches, result.device)
    return result
