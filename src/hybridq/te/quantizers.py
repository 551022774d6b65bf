"""Transformer Engine's quantizers: mutable objects, each with a frozen quantizer of hybridq inside.

What a quantizer makes holds the frozen one, so that a later change of this object does not reach
it. `internal=True` gives the same tensors under the storages' names: there is no bare storage.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/tensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import quantizers as ours
from ..errors import warn
from ..tensor import QuantizedTensor
from .common import recipe
from .constants import DType, element_of
from .python_quantizers import GivenScaleCodec, coded_quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]


class Quantizer:
    """Base of the quantizers.

    Args:
        rowwise, columnwise: planes to make.

    Attributes:
        rowwise_usage, columnwise_usage: the same, and may be set.
        internal: what it makes is an instance of the storage's class, and not of the tensor's.
        optimize_for_gemm: has no effect.
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool
    custom: bool = False
    _recipe: Any = recipe.CustomRecipe
    _made: Any = None
    #: Whether it equals another one of the same class and attributes.
    _is_value: bool = False
    #: Whether its columnwise planes may be transformed, and are made of rows that were gathered.
    has_transform: bool = False

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_made", None)  # made anew of what is changed
        object.__setattr__(self, name, value)

    @property
    def frozen(self) -> Any:
        """The quantizer of hybridq that this one is now."""
        if self._made is None:
            own = coded_quantizer(self) if self._is_users() else self._freeze()
            made = own.with_usage(bool(self.rowwise_usage), bool(self.columnwise_usage))
            object.__setattr__(self, "_made", made)
        return self._made

    @property
    def slot_value(self) -> Any:
        """What a module's slot takes, or a direction of a hybrid: the frozen value."""
        return self.frozen

    @classmethod
    def _is_users(cls) -> bool:
        """Whether a user's class says itself what becomes of a tensor."""
        return any(
            getattr(cls, name).__module__.split(".")[0] != __name__.split(".")[0]
            for name in ("quantize", "quantize_impl")
        )

    #: What makes the frozen quantizer, of the element and these attributes.
    _maker: Any = None
    _passed: tuple[str, ...] = ()

    def _freeze(self) -> Any:
        if self._maker is None:
            raise NotImplementedError(f"{type(self).__name__}: quantizes nothing by itself")
        given = {name: getattr(self, name) for name in self._passed}
        return self._maker(element_of(self.dtype), **given)  # type: ignore[attr-defined]

    # ---- quantization

    def __call__(self, tensor: torch.Tensor, **options: Any) -> QuantizedTensor:
        return self.quantize(tensor, **options)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Return `tensor` quantized, as `hybridq.Quantizer.quantize`.

        Args:
            tensor, out, dtype: as there.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        made: Any
        is_known = dtype is not None and not self._is_users()
        made = self.frozen.quantize(tensor, dtype=dtype) if is_known else self.quantize_impl(tensor)
        if self.internal and isinstance(made, QuantizedTensor):
            made.is_internal = True  # type: ignore[attr-defined]
        return made

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Return `tensor` quantized; what `quantize` calls, for classes that derive from this one.

        A class that overrides it is a quantizer written in Python, which a CustomRecipe may give
        any module but GroupedLinear: the guide has what it may return and what it costs.

        Args:
            tensor: `(..., K)`.
        """
        made: QuantizedTensor = self._asked(self._freeze(), lambda own: own.quantize(tensor))
        return made

    def _asked(self, own: Any, make: Callable[[Any], Any]) -> Any:
        """Return what `make` makes by a frozen quantizer with these usages; of none, no plane."""
        row, col = bool(self.rowwise_usage), bool(self.columnwise_usage)
        made = make(own.with_usage(row or not col, col))
        if not (row or col):
            made.clear()
        return made

    def multi_quantize(self, list_of_tensors: Sequence[torch.Tensor]) -> list[QuantizedTensor]:
        """Return each tensor quantized.

        Args:
            list_of_tensors: any number.
        """
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize `src` into all planes of `dst`; return `dst`.

        Args:
            src: of `dst`'s shape.
            dst: with planes of this quantizer.
            noop_flag: FP32 `[1]`: nothing is written where it is 1. Reading it waits for a device.
        """
        if noop_flag is None or float(noop_flag) != 1.0:
            with torch.no_grad():
                self.frozen.update_quantized(src, dst)
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """Return a tensor to be written into; its values are zeros.

        Args:
            shape, dtype, device, requires_grad: as for `hybridq.Quantizer.make_empty`.
            pin_memory: whether its buffers are in pinned memory of the host.
        """
        given: dict[str, Any] = {"dtype": dtype, "device": device}
        made = self._asked(self.frozen, lambda own: own.make_empty(tuple(shape), **given))
        made = made.pin_memory() if pin_memory and made.nbytes else made
        return made.requires_grad_(requires_grad)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record what `tensor` tells of scales to come: nothing, but of Float8Quantizer.

        Args:
            tensor: `(..., K)`.
        """

    # ---- what it says of itself

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change which planes are made.

        Args:
            rowwise, columnwise: None leaves that one as it is.
        """
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Return which planes are made."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Any:
        """Return another quantizer with the same attributes."""
        return copy.copy(self)

    def is_requantization_safe(self) -> bool:
        """Return whether quantizing the same values again gives the same bits."""
        made = self.frozen
        return bool(not made.is_stochastic and not made.has_given_scale)

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return what Transformer Engine says; gathers here take any plane."""
        return False

    def allows_save_original_input_for_backward(self) -> bool:
        """Return whether the backward may quantize the original again."""
        return True

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Return True: any shape can be quantized, and gathered so.

        Args:
            inp: any tensor.
        """
        return True

    def _get_compatible_recipe(self) -> Any:
        return self._recipe

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_made"}

    def __eq__(self, other: object) -> bool:
        if not (self._is_value and type(self) is type(other)):
            return self is other
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self.frozen) if self._is_value else id(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._fields().items())
        return f"{type(self).__name__}({shown})"


class Float8Quantizer(Quantizer):
    """FP8 with the caller's scale, which records the amax of what it sees.

    Args:
        scale, amax: FP32, one value each; values are multiplied with `scale`.
        fp8_dtype: DType of the codes.
        rowwise, columnwise: planes to make.
    """

    _recipe = recipe.DelayedScaling

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax, self.dtype = scale, amax, DType.cast(fp8_dtype)

    def _freeze(self) -> ours.Float8Quantizer:
        return ours.Float8Quantizer(self.scale, self.amax, element_of(self.dtype))

    @property
    def slot_value(self) -> Any:
        own = coded_quantizer(self, GivenScaleCodec)  # whose planes know the caller's tensors
        return own.with_usage(bool(self.rowwise_usage), bool(self.columnwise_usage))

    def calibrate(self, tensor: torch.Tensor) -> None:
        self.frozen.calibrate(tensor)


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale per tensor, from the tensor's own amax.

    Args:
        fp8_dtype: DType of the codes.
        rowwise, columnwise: planes to make.
        with_amax_reduction, amax_reduction_group: as `hybridq.Float8CurrentScalingQuantizer`.
        force_pow_2_scales, amax_epsilon: the same.
        device, use_existing_amax, scale, amax: have no effect, here and there.
    """

    _is_value = True
    _recipe = recipe.Float8CurrentScaling
    _maker = staticmethod(ours.Float8CurrentScalingQuantizer)
    _passed = (
        *("with_amax_reduction", "amax_reduction_group"),
        *("force_pow_2_scales", "amax_epsilon"),
    )

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            text = "use_existing_amax, scale and amax have no effect: the tensor's amax is taken"
            warn(f"{type(self).__name__}: {text}", DeprecationWarning)
        self.dtype = DType.cast(fp8_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


class Float8BlockQuantizer(Quantizer):
    """FP8 with one FP32 scale per 1x128 or 128x128 block.

    Args:
        fp8_dtype: DType of the codes.
        rowwise, columnwise: planes to make; they must be given.
        amax_epsilon, force_pow_2_scales, block_scaling_dim: as `hybridq.Float8BlockQuantizer`.
    """

    _is_value = True
    _recipe = recipe.Float8BlockScaling
    _maker = staticmethod(ours.Float8BlockQuantizer)
    _passed = ("amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
    block_len = 128

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp8_dtype)
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim


class MXFP8Quantizer(Quantizer):
    """MXFP8: one E8M0 scale per 32 values.

    Args:
        fp8_dtype: DType of the codes.
        rowwise, columnwise: planes to make.
        with_2d_quantization: one scale per 32x32 square.
    """

    _is_value = True
    _recipe = recipe.MXFP8BlockScaling
    _maker = staticmethod(ours.MXFP8Quantizer)
    _passed = ("with_2d_quantization",)

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_2d_quantization = DType.cast(fp8_dtype), with_2d_quantization


class NVFP4Quantizer(Quantizer):
    """NVFP4: E2M1, one E4M3 scale per 16 values, one FP32 amax.

    Args:
        fp4_dtype: DType.kFloat4E2M1.
        rowwise, columnwise: planes to make.
        with_amax_reduction, amax_reduction_group: as `hybridq.NVFP4Quantizer`.
        with_rht, with_post_rht_amax: the same; the amax is always taken after the transform.
        with_2d_quantization, stochastic_rounding, row_scaled_nvfp4: the same.
        with_random_sign_mask, nvfp4_use_4over6: the same.
        nvfp4_e4m3_max, nvfp4_4over6_err_mode: the same; without four-over-six of no effect.
    """

    _is_value = has_transform = True
    _recipe = recipe.NVFP4BlockScaling
    _maker = staticmethod(ours.NVFP4Quantizer)

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.cast(fp4_dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding, self.row_scaled_nvfp4 = stochastic_rounding, row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = str(nvfp4_4over6_err_mode).upper()
        self.with_random_sign_mask = with_random_sign_mask

    @property
    def _passed(self) -> tuple[str, ...]:  # type: ignore[override]
        over = ("nvfp4_use_4over6", "nvfp4_e4m3_max", "nvfp4_4over6_err_mode")
        return (
            *("with_amax_reduction", "amax_reduction_group", "with_rht", "with_2d_quantization"),
            *("stochastic_rounding", "row_scaled_nvfp4", "with_random_sign_mask"),
            *(over if self.nvfp4_use_4over6 else ()),
        )


class IdentityQuantizer(Quantizer):
    """Quantizes nothing: values stay in `dtype`.

    Args:
        dtype: None: the tensor's own.
        rowwise, columnwise: planes to make; both are one buffer.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _freeze(self) -> ours.Quantizer:
        return ours.IdentityQuantizer(dtype=self.dtype)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Return `tensor` as a tensor of the quantizer's dtype.

        Args:
            tensor, out, dtype: as of the base; None: the quantizer's dtype, if it has one.
        """
        return super().quantize(tensor, out=out, dtype=dtype or self.dtype)

    def make_empty(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> QuantizedTensor:
        """Return a tensor of zeros, of the quantizer's dtype if it has one.

        Args:
            shape, dtype, options: as of the base.
        """
        return super().make_empty(shape, dtype=self.dtype or dtype, **options)
