"""Stand-ins on a CPU, in FP64, for torch's grouped products on a GPU: scaled ones and BF16.

As literal as a GPU: what torch and its kernels check or assert is checked (GroupedBlas.cpp,
GroupedMMUtils.h, GroupMMCommon.cuh; MSLK, grouped_common.cuh), scales are read out of memory where
those kernels look for each group's, and what they do not write stays NaN. Some versions take more
than is allowed here: a contraction over no tokens is an error, since older ones stop the GPU.
It shares no code with what it tests.
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, SwizzleType

from scaled_mm_oracle import memory, need, up, values


def is_transposed(mat: torch.Tensor) -> bool:
    """Whether the last axis but one is contiguous; strides are checked as torch does."""
    step = 16 // mat.element_size()
    need(mat.data_ptr() % 16 == 0, "an address of 16 bytes")
    down, right = mat.stride()[-2:]
    if down == 1 and right >= max(1, mat.shape[-2]):
        need(right % step == 0, f"strides of 16 bytes, got {mat.stride()}")
        return True
    need(right == 1 and down >= max(1, mat.shape[-1]), f"strides, got {mat.stride()}")
    need(down % step == 0, f"strides of 16 bytes, got {mat.stride()}")
    return False


def bounds(offs: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Begin and end of every group."""
    need(offs.dtype == torch.int32 and offs.dim() == 1, "int32 [G]")
    need(0 < offs.shape[0] < 1024, "fewer than 1024 groups")
    ends = offs.tolist()
    found = list(zip([0, *ends[:-1]], ends, strict=True))
    need(all(begin <= end <= size for begin, end in found), f"ends within {size}, got {ends}")
    return found


def tile_scales(flat: list[float], start: int, rows: int, blocks: int) -> torch.Tensor:
    """Scales `[rows, blocks]` out of 128 x 4 tiles that begin at `start`."""
    across = up(blocks, 4) // 4
    out = torch.empty(rows, blocks, dtype=torch.float64)
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * across + c // 4
            out[r, c] = flat[start + tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
    return out


class _Blocks:
    """Block scales: where MSLK's kernels find those of each group."""

    def __init__(self, scale: torch.Tensor, width: int, groups: list[tuple[int, int]]) -> None:
        need(scale.is_contiguous(), "contiguous scales")
        self.scale, self.width, self.groups = scale, width, groups
        self.flat = memory(scale)

    def wide(self, start: int, rows: int, k: int) -> torch.Tensor:
        need(k % self.width == 0, f"K in blocks of {self.width}")
        own = tile_scales(self.flat, start, rows, k // self.width)
        return own.repeat_interleave(self.width, 1)

    def of_rows(self, group: int, k: int) -> torch.Tensor:
        """Ragged rows: each group's scales begin with a tile."""
        sizes = [end - begin for begin, end in self.groups]
        before = sum(up(size, 128) for size in sizes[:group])
        return self.wide(before * up(k // self.width, 4), sizes[group], k)

    def of_stack(self, group: int, n: int, k: int) -> torch.Tensor:
        step = up(n, 128) * up(k // self.width, 4)
        need(tuple(self.scale.shape) == (len(self.groups), step), f"{tuple(self.scale.shape)}")
        return self.wide(group * step, n, k)

    def of_columns(self, group: int, rows: int) -> torch.Tensor:
        """A ragged contraction: the scales of one group after those of the other."""
        blocks = [(end - begin) // self.width for begin, end in self.groups]
        before = sum(up(count, 4) for count in blocks[:group])
        need(self.scale.dim() == 2 and self.scale.shape[0] >= rows, f"{tuple(self.scale.shape)}")
        begin, end = self.groups[group]
        return self.wide(up(rows, 128) * before, rows, end - begin)


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: list[torch.Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[torch.Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType] | None = None,
    swizzle_b: list[SwizzleType] | None = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The product of every group, checked and computed in FP64 and rounded once."""
    need(not use_fast_accum, "fast accumulation is not what hybridq promises")
    need(bias is None and output_dtype == torch.bfloat16, "BF16, and nothing follows")
    need(not is_transposed(mat_a) and is_transposed(mat_b), "row-major times column-major")
    need(mat_a.shape[-1] % 16 == 0, f"K in bytes, got {mat_a.shape}")
    need(mat_b.shape[-2] % 16 == 0 and mat_b.shape[-1] % 16 == 0, f"got {mat_b.shape}")
    need(mat_a.dim() == 2 and offs is not None, "ragged")
    need(scale_recipe_a == scale_recipe_b and swizzle_a == swizzle_b, "a known pair of recipes")
    is_stack = mat_b.dim() == 3
    recipe, right = scale_recipe_a, mat_b.transpose(-2, -1)
    is_fp4 = mat_a.dtype == torch.float4_e2m1fn_x2
    per_byte = 2 if is_fp4 else 1
    m, k, n = mat_a.shape[0], mat_a.shape[1] * per_byte, mat_b.shape[-1]
    groups = bounds(offs, m if is_stack else k)
    count = len(groups)
    if is_stack:
        need(mat_b.shape[0] == count and mat_b.shape[1] == mat_a.shape[1], "a b for each group")
        out = torch.full((m, n), float("nan"), dtype=torch.float64)
    else:
        need(mat_b.shape[0] == mat_a.shape[1], "one contraction")
        out = torch.full((count, m, n), float("nan"), dtype=torch.float64)
        need(all(end > begin for begin, end in groups), "a contraction over no tokens")
        need(all((end - begin) % 16 == 0 for begin, end in groups), "groups begin at 16 bytes")
    if recipe == [ScalingType.RowWise]:
        need(mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn and not swizzle_a, "E4M3")
        first, second = scale_a[0], scale_b[0]
        need(first.dtype == second.dtype == torch.float32, "FP32 scales")
        need(first.is_contiguous() and first.dim() == 1, "scales of a")
        need(len(first) == (m if is_stack else m * count), f"scales of a: {len(first)}")
        if is_stack:
            need(tuple(second.shape) == (count, n) and second.stride(1) == 1, "scales of b")
        else:
            need(tuple(second.shape) == (n * count,) and second.is_contiguous(), "scales of b")
        factor = [1.0] * count
    else:
        width = 16 if is_fp4 else 32
        scales = (torch.float8_e4m3fn if is_fp4 else torch.float8_e8m0fnu,)
        levels = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        need(recipe == (levels if is_fp4 else [ScalingType.BlockWise1x32]), f"recipe {recipe}")
        need(is_fp4 or mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn, "E4M3")
        need(swizzle_a[0] == SwizzleType.SWIZZLE_32_4_4, "scales are swizzled")
        need(scale_a[0].dtype in scales and scale_b[0].dtype in scales, "dtype of the scales")
        need(mat_a.is_contiguous() and right.is_contiguous(), "contiguous operands")
        need(scale_a[0].dim() == 2 and scale_a[0].shape[0] >= m, "scales of a are [rows, blocks]")
        a_scale, b_scale = (_Blocks(one[0], width, groups) for one in (scale_a, scale_b))
        factor = [1.0] * count
        if is_fp4:
            need(len(scale_a) == len(scale_b) == 2, "two levels")
            both = [one[1] for one in (scale_a, scale_b)]
            need(all(tuple(f.shape) == (count,) for f in both), "a factor for each group")
            factor = (both[0] * both[1]).double().tolist()
        elif is_stack and m // count == 0:
            return out.to(output_dtype)  # MSLK returns before it writes
    for g, (begin, end) in enumerate(groups):
        if is_stack:
            if end == begin:
                continue
            left, other = values(mat_a[begin:end]), values(right[g])
        else:
            cut = slice(begin // per_byte, end // per_byte)
            left, other = values(mat_a[:, cut]), values(right[:, cut])
        if recipe == [ScalingType.RowWise]:
            rows = first[begin:end] if is_stack else first[g * m : (g + 1) * m]
            columns = second[g] if is_stack else second[g * n : (g + 1) * n]
            one, two = rows.double()[:, None], columns.double()[:, None]
        elif is_stack:
            one, two = a_scale.of_rows(g, k), b_scale.of_stack(g, n, k)
        else:
            one, two = a_scale.of_columns(g, m), b_scale.of_columns(g, n)
        product = (left * one) @ (other * two).t() * factor[g]
        if is_stack:
            out[begin:end] = product
        else:
            out[g] = product
    return out.to(output_dtype)


def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """BF16 operands; a contraction over nothing is taken only with tokens below each other."""
    need(mat_a.dtype == mat_b.dtype == torch.bfloat16, "BF16")
    below = is_transposed(mat_a), not is_transposed(mat_b)
    is_stack = mat_b.dim() == 3
    groups = bounds(offs, mat_a.shape[0] if is_stack else mat_a.shape[1])
    left, right = mat_a.double(), mat_b.double()
    if is_stack:
        out = torch.full((mat_a.shape[0], mat_b.shape[2]), float("nan"), dtype=torch.float64)
        for g, (begin, end) in enumerate(groups):
            out[begin:end] = left[begin:end] @ right[g]
        return out.bfloat16()
    shape = (len(groups), mat_a.shape[0], mat_b.shape[1])
    out = torch.full(shape, float("nan"), dtype=torch.float64)
    for g, (begin, end) in enumerate(groups):
        if below != (True, True):
            need(end > begin, "a contraction over no tokens")
        if below != (True, True) and g < len(groups) - 1:
            need((end - begin) % 8 == 0, "groups begin at 16 bytes")
        if end > begin:
            out[g] = left[:, begin:end] @ right[begin:end]
    return out.bfloat16()
