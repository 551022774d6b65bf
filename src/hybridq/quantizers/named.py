"""Constructors of Quantizer with the names and arguments that users of Transformer Engine know.

Source: Transformer Engine's quantizers; what each argument means is stated here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import SpecError, check_bools
from ..formats import DEFAULT_SIGNS, ERRORS, Element, Format, PlaneSpec, element, format
from ..tensor.in_graph import constructor
from .delayed import DelayedScalingRequest
from .quantizer import Quantizer
from .statistics import group_name

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "delayed_quantizer",
]

_DType = str | torch.dtype | Element


def _fp8(where: str, dtype: _DType, base: str) -> Format:
    """Return the format `base`, with its E5M2 twin if `dtype` says so."""
    chosen = element(dtype)
    if chosen.name not in ("e4m3", "e5m2"):
        raise SpecError(f"{where}: fp8_dtype must be e4m3 or e5m2, got {dtype!r}")
    return replace(format(base), element=chosen)


def _group(where: str, with_reduction: bool, group: Any) -> str | None:
    if with_reduction and group is None:
        raise ValueError(f"{where}: with_amax_reduction needs amax_reduction_group, got None")
    return group_name(group) if with_reduction else None


@constructor
def Float8CurrentScalingQuantizer(
    fp8_dtype: _DType = torch.float8_e4m3fn,
    device: Any = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    with_amax_reduction: bool = False,
    amax_reduction_group: Any = None,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Quantizer:
    """Return a quantizer to FP8 with one scale per tensor, from the tensor's own amax.

    Args:
        fp8_dtype: E4M3 or E5M2, as torch dtype or name.
        device: accepted and unused; a quantizer works on the tensor's device.
        rowwise, columnwise: planes to make.
        with_amax_reduction: reduce amax over `amax_reduction_group` first.
        amax_reduction_group: a process group or its name.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of amax.
    """
    where = "Float8CurrentScalingQuantizer"
    check_bools(where, with_amax_reduction=with_amax_reduction)
    fmt = replace(
        _fp8(where, fp8_dtype, "fp8_e4m3"), power_of_two=force_pow_2_scales, eps=amax_epsilon
    )
    spec = PlaneSpec(fmt)
    group = _group(where, with_amax_reduction, amax_reduction_group)
    return Quantizer(spec, spec, "original", rowwise, columnwise, group)


@constructor
def Float8BlockQuantizer(
    fp8_dtype: _DType = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
    block_scaling_dim: int = 2,
) -> Quantizer:
    """Return a quantizer to FP8 with one FP32 scale per block of 128.

    Args:
        fp8_dtype: E4M3 or E5M2, as torch dtype or name.
        rowwise, columnwise: planes to make.
        amax_epsilon: lower bound of a block's amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1: 1x128 blocks; 2: 128x128 blocks.

    Raises:
        SpecError: another dtype, epsilon or dimension.
    """
    if block_scaling_dim not in (1, 2):
        raise SpecError(
            f"Float8BlockQuantizer: block_scaling_dim must be 1 or 2, got {block_scaling_dim}"
        )
    base = "fp8_1x128" if block_scaling_dim == 1 else "fp8_128x128"
    fmt = replace(
        _fp8("Float8BlockQuantizer", fp8_dtype, base),
        power_of_two=force_pow_2_scales,
        eps=amax_epsilon,
    )
    return Quantizer(PlaneSpec(fmt), PlaneSpec(fmt), "original", rowwise, columnwise)


@constructor
def MXFP8Quantizer(
    fp8_dtype: _DType = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    with_2d_quantization: bool = False,
) -> Quantizer:
    """Return a quantizer to MXFP8: one E8M0 scale per 32 values.

    Args:
        fp8_dtype: E4M3 or E5M2, as torch dtype or name.
        rowwise, columnwise: planes to make.
        with_2d_quantization: one scale per 32x32 square, the same in both directions.
    """
    check_bools("MXFP8Quantizer", with_2d_quantization=with_2d_quantization)
    base = "mxfp8_32x32" if with_2d_quantization else "mxfp8"
    spec = PlaneSpec(_fp8("MXFP8Quantizer", fp8_dtype, base))
    return Quantizer(spec, spec, "original", rowwise, columnwise)


@constructor
def NVFP4Quantizer(
    fp4_dtype: _DType = "e2m1",
    rowwise: bool = True,
    columnwise: bool = True,
    with_amax_reduction: bool = False,
    amax_reduction_group: Any = None,
    with_rht: bool = False,
    with_post_rht_amax: bool = True,
    with_2d_quantization: bool = False,
    stochastic_rounding: bool = False,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_e4m3_max: int = 448,
    nvfp4_4over6_err_mode: str = "MAE",
    with_random_sign_mask: bool = True,
) -> Quantizer:
    """Return a quantizer to NVFP4: E2M1, one E4M3 scale per 16 values, one FP32 amax.

    Args:
        fp4_dtype: E2M1.
        rowwise, columnwise: planes to make.
        with_amax_reduction: reduce the tensor's amax over `amax_reduction_group` first.
        amax_reduction_group: a process group or its name.
        with_rht: apply the random Hadamard transform to the columnwise plane.
        with_post_rht_amax: must be True with `with_rht`: amax is taken after the transform.
        with_2d_quantization: one scale per 16x16 square, the same in both directions.
        stochastic_rounding: round codes stochastically (gradients).
        row_scaled_nvfp4: one FP32 amax per row of each plane instead of one per tensor; not with
            `with_2d_quantization` or `with_amax_reduction`.
        nvfp4_use_4over6: each block takes the better of two scales; not with `with_rht` or
            `stochastic_rounding`.
        nvfp4_e4m3_max: with `nvfp4_use_4over6`, the largest block scale: 448 or 256.
        nvfp4_4over6_err_mode: with `nvfp4_use_4over6`, the error compared: `"MAE"` or `"MSE"`.
        with_random_sign_mask: use the fixed random signs in the transform, else none.

    Raises:
        SpecError: arguments that do not go together.
        TypeError: a switch is no bool.
    """
    if element(fp4_dtype).name != "e2m1":
        raise SpecError(f"NVFP4Quantizer: fp4_dtype must be e2m1, got {fp4_dtype!r}")
    check_bools(
        "NVFP4Quantizer",
        with_amax_reduction=with_amax_reduction,
        with_rht=with_rht,
        with_post_rht_amax=with_post_rht_amax,
        with_2d_quantization=with_2d_quantization,
        nvfp4_use_4over6=nvfp4_use_4over6,
        with_random_sign_mask=with_random_sign_mask,
    )
    if with_rht and not with_post_rht_amax:
        raise SpecError(
            "NVFP4Quantizer: with_rht takes amax after the transform; with_post_rht_amax must be "
            "True, got False"
        )
    error = _error_mode(nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode)
    if row_scaled_nvfp4 and with_amax_reduction:
        raise SpecError(
            "NVFP4Quantizer: row_scaled_nvfp4 takes each row's own amax; with_amax_reduction must "
            "be False, got True"
        )
    fmt = format("nvfp4_16x16" if with_2d_quantization else "nvfp4")
    signs = (DEFAULT_SIGNS if with_random_sign_mask else 0) if with_rht else None
    bound = float(nvfp4_e4m3_max)
    row = PlaneSpec(fmt, stochastic_rounding, None, bound, error, row_scaled_nvfp4)
    return Quantizer(
        row,
        replace(row, signs=signs),
        "original",
        rowwise,
        columnwise,
        _group("NVFP4Quantizer", with_amax_reduction, amax_reduction_group),
    )


def _error_mode(use_4over6: bool, e4m3_max: int, err_mode: str) -> str | None:
    """Return PlaneSpec's `four_over_six` for Transformer Engine's three arguments."""
    if e4m3_max not in (448, 256):
        raise SpecError(f"NVFP4Quantizer: nvfp4_e4m3_max must be 448 or 256, got {e4m3_max!r}")
    error = str(err_mode).lower()
    if error not in ERRORS:
        raise SpecError(
            f"NVFP4Quantizer: nvfp4_4over6_err_mode must be MAE or MSE, got {err_mode!r}"
        )
    if use_4over6:
        return error
    if e4m3_max != 448 or error != "mae":
        raise SpecError(
            "NVFP4Quantizer: nvfp4_e4m3_max and nvfp4_4over6_err_mode belong to "
            f"nvfp4_use_4over6=True, got {e4m3_max} and {err_mode!r} without it"
        )
    return None


@constructor
def IdentityQuantizer(
    *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
) -> Quantizer:
    """Return a quantizer that quantizes nothing: values stay in `dtype`.

    Args:
        dtype: float32, bfloat16, float16, or None: the tensor's own.
        rowwise, columnwise: planes to make; both are one buffer.
    """
    spec = PlaneSpec(format("identity"))
    return Quantizer(
        spec if dtype is None else spec.resolve(dtype),
        spec if dtype is None else spec.resolve(dtype),
        "original",
        rowwise,
        columnwise,
    )


@constructor
def HybridQuantizer(
    *,
    rowwise_quantizer: Quantizer | DelayedScalingRequest,
    columnwise_quantizer: Quantizer | DelayedScalingRequest,
    columnwise_source: str = "original",
) -> Quantizer:
    """Return a quantizer that takes its rowwise plane from one and the columnwise from another.

    Args:
        rowwise_quantizer: its rowwise spec is used; or a request for delayed scaling.
        columnwise_quantizer: its columnwise spec is used; or such a request.
        columnwise_source: `"original"` or `"rowwise_dequantized"`: what the columnwise plane is
            made of.

    Raises:
        TypeError: an argument is neither a Quantizer nor a DelayedScalingRequest.
        SpecError: a spec is missing, or the two reduce amax over different groups.
    """
    rowwise = _of_direction("rowwise_quantizer", rowwise_quantizer)
    columnwise = _of_direction("columnwise_quantizer", columnwise_quantizer)
    row, col = rowwise.rowwise, columnwise.columnwise
    if row is None or col is None:
        raise SpecError(
            "HybridQuantizer: rowwise_quantizer must have a rowwise spec and columnwise_quantizer "
            "a columnwise one"
        )
    groups = {
        part.amax_group
        for part, spec in ((rowwise, row), (columnwise, col))
        if spec.needs_tensor_amax
    }
    if len(groups) > 1:
        raise SpecError(
            f"HybridQuantizer: both must reduce amax over one group, got {sorted(map(str, groups))}"
        )
    return Quantizer(
        row,
        col,
        columnwise_source,
        amax_group=next(iter(groups), None),
        rowwise_delay=rowwise.rowwise_delay,
        columnwise_delay=columnwise.columnwise_delay,
    )


def _of_direction(name: str, given: Quantizer | DelayedScalingRequest) -> Quantizer:
    if isinstance(given, DelayedScalingRequest):
        return delayed_quantizer(given)
    if not isinstance(given, Quantizer):
        raise TypeError(f"HybridQuantizer: {name} must be a Quantizer, got {type(given).__name__}")
    return given


def delayed_quantizer(request: DelayedScalingRequest, is_gradient: bool = False) -> Quantizer:
    """Return the quantizer of a slot whose planes both take their scale as `request` says.

    Args:
        request: how the scale follows from earlier steps.
        is_gradient: of a gradient's slot.
    """
    base = _fp8("DelayedScalingRequest", request.element(is_gradient), "fp8_e4m3")
    spec = PlaneSpec(base)
    return Quantizer(spec, spec, rowwise_delay=request, columnwise_delay=request)
