"""Transformer Engine's recipes: mutable dataclasses, each with a frozen recipe of hybridq inside.

A field that has a meaning here is taken over; one that has none is accepted at its default, and
any other value of it is refused by name. Environment variables are not read.

Source: names, order and defaults of fields: Transformer Engine's `common/recipe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar

import torch

from ... import recipes as ours
from ...quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from ..python_quantizers import keep_for
from .base import FAST_SUMS, FP32_SUMS, SUMS, Format, MMParams, QParams, Recipe
from .scaling import scaling_algorithm

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "quantizer_factory",
]


@dataclass
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amaxes of earlier steps.

    Args:
        margin, fp8_format, amax_history_len, reduce_amax: as `hybridq.recipes.DelayedScaling`.
        amax_compute_algo: `"max"`, `"most_recent"`, or `f(history) -> amax` of FP32 `[length, n]`,
            slot 0 the newest.
        scaling_factor_compute_algo: None, or `f(amax, old_scale, fp8_max, recipe) -> scale`.
        fp8_dpa: attention is quantized, too (`hybridq.recipes.with_attention`).
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None.
        override_linear_precision: `(False, False, False)`; no field.
        params_dtype, device: have no effect, since a recipe has no parameters; no fields.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.

    Source: the last three: what Megatron-Core's `TEDelayedScaling` gives it.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    override_linear_precision: InitVar[tuple[bool, ...]] = (False, False, False)
    params_dtype: InitVar[Any] = None
    device: InitVar[Any] = None

    def __post_init__(
        self, override_linear_precision: tuple[bool, ...], params_dtype: Any, device: Any
    ) -> None:
        if any(override_linear_precision):
            raise NotImplementedError(
                "DelayedScaling: override_linear_precision must be (False, False, False), got "
                f"{override_linear_precision}; of the other recipes single products may stay in "
                'high precision, as hybridq.recipe("fp8_current", wgrad="bf16")'
            )
        super().__post_init__()

    def _freeze(self) -> ours.Recipe:
        return self.with_group(None)

    def with_group(self, group: Any) -> ours.Recipe:
        """Return the recipe of hybridq whose amaxes are reduced over a process group.

        Args:
            group: None: the default group.
        """
        return ours.DelayedScaling(
            self.margin,
            self._format,
            self.amax_history_len,
            scaling_algorithm(self),
            self.reduce_amax,
            group,
            backward_override=self.backward_override,
        )


@dataclass
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor's own amax.

    `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` are attributes, which may
    be set to other QParams.

    Args:
        use_power_2_scales, fp8_format: as `hybridq.recipes.Float8CurrentScaling`.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: any MMParams: sums are FP32.
        fp8_dpa: attention is quantized, too (`hybridq.recipes.with_attention`).
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None, `"high_precision"` or `"dequantized"`.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = FAST_SUMS
    fp8_gemm_dgrad: MMParams = FP32_SUMS
    fp8_gemm_wgrad: MMParams = FP32_SUMS
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        params = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params

    def _freeze(self) -> ours.Recipe:
        plain = ours.Float8CurrentScaling(
            self.use_power_2_scales, self._format, backward_override=self.backward_override
        )

        def make(params: QParams, is_weight: bool, is_gradient: bool) -> Quantizer:
            _only_fp8(self, params)
            return Float8CurrentScalingQuantizer(
                "e5m2" if is_gradient and self._format == "HYBRID" else "e4m3",
                force_pow_2_scales=params.power_2_scale,
                amax_epsilon=params.amax_epsilon,
            )

        edge = QParams(power_2_scale=self.use_power_2_scales)
        return _known_or(plain, _per_slot(self, "fp8_quant", make, edge))


@dataclass
class MXFP8BlockScaling(Recipe):
    """MXFP8: E8M0 scales of 1x32 blocks.

    Args:
        margin: 0.
        fp8_format, enable_2d_quantization: as `hybridq.recipes.MXFP8BlockScaling`.
        fp8_dpa: attention is quantized, too (`hybridq.recipes.with_attention`).
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None, `"high_precision"` or `"dequantized"`.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def _freeze(self) -> ours.Recipe:
        if self.margin != 0:
            raise ValueError(
                "MXFP8BlockScaling: margin must be 0, since scales of blocks have none, got "
                f"{self.margin}"
            )
        return ours.MXFP8BlockScaling(
            self._format, self.enable_2d_quantization, backward_override=self.backward_override
        )


@dataclass
class Float8BlockScaling(Recipe):
    """FP8 with one scale per 1x128 or 128x128 block.

    `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` are attributes, which may
    be set to other QParams. Two operands in 128x128 blocks are no error here.

    Args:
        use_f32_scales, fp8_format: as `hybridq.recipes.Float8BlockScaling`.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: the same.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: MMParams that ask for FP32 sums.
        fp8_dpa: attention is quantized, too (`hybridq.recipes.with_attention`).
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None, `"high_precision"` or `"dequantized"`.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = FP32_SUMS
    fp8_gemm_dgrad: MMParams = FP32_SUMS
    fp8_gemm_wgrad: MMParams = FP32_SUMS
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SUMS:
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(f"Float8BlockScaling: {name} must ask for FP32 sums, got False")
        params = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params

    def _freeze(self) -> ours.Recipe:
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        plain = ours.Float8BlockScaling(
            self.use_f32_scales, self._format, *dims, backward_override=self.backward_override
        )

        def make(params: QParams, is_weight: bool, is_gradient: bool) -> Quantizer:
            _only_fp8(self, params)
            return Float8BlockQuantizer(
                "e5m2" if is_gradient and self._format == "HYBRID" else "e4m3",
                force_pow_2_scales=params.power_2_scale,
                amax_epsilon=params.amax_epsilon,
                block_scaling_dim=dims[1 if is_weight else 2 * is_gradient],
            )

        return _known_or(plain, _per_slot(self, "fp8_quant", make))


@dataclass
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 with E4M3 scales of 1x16 blocks, 16x16 for weights.

    `fp4_quant_fwd_inp`, `fp4_quant_fwd_weight` and `fp4_quant_bwd_grad` are attributes, which may
    be set to other QParams.

    Args:
        disable_rht, disable_stochastic_rounding, disable_2d_quantization: as
            `hybridq.recipes.NVFP4BlockScaling`.
        row_scaled_activation, nvfp4_4over6: the same.
        nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode: the same; without four-over-six the
            latter says nothing.
        fp4_format, fp8_format: E2M1 and E4M3.
        fp8_dpa: attention is quantized, too (`hybridq.recipes.with_attention`).
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None, `"high_precision"` or `"dequantized"`.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            if getattr(self, name) is not only:
                got = getattr(self, name)
                raise ValueError(f"NVFP4BlockScaling: {name} must be {only.name}, got {got}")
        rht = not self.disable_rht
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=rht, stochastic_rounding=not self.disable_stochastic_rounding
        )

    def _freeze(self) -> ours.Recipe:
        mode = self.nvfp4_4over6_err_mode
        if self.nvfp4_4over6 == "none" and mode == "MSE":
            mode = "MAE"  # no error is compared
        plain = ours.NVFP4BlockScaling(
            self.disable_rht,
            self.disable_stochastic_rounding,
            self.disable_2d_quantization,
            self.row_scaled_activation,
            self.nvfp4_4over6,
            self.nvfp4_4over6_e4m3_use_256,
            mode,
            backward_override=self.backward_override,
        )

        def make(params: QParams, is_weight: bool, is_gradient: bool) -> Quantizer:
            slot = "weight" if is_weight else "grad_output" if is_gradient else "input"
            row = plain.quantizer(ours.QuantizerRole("linear", slot)).rowwise
            over = None if row is None else row.four_over_six
            options: dict[str, Any] = {}
            if row is not None and over is not None:
                options = {
                    "nvfp4_use_4over6": True,
                    "nvfp4_4over6_err_mode": over,
                    "nvfp4_e4m3_max": int(row.tensor_bound),
                }
            return NVFP4Quantizer(
                with_rht=params.random_hadamard_transform,
                with_post_rht_amax=params.random_hadamard_transform,
                with_2d_quantization=params.fp4_2d_quantization,
                stochastic_rounding=params.stochastic_rounding,
                row_scaled_nvfp4=self.row_scaled_activation and slot == "input",
                **options,
            )

        return _known_or(plain, _per_slot(self, "fp4_quant", make))


@dataclass(frozen=True)
class _BySlot:
    """A factory of three quantizers, equal to another one of the same; or of two more.

    `boundary` is of a module's output and of its input's gradient, where these are no neighbours'.
    """

    reads_names: ClassVar[bool] = False
    forward: Quantizer
    weight: Quantizer
    gradient: Quantizer
    boundary: tuple[Quantizer, Quantizer] | None = None

    def __call__(self, role: ours.QuantizerRole) -> Quantizer:
        if self.boundary and role.tensor_type in ("output", "grad_input"):
            return self.boundary[role.is_gradient]
        if role.is_gradient:
            return self.gradient
        return self.weight if role.tensor_type == "weight" else self.forward


def _per_slot(
    recipe: Any,
    prefix: str,
    make: Callable[[QParams, bool, bool], Any],
    edge: QParams | None = None,
) -> Any:
    """Return the CustomRecipe of what `make(params, is_weight, is_gradient)` gives.

    `edge` is of outputs and of inputs' gradients; None: as inputs and gradients.
    """
    names = ("fwd_inp", "fwd_weight", "bwd_grad")
    params = [getattr(recipe, f"{prefix}_{name}") for name in names]
    for name, one in zip(names, params, strict=True):
        if not isinstance(one, QParams):
            raise TypeError(f"{type(recipe).__name__}: {prefix}_{name} must be QParams, got {one}")
    slots = _BySlot(
        make(params[0], False, False),
        make(params[1], True, False),
        make(params[2], False, True),
        None if edge is None else (make(edge, False, False), make(edge, False, True)),
    )
    return ours.CustomRecipe(slots, backward_override=recipe.backward_override)


def _only_fp8(recipe: Any, params: QParams) -> None:
    if replace(params, power_2_scale=False, amax_epsilon=0.0) != QParams():
        raise ValueError(
            f"{type(recipe).__name__}: QParams of FP8 have power_2_scale and amax_epsilon alone, "
            f"got {params}"
        )


def _known_or(plain: ours.Recipe, custom: ours.Recipe) -> ours.Recipe:
    """Return `plain`, whose text says more, if its quantizers are those of `custom`."""
    roles = [ours.QuantizerRole("linear", slot) for slot in ("input", "weight", "grad_output")]
    same = all(plain.quantizer(role) == custom.quantizer(role) for role in roles)
    return plain if same else custom


def quantizer_factory(*, key: Any) -> Callable[[Any], Any]:
    """Return a decorator that gives a factory its `qfactory_key`.

    Args:
        key: a name and a version, as a rule.

    Raises:
        TypeError: it has no hash.
    """
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"quantizer_factory: key must be hashable, got {key!r}") from None

    def keyed(factory: Any) -> Any:
        factory.qfactory_key = key
        return factory

    return keyed


class _Asked:
    """A caller's factory as hybridq asks it: with None for a boundary, and given frozen values.

    Equal to another one of the same factory, and so are recipes of both.
    """

    def __init__(self, qfactory: Callable[[Any], Any], fp8_dpa: bool = False) -> None:
        self.qfactory, self.fp8_dpa = qfactory, fp8_dpa
        self.reads_names = bool(getattr(qfactory, "reads_names", True))
        named = qfactory if hasattr(qfactory, "__qualname__") else type(qfactory)
        self.__dict__["__qualname__"] = named.__qualname__

    def __call__(self, role: ours.QuantizerRole) -> Any:
        asked: ours.QuantizerRole | None = role
        if role.tensor_type in ("output", "grad_input"):
            asked = None  # nobody said who takes it in
        elif role.module_type == "grouped_linear" and self.reads_names:
            # hybridq tells groups of a module apart, by `<name>.<g>`.
            asked = replace(role, name=role.name.rpartition(".")[0])
        made = self.qfactory(asked)
        own = getattr(made, "slot_value", getattr(made, "frozen", made))
        keep_for(getattr(self.qfactory, "__self__", self.qfactory), own)
        return own

    def __eq__(self, other: object) -> bool:
        own = (self.qfactory, self.fp8_dpa)
        return isinstance(other, _Asked) and own == (other.qfactory, other.fp8_dpa)

    def __hash__(self) -> int:
        return hash(self.qfactory)


@dataclass
class CustomRecipe(Recipe):
    """A recipe made of the caller's own function.

    Args:
        qfactory: `qfactory(role)`, asked once per slot; it returns a quantizer of `hybridq.te`, or
            of hybridq, or a DelayedScalingRequest. `role` is a QuantizerRole, or None for an
            output or a gradient of an input of which nobody said who takes it in.
        fp8_format: says nothing: quantizers have elements of their own.
        fp8_dpa: the factory is asked for the operands of attention, too: `role.module_type` is
            `"dpa"`, `role.tensor_type` `"qkv"`, `"s"`, `"do"` or `"dp"`.
        fp8_mha: with `fp8_dpa`; changes no number: the projections quantize the same tensors.
        backward_override: None, `"high_precision"` or `"dequantized"`.
        quantization_alignment: what `get_align_size_for_quantization` returns; any shape will do.
        qfactory_key: what `quantizer_factory` gave the factory; recipes of one function are one
            recipe, with a key or without.

    Raises:
        ValueError, TypeError, NotImplementedError: another value; the text names the field.
    """

    qfactory: Callable[[Any], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128
    qfactory_key: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qfactory_key is None:
            self.qfactory_key = getattr(self.qfactory, "qfactory_key", None)
        if self.quantization_alignment <= 0:
            raise ValueError(
                "CustomRecipe: quantization_alignment must be positive, got "
                f"{self.quantization_alignment}"
            )

    def _freeze(self) -> ours.Recipe:
        given: object = self.qfactory
        if not callable(given):
            got = type(given).__name__
            raise TypeError(f"CustomRecipe: qfactory must be callable, got {got}")
        return ours.CustomRecipe(
            _Asked(self.qfactory, bool(self.fp8_dpa)),
            backward_override=self.backward_override,
        )
