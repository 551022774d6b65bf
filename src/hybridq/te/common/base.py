"""What all recipes share: elements, parameters of GEMMs and of slots, the base class."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple

from ... import recipes as ours

__all__ = ["FAST_SUMS", "FP32_SUMS", "SUMS", "Format", "MMParams", "QParams", "Recipe"]


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Elements of forward tensors and of gradients, by their largest finite values."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """How a GEMM sums up.

    Args:
        use_split_accumulator: True asks for FP32 sums. GEMMs here always have them, which is what
            False leaves open.
    """

    use_split_accumulator: bool = True


FP32_SUMS: Final = MMParams()
FAST_SUMS: Final = MMParams(use_split_accumulator=False)


@dataclass(frozen=True)
class QParams:
    """How a slot is quantized.

    Args:
        power_2_scale: FP8: scales are powers of two.
        amax_epsilon: FP8: lower bound of an amax.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: NVFP4.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


#: Fields that say how a GEMM sums up.
SUMS: Final = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_OVERRIDES: Final = (None, "high_precision", "dequantized")


def _is(*names: str) -> Any:
    def predicate(cls: type) -> bool:
        return any(base.__name__ in names for base in cls.__mro__)

    predicate.__doc__ = f"Return whether the recipe is {' or '.join(names)}."
    return classmethod(predicate)


class Recipe(ours.RecipeSource):
    """Base of the recipes. `hybridq.autocast` takes them as well as `te.autocast` does.

    Example:
        >>> import hybridq.te as te
        >>> recipe = te.common.recipe.MXFP8BlockScaling()
        >>> recipe.mxfp8(), recipe.current
        (True, <MXFP8BlockScaling(): mxfp8>)
    """

    is_steady: ClassVar[bool] = True
    _made: ClassVar[ours.Recipe | None] = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_made", None)  # made anew of what is changed
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        self._check()

    @property
    def current(self) -> ours.Recipe:
        """The recipe of hybridq that this one is now."""
        if self._made is None:
            self._check()
            object.__setattr__(self, "_made", self.attending(self._freeze()))
        return self._made  # type: ignore[return-value]

    def attending(self, made: ours.Recipe) -> ours.Recipe:
        """Return a recipe of hybridq that quantizes attention as well, if `fp8_dpa` says so.

        Args:
            made: of this recipe.
        """
        return ours.with_attention(made) if getattr(self, "fp8_dpa", False) else made

    def _freeze(self) -> ours.Recipe:
        raise NotImplementedError(f"{type(self).__name__}.current: must be overridden")

    def _check(self) -> None:
        """Raise for values that nothing here is like."""
        own = type(self).__name__
        given = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        if given.get("fp8_format") in (Format.E5M2, Format.E2M1):
            raise ValueError(f"{own}: fp8_format must be E4M3 or HYBRID, got {self._format}")
        override = given.get("backward_override")
        if override not in _OVERRIDES:
            raise ValueError(f"{own}: backward_override must be of {_OVERRIDES}, got {override!r}")
        for name in SUMS:
            if name in given and not isinstance(given[name], MMParams):
                raise TypeError(f"{own}: {name} must be MMParams, got {given[name]!r}")
        if given.get("fp8_mha") and not given.get("fp8_dpa"):
            raise ValueError(
                f"{own}: fp8_mha must be False without fp8_dpa, whose tensors it is about, got True"
            )

    @property
    def _format(self) -> str:
        given: Any = getattr(self, "fp8_format", Format.E4M3)
        return str(getattr(given, "name", given))

    nvfp4 = _is("NVFP4BlockScaling")
    mxfp8 = _is("MXFP8BlockScaling")
    delayed = _is("DelayedScaling")
    float8_current_scaling = _is("Float8CurrentScaling")
    float8_per_tensor_scaling = _is("DelayedScaling", "Float8CurrentScaling")
    float8_block_scaling = _is("Float8BlockScaling")
    custom = _is("CustomRecipe")
