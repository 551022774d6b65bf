"""`hybridq.recipe`: a recipe by the formats of each GEMM's operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ..direction import COLUMNWISE, DIRECTIONS, ROWWISE
from ..errors import check_bools, must_be_one_of
from ..formats import Format, PlaneSpec
from ..gemm import CONTRACT
from ..quantizers import DelayedScalingRequest, Quantizer, delayed_quantizer
from .by_gemm import ByGemm, source_of
from .choices import GemmPrecision
from .named import get
from .plane_options import Named, plane_of
from .recipe import Recipe
from .roles import GRAD_OUTPUT, INPUT, LINEAR, SLOTS, WEIGHT, QuantizerRole

__all__ = ["recipe"]

#: How a plane, both operands of a GEMM, and both planes of a slot may be given.
PlaneChoice = str | Format | PlaneSpec | Mapping[str, Any]
GemmChoice = PlaneChoice | tuple[PlaneChoice, PlaneChoice]
SlotChoice = PlaneChoice | tuple[PlaneChoice, PlaneChoice] | Quantizer | DelayedScalingRequest

_SOURCE: Final = "columnwise_source"
#: Module types that a base must treat alike.
_MODULE_TYPES: Final = (LINEAR, "grouped_linear")
#: Which planes each of `recipe`'s own options is for.
_OPTION_PLANES: Final = {
    "stochastic_rounding": tuple((GRAD_OUTPUT, direction) for direction in DIRECTIONS),
    "with_rht": ((GRAD_OUTPUT, COLUMNWISE), (INPUT, COLUMNWISE)),
    "with_2d_quantization": tuple((WEIGHT, direction) for direction in DIRECTIONS),
}


def recipe(
    base: Recipe | str | None = None,
    *,
    fprop: GemmChoice | None = None,
    dgrad: GemmChoice | None = None,
    wgrad: GemmChoice | None = None,
    input: SlotChoice | None = None,
    weight: SlotChoice | None = None,
    grad_output: SlotChoice | None = None,
    stochastic_rounding: bool = False,
    with_rht: bool = False,
    with_2d_quantization: bool = False,
    precision: str | GemmPrecision | Mapping[str, str] | None = None,
    backward_override: str | None = None,
    columnwise_source: str | None = None,
) -> Recipe:
    """Return a recipe by the formats of each GEMM's operands.

    Args:
        base: recipe, or the name of one, of all operands that are not named here; None:
            `"bf16"`, which quantizes nothing. It must not depend on the names of modules.
        fprop: of `y = x @ w.T`: the rowwise planes of input and weight.
        dgrad: of `dx = dy @ w`: grad_output's rowwise plane, weight's columnwise one.
        wgrad: of `dw = dy.T @ x`: the columnwise planes of grad_output and input.
        input, weight, grad_output: of both planes of that slot, whatever the GEMMs say; a
            Quantizer or a DelayedScalingRequest too.
        stochastic_rounding: gradients are rounded stochastically.
        with_rht: both operands of wgrad pass the random Hadamard transform.
        with_2d_quantization: the weight has square blocks.
        precision, backward_override, columnwise_source: choices, as in `Recipe`; None: the base's.

    Formats: one for both operands of a GEMM (both planes of a slot), a pair in the order above
    (rowwise, columnwise), or a mapping by slot (by direction), where what is missing stays as it
    was. Each is a name of `hybridq.formats.names()`, a Format, a PlaneSpec or the string of one
    (`"nvfp4;sr;rht"`), or a mapping with `"format"` and options, named as the arguments of
    `NVFP4Quantizer` and the other quantizers are: `{"format": "nvfp4", "with_rht": True}`.
    `"bf16"`, `"high_precision"` and `"identity"` leave an operand as it is.

    The three options are for operands that are named here by a format alone. A columnwise plane of
    input or weight whose format is another one than the rowwise plane's, without transform, is
    made of what that one decodes to; `weight={"columnwise_source": "original"}` says otherwise.

    Raises:
        ValueError: an unknown name, an option that meets no operand, or nothing is given.
        TypeError: what is given is nothing of the above.

    Source: ours; the rule for columnwise planes is that of `hybridq.recipes.zoo`.

    Example:
        >>> import hybridq
        >>> hybridq.recipe(fprop="mxfp8", dgrad=("nvfp4;sr", "nvfp4"), wgrad="bf16")
        recipe(fprop='mxfp8', dgrad=('nvfp4;sr', 'nvfp4'), wgrad='bf16')
        >>> hybridq.recipe("mxfp8", grad_output="mxfp8_e5m2").arguments()["wgrad"]
        ('mxfp8_e5m2', 'mxfp8')
    """
    start = get("bf16" if base is None else base)
    choices = {
        "precision": precision,
        "backward_override": backward_override,
        "columnwise_source": columnwise_source,
    }
    chosen = {name: value for name, value in choices.items() if value is not None}
    gemms = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    slots = {INPUT: input, WEIGHT: weight, GRAD_OUTPUT: grad_output}
    planes = _planes_of_gemms({name: one for name, one in gemms.items() if one is not None})
    whole, sources = _take_slots(
        {name: one for name, one in slots.items() if one is not None}, planes
    )
    options = {
        "stochastic_rounding": stochastic_rounding,
        "with_rht": with_rht,
        "with_2d_quantization": with_2d_quantization,
    }
    _take_options(options, planes)
    if not planes and not whole and not sources:
        if base is None:
            raise ValueError(
                "recipe: needs a format of some operand, or a base, got neither; for example "
                "recipe(fprop='mxfp8', dgrad='mxfp8', wgrad='bf16')"
            )
        return start.with_choices(**chosen) if chosen else start
    kept = {name: getattr(start, name) for name in choices if name not in chosen}
    made = {
        slot: whole.get(slot) or _changed(slot, one, planes, sources.get(slot))
        for slot, one in _quantizers(start).items()
    }
    return ByGemm(**made, **{**kept, **chosen})  # type: ignore[arg-type]


def _quantizers(base: Recipe) -> dict[str, Quantizer]:
    """Return the quantizers of a base by slot; raise if there is more than one for a slot."""
    found: list[dict[str, Quantizer]] = []
    if not base.reads_names:
        found = [
            {slot: base.quantizer(QuantizerRole(kind, slot)) for slot in SLOTS}
            for kind in _MODULE_TYPES
        ]
    if not found or found[0] != found[1]:
        what = "names" if not found else "types"
        raise ValueError(
            f"recipe: base must be the same for all modules, got {base!r}, which may depend on "
            f"their {what}; give recipes made by hybridq.recipe to ByName instead (a factory that "
            "reads no names says so: factory.reads_names = False)"
        )
    return found[0]


_Planes = dict[tuple[str, str], Named]


def _planes_of_gemms(given: Mapping[str, Any]) -> _Planes:
    """Return what is said of each plane, by slot and direction."""
    found: _Planes = {}
    for gemm in CONTRACT:
        if gemm.name in given:
            places = {gemm.a: (gemm.a, gemm.a_direction), gemm.b: (gemm.b, gemm.b_direction)}
            for part, one in _parts(given[gemm.name], tuple(places), gemm.name).items():
                found[places[part]] = plane_of(one, f"{gemm.name}, {part}")
    return found


def _parts(given: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return what is given for each of two parts: one thing for both, a pair, or a mapping."""
    if isinstance(given, Mapping) and "format" not in given:
        for name in given:
            if name not in names:
                raise ValueError(f"recipe: a part of {where} {must_be_one_of(names, name)}")
        return dict(given)
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise ValueError(
                f"recipe: {where} must be one format or a pair ({', '.join(names)}), got {given!r}"
            )
        return dict(zip(names, given, strict=True))
    return dict.fromkeys(names, given)


def _take_slots(
    given: Mapping[str, Any], planes: _Planes
) -> tuple[dict[str, Quantizer], dict[str, str]]:
    """Put what slots say into `planes`; return whole quantizers, and sources that are named."""
    whole: dict[str, Quantizer] = {}
    sources: dict[str, str] = {}
    for slot, one in given.items():
        if isinstance(one, DelayedScalingRequest):
            one = delayed_quantizer(one, slot == GRAD_OUTPUT)
        if isinstance(one, Quantizer):
            whole[slot] = one.resolved(slot == GRAD_OUTPUT)
            continue
        for part, plane in _parts(one, (*DIRECTIONS, _SOURCE)[: _width(one)], slot).items():
            if part == _SOURCE:
                sources[slot] = plane
            else:
                planes[slot, part] = plane_of(plane, f"{slot}, {part}")
    for slot in whole:
        for direction in DIRECTIONS:
            planes.pop((slot, direction), None)
    return whole, sources


def _width(given: Any) -> int:
    """A mapping may name the source too."""
    return 3 if isinstance(given, Mapping) and "format" not in given else 2


def _take_options(options: Mapping[str, bool], planes: _Planes) -> None:
    """Fill in what formats leave open; raise where an option meets nothing."""
    check_bools("recipe", **options)
    for name, value in options.items():
        if not value:
            continue
        places = [place for place in _OPTION_PLANES[name] if place in planes]
        taking = [place for place in places if planes[place].takes(name)]
        if not taking:
            where = " or ".join(f"{slot}.{of}" for slot, of in _OPTION_PLANES[name])
            raise ValueError(
                f"recipe: {name} needs a quantized operand that a format's name gives ({where}), "
                f"got {', '.join(f'{slot}.{of}' for slot, of in places) or 'none'}"
            )
        for place in taking:
            planes[place] = planes[place].filled(name)


def _changed(slot: str, base: Quantizer, planes: _Planes, source: str | None) -> Quantizer:
    """Return the quantizer of a slot with the planes that are named."""
    named: dict[str, PlaneSpec] = {
        of: planes[slot, of].spec(slot) for of in DIRECTIONS if (slot, of) in planes
    }
    if not named and source is None:
        return base
    changes: dict[str, Any] = dict(named)
    for direction in named:
        changes |= {f"{direction}_usage": True, f"{direction}_delay": None}
    row, col = named.get(ROWWISE, base.rowwise), named.get(COLUMNWISE, base.columnwise)
    if named or source is not None:
        changes[_SOURCE] = source_of(slot, row, col) if source is None else source
    return replace(base, **changes)
