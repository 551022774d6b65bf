"""Launches of realistic size for test_triton_code; memory is reserved, never touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridq.formats import PlaneSpec
from hybridq.kernels.choice.arguments import (
    BlockSide,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Operand,
)
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.triton import plan, plan_grouped_block
from triton_tools import Compiled, compile_for

for module in (plan, plan_grouped_block):
    module.processors = lambda device: 132  # type: ignore[attr-defined]

SIZE, TOKENS, GROUPS = 4096, 16384, 8


def _buffers(name: str, rows: int, k: int, groups: int | None = None) -> list[torch.Tensor]:
    lead = () if groups is None else (groups,)
    return [
        torch.empty((*lead, *buffer.shape), dtype=buffer.dtype or torch.bfloat16)
        for buffer in PlaneSpec.parse(name).buffers(rows, k)
    ]


def _compile(launch: Any, folder: Path, capability: int) -> Compiled:
    made = compile_for(launch, capability, folder)
    given = launch.arguments
    if "BLOCK_L" in given and "BLOCK_K" in given:
        made.codes = given["BLOCK_L"] * given["BLOCK_K"] // (32 * launch.num_warps)
    made.read()  # the tools lie in this process's environment
    return made


def dense(folder: Path, capability: int, a: str, b: str, rows: int, which: int = 0) -> Compiled:
    """A dense GEMM with `rows` rows of a and 4096 of b."""
    left = Operand(_buffers(a, rows, SIZE), PlaneSpec.parse(a), rows, SIZE)
    right = Operand(_buffers(b, SIZE, SIZE), PlaneSpec.parse(b), SIZE, SIZE)
    _, launches = plan.plan_gemm(left, right, GemmArgs(None, None, torch.bfloat16))
    return _compile(launches[which], folder, capability)


def reduce(folder: Path, capability: int) -> Compiled:
    """The sum of the shares of K of a dense GEMM."""
    return dense(folder, capability, "mxfp8", "nvfp4", 16, which=1)


def grouped(folder: Path, capability: int, kind: str, a: str, b: str) -> Compiled:
    """A grouped GEMM of 16384 tokens, or 128 (kind `"few"`), and 8 groups."""
    tokens = 128 if kind == "few" else TOKENS
    ends = torch.zeros(GROUPS, dtype=torch.int32)
    padded = torch.zeros(GROUPS + 1, dtype=torch.int32)
    if kind != "k":
        left = GroupedOperand(_buffers(a, tokens, SIZE), PlaneSpec.parse(a), tokens, SIZE)
        weights = _buffers(b, SIZE, SIZE, GROUPS)
        right = GroupedOperand(weights, PlaneSpec.parse(b), SIZE, SIZE, is_stack=True)
    else:
        left, right = (_over_tokens(name) for name in (a, b))
    args = GroupedArgs(ends, tokens, padded, None, None, torch.bfloat16)
    _, launches = plan.plan_grouped(left, right, args)
    return _compile(launches[0], folder, capability)


def _over_tokens(name: str) -> GroupedOperand:
    spec = PlaneSpec.parse(name)
    if spec.format.is_identity:
        plain = torch.empty(TOKENS, SIZE, dtype=spec.format.storage_dtype).t()
        return GroupedOperand([plain], spec, SIZE, TOKENS)
    k = ragged.capacity(TOKENS, GROUPS)
    return GroupedOperand(_buffers(name, SIZE, k), spec, SIZE, k, is_padded=True)


def block(folder: Path, capability: int, is_square: bool) -> Compiled:
    """An FP8 GEMM of 4096^3 with block scales."""
    codes = torch.empty(SIZE, SIZE, dtype=torch.uint8)
    a_scale = torch.empty(SIZE, SIZE // 128)
    b_scale = torch.empty(SIZE // 128 if is_square else SIZE, SIZE // 128)
    args = GemmArgs(None, None, torch.bfloat16)
    _, launches = plan.plan_block(codes, a_scale, codes, b_scale, ("e4m3", "e4m3"), is_square, args)
    return _compile(launches[0], folder, capability)


def grouped_block(folder: Path, capability: int, kind: str, tokens: int = TOKENS) -> Compiled:
    """An FP8 GEMM of 8 groups of tokens with 1x128 scales; kind `"k"`: contracted over tokens."""
    plan_grouped_block._major = lambda device: capability // 10  # type: ignore[assignment]
    depth = ragged.capacity(tokens, GROUPS) if kind == "k" else SIZE

    def side(rows: int, matrices: int = 1) -> BlockSide:
        codes = torch.empty(matrices * rows, depth, dtype=torch.uint8)
        return BlockSide(codes, torch.empty(depth // 128, matrices * rows), "e4m3", rows)

    ends = torch.zeros(GROUPS, dtype=torch.int32)
    padded = torch.zeros(GROUPS + 1, dtype=torch.int32)
    args = GroupedArgs(ends, tokens, padded, None, None, torch.bfloat16)
    sides = (side(SIZE), side(SIZE)) if kind == "k" else (side(tokens), side(SIZE, GROUPS))
    launches = plan_grouped_block.plan_grouped_block(*sides, args, kind != "k")[1]
    return _compile(launches[0], folder, capability)


def ones(folder: Path, capability: int) -> None:
    """Sizes of one, which Triton compiles as constants: every kernel must take them."""
    bias, into = torch.ones(1, 1), torch.ones(1, 1)
    for k in (1, 1100):
        sides = [Operand(_buffers(n, 1, k), PlaneSpec.parse(n), 1, k) for n in ("nvfp4", "mxfp8")]
        for launch in plan.plan_gemm(*sides, GemmArgs(bias[0], into, torch.float32))[1]:
            compile_for(launch, capability, folder)
    ends, padded = torch.ones(1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for name in ("mxfp8", "bf16", "fp32"):
        spec = PlaneSpec.parse(name)
        stack = GroupedOperand(_buffers(name, 1, 1, 1), spec, 1, 1, is_stack=True)
        for tokens in (1, 200):
            rows = GroupedOperand(_buffers(name, tokens, 1), spec, tokens, 1)
            args = GroupedArgs(ends, tokens, None, bias, None, torch.float32)
            compile_for(plan.plan_grouped(rows, stack, args)[1][0], capability, folder)
        wide = GroupedOperand(_buffers(name, 1, 128), spec, 1, 128, is_padded=name == "mxfp8")
        args = GroupedArgs(ends, 1, padded, None, None, torch.float32)
        compile_for(plan.plan_grouped(wide, wide, args)[1][0], capability, folder)
    codes, scale = torch.empty(1, 1, dtype=torch.uint8), torch.empty(1, 1)
    for is_square in (True, False):
        given = (codes, scale, codes, scale, ("e4m3", "e5m2"), is_square)
        launches = plan.plan_block(*given, GemmArgs(bias[0], None, torch.float16))[1]
        compile_for(launches[0], capability, folder)
