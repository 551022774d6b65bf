"""Options of a product: what each candidate's formats lose in it, and how long it takes in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...formats import PlaneSpec
from ...gemm import CONTRACT, Gemm
from ...quantizers import Quantizer
from ...recipes import QuantizerRole, Recipe, get
from ...recipes.gemm_words import gemm_formats
from ...recipes.roles import SLOTS
from ..precision import (
    GNR_LINE,
    ExpertLoss,
    ProductShape,
    ProductStatistics,
    SlotRow,
    SlotStatistics,
)

__all__ = ["PLAIN", "Option", "candidates_of", "gemm_sizes", "options_of"]

#: Name of the option that quantizes nothing.
PLAIN: Final = "bf16"


@dataclass(frozen=True)
class Option:
    """One way to compute a product.

    Args:
        layer: of the model.
        gemm: `"fprop"`, `"dgrad"` or `"wgrad"`.
        name: of the candidate recipe; `"bf16"`: nothing is quantized.
        formats: of both operands, as `hybridq.recipe` takes them.
        errors: severity of each operand's plane.
        added: error that both add to the product, or None.
        reason: why it is not taken; empty: it may be.
        nbytes: of both planes.
        seconds: that quantizing and multiplying take; None: not known yet.
        how: what the seconds are: `"measured"`, or the backend that was planned with.
    """

    layer: str
    gemm: str
    name: str
    formats: tuple[str, str]
    errors: tuple[float, float] = (0.0, 0.0)
    added: float | None = 0.0
    reason: str = ""
    nbytes: int = 0
    seconds: float | None = None
    how: str = ""


def candidates_of(names: Iterable[str]) -> dict[str, Recipe]:
    """Return candidate recipes by name.

    Args:
        names: of recipes.

    Raises:
        TypeError: it is no collection of names.
        ValueError: an unknown name, or a recipe that depends on the names of modules, or that
            keeps histories; or there is none.
    """
    given: object = names
    if isinstance(given, str | Recipe) or not isinstance(given, Iterable):
        raise TypeError(f"advise: candidates must be a collection of names, got {given!r}")
    names = tuple(names)
    if not names:
        raise ValueError("advise: candidates must have a recipe at least, got none")
    found = {}
    for name in names:
        recipe = get(name)
        made = _quantizers(recipe)
        is_delayed = any(one.rowwise_delay or one.columnwise_delay for one in made.values())
        if recipe.reads_names or is_delayed:
            raise ValueError(
                "advise: a candidate must be one recipe for all modules, without histories, got "
                f"{name!r}"
            )
        if name != PLAIN:
            found[name] = recipe
    return found


def _quantizers(recipe: Recipe) -> dict[str, Quantizer]:
    return {slot: recipe.quantizer(QuantizerRole("linear", slot)) for slot in SLOTS}


def formats_of(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Return the formats of both operands of each GEMM under a recipe.

    Args:
        recipe: any that names formats for all of them.
    """
    found = {}
    for gemm, formats in gemm_formats(_quantizers(recipe)).items():
        if formats is not None:
            found[gemm] = (formats, formats) if isinstance(formats, str) else formats
    return found


def gemm_sizes(gemm: Gemm, shape: ProductShape) -> tuple[int, int, int]:
    """Return (M, N, K) of a product of a layer, of all its groups' rows together.

    Args:
        gemm: which.
        shape: of the layer, whose largest call counts.
    """
    rows, (into, out) = max(shape.rows), shape.features
    sizes = {"fprop": (rows, out, into), "dgrad": (rows, into, out), "wgrad": (out, into, rows)}
    return sizes[gemm.name]


def options_of(
    shape: ProductShape,
    candidates: Mapping[str, Recipe],
    rows: Sequence[SlotRow],
    products: Sequence[ProductStatistics],
    limit: float,
) -> list[Option]:
    """Return the ways to compute the products of a layer, those that lose too much too.

    A product that the run did not make has none, as dgrad where the input needs no gradient.

    Args:
        shape: of the layer.
        candidates: by name.
        rows, products: of a report of these candidates.
        limit: severity that a plane may have at most.
    """
    own = {(row.tensor, row.direction, row.format): row for row in rows if row.layer == shape.layer}
    added = {
        (one.gemm, one.format): one.relative_error for one in products if one.layer == shape.layer
    }
    is_seen = {(row.tensor, row.direction) for row in own.values()}
    found = []
    for gemm in CONTRACT:
        sides = ((gemm.a, gemm.a_direction), (gemm.b, gemm.b_direction))
        if not is_seen.issuperset(sides):
            continue
        plain = [own.get((*side, PLAIN)) for side in sides]
        nbytes = sum(row.statistics.nbytes for row in plain if row is not None)
        found.append(Option(shape.layer, gemm.name, PLAIN, (PLAIN, PLAIN), nbytes=nbytes))
        for name, recipe in candidates.items():
            formats = formats_of(recipe).get(gemm.name, (PLAIN, PLAIN))
            if formats == (PLAIN, PLAIN):
                continue
            pair = [own.get((*side, text)) for side, text in zip(sides, formats, strict=True)]
            label = formats[0] if formats[0] == formats[1] else " x ".join(formats)
            found.append(
                Option(
                    *(shape.layer, gemm.name, name, formats),
                    errors=(_severity(pair[0]), _severity(pair[1])),
                    added=added.get((gemm.name, label)),
                    reason=_reason(pair, limit),
                    nbytes=sum(row.statistics.nbytes for row in pair if row is not None),
                )
            )
    return found


def _severity(row: SlotRow | None) -> float:
    return math.nan if row is None else row.severity


def _reason(pair: Sequence[SlotRow | None], limit: float) -> str:
    """Return why a pair of planes may not be taken; empty: it may."""
    for row in pair:
        if row is None:
            return "not seen in this run"
        what = f"{row.tensor} {row.direction} in {row.format}"
        own = row.statistics
        if own.bad:
            return f"{what}: {own.bad} values are not finite"
        if row.is_below_line:
            return (
                f"{what}: gradient {row.gradient_to_noise:.2f} of its noise, below {GNR_LINE:.2f}"
            )
        if row.severity > limit:
            lossy: SlotStatistics | ExpertLoss = own
            if row.severity > own.severity and row.worst_expert is not None:
                what, lossy = f"{what} of expert {row.worst_expert}", row.experts[row.worst_expert]
            share = 100 * lossy.underflows / max(lossy.nonzero, 1)
            lost = f", {share:.0f}% become zero" if lossy.underflows else ""
            return f"{what}: error {row.severity:.2g} over {limit:g}{lost}"
    return ""


def spec_pair(option: Option) -> tuple[PlaneSpec, PlaneSpec]:
    """Return the specs of both operands of an option."""
    a, b = (PlaneSpec.parse("identity" if one == PLAIN else one) for one in option.formats)
    return a, b
