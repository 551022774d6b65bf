"""`hybridq.summary`: which modules of a model are quantized, how, and what share of its work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .._text import Table, html
from ..converters import (
    LEAST_WIDTH,
    LEFT_ALONE,
    NO_PRODUCT,
    UNKNOWN,
    Conversion,
    NotConverted,
    conversion,
    of_unknown_class,
    originals,
    report_of,
)
from ..nn import QuantizedModule
from ..recipes import Recipe, get
from ..tensor import is_quantized
from .checkpoint_summary import starred
from .flops import FlopCount, count_flops
from .module_formats import formats_of, padding_of

__all__ = ["ModuleSummary", "Summary", "summary"]

#: What a module is, in the order of a table's columns.
STATES: Final = ("converted", LEFT_ALONE, UNKNOWN, NO_PRODUCT)


@dataclass(frozen=True)
class ModuleSummary:
    """What `summary` says of one module.

    Args:
        name: qualified.
        kind: its class.
        state: `"converted"`, or would be; `"left alone"`, though of a kind that is converted;
            `"not known"` to any converter; `"no product"`: an embedding, a convolution with
            overlapping patches.
        reason: why it is not converted; empty if it is.
        helps: what would convert it; empty if it is, or if nothing would.
        parameters: elements of its matrices; what several modules share counts for
            the first that multiplies by it.
        flops: of its products with parameters in one forward; 0 where none was run.
        formats: of each slot the planes under the recipe; empty without one, or if it is not
            converted.
        padding: share of what the planes of its weight cover that is no part of it.
    """

    name: str
    kind: str
    state: str
    reason: str
    helps: str
    parameters: int
    flops: int
    formats: tuple[tuple[str, str], ...]
    padding: float

    @property
    def is_quantized(self) -> bool:
        """Whether it is converted, and the recipe, if there is one, quantizes something of it."""
        if self.state != STATES[0]:
            return False
        return not self.formats or any(text != "bf16" for _, text in self.formats)


@dataclass(frozen=True, repr=False)
class Summary:
    """What `hybridq.summary` returns: `str` and a notebook show two tables, `to_json` is for files.

    Args:
        model: its class.
        recipe: as it prints; None: none was given.
        is_converted: whether `convert` was called; else this is what it would do.
        modules: with matrices, or products with parameters.
        other_flops: of products of one forward without parameters, and of convolutions; None: no
            forward was run, and shares are those of parameters.
    """

    model: str
    recipe: str | None
    is_converted: bool
    modules: tuple[ModuleSummary, ...]
    other_flops: int | None

    def weight(self, module: ModuleSummary) -> int:
        """Return what a module counts for in shares: its operations, or its parameters.

        Args:
            module: one of `modules`.
        """
        if module.state == "no product":
            return 0
        return module.parameters if self.other_flops is None else module.flops

    @property
    def share(self) -> float:
        """Share that is quantized of the linear operations, or without an input of parameters."""
        total = sum(map(self.weight, self.modules))
        return sum(self.weight(one) for one in self.modules if one.is_quantized) / max(total, 1)

    @property
    def share_of_linear_flops(self) -> float:
        """Share of the linear operations of a forward that is quantized.

        Raises:
            ValueError: no input was given, and so none was run.
        """
        if self.other_flops is None:
            raise ValueError("share_of_linear_flops: summary must be given an input, got none")
        return self.share

    def tables(self) -> tuple[Table, Table]:
        """Return a table by class and one by name, in which layers that are alike are one row."""
        return self._by_class(), self._by_name()

    def to_json(self) -> str:
        """Return all of it as a JSON object, with `share`."""
        return json.dumps({**asdict(self), "share": self.share}, indent=2)

    def _what(self) -> str:
        return "parameters of products" if self.other_flops is None else "linear FLOPs"

    def _share(self, modules: Iterable[ModuleSummary]) -> str:
        total = sum(map(self.weight, self.modules))
        return f"{100 * sum(map(self.weight, modules)) / max(total, 1):.1f}%"

    def _by_class(self) -> Table:
        groups = _grouped(
            self.modules,
            lambda one: (one.kind, one.state, _starred_reason(one.reason), one.helps),
        )
        rows = tuple(
            (
                kind,
                str(len(found)),
                state if not reason else f"{state}: {reason}",
                f"{sum(one.parameters for one in found):,}",
                self._share(found),
                helps,
            )
            for (kind, state, reason, helps), found in groups.items()
        )
        verb = "quantized" if self.is_converted else "would be quantized by hybridq.convert"
        under = "" if self.recipe is None else f" under {self.recipe}"
        title = f"{self.model}: {100 * self.share:.1f}% of the {self._what()} {verb}{under}"
        share = f"share of {self._what()}"
        heads = ("class", "modules", "state", "parameters", share, "converted with")
        return Table(title, heads, rows, self._notes())

    def _notes(self) -> tuple[str, ...]:
        if self.other_flops is None:
            return ("shares are those of parameters: give an input to measure operations",)
        linear = sum(one.flops for one in self.modules)
        return (
            f"one forward: {linear:,} FLOPs of products with parameters, {self.other_flops:,} of "
            "attention, convolutions and the like",
        )

    def _by_name(self) -> Table:
        groups = _grouped(self.modules, _likeness)
        rows = []
        for (name, kind, state, reason, formats, padding), found in groups.items():
            slots = ", ".join(f"{slot} {text}" for slot, text in formats)
            row = (name, kind, str(len(found)), self._share(found), slots or reason or state)
            rows.append((*row, f"{100 * padding:.1f}%" if padding else ""))
        heads = ("module", "class", "times", "share", "formats, or why not", "padding")
        return Table("By name", heads, tuple(rows))

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.tables())

    def _repr_html_(self) -> str:
        return "".join(map(html, self.tables()))


_Key = tuple[Any, ...]
#: State, reason, and what helps.
_Word = tuple[str, str, str]
_CONVERTED: Final[_Word] = (STATES[0], "", "")


def _grouped(
    modules: Iterable[ModuleSummary], key: Callable[[ModuleSummary], _Key]
) -> dict[_Key, list[ModuleSummary]]:
    found: dict[_Key, list[ModuleSummary]] = {}
    for one in modules:
        found.setdefault(key(one), []).append(one)
    return found


def _likeness(one: ModuleSummary) -> _Key:
    """Return what modules of one row have in common: their names but for the numbers."""
    reason = _starred_reason(one.reason)
    name = starred(one.name) or "(model)"
    return name, one.kind, one.state, reason, one.formats, round(one.padding, 4)


def _starred_reason(reason: str) -> str:
    """Return a reason, with stars in the qualified names that it has."""
    before, told, name = reason.partition("the name ")
    words = (starred(one) if "." in one else one for one in before.split(" "))
    return " ".join(words) + told + starred(name)


def summary(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    input: Any = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> Summary:
    """Return which modules of a model are quantized, or why not, and what share of its work it is.

    It may be asked before `convert`, with the same arguments, and after, when it knows them. The
    model stays as it is.

    Args:
        model: any module.
        recipe: a Recipe or the name of one, whose formats of each slot are shown; None: that which
            `hybridq.quantize_model` gave the model, or none.
        input: what the model is called with, once, to measure operations by module: its argument, a
            tuple of arguments, or a dict of named ones. Products with a parameter are linear
            operations; attention scores are not. It runs in evaluation mode, without gradients and
            outside of `hybridq.autocast`. None: shares are those of parameters.
        filter_fn, also, least_width: as `convert` takes them, where it was not called yet.

    Raises:
        TypeError: `model` is no module, `recipe` no recipe, or as `convert` raises.
        ValueError: no recipe has that name, or as `convert` raises.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 4))
        >>> found = hybridq.summary(hybridq.convert(model), "mxfp8", torch.randn(3, 64))
        >>> print(found.tables()[0].title)
        Sequential: 94.1% of the linear FLOPs quantized under <MXFP8BlockScaling(): mxfp8>
        >>> [(one.name, one.flops, one.reason) for one in found.modules]
        [('0', 49152, ''), ('1', 3072, 'narrow, 128 to 4 features')]
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"summary: model must be an nn.Module, got {type(given).__name__}")
    chosen = _bound(model) if recipe is None else get(recipe)
    count = None if input is None else count_flops(model, input)
    known = conversion(model, filter_fn, also=also, least_width=least_width)
    modules = tuple(_modules(model, known, chosen, count))
    ours = {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    is_converted = report_of(model) is not None or ours >= set(known.converted)
    other = None if count is None else sum(count.other.values())
    text = None if chosen is None else repr(chosen)
    return Summary(type(model).__name__, text, is_converted, modules, other)


def _bound(model: nn.Module) -> Recipe | None:
    """Return the recipe that modules of a model were given; None: there is none."""
    ours = (one for one in model.modules() if isinstance(one, QuantizedModule))
    return next((one.bound_recipe for one in ours if one.bound_recipe is not None), None)


def _modules(
    model: nn.Module, known: Conversion, recipe: Recipe | None, count: FlopCount | None
) -> Iterator[ModuleSummary]:
    """Yield what is to be said of each module that multiplies, or has matrices."""
    linear = {} if count is None else count.linear
    seen: set[int] = set()
    states = _states(model, known)
    for name, module in model.named_modules():
        every = [*module.parameters(recurse=False), *originals(module).values()]
        own = {id(one): one for one in every if one.dim() >= 2}
        if isinstance(module, ParametrizationList) or (not own and name not in linear):
            continue
        state, reason, helps = states.get(name, (NO_PRODUCT, "it meets no product", ""))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            rows = "quantized rows" if any(map(is_quantized, own.values())) else "rows"
            state, reason, helps = NO_PRODUCT, f"a lookup of {rows}", ""
        elif state == STATES[0] and count is not None and not linear.get(name):
            state, reason = _passed_by(name, own.values(), model, count)
        elif count is not None and state in (UNKNOWN, NO_PRODUCT):
            found = None if name not in states else (state, reason, helps)
            state, reason, helps = _unknown(module, name, found, linear.get(name, 0), count)
        formats: tuple[tuple[str, str], ...] = ()
        padding = 0.0
        if state == STATES[0] and recipe is not None:
            formats = formats_of(module, name, recipe)
            padding = padding_of(module, name, recipe)
        size = sum(one.numel() for key, one in own.items() if key not in seen)
        if state != STATES[3]:
            seen.update(own)
        flops = linear.get(name, 0)
        kind = module._get_name()
        yield ModuleSummary(name, kind, state, reason, helps, size, flops, formats, padding)


def _passed_by(
    name: str, own: Iterable[torch.Tensor], model: nn.Module, count: FlopCount
) -> tuple[str, str]:
    """Return what a converted module is that ran no product: perhaps another has its weight."""
    ids = {id(one) for one in own}
    names = [key for key, one in model.named_parameters() if id(one) in ids]
    users = [user for key in names for user in count.users.get(key, ()) if user != name]
    if not users:
        return STATES[0], ""
    return STATES[1], f"its weight is multiplied by {users[0] or 'the model'} itself"


def _unknown(
    module: nn.Module, name: str, found: _Word | None, flops: int, count: FlopCount
) -> _Word:
    """Return what a module is that no converter takes, why, and what would convert it.

    Args:
        module, name: of it.
        found: what is known without a forward, if there is anything.
        flops: of its products with parameters.
        count: of all that ran.
    """
    if not flops and found is not None and found[0] == NO_PRODUCT:
        return found  # a convolution
    if not flops:
        return NO_PRODUCT, "none with its parameters was run", ""
    # Without matrices of its own it multiplies by another's.
    state, reason, helps = _word(of_unknown_class(module, name))
    weight = count.weights.get(name, "").removeprefix(f"{name}.")
    if state == UNKNOWN and weight:
        reason += f", which multiplies by {weight} itself"
    return state, reason, helps


def _word(one: NotConverted) -> _Word:
    return one.state, one.text, one.helps


def _states(model: nn.Module, known: Conversion) -> dict[str, _Word]:
    """Return by name what a module is, why, and what helps: as `convert` decided, or would."""
    told = report_of(model)
    left = {one.name: _word(one) for one in known.kept}
    if told is not None:
        modules = dict(model.named_modules())
        missed = (one for one in known.converted if not isinstance(modules[one], QuantizedModule))
        late = (LEFT_ALONE, "it was not there when convert was called", "hybridq.convert again")
        left |= dict.fromkeys(missed, late)
        left |= {one.name: _word(one) for one in told.kept if one.name in left}
    found = dict.fromkeys(known.converted, _CONVERTED)
    found |= {
        name: _CONVERTED
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
    }
    return found | left
