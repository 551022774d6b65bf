"""What a caller says of one operand: a format, with options named as quantizers name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import SpecError, must_be_one_of
from ..formats import DEFAULT_SIGNS, ERRORS, Format, PlaneSpec, format

__all__ = ["AS_IT_IS", "Named", "plane_of"]

#: Names that leave an operand as it is, whatever its dtype.
AS_IT_IS: Final = ("bf16", "high_precision", "identity")
#: The options of a format, by the argument of the quantizers that has the name: its default.
_OPTIONS: Final[dict[str, Any]] = {
    "stochastic_rounding": False,
    "with_rht": False,
    "with_random_sign_mask": True,
    "with_2d_quantization": False,
    "row_scaled_nvfp4": False,
    "nvfp4_use_4over6": False,
    "nvfp4_e4m3_max": 448,
    "nvfp4_4over6_err_mode": "MAE",
    "force_pow_2_scales": None,
    "amax_epsilon": None,
}
#: Those that take a number or a name; all others are bools.
_VALUES: Final = ("nvfp4_e4m3_max", "nvfp4_4over6_err_mode", "amax_epsilon")


@dataclass(frozen=True)
class Named:
    """A format and the options that were given with it.

    Args:
        format: the format.
        options: those that were given, by name.
        whole: the plane's spec where that was given, which leaves nothing open; else None.
    """

    format: Format
    options: Mapping[str, Any]
    whole: PlaneSpec | None = None

    def takes(self, option: str) -> bool:
        """Return whether an option of the whole recipe can be filled in here.

        Args:
            option: `"stochastic_rounding"`, `"with_rht"` or `"with_2d_quantization"`.
        """
        if self.whole is not None or option in self.options or self.format.is_identity:
            return False
        is_square = self.format.block is not None and self.format.block[0] != 1
        if option == "with_2d_quantization":
            return self.format.block is not None and not is_square
        return option != "with_rht" or not is_square

    def filled(self, option: str) -> Named:
        """Return this with an option that it `takes`.

        Args:
            option: its name.
        """
        return replace(self, options={**self.options, option: True})

    def spec(self, where: str) -> PlaneSpec:
        """Return the plane's spec.

        Args:
            where: the operand, for errors.

        Raises:
            SpecError: options that do not go with the format or with each other.
        """
        if self.whole is not None:
            return self.whole
        try:
            return _spec(self.format, {**_OPTIONS, **self.options})
        except SpecError as error:
            raise SpecError(f"recipe: {where}: {error}") from error


def _spec(fmt: Format, options: Mapping[str, Any]) -> PlaneSpec:
    if options["with_2d_quantization"]:
        if fmt.block is None:
            raise SpecError(f"with_2d_quantization needs a format with blocks, got {fmt}")
        fmt = replace(fmt, block=(fmt.block[1], fmt.block[1]))
    if options["force_pow_2_scales"] is not None:
        fmt = replace(fmt, power_of_two=options["force_pow_2_scales"])
    if options["amax_epsilon"] is not None:
        fmt = replace(fmt, eps=options["amax_epsilon"])
    signs = None
    if options["with_rht"]:
        signs = DEFAULT_SIGNS if options["with_random_sign_mask"] else 0
    error = str(options["nvfp4_4over6_err_mode"]).lower()
    if error not in ERRORS:
        given = options["nvfp4_4over6_err_mode"]
        raise SpecError(f"nvfp4_4over6_err_mode {must_be_one_of(('MAE', 'MSE'), given)}")
    if not options["nvfp4_use_4over6"] and (options["nvfp4_e4m3_max"], error) != (448, "mae"):
        raise SpecError(
            "nvfp4_e4m3_max and nvfp4_4over6_err_mode belong to nvfp4_use_4over6, got it off"
        )
    return PlaneSpec(
        fmt,
        options["stochastic_rounding"],
        signs,
        float(options["nvfp4_e4m3_max"]),
        error if options["nvfp4_use_4over6"] else None,
        options["row_scaled_nvfp4"],
    )


def plane_of(given: object, where: str) -> Named:
    """Return what a caller says of one operand.

    Args:
        given: a format's name, a PlaneSpec's string, a Format, a PlaneSpec, or a mapping with
            `"format"` and options.
        where: the operand, for errors.

    Raises:
        SpecError: an unknown name, option or value.
        TypeError: `given` is nothing of these.
    """
    try:
        if isinstance(given, PlaneSpec):
            return Named(given.format, {}, given)
        if isinstance(given, Mapping):
            return _with_options(given)
        if isinstance(given, str | Format):
            return _bare(given)
    except SpecError as error:
        raise SpecError(f"recipe: {where}: {error}") from error
    raise TypeError(
        f"recipe: {where} must be a format's name, a Format, a PlaneSpec or a mapping with "
        f"'format', got {type(given).__name__}"
    )


def _bare(given: str | Format) -> Named:
    if isinstance(given, str):
        if given.lower() in AS_IT_IS:
            given = "identity"
        elif PlaneSpec.is_text(given):
            spec = PlaneSpec.parse(given)
            return Named(spec.format, {}, spec)
    return Named(format(given), {})


def _with_options(given: Mapping[str, Any]) -> Named:
    named, options = given.get("format"), dict(given)
    options.pop("format", None)
    if not isinstance(named, str | Format):
        raise SpecError(f"'format' must be a format's name or a Format, got {named!r}")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise SpecError(f"an option {must_be_one_of(_OPTIONS, name)}")
        is_bool = isinstance(value, bool)
        if is_bool == (name in _VALUES) or (name == "amax_epsilon" and isinstance(value, str)):
            kind = "no bool" if name in _VALUES else "a bool"
            raise SpecError(f"{name} must be {kind}, got {value!r}")
    bare = _bare(named)
    if bare.whole is not None and options:
        raise SpecError(f"'format' must be a name where options are given, got {named!r}")
    return replace(bare, options=options)
