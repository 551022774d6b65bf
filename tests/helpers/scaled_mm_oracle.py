"""A stand-in for `torch.nn.functional.scaled_mm` on a CPU, in FP64.

It takes its arguments as literally as a GPU would: the sizes, strides, alignments and orders that
torch checks (aten/src/ATen/native/cuda/ScaledBlas.cpp) are checked, and the scales are read out of
memory by cuBLASLt's formulas, element by element. It shares no code with what it tests.
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, SwizzleType

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCKS = {ScalingType.BlockWise1x128, ScalingType.BlockWise128x128}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def up(count: int, step: int) -> int:
    """`count` rounded up to a multiple of `step`."""
    return (count + step - 1) // step * step


def need(condition: bool, text: str) -> None:
    """Fail as torch would."""
    if not condition:
        raise RuntimeError(f"scaled_mm oracle: {text}")


def values(data: torch.Tensor) -> torch.Tensor:
    """FP64 values of row-major codes `[rows, K]`."""
    if data.dtype in FP8:
        return data.to(torch.float64)
    codes = data.view(torch.uint8).to(torch.int64)
    both = torch.stack((codes & 15, codes >> 4), -1).reshape(data.shape[0], -1)
    sign = 1.0 - 2.0 * (both >> 3).to(torch.float64)
    return E2M1[both & 7] * sign


def memory(tensor: torch.Tensor) -> list[float]:
    """The values at a tensor's address, in order, as many as its strides span."""
    span = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = torch.as_strided(tensor, (span,), (1,))
    if tensor.dtype == torch.float8_e8m0fnu:
        bytes_ = flat.view(torch.uint8).to(torch.int64).tolist()
        return [float("nan") if b == 255 else 2.0 ** (b - 127) for b in bytes_]
    return flat.to(torch.float64).tolist()


def tiles(scale: torch.Tensor, rows: int, k: int, width: int) -> torch.Tensor:
    """Scales of every element, out of swizzled 128 x 4 tiles."""
    blocks = -(-k // width)
    need(scale.is_contiguous(), "swizzled scales are contiguous")
    need(scale.numel() == up(rows, 128) * up(blocks, 4), f"swizzled scales: {scale.numel()}")
    flat, out = memory(scale), torch.empty(rows, blocks, dtype=torch.float64)
    right = up(blocks, 4) // 4
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * right + c // 4
            out[r, c] = flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
    return out.repeat_interleave(width, 1)[:, :k]


def expanded(
    scales: list[torch.Tensor],
    recipes: list[ScalingType],
    swizzles: list[SwizzleType],
    shape: tuple[int, int],
    data: torch.Tensor,
    is_left: bool,
) -> tuple[torch.Tensor, float]:
    """A scale for every element `[rows, K]`, and the second level."""
    rows, k = shape
    scale, recipe, factor = scales[0], recipes[0], 1.0
    if recipe in (ScalingType.TensorWise, ScalingType.RowWise):
        need(data.dtype in FP8 and scale.dtype == torch.float32, "FP8 with FP32 scales")
        need(not swizzles, "no swizzle")
        if recipe == ScalingType.TensorWise:
            need(scale.numel() == 1, "one scale")
            return torch.full(shape, float(scale), dtype=torch.float64), factor
        need(tuple(scale.shape) == ((rows, 1) if is_left else (1, rows)), "one scale per row")
        need(scale.is_contiguous(), "scales by rows are contiguous")
        return scale.reshape(rows, 1).double().expand(shape), factor
    blocks = -(-k // 128)
    if recipe == ScalingType.BlockWise1x128:
        need(tuple(scale.shape) == (rows, blocks), f"1x128 scales: {tuple(scale.shape)}")
        need(scale.stride(0) == 1 and (blocks == 1 or scale.stride(1) == rows), "strides (1, rows)")
        need(rows % 4 == 0 and scale.data_ptr() % 16 == 0, "columns of scales begin at 16 bytes")
        flat = memory(scale)
        own = torch.tensor([[flat[r + c * rows] for c in range(blocks)] for r in range(rows)])
        return own.double().repeat_interleave(128, 1)[:, :k], factor
    if recipe == ScalingType.BlockWise128x128:
        long, down = up(blocks, 4), -(-rows // 128)
        need(tuple(scale.shape) == (long, down), f"128x128 scales: {tuple(scale.shape)}")
        need(scale.stride(0) == 1 and (down == 1 or scale.stride(1) == long), "strides (1, K/128)")
        flat = memory(scale)
        own = torch.tensor([[flat[c + r * long] for c in range(blocks)] for r in range(down)])
        own = own.double().repeat_interleave(128, 0)[:rows]
        return own.repeat_interleave(128, 1)[:, :k], factor
    need(swizzles[0] == SwizzleType.SWIZZLE_32_4_4, "scales are swizzled")
    if recipe == ScalingType.BlockWise1x32:
        need(data.dtype in FP8 and scale.dtype == torch.float8_e8m0fnu, "MXFP8")
        need(len(scales) == len(swizzles) == 1 and k % 32 == 0, "one level, blocks of 32")
        return tiles(scale, rows, k, 32), factor
    need(recipe == ScalingType.BlockWise1x16, f"recipe {recipe}")
    need(data.dtype == torch.float4_e2m1fn_x2 and scale.dtype == torch.float8_e4m3fn, "NVFP4")
    need(len(scales) == len(recipes) == len(swizzles), "as many swizzles as levels")
    if len(scales) == 2:
        need(recipes[1] == ScalingType.TensorWise, "a second level per tensor")
        need(swizzles[1] == SwizzleType.NO_SWIZZLE and scales[1].numel() == 1, "one factor")
        factor = float(scales[1])
    return tiles(scale, rows, k, 16), factor


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: list[torch.Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[torch.Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType] | None = None,
    swizzle_b: list[SwizzleType] | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The product, checked and computed in FP64 and rounded once."""
    need(not use_fast_accum, "fast accumulation is not what hybridq promises")
    need(mat_a.is_contiguous() and mat_b.t().is_contiguous(), "row-major times column-major")
    need(mat_a.data_ptr() % 16 == 0 and mat_b.data_ptr() % 16 == 0, "addresses of 16 bytes")
    need(not (mat_a.dtype == mat_b.dtype == torch.float8_e5m2), "no E5M2 by E5M2")
    need(
        scale_recipe_a[0] in (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        or scale_recipe_a == scale_recipe_b,
        "a known pair of recipes",
    )
    need(
        not (scale_recipe_a[0] == scale_recipe_b[0] == ScalingType.BlockWise128x128),
        "no 128x128 by 128x128",
    )
    if BLOCKS & {*scale_recipe_a, *scale_recipe_b}:
        both = {mat_a.dtype, mat_b.dtype}
        need(both == {torch.float8_e4m3fn}, "Invalid scaling configuration: block scales of E4M3")
    return _product(
        mat_a,
        mat_b,
        (scale_a, scale_recipe_a, swizzle_a or []),
        (scale_b, scale_recipe_b, swizzle_b or []),
        bias,
        output_dtype,
    )


def older_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm` of block scales, whose recipes follow from the sizes of the scales."""
    need(
        not use_fast_accum and scale_result is None, "no fast accumulation, no scale of the result"
    )
    need(mat_a.is_contiguous() and mat_b.t().is_contiguous(), "row-major times column-major")
    need(not (mat_a.dtype == mat_b.dtype == torch.float8_e5m2), "no E5M2 by E5M2")
    sides = [
        _blocks(scale, rows, mat_b.shape[0])
        for scale, rows in ((scale_a, mat_a.shape[0]), (scale_b.t(), mat_b.shape[1]))
    ]
    need([one[1] for one in sides].count([ScalingType.BlockWise128x128]) < 2, "no two of squares")
    return _product(mat_a, mat_b, sides[0], sides[1], bias, out_dtype)


_Side = tuple[list[torch.Tensor], list[ScalingType], list[SwizzleType]]


def _blocks(scale: torch.Tensor, rows: int, k: int) -> _Side:
    """A side of the newer product, by the sizes of its scales."""
    blocks = -(-k // 128)
    if tuple(scale.shape) == (rows, blocks):
        return [scale], [ScalingType.BlockWise1x128], []
    down, long = -(-rows // 128), up(blocks, 4)
    need(tuple(scale.shape) == (down, blocks), f"block scales: {tuple(scale.shape)}")
    need(scale.stride(1) == 1 and (down == 1 or scale.stride(0) == long), "rows of 16 bytes")
    # As the newer product takes them, which reads no more than these.
    made = torch.as_strided(scale, (long, down), (1, long))
    return [made], [ScalingType.BlockWise128x128], []


def _product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    first: _Side,
    second: _Side,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    left, right = values(mat_a), values(mat_b.t())
    (m, k), n = left.shape, right.shape[0]
    need(k % 16 == 0 and n % 16 == 0, f"K and N are multiples of 16, got {k} and {n}")
    if ScalingType.RowWise in first[1]:
        need(output_dtype == torch.bfloat16 and bias is None, "products by rows are BF16")
    one, fa = expanded(*first, (m, k), mat_a, True)
    two, fb = expanded(*second, (n, k), mat_b, False)
    product = (left * one) @ (right * two).t() * (fa * fb)
    if bias is not None:
        need(tuple(bias.shape) == (n,) and bias.dtype == output_dtype, "bias of the result's dtype")
        need(output_dtype != torch.float32, "no bias with an FP32 result")
        product = product + bias.double()
    return product.to(output_dtype)
