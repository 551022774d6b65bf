"""Recipes as TOML files: `load` reads what `Recipe.to_toml` writes, and what people write.

| key | says |
| --- | --- |
| `recipe` | the name of a recipe, or a table of these keys |
| `options` | a table: fields of the class of that recipe |
| `fprop`, `dgrad`, `wgrad`, `input`, `weight`, `grad_output` | formats, as in `hybridq.recipe` |
| `stochastic_rounding`, `with_rht`, `with_2d_quantization` | its options |
| `precision`, `backward_override`, `columnwise_source` | choices |
| `rules` | tables of these keys and `name`, a pattern: what stands beside is for all others |
| `phases`, `total_steps` | a schedule: tables of these keys and `start`; nothing stands beside |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from ..errors import must_be_one_of
from .by_name import ByName
from .choices import CHOICES
from .named import named
from .recipe import Recipe, RecipeSource
from .recipe_by_gemm import recipe as by_gemm
from .schedule import RecipeSchedule
from .toml_text import line_of, parse

__all__ = ["load", "loads"]

_GEMM_KEYS: Final = (
    *("fprop", "dgrad", "wgrad", "input", "weight", "grad_output"),
    *("stochastic_rounding", "with_rht", "with_2d_quantization"),
)
_KEYS: Final = ("recipe", "options", *_GEMM_KEYS, *CHOICES, "rules")
_SCHEDULE_KEYS: Final = ("phases", "total_steps")

_Place = tuple[str | int, ...]


def load(path: str | os.PathLike[str]) -> RecipeSource:
    """Return the recipe, or the schedule, that a TOML file says.

    Args:
        path: of the file, in UTF-8; docs/guides/recipes.md has its keys.

    Raises:
        ValueError: it is no TOML, or a key or a value is none that there is; the message names the
            file, the line where it is seen, and the place.
        OSError: the file cannot be read.

    Source: ours.

    Example:
        >>> import hybridq, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "recipe.toml")
        >>> _ = file.write_text(hybridq.recipe("nvfp4", wgrad="bf16").to_toml())
        >>> hybridq.recipes.load(file)
        recipe(fprop=('nvfp4', 'nvfp4_16x16'), dgrad=('nvfp4;sr', 'nvfp4_16x16'), wgrad='bf16')
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors write a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: must be text in UTF-8, got: {error}") from error
    return loads(text, os.fspath(path))


def loads(text: str, where: str = "a text") -> RecipeSource:
    """Return the recipe, or the schedule, that a text says, which is as in a file.

    Args:
        text: TOML.
        where: what errors call it.

    Raises:
        ValueError: as `load`.
    """
    return _Reader(text, where).source(parse(text, where))


class _Located(ValueError):
    """An error that says where it is already."""


class _Reader(NamedTuple):
    text: str
    where: str

    def fail(self, place: _Place, message: str, cause: Exception | None = None) -> NoReturn:
        line = line_of(self.text, place)
        at = "" if line is None else f", line {line}"
        path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)
        named = f"{path.lstrip('.')}: " if path else ""
        raise _Located(f"{self.where}{at}: {named}{message}") from cause

    def check_keys(self, table: Mapping[str, Any], known: Iterable[str], place: _Place) -> None:
        known = tuple(known)
        for key in table:
            if key not in known:
                self.fail((*place, key), f"a key {must_be_one_of(known, key)}")

    def source(self, table: Mapping[str, Any]) -> RecipeSource:
        if "phases" not in table:
            self.check_keys(table, (*_KEYS, *_SCHEDULE_KEYS), ())
            if "total_steps" in table:
                self.fail(("total_steps",), "belongs to phases, got it without any")
            return self.recipe(table, ())
        for key in table:
            if key in _KEYS:
                self.fail((key,), "stands in a phase where there are phases, got it beside them")
        self.check_keys(table, _SCHEDULE_KEYS, ())
        phases = []
        for place, one in self.tables(table["phases"], ("phases",)):
            if "start" not in one:
                self.fail(place, "needs a start, got none")
            phases.append((one["start"], self.recipe(one, place, "start")))
        try:
            return RecipeSchedule(phases, table.get("total_steps"))
        except (TypeError, ValueError) as error:
            self.fail(("phases",), str(error), error)

    def tables(self, given: object, place: _Place) -> list[tuple[_Place, Mapping[str, Any]]]:
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            self.fail(place, f"must be an array of tables, got {given!r}")
        return [((*place, number), one) for number, one in enumerate(given)]

    def recipe(self, table: Mapping[str, Any], place: _Place, *also: str) -> Recipe:
        self.check_keys(table, (*also, *_KEYS), place)
        base = self.base(table, place)
        said = {key: table[key] for key in (*_GEMM_KEYS, *CHOICES) if key in table}
        if base is None and not said.keys() & {*_GEMM_KEYS}:
            self.fail(place, f"needs a recipe, or the formats of a GEMM, got {sorted(table)}")
        try:
            made = by_gemm(base, **said)
        except (TypeError, ValueError) as error:
            asked = re.findall(r"\w+", str(error).partition(" must ")[0])
            key = next((key for key in said if key in asked), None)
            self.fail((*place, key) if key else place, str(error), error)
        return made if "rules" not in table else self.by_name(table["rules"], made, place)

    def base(self, table: Mapping[str, Any], place: _Place) -> Recipe | None:
        given, options = table.get("recipe"), table.get("options")
        if given is None:
            if options is not None:
                self.fail((*place, "options"), "are those of a recipe's class, got no recipe")
            return None
        if isinstance(given, Mapping):
            found = self.recipe(given, (*place, "recipe"))
        else:
            try:
                found = named(given)
            except (TypeError, ValueError) as error:
                self.fail((*place, "recipe"), str(error), error)
        return found if options is None else self.with_options(found, options, place)

    def with_options(self, base: Recipe, options: object, place: _Place) -> Recipe:
        place = (*place, "options")
        if not isinstance(options, Mapping):
            self.fail(place, f"must be a table, got {options!r}")
        if not base.has_options:
            self.fail(place, f"are those of a built-in class, got some for {base!r}")
        known = (one.name for one in fields(base))  # type: ignore[arg-type]
        self.check_keys(options, (name for name in known if name not in CHOICES), place)
        try:
            return replace(base, **options)  # type: ignore[type-var]
        except (TypeError, ValueError) as error:
            self.fail(place, str(error), error)

    def by_name(self, rules: object, default: Recipe, place: _Place) -> ByName:
        found = []
        for at, rule in self.tables(rules, (*place, "rules")):
            if not isinstance(rule.get("name"), str):
                self.fail(at, f"needs a name, modules' pattern, got {rule.get('name')!r}")
            found.append((rule["name"], self.recipe(rule, at, "name")))
        return ByName(found, default)
