"""Planes as torch's scaled products take them: one function per kind of scaling.

A view changes no value. Where a plane's own blocks are larger than the kind's, scales repeat; a
narrower element is rewritten in a wider one; a power of two in FP32 becomes an E8M0 byte.

| kind | element | one scale per | scales |
| --- | --- | --- | --- |
| `tensor` | E4M3, E5M2 | tensor | FP32 |
| `row` | E4M3, E5M2 | row | FP32 |
| `block` | E4M3, E5M2 | 1x128 or 128x128 | FP32 |
| `mx` | E4M3, E5M2 | 1x32 | E8M0, swizzled |
| `nvfp4` | E2M1 | 1x16, and tensor | E4M3, swizzled, and FP32 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch

from ...formats import Element, PlaneSpec
from ...formats.elements import E2M1, E4M3, E5M2, E8M0, FP32
from ...reference import cast, decode_codes, fold_element, tensor_factor, unpack
from ..choice import Operand, OpQuery, select
from .operand_layout import ceil_to, fill_scale, pad_codes, pad_rows, scales_1x128, scales_128x128

__all__ = [
    "KINDS",
    "TILED_SCALES",
    "Scaled",
    "ScalingKind",
    "block_scales",
    "fp8_codes",
    "fp8_target",
    "is_foldable",
    "laid_down",
    "lies_down",
    "lies_in_squares",
    "mx_scales",
    "nvfp4_scales",
    "pair_reason",
    "rows_later",
    "swizzled",
    "tiled",
    "tiled_view",
    "two_levels",
    "unit_blocks",
    "view_reason",
]

#: torch's dtype of each element that scaled products take.
FP8: Final = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_BLOCK: Final = 128
_MX: Final = 32
_NV: Final = 16


@dataclass(frozen=True)
class Scaled:
    """An operand of `torch.nn.functional.scaled_mm`.

    Args:
        data: codes `[rows, K]` in torch's dtype, padded; a packed element has `K / 2` bytes.
        scales: one or two levels.
        recipes: names of `torch.nn.functional.ScalingType`, one per level.
        swizzles: names of `SwizzleType`, one per level, or empty.
        factor: FP32 `[1]` or `[rows]` that the product still has to be multiplied by, or None.
    """

    data: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    recipes: tuple[str, ...]
    swizzles: tuple[str, ...] = ()
    factor: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [self.data, *self.scales, *([] if self.factor is None else [self.factor])]


@dataclass(frozen=True)
class ScalingKind:
    """One way of scaling.

    Args:
        name: of the kind.
        reason: None if a plane of a spec with K columns (None: not known) can be viewed so, else
            why not.
        view: makes the view of an operand with that many rows, zeros added; the last argument
            says whether blocks of 128 rows may stay (only one operand's may).
        rows: multiple of rows that operand a needs; operand b needs 16.
    """

    name: str
    reason: Callable[[PlaneSpec, int | None], str | None]
    view: Callable[[Operand, int, bool], Scaled]
    rows: int = 1


def view_reason(kind: ScalingKind, a: PlaneSpec, b: PlaneSpec, k: int | None) -> str | None:
    """Return None if both planes can be viewed as `kind`, else why not."""
    return pair_reason(a, b) or _kind_reason(kind, a, b, k)


def pair_reason(a: PlaneSpec, b: PlaneSpec) -> str | None:
    """Return why no kind can multiply two planes, or None."""
    if a.signs != b.signs:
        return "one operand is transformed and the other is not, so it is transformed back first"
    for name, spec in (("a", a), ("b", b)):
        if spec.format.is_identity:
            return f"operand {name} is not quantized ({spec.format})"
    if fp8_target(a) == fp8_target(b) == E5M2:
        return "torch multiplies no two E5M2 matrices"
    return None


def _kind_reason(kind: ScalingKind, a: PlaneSpec, b: PlaneSpec, k: int | None) -> str | None:
    for name, spec in (("a", a), ("b", b)):
        reason = kind.reason(spec, k)
        if reason is not None:
            return f"operand {name} {reason}"
    return None


@lru_cache(maxsize=1024)
def fp8_target(spec: PlaneSpec) -> Element | None:
    """Return the FP8 element that the codes of `spec` have or fit into."""
    return None if spec.format.element is None else fold_element(spec.format.element)


@lru_cache(maxsize=64)
def _wider(element: Element, device: torch.device) -> torch.Tensor:
    """Return the E4M3 code of every code of a narrower element; copied to a device only once."""
    codes = torch.arange(1 << element.bits, dtype=torch.uint8, device="cpu")
    return cast(decode_codes(codes, element), E4M3).to(device)


def fp8_codes(operand: Operand, rows: int, step: int) -> torch.Tensor:
    """Return the operand's codes as E4M3 or E5M2, `[rows, K]`, K a multiple of `step`."""
    spec = operand.spec
    element, width = spec.format.element, spec.padded(operand.cols)
    data = operand.buffers[0]
    if element is not None and element not in FP8:
        data = _wider(element, data.device)[unpack(data, element, width).to(torch.int64)]
    target = fp8_target(spec) or E4M3
    return pad_codes(data, rows, ceil_to(width, step)).view(FP8[target])


def _is_fp8(spec: PlaneSpec) -> str | None:
    fmt = spec.format
    if fmt.element not in FP8:
        return f"has no FP8 element ({fmt})"
    if fmt.scale != FP32:
        return f"has no FP32 scales ({fmt})"
    return None


# ---- one scale per tensor


def _tensor_reason(spec: PlaneSpec, k: int | None) -> str | None:
    if spec.format.block is not None:
        return f"has more than one scale ({spec.format})"
    return _is_fp8(spec)


def _view_tensor(operand: Operand, rows: int, is_square: bool) -> Scaled:
    return Scaled(fp8_codes(operand, rows, 16), (operand.buffers[1],), ("TensorWise",))


# ---- one scale per row


def _row_reason(spec: PlaneSpec, k: int | None) -> str | None:
    block = spec.format.block
    if block is not None and (block[0] != 1 or k is None or block[1] < spec.padded(k)):
        return f"has not one scale per row ({spec.format})"
    return _is_fp8(spec)


def _view_row(operand: Operand, rows: int, is_square: bool) -> Scaled:
    scale = operand.buffers[1]
    if operand.spec.format.block is None:
        scale = fill_scale(scale, operand.rows, 1)
    return Scaled(fp8_codes(operand, rows, 16), (pad_rows(scale, rows).contiguous(),), ("RowWise",))


def rows_later(view: Scaled, rows: int) -> Scaled:
    """Return a view by rows whose scales are left to the result, as `factor`."""
    one = torch.ones(1, dtype=torch.float32, device=view.data.device)
    return replace(view, scales=(one,), recipes=("TensorWise",), factor=view.scales[0][:rows, 0])


# ---- FP32 scales of 1x128 or 128x128 blocks


def _block_reason(spec: PlaneSpec, k: int | None) -> str | None:
    block = spec.format.block
    if block is not None and block[1] % _BLOCK:
        return f"has blocks that are no multiple of 128 ({spec.format})"
    return _is_fp8(spec)


def _view_block(operand: Operand, rows: int, is_square: bool) -> Scaled:
    data = fp8_codes(operand, rows, 16)
    scale, is_square = block_scales(operand, is_square)
    if is_square:
        return Scaled(data, (scales_128x128(scale),), ("BlockWise128x128",))
    return Scaled(data, (scales_1x128(scale, rows),), ("BlockWise1x128",))


def lies_down(spec: PlaneSpec) -> bool:
    """Return whether a new plane has scales of 1x128 that lie as the product reads them."""
    return spec.scale_layout == "down" or spec.format.unfolded is not None


def lies_in_squares(spec: PlaneSpec, k: int) -> bool:
    """Return whether a plane has scales of 128x128 that lie as the product reads them.

    Args:
        spec: of the plane.
        k: its own columns, with a transform's padding.
    """
    # Blocks of a row, side by side, are a multiple of 16 bytes.
    return spec.format.block == (_BLOCK, _BLOCK) and ceil_to(k, _BLOCK) // _BLOCK % 4 == 0


@lru_cache(maxsize=1024)
def laid_down(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec of a plane that `_view_block` takes without a copy, for planes of 1x128."""
    if spec.format.block != (1, _BLOCK) or spec.format.scale != FP32:
        return spec
    return replace(spec, scale_layout="down")


@lru_cache(maxsize=1024)
def tiled(spec: PlaneSpec) -> PlaneSpec:
    """Return the spec of a plane whose scales are in the tiles that `mx` and `nvfp4` take.

    Only of planes whose codes and scales these take as they are.
    """
    fmt = spec.format
    is_mx = fmt.scale == E8M0 and fmt.element in FP8 and fmt.block in ((1, _MX), (_MX, _MX))
    is_nv = fmt.rule == "two_level" and fmt.element == E2M1
    is_nv = is_nv and fmt.block in ((1, _NV), (_NV, _NV))
    # Options that no tile kernel has are encoded, and then put into tiles.
    is_odd = spec.row_scaled or spec.four_over_six is not None
    return replace(spec, scale_layout="tiles") if (is_mx or is_nv) and not is_odd else spec


def unit_blocks(data: torch.Tensor, recipe: str) -> Scaled:
    """Return codes `[rows, K]`, both multiples of 128, with block scales that are all one.

    Args:
        data: in torch's dtype.
        recipe: `"BlockWise1x128"` or `"BlockWise128x128"`.
    """
    rows, blocks = data.shape[0], data.shape[1] // _BLOCK
    ones = torch.ones(rows, blocks, dtype=torch.float32, device=data.device)
    if recipe == "BlockWise128x128":
        return Scaled(data, (scales_128x128(ones[::_BLOCK]),), (recipe,))
    return Scaled(data, (scales_1x128(ones, rows),), (recipe,))


def block_scales(operand: Operand, is_square: bool) -> tuple[torch.Tensor, bool]:
    """Return an FP8 operand's scales, and whether they are one per 128x128.

    Args:
        operand: one that the kind `block` takes.
        is_square: squares of 128x128 may stay; else each row gets scales of its own.

    Returns:
        FP32 `[rows, ceil(K / 128)]` or `[ceil(rows / 128), ceil(K / 128)]`, any strides.
    """
    block, scale = operand.spec.format.block, operand.buffers[1]
    width = ceil_to(operand.spec.padded(operand.cols), _BLOCK) // _BLOCK
    if block is None:
        return fill_scale(scale, operand.rows, width), False
    if block == (_BLOCK, _BLOCK) and is_square:
        return scale, True
    return repeat_scales(scale, operand.rows, width, block[0], block[1] // _BLOCK), False


def repeat_scales(
    scale: torch.Tensor, rows: int, width: int, down: int, right: int
) -> torch.Tensor:
    """Return scales `[..., rows, width]` of blocks that were `down` times as tall, `right` as wide.

    Args:
        scale: `[..., ceil(rows / down), ceil(width / right)]`.
        rows, width: of the result.
        down, right: blocks of the result in one block of `scale`.
    """
    if down > 1:
        scale = scale.repeat_interleave(down, -2)[..., :rows, :]
    return scale.repeat_interleave(right, -1)[..., :width] if right > 1 else scale


# ---- E8M0 scales of 1x32 blocks


def _mx_reason(spec: PlaneSpec, k: int | None) -> str | None:
    fmt = spec.format
    if fmt.block is None or fmt.element is None or fmt.block[1] % _MX:
        return f"has no blocks of 32 ({fmt})"
    if fmt.scale == E8M0:
        return None if _fits(fmt.element) else f"has an element that is no FP8 ({fmt})"
    if not fmt.has_power_of_two_scales:
        return f"has scales that are no powers of two ({fmt})"
    return _is_fp8(spec)


def _fits(element: Element) -> bool:
    """Whether E4M3 or E5M2 holds every value of `element`."""
    target = fold_element(element)
    return (
        element.has_sign
        and (element == target or element.specials != "ieee")
        and element.mantissa_bits <= target.mantissa_bits
        and element.max <= target.max
        and element.min_subnormal >= target.min_subnormal
    )


def mx_scales(operand: Operand) -> torch.Tensor:
    """Return E8M0 bytes `[..., rows, ceil(K / 32)]`, one per row and 32 values.

    Args:
        operand: one that the kind `mx` takes; its buffers may be stacks.
    """
    width = ceil_to(operand.spec.padded(operand.cols), _MX) // _MX
    scale = operand.buffers[1]
    if scale.dtype == torch.float32:
        # The exponent field of a positive power of two is its byte; 2^-127, a subnormal, has 0.
        bits = scale.contiguous().view(torch.int32)
        scale = ((bits >> 23) & 255).to(torch.uint8)
    block = operand.spec.format.block or (1, _MX)
    return repeat_scales(scale, operand.rows, width, block[0], block[1] // _MX)


def _view_mx(operand: Operand, rows: int, is_square: bool) -> Scaled:
    data = fp8_codes(operand, rows, _MX)
    is_tiled = operand.spec.scale_layout == "tiles"
    tiles = operand.buffers[1] if is_tiled else swizzled(mx_scales(operand))
    scales = (tiles.view(torch.float8_e8m0fnu),)
    return Scaled(data, scales, ("BlockWise1x32",), ("SWIZZLE_32_4_4",))


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return scales `[rows, blocks]` in tiles, by the device's own kernel if it has one."""
    backend = select(OpQuery("swizzle", scale.device.type, scale.dtype))
    return backend.ops["swizzle"](scale.contiguous())


# ---- NVFP4


def _nvfp4_reason(spec: PlaneSpec, k: int | None) -> str | None:
    fmt = spec.format
    if fmt.rule != "two_level" or fmt.element != E2M1 or fmt.block is None or fmt.block[1] % _NV:
        return f"is no NVFP4 ({fmt})"
    return None


def nvfp4_scales(operand: Operand, blocks: int) -> torch.Tensor:
    """Return E4M3 bytes `[..., rows, blocks]`, one per row and 16 values, zeros added.

    Args:
        operand: one that the kind `nvfp4` takes; its buffers may be stacks.
        blocks: how many a row has at least.
    """
    block = operand.spec.format.block or (1, _NV)
    width = ceil_to(operand.spec.padded(operand.cols), _NV) // _NV
    scale = repeat_scales(operand.buffers[1], operand.rows, width, block[0], block[1] // _NV)
    if scale.shape[-1] == blocks:
        return scale
    return torch.nn.functional.pad(scale, (0, blocks - scale.shape[-1]))


def _view_nvfp4(operand: Operand, rows: int, is_square: bool) -> Scaled:
    wide = ceil_to(operand.spec.padded(operand.cols), 32)
    data = pad_codes(operand.buffers[0], rows, wide // 2).view(torch.float4_e2m1fn_x2)
    is_tiled = operand.spec.scale_layout == "tiles"
    tiles = operand.buffers[1] if is_tiled else swizzled(nvfp4_scales(operand, wide // _NV))
    scale = tiles.view(torch.float8_e4m3fn)
    factor = tensor_factor(operand.buffers, operand.spec)
    # Scaling by rows has no place in the product: its factors are applied to the result.
    return Scaled(data, (scale,), ("BlockWise1x16",), ("SWIZZLE_32_4_4",), factor)


def two_levels(view: Scaled) -> Scaled:
    """Return an NVFP4 view whose factor is a second level of scales."""
    if view.factor is None:
        return view
    return replace(
        view,
        scales=(*view.scales, view.factor.reshape(1)),
        recipes=(*view.recipes, "TensorWise"),
        swizzles=(*view.swizzles, "NO_SWIZZLE"),
        factor=None,
    )


#: torch's dtype of scales in tiles, by the name of their scaling.
TILED_SCALES: Final = {
    "BlockWise1x32": torch.float8_e8m0fnu,
    "BlockWise1x16": torch.float8_e4m3fn,
}


def tiled_view(
    scale: torch.Tensor, data: torch.Tensor, recipe: str, factor: torch.Tensor | None
) -> Scaled:
    """Return an operand whose scales are in tiles, with an NVFP4 factor as the second level.

    Args:
        scale: the tiles, of a plane that needs no padding and is not scaled by rows.
        data: its codes, in torch's dtype.
        recipe: a key of `TILED_SCALES`.
        factor: FP32 `[1]`; None: there is none.
    """
    scale = scale.view(TILED_SCALES[recipe])
    if factor is None:
        return Scaled(data, (scale,), (recipe,), ("SWIZZLE_32_4_4",))
    both, recipes = (scale, factor), (recipe, "TensorWise")
    return Scaled(data, both, recipes, ("SWIZZLE_32_4_4", "NO_SWIZZLE"))


@lru_cache(maxsize=1024)
def is_foldable(spec: PlaneSpec) -> bool:
    """Whether `reference.fold_plane` takes a plane of `spec`."""
    fmt = spec.format
    return (
        fmt.scale == E8M0
        and spec.scale_layout == ""
        and fmt.block is not None
        and _BLOCK % fmt.block[1] == 0
        and fmt.element is not None
        and _fits(fmt.element)
    )


#: By name, the layouts of scales that torch's scaled products take.
KINDS: Final = {
    kind.name: kind
    for kind in (
        ScalingKind("tensor", _tensor_reason, _view_tensor),
        ScalingKind("row", _row_reason, _view_row),
        ScalingKind("block", _block_reason, _view_block, rows=4),
        ScalingKind("mx", _mx_reason, _view_mx),
        ScalingKind("nvfp4", _nvfp4_reason, _view_nvfp4),
    )
}
