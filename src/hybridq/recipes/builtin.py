"""The built-in recipes, with Transformer Engine's names, fields and defaults.

A field that hybridq does not implement yet is not a field here: passing it is an error, and not
silently without effect.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Final

from ..errors import check_bools, must_be_one_of
from ..quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .choices import CHOICES
from .gemm_words import gemms_text
from .recipe import ChoosingRecipe, _set
from .roles import LINEAR, SLOTS, WEIGHT, QuantizerRole

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "FloatFormat",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
]


_SCOPES: Final = ("none", "weights", "activations", "all")


class FloatFormat(Enum):
    """FP8 elements of forward tensors and of gradients (Transformer Engine's `Format`)."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")

    def __repr__(self) -> str:
        return f"FloatFormat.{self.name}"

    def element(self, role: QuantizerRole) -> str:
        """Return the name of the element that the role's tensor is made of."""
        forward, gradient = self.value
        return gradient if role.is_gradient else forward


@dataclass(frozen=True, repr=False)
class _BuiltIn(ChoosingRecipe):
    """Prints the formats of its GEMMs, and is said by its name and its fields in a file."""

    has_options: ClassVar[bool] = True

    def __post_init__(self) -> None:
        switches = [field.name for field in fields(self) if isinstance(field.default, bool)]
        check_bools(type(self).__name__, **{name: getattr(self, name) for name in switches})
        super().__post_init__()

    def _formats_text(self) -> str:
        return gemms_text({slot: self.quantizer(QuantizerRole(LINEAR, slot)) for slot in SLOTS})

    def _table(self) -> dict[str, Any]:
        from .named import name_of  # whose recipes are made of these

        name = name_of(type(self)())
        if name is None:  # a class that derives from one of them
            return super()._table()
        options = {
            field.name: value.name if isinstance(value, FloatFormat) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default and field.name not in CHOICES
        }
        if "amax_reduction_group" in options:
            raise ValueError("to_toml: a process group is no part of a file, got one")
        return {"recipe": name, **({"options": options} if options else {}), **self._chosen_table()}


@dataclass(frozen=True, repr=False)
class _Float8Recipe(_BuiltIn):
    """Normalizes `fp8_format`, which may be given by name or as a peer's enumeration."""

    def __post_init__(self) -> None:
        given = self.fp8_format  # type: ignore[attr-defined]
        name = given if isinstance(given, str) else getattr(given, "name", None)
        known = FloatFormat.__members__
        if not isinstance(name, str) or name.upper() not in known:
            raise ValueError(f"{type(self).__name__}: fp8_format {must_be_one_of(known, given)}")
        _set(self, fp8_format=known[name.upper()])
        super().__post_init__()


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(_Float8Recipe):
    """FP8 with one scale per tensor, from the tensor's own amax.

    Args:
        use_power_2_scales: round scales down to powers of two.
        fp8_format: `HYBRID` (E4M3 forward, E5M2 for gradients) or `E4M3`; a FloatFormat, its name,
            or any enumeration member of that name.
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Raises:
        ValueError: unknown `fp8_format`.
    """

    use_power_2_scales: bool = False
    fp8_format: FloatFormat | str = FloatFormat.HYBRID

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.fp8_format.element(role),  # type: ignore[union-attr]
            force_pow_2_scales=self.use_power_2_scales,
        )


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(_Float8Recipe):
    """FP8 with one scale per 1x128 block of inputs and gradients, per 128x128 block of weights.

    Args:
        use_f32_scales: FP32 scales of any value instead of powers of two.
        fp8_format: `E4M3` or `HYBRID` (gradients in E5M2).
        x_block_scaling_dim: 1 for 1x128 blocks of inputs, 2 for 128x128.
        w_block_scaling_dim: the same for weights.
        grad_block_scaling_dim: the same for gradients.
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Raises:
        ValueError: unknown `fp8_format`, or a dim that is neither 1 nor 2.
    """

    use_f32_scales: bool = False
    fp8_format: FloatFormat | str = FloatFormat.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self) -> None:
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(
                    f"Float8BlockScaling: {name} must be 1 or 2, got {getattr(self, name)!r}"
                )
        super().__post_init__()

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        dim = self.x_block_scaling_dim
        if role.tensor_type == WEIGHT:
            dim = self.w_block_scaling_dim
        elif role.is_gradient:
            dim = self.grad_block_scaling_dim
        return Float8BlockQuantizer(
            self.fp8_format.element(role),  # type: ignore[union-attr]
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=not self.use_f32_scales,
            block_scaling_dim=dim,
        )


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(_Float8Recipe):
    """MXFP8: E8M0 scales of 1x32 blocks.

    Args:
        fp8_format: `E4M3` or `HYBRID` (gradients in E5M2).
        enable_2d_quantization: 32x32 blocks for weights: one plane serves both directions.
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Raises:
        ValueError: unknown `fp8_format`.
    """

    fp8_format: FloatFormat | str = FloatFormat.E4M3
    enable_2d_quantization: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return MXFP8Quantizer(
            self.fp8_format.element(role),  # type: ignore[union-attr]
            with_2d_quantization=self.enable_2d_quantization and role.tensor_type == WEIGHT,
        )


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(_BuiltIn):
    """NVFP4: E2M1 with E4M3 scales of 1x16 blocks, 16x16 for weights.

    Inputs and gradients pass a random Hadamard transform on their columnwise plane (the operands
    of the weight gradient); gradients are rounded stochastically.

    Args:
        disable_rht: no Hadamard transform.
        disable_stochastic_rounding: gradients are rounded to nearest even.
        disable_2d_quantization: 1x16 blocks for weights too.
        row_scaled_activation: one FP32 amax per row of a plane of an input, instead of one per
            tensor.
        nvfp4_4over6: `"none"`, `"weights"`, `"activations"` (inputs) or `"all"`: which tensors'
            blocks take the better of two scales; gradients never do.
        nvfp4_4over6_e4m3_use_256: of those, which have block scales up to 256 instead of 448.
        nvfp4_4over6_err_mode: the error that is compared, `"MAE"` or `"MSE"`.
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    Raises:
        ValueError: an unknown choice; four-over-six of activations without `disable_rht`, since it
            does not go with the transform; an option of four-over-six where nothing has it.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"

    def __post_init__(self) -> None:
        mode = str(self.nvfp4_4over6_err_mode).upper()
        for name, given, known in (
            ("nvfp4_4over6", self.nvfp4_4over6, _SCOPES),
            ("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256, _SCOPES),
            ("nvfp4_4over6_err_mode", mode, ("MAE", "MSE")),
        ):
            if given not in known:
                raise ValueError(f"NVFP4BlockScaling: {name} {must_be_one_of(known, given)}")
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                "NVFP4BlockScaling: four-over-six of activations does not go with the Hadamard "
                f"transform, got nvfp4_4over6={self.nvfp4_4over6!r}; add disable_rht=True or "
                "choose 'weights'"
            )
        if self.nvfp4_4over6 == "none" and mode != "MAE":
            raise ValueError(
                "NVFP4BlockScaling: nvfp4_4over6_err_mode belongs to four-over-six, got "
                f"{self.nvfp4_4over6_err_mode!r} with nvfp4_4over6='none'"
            )
        _set(self, nvfp4_4over6_err_mode=mode)
        super().__post_init__()

    def _four_over_six(self, scope: str) -> dict[str, Any]:
        """Return NVFP4Quantizer's arguments for tensors of `scope`."""
        if self.nvfp4_4over6 not in (scope, "all"):
            return {}
        return {
            "nvfp4_use_4over6": True,
            "nvfp4_e4m3_max": 256 if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
        }

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == WEIGHT:
            return NVFP4Quantizer(
                with_2d_quantization=not self.disable_2d_quantization,
                **self._four_over_six("weights"),
            )
        with_rht = not self.disable_rht
        if role.is_gradient:
            return NVFP4Quantizer(
                with_rht=with_rht,
                with_post_rht_amax=with_rht,
                stochastic_rounding=not self.disable_stochastic_rounding,
            )
        return NVFP4Quantizer(
            with_rht=with_rht,
            with_post_rht_amax=with_rht,
            row_scaled_nvfp4=self.row_scaled_activation,
            **self._four_over_six("activations"),
        )
