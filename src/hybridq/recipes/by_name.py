"""ByName: a recipe that is another one for modules of certain names."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from ..quantizers import Quantizer
from .named import call_text, get
from .recipe import Recipe, _set
from .roles import QuantizerRole

__all__ = ["ByName"]

#: What torch.compile puts before the names of a model's modules.
_COMPILED: Final = "_orig_mod."


@dataclass(frozen=True, repr=False)
class ByName(Recipe):
    """The recipe of the first pattern that a module's qualified name matches, else `default`.

    Args:
        rules: `(pattern, recipe)` pairs in order. A pattern is a shell's (`fnmatch`, upper and
            lower case differ): `"blocks.0.*"` are the modules inside `blocks.0`, `"*.proj"` all
            projections. A recipe is a Recipe, also another ByName, or its name.
        default: the recipe of all others, and of modules without a name.

    `hybridq.convert` gives modules their names. Each module follows its recipe with all its
    choices; `with_choices` and `autocast(precision=)` change those of all of them.

    Raises:
        TypeError: a rule is no pair, a pattern no text, a recipe no recipe.
        ValueError: an unknown recipe name.

    Source: ours.

    Example:
        >>> import hybridq
        >>> recipe = hybridq.recipes.ByName([("blocks.0.*", "bf16")], default="nvfp4")
        >>> recipe.for_name("blocks.0.up") == hybridq.recipes.get("bf16")
        True
        >>> recipe.for_name("blocks.10.up")
        <NVFP4BlockScaling(): fprop nvfp4 x nvfp4_16x16, dgrad nvfp4;sr x nvfp4_16x16, ...>
        >>> recipe
        ByName([('blocks.0.*', 'bf16')], default='nvfp4')
    """

    rules: Sequence[tuple[str, Recipe | str]]
    default: Recipe | str

    def __post_init__(self) -> None:
        rules = tuple(_rule(rule) for rule in self.rules)
        default = get(self.default)
        # Of GEMMs outside modules, which have no name.
        _set(self, rules=rules, default=default, precision=default.precision)
        recipes = (*(recipe for _, recipe in rules), default)
        patterns = [pattern for pattern, _ in rules]
        # Keys end where their quotes do, so no two lists of them read the same.
        self.seal(f"ByName({patterns!r}, {[recipe.key for recipe in recipes]!r})", True)
        _set(self, quantizes_attention=any(recipe.quantizes_attention for recipe in recipes))

    @staticmethod
    def first_last(
        model: nn.Module,
        first: int = 1,
        last: int = 1,
        *,
        recipe: Recipe | str = "bf16",
        default: Recipe | str,
        blocks: str | Iterable[str] | None = None,
    ) -> ByName:
        """Return a ByName with `recipe` for the first and last blocks of a model.

        Args:
            model: what `hybridq.convert` was given.
            first, last: how many blocks at each end.
            recipe: theirs.
            default: that of all other modules.
            blocks: qualified name of the container of the blocks, or several, each with its own
                first and last; None: the model's only `nn.ModuleList` that is not in another.

        Raises:
            ValueError: a negative number, no such container, or not exactly one to choose from.

        Example:
            >>> import hybridq
            >>> from torch import nn
            >>> model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(8, 8) for _ in range(5))})
            >>> recipe = hybridq.recipes.ByName.first_last(model, 1, 2, default="nvfp4")
            >>> [f"h.{i}" for i in range(5) if recipe.for_name(f"h.{i}") != recipe.default]
            ['h.0', 'h.3', 'h.4']
        """
        for name, count in (("first", first), ("last", last)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(
                    f"first_last: {name} must be an integer of at least 0, got {count!r}"
                )
        found = dict(model.named_modules())
        chosen = _containers(found) if blocks is None else blocks
        rules: list[tuple[str, Recipe | str]] = []
        for container in [chosen] if isinstance(chosen, str) else chosen:
            if container not in found:
                raise ValueError(f"first_last: the model has no module blocks={container!r}")
            names = [name for name, _ in found[container].named_children()]
            ends = names[:first] + names[max(first, len(names) - last) :]
            for name in ends:
                block = f"{container}.{name}" if container else name
                literal = glob.escape(block.replace(_COMPILED, ""))
                rules += [(literal, recipe), (f"{literal}.*", recipe)]
        return ByName(tuple(rules), default)

    def for_name(self, name: str) -> Recipe:
        """Return the recipe of a module of this qualified name."""
        for pattern, recipe in self.rules:
            if fnmatchcase(name, pattern):
                return get(recipe).for_name(name)
        return get(self.default).for_name(name)

    def unfollowed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns that none of these modules follows: no name matches them first.

        `"blocks.0"` and `"blocks.0.*"` count as one: a block is a module, or holds some.

        Args:
            names: qualified names of modules.
        """
        left = tuple(dict.fromkeys(names))
        unused: list[str] = []
        used: set[str] = set()
        within: list[str] = []
        for pattern, recipe in self.rules:
            own = [name for name in left if fnmatchcase(name, pattern)]
            left = tuple(name for name in left if not fnmatchcase(name, pattern))
            if own:
                used.add(pattern.removesuffix(".*"))
                within += get(recipe).unfollowed(own)
            else:
                unused.append(pattern)
        unused = [one for one in unused if one.removesuffix(".*") not in used]
        within += get(self.default).unfollowed(left) if left else ()
        return tuple(dict.fromkeys((*unused, *within)))

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Return the quantizer that the recipe of the role's module makes."""
        return self.for_name(role.name).quantizer(role)

    def ask(self, role: QuantizerRole) -> Quantizer:
        """Return the same; the recipe of the role's module names what is wrong with it."""
        return self.for_name(role.name).ask(role)

    def _call(self) -> str:
        rules = ", ".join(f"({pattern!r}, {call_text(recipe)})" for pattern, recipe in self.rules)
        return f"ByName([{rules}], default={call_text(self.default)})"

    def _table(self) -> dict[str, Any]:
        default = get(self.default)._table()
        if "rules" in default:
            default = {"recipe": default}
        rules = [{"name": pattern, **get(recipe)._table()} for pattern, recipe in self.rules]
        return {**default, "rules": rules}

    def _with(self, where: str, choices: dict[str, Any]) -> ByName:
        rules = [(pattern, get(recipe)._with(where, choices)) for pattern, recipe in self.rules]
        return ByName(tuple(rules), get(self.default)._with(where, choices))


def _rule(rule: Any) -> tuple[str, Recipe]:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise TypeError(f"ByName: a rule is a pair (pattern, recipe), got {rule!r}")
    pattern, recipe = rule
    if not isinstance(pattern, str):
        raise TypeError(f"ByName: a pattern is a string, got {type(pattern).__name__}")
    return pattern, get(recipe)


def _containers(found: dict[str, nn.Module]) -> str:
    """Return the name of the only list of blocks that is not in another one."""
    lists = [name for name, module in found.items() if isinstance(module, nn.ModuleList)]
    outer = [a for a in lists if not any(a.startswith(f"{b}.") for b in lists if b != a)]
    if len(outer) != 1:
        raise ValueError(
            "first_last: name the blocks' container, blocks='...': the model's only nn.ModuleList "
            f"that is not in another is taken by default, got {', '.join(outer) or 'none'}"
        )
    return outer[0]
