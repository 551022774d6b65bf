"""Norms and activations before encode on a GPU: the bits of the CPU core."""

from __future__ import annotations

import pytest
import torch

import kernel_cases as cases
from prologue_cases import (
    KINDS,
    QUANTIZED,
    TURNED,
    check_map,
    check_map_encode,
    fused_cases,
    prologue,
    source,
    specs_of,
    turn,
)


@pytest.mark.parametrize("kind,has_beta", KINDS)
def test_values_and_statistics_are_the_cpus(kernels, kind: str, has_beta: bool) -> None:
    for i, shape in enumerate(((300, 4096), (33, 257), (5, 70_001), (1, 1), (0, 8), (5, 0))):
        for dtype in cases.DTYPES:
            x = source(kind, *shape, dtype, i, cases.SPECIALS[i % 5])
            check_map(kernels, x, prologue(kind, has_beta, shape[1]), f"{kind} {shape} {dtype}")


@pytest.mark.parametrize("pair,dtype", fused_cases())
def test_planes_of_one_tile_kernel_are_the_cpus(
    kernels, pair: tuple[str, str], dtype: torch.dtype
) -> None:
    row, col = specs_of(pair)
    for i, (kind, has_beta) in enumerate(KINDS):
        for rows, cols in ((160, 136), (1024, 2048)):
            x = source(kind, rows, cols, dtype, i, cases.SPECIALS[i % 5])
            made = prologue(kind, has_beta, cols)
            check_map_encode(kernels, x, made, row, col, f"{pair} {kind} {rows} x {cols} {dtype}")


@pytest.mark.parametrize("kind,has_beta", KINDS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_planes_of_the_general_kernel_are_the_cpus(
    kernels, kind: str, has_beta: bool, dtype: torch.dtype
) -> None:
    row, col = specs_of(("nvfp4;rows", f"fp8_e4m3{TURNED[5:]}"))
    for shape in ((33, 77), (1000, 1030)):
        x = source(kind, *shape, dtype, shape[0], "normal")
        x[0], x[1, ::3], x[2], x[3, ::2] = float("nan"), float("inf"), 0.0, -float("inf")
        made = prologue(kind, has_beta, shape[1])
        check_map_encode(kernels, x, made, row, col, f"{kind} of {shape} {dtype}")


@pytest.mark.parametrize("name", QUANTIZED)
def test_planes_of_any_pair_are_the_cpus(kernels, name: str) -> None:
    row, col = QUANTIZED[name]
    for i, shape in enumerate(((160, 136), (33, 77), (640, 1000), (0, 8), (5, 0))):
        dtype, special = turn(i + len(name))
        kind, has_beta = KINDS[(5 * i + len(name)) % len(KINDS)]
        x = source(kind, *shape, dtype, i, special)
        made = prologue(kind, has_beta, shape[1])
        check_map_encode(kernels, x, made, row, col, f"{name}: {kind} of {shape} {dtype} {special}")
