"""Advice: what `hybridq.advise` returns."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._text import Table, html
from ...gemm import CONTRACT
from ...recipes import ByName, Recipe, RecipeSource, get
from ...recipes.recipe_by_gemm import recipe as by_gemm
from .options import PLAIN, Option

__all__ = ["Advice", "Advised", "layer_recipe", "recipe_of"]


@dataclass(frozen=True)
class Advised:
    """What is advised for one product of a layer, and why.

    Args:
        layer: of the model.
        role: name that recipes ask by.
        gemm: `"fprop"`, `"dgrad"` or `"wgrad"`.
        formats: of both operands; `"bf16"` leaves one as it is.
        errors: severity of each operand's plane.
        added: error that both add to the product, or None.
        seconds, plain_seconds: that the product takes so, and in BF16; None: not known.
        reason: in words.
    """

    layer: str
    role: str
    gemm: str
    formats: tuple[str, str]
    errors: tuple[float, float]
    added: float | None
    seconds: float | None
    plain_seconds: float | None
    reason: str


@dataclass(frozen=True, repr=False)
class Advice(RecipeSource):
    """A recipe, and why each slot has its format: `hybridq.autocast(recipe=advice)` takes it.

    Args:
        recipe: the one that is advised.
        products: what is advised for each product.
        device: that times are of.
        is_planned: times follow from a data sheet; else they were measured.
        loss, plain_loss: of the run under the recipe and in BF16; None: there was none.
        budget: share by which the loss might rise.
        notes: what else is to be known.
    """

    recipe: Recipe
    products: tuple[Advised, ...]
    device: str
    is_planned: bool
    loss: float | None
    plain_loss: float | None
    budget: float
    notes: tuple[str, ...] = ()

    @property
    def current(self) -> Recipe:
        """The recipe that is advised."""
        return self.recipe

    def _table(self) -> dict[str, Any]:
        return self.recipe._table()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as a TOML file, with the reasons as comments.

        `hybridq.recipes.load` and `hybridq.autocast` take its path.

        Args:
            path: of the file.
        """
        lines = [f"# {line}" for line in str(self).splitlines()]
        Path(path).write_text("\n".join([*lines, "", self.to_toml()]), encoding="utf-8")

    def table(self) -> Table:
        """Return a row for each operand: its format, its error, and why."""
        rows = []
        for one in self.products:
            gemm = next(known for known in CONTRACT if known.name == one.gemm)
            sides = ((gemm.a, gemm.a_direction), (gemm.b, gemm.b_direction))
            for at, (slot, direction) in enumerate(sides):
                times = _times(one) if at == 0 else ""
                reason = one.reason if at == 0 else ""
                error = f"{one.errors[at]:.2g}" if one.formats[at] != PLAIN else ""
                head = (one.layer or "(model)", one.gemm) if at == 0 else ("", "")
                rows.append((*head, slot, direction, one.formats[at], error, times, reason))
        heads = ("layer", "GEMM", "tensor", "direction", "format", "error", "time / BF16", "why")
        quantized = sum(one.formats != (PLAIN, PLAIN) for one in self.products)
        how = "planned by its data sheet" if self.is_planned else "measured here"
        title = (
            f"Advice: {quantized} of {len(self.products)} products quantized; times on "
            f"{self.device}, {how}"
        )
        notes = list(self.notes)
        if self.loss is not None and self.plain_loss is not None:
            notes.append(
                f"loss {self.loss:.6g}, in BF16 {self.plain_loss:.6g}; it may rise by "
                f"{100 * self.budget:g}%"
            )
        return Table(title, heads, tuple(rows), tuple(notes))

    def to_json(self) -> str:
        """Return all of it as a JSON object, the recipe as the text of its file."""
        return json.dumps(
            {
                "recipe": self.to_toml(),
                "device": self.device,
                "is_planned": self.is_planned,
                "loss": self.loss,
                "plain_loss": self.plain_loss,
                "budget": self.budget,
                "products": [asdict(one) for one in self.products],
                "notes": list(self.notes),
            },
            indent=2,
        )

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return html(self.table())


def _times(one: Advised) -> str:
    if one.seconds is None or not one.plain_seconds:
        return ""
    return f"{one.seconds / one.plain_seconds:.2f}"


def layer_recipe(options: Mapping[str, Option]) -> Recipe:
    """Return the recipe of a layer by the options of its products.

    Args:
        options: by GEMM.
    """
    formats: dict[str, Any] = {
        gemm: one.formats for gemm, one in options.items() if one.formats != (PLAIN, PLAIN)
    }
    return by_gemm(**formats) if formats else get(PLAIN)


def recipe_of(by_role: Sequence[tuple[str, Recipe]]) -> Recipe:
    """Return one recipe for all layers: rules for those that have not the most frequent one.

    Args:
        by_role: name of each layer, as roles have it, and its recipe.
    """
    kinds = {recipe.key: recipe for _, recipe in by_role}
    most, _ = Counter(recipe.key for _, recipe in by_role).most_common(1)[0]
    default = kinds[most]
    rules: list[tuple[str, Recipe | str]] = []
    for role, recipe in by_role:
        if recipe.key != most:
            literal = glob.escape(role)
            # Experts in a stack are asked for one by one, by number.
            rules += [(literal, recipe), (f"{literal}.[0-9]*", recipe)]
    return ByName(tuple(rules), default) if rules else default
