"""Choices that any recipe may offer: precision by GEMM, and what the backward multiplies.

They change which planes a module makes and how its GEMMs run, and nothing else: `bind` applies them
to what the recipe's quantizers say, and modules know nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..errors import must_be_one_of
from ..formats import PlaneSpec
from ..kernels import check_precision
from ..quantizers import IdentityQuantizer, Quantizer
from ..quantizers.quantizer import SOURCES
from .roles import GRAD_OUTPUT

__all__ = ["CHOICES", "GemmPrecision", "check_choice", "check_choices", "with_choices_of"]

#: What the backward multiplies instead of the recipe's columnwise planes.
_OVERRIDES: Final = ("high_precision", "dequantized")
#: The fields that a recipe may have for its choices, and what they are where it does not choose.
CHOICES: Final[dict[str, Any]] = {
    "precision": "auto",
    "backward_override": None,
    "columnwise_source": None,
}


class GemmPrecision(NamedTuple):
    """Precision of each of a module's three GEMMs: `"auto"`, `"exact"` or `"fast"`.

    Attributes:
        fprop: of `y = x @ w.T`.
        dgrad: of `dx = dy @ w`.
        wgrad: of `dw = dy.T @ x`.

    Example:
        >>> import hybridq
        >>> precision = hybridq.recipes.GemmPrecision(wgrad="exact")
        >>> hybridq.recipes.MXFP8BlockScaling(precision=precision).precision.fprop
        'auto'
    """

    fprop: str = "auto"
    dgrad: str = "auto"
    wgrad: str = "auto"

    @staticmethod
    def of(precision: str | GemmPrecision) -> GemmPrecision:
        """Return the three precisions that a recipe's `precision` stands for."""
        return (
            precision if isinstance(precision, GemmPrecision) else GemmPrecision(*[precision] * 3)
        )


def _precision(given: object, where: str) -> str | GemmPrecision:
    """Return one string if it serves all three GEMMs, else a GemmPrecision."""
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in GemmPrecision._fields]
        if unknown:
            names = must_be_one_of(GemmPrecision._fields, unknown[0])
            raise ValueError(f"{where}: the GEMM of a precision {names}")
        given = GemmPrecision(**given)
    if not isinstance(given, GemmPrecision):
        return check_precision(given, where)  # type: ignore[arg-type]
    for one in given:
        check_precision(one, where)
    return given.fprop if len(set(given)) == 1 else given


def check_choice(name: str, given: object, where: str) -> Any:
    """Return the normal form of a choice; equal choices have equal normal forms.

    Args:
        name: of the field.
        given: its value. A precision may be one text, a GemmPrecision, or a mapping whose missing
            GEMMs are `"auto"`.
        where: in whose name an error is raised.

    Raises:
        ValueError: unknown value.
        TypeError: there is no such choice.
    """
    if name not in CHOICES:
        raise TypeError(f"{where}: a choice {must_be_one_of(CHOICES, name)}")
    if name == "precision":
        return _precision(given, where)
    known = _OVERRIDES if name == "backward_override" else SOURCES
    if given is not None and given not in known:
        raise ValueError(f"{where}: {name} {must_be_one_of(known, given, 'None or ')}")
    return given


def check_choices(override: str | None, source: str | None, where: str) -> None:
    """Raise ValueError where two choices contradict each other."""
    if override is not None and source is not None:
        raise ValueError(
            f"{where}: columnwise_source chooses what the columnwise planes are made of, and with "
            f"backward_override={override!r} there are none, got columnwise_source={source!r}"
        )


def with_choices_of(
    quantizers: Mapping[str, Quantizer], override: str | None, source: str | None
) -> dict[str, Quantizer]:
    """Return the quantizers of a module's slots after a recipe's choices.

    Args:
        quantizers: by tensor type.
        override: `"high_precision"`: the backward multiplies input and weight as they were given;
            `"dequantized"`: what their rowwise planes decode to; the gradient is left alone in
            both. None: the columnwise planes that the quantizers make.
        source: what columnwise planes of input and weight are made of; None: each quantizer's own.
            Gradients keep theirs: their two planes belong to two GEMMs of the same pass.
    """
    plain = IdentityQuantizer()
    changed = {}
    for slot, quantizer in quantizers.items():
        if slot == GRAD_OUTPUT:
            changed[slot] = quantizer if override is None else plain
        elif override is not None:
            changed[slot] = _unquantized_columns(quantizer, plain.rowwise, override)
        elif source is not None and (source == "original" or quantizer.rowwise is not None):
            changed[slot] = replace(quantizer, columnwise_source=source)
        else:
            changed[slot] = quantizer
    return changed


def _unquantized_columns(quantizer: Quantizer, plain: PlaneSpec | None, override: str) -> Quantizer:
    """Return `quantizer` with a columnwise plane that is not quantized, but may be decoded."""
    is_decoded = override == "dequantized" and quantizer.rowwise is not None
    return replace(
        quantizer,
        columnwise=plain,
        columnwise_source="rowwise_dequantized" if is_decoded else "original",
        columnwise_usage=True,
        columnwise_delay=None,
    )
