"""What `convert` converts in a model and what it leaves alone, as a value that can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import names_in
from ..nn import QuantizedModule
from .converter import Converter
from .exclusions import LEAST_WIDTH, kept_in_fp32, reasons
from .not_converted import (
    LEFT_ALONE,
    UNKNOWN,
    NotConverted,
    as_it_is,
    by_filter,
    left,
    matrices,
    of_another_class,
    of_unknown_class,
    overlapping,
)
from .table import LINEAR, converter_of, converters, converters_with, reason_to_leave

__all__ = ["Conversion", "check_model", "conversion", "keep_report", "kind_of", "report_of"]

#: Where a model has what `convert` did to it: an attribute that no state_dict knows.
_REPORT: Final = "conversion_report"

#: Filters of `convert`: (module, qualified name) to whether it is converted.
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Conversion:
    """Which modules of a model are hybridq's or would be, and which are not; `str` a table.

    Args:
        converted: qualified names of the modules that `convert` converts, or has converted.
        kept: of each module that multiplies, or may, and is not converted, why, and what would
            convert it. No embeddings, which are looked up, and no norms.
        elements: of weights that are converted, left alone, and of others.
        kinds: of modules: the name of the converter, how many are converted, and how many there
            are.
    """

    converted: tuple[str, ...]
    kept: tuple[NotConverted, ...]
    elements: tuple[int, int, int]
    kinds: tuple[tuple[str, int, int], ...] = ()

    @property
    def left_alone(self) -> tuple[tuple[str, str], ...]:
        """Name and reason of each that stays, of a kind that is converted or known by its name."""
        return tuple((one.name, one.text) for one in self.kept if one.state == LEFT_ALONE)

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """Name and class of modules with weights of two or more axes that no converter knows."""
        return tuple((one.name, one.kind) for one in self.kept if one.state == UNKNOWN)

    @property
    def summary(self) -> str:
        """One line: how many modules, and how much of the weights of matrix products."""
        share = 100 * self.elements[0] / max(sum(self.elements), 1)
        kinds = self.kinds or ((LINEAR.name, 0, 0),)
        counted = " and ".join(f"{made} of {total} {kind}" for kind, made, total in kinds)
        text = f"{counted}, {share:.1f}% of the weights"
        if self.left_alone:
            text += f"; left alone: {_some([f'{n} ({why})' for n, why in self.left_alone])}"
        if self.others:
            text += f"; not known: {_some([f'{n} ({kind})' for n, kind in self.others])}"
        return text

    def to_json(self) -> str:
        """Return all of it as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{'converted':<11} {name}" for name in self.converted]
        return "\n".join([*lines, *map(str, self.kept), self.summary])


def _some(strings: list[str]) -> str:
    return ", ".join(strings[:4]) + (f" and {len(strings) - 4} more" if len(strings) > 4 else "")


def conversion(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> Conversion:
    """Return what `convert` does to a model with these arguments, and why; nothing is changed.

    It may be asked before `convert` and after: what is converted already counts as converted.

    Args:
        model: any module.
        filter_fn, also, least_width: as `convert` takes them.

    Raises:
        TypeError, ValueError: as `convert`.

    Example:
        >>> import hybridq
        >>> from torch import nn
        >>> model = nn.ModuleDict({"up": nn.Linear(8, 16), "lm_head": nn.Linear(16, 8)})
        >>> print(hybridq.conversion(hybridq.convert(model)))
        converted   up
        left alone  lm_head: heads, the name lm_head; converted with also=["heads"]
        1 of 2 nn.Linear, 50.0% of the weights; left alone: lm_head (heads, the name lm_head)
    """
    check_model("conversion", model, filter_fn)
    also = names_in("conversion: also", also)
    among = converters_with(also)
    kept = reasons(model, also, least_width, among)
    own_word = kept_in_fp32(model)
    converted: list[str] = []
    stay: list[NotConverted] = []
    elements = [0, 0, 0]
    kinds: dict[str, list[int]] = {}
    seen: set[int] = set()
    # An attention of torch's is converted with its child, or neither is.
    owners: dict[int, tuple[nn.Module, str]] = {
        id(one.out_proj): (one, name)
        for name, one in model.named_modules()
        if type(one) is nn.MultiheadAttention
    }
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # its parameters are those of the module that has it
        kind, why = kind_of(module, among), None
        if kind is None and isinstance(module, _KNOWN):
            if isinstance(module, nn.modules.conv._ConvNd) and not isinstance(
                module, QuantizedModule
            ):
                stay.append(overlapping(module, name))
            elif "embeddings" in also and isinstance(module, nn.Embedding):
                stay.append(of_another_class(module, name))
            continue
        weights = [one for one in matrices(module).values() if id(one) not in seen]
        if kind is not None and kind.only_with is not None:
            weights = []  # no product has them; but that of a head that shares one counts
        seen.update(map(id, weights))
        size = sum(one.numel() for one in weights)
        if kind is not None and not isinstance(module, QuantizedModule):
            own, place = owners.get(id(module), (module, name))
            why = _why(own, place, among, kept, filter_fn)
            why = None if why is None else replace(why, name=name, kind=type(module).__name__)
        if kind is not None:
            count = kinds.setdefault(kind.name, [0, 0])
            count[0] += why is None
            count[1] += 1
        elif size and not isinstance(module, QuantizedModule):
            why = of_unknown_class(module, name, own_word.get(id(module)))
        if why is not None:
            stay.append(why)
            elements[2 if why.state == UNKNOWN else 1] += size
        elif kind is not None or isinstance(module, QuantizedModule):
            converted += [] if kind is None else [name]
            elements[0] += size
    counted = (elements[0], elements[1], elements[2])
    by_kind = tuple((one, made, total) for one, (made, total) in kinds.items())
    return Conversion(tuple(converted), tuple(stay), counted, by_kind)


def check_model(where: str, model: object, filter_fn: object) -> None:
    """Raise unless these are a model and a filter.

    Args:
        where: who asks, for the error.
        model, filter_fn: what the caller gave.

    Raises:
        TypeError: the model is no module, or the filter cannot be called.
    """
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        hint = "; pass an instance, not the class" if is_class else ""
        raise TypeError(f"{where}: model must be an nn.Module, got {type(model).__name__}{hint}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"{where}: filter_fn must be callable, filter_fn(module, name) -> bool, got "
            f"{type(filter_fn).__name__}"
        )


def keep_report(model: nn.Module, made: Conversion) -> None:
    """Keep with a model what `convert` did to it; copies and files of the model have it, too.

    Args:
        model: after `convert`.
        made: what it did.
    """
    model.__dict__[_REPORT] = made


def report_of(model: nn.Module) -> Conversion | None:
    """Return what the last `convert` of this very model did; None: there was none.

    Args:
        model: any module.
    """
    found = model.__dict__.get(_REPORT)
    return found if isinstance(found, Conversion) else None


#: Modules whose weights meet no matrix product, or another operation.
_KNOWN = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm)


def kind_of(module: nn.Module, among: Iterable[Converter]) -> Converter | None:
    """Return the kind of a module, converted or not; None: no converter knows it.

    Args:
        module: any.
        among: converters, in the order in which they are asked.
    """
    known = converter_of(module, among)
    if known is None:  # several kinds may become one class: the built-in ones first
        made = [one for one in reversed(converters()) if one.made(module)]
        known = max(made, key=lambda one: len(one.makes.__mro__), default=None)
    if known is None and isinstance(module, nn.Linear):
        return LINEAR
    return known


def _why(
    module: nn.Module,
    name: str,
    among: tuple[Converter, ...],
    kept: dict[str, tuple[str, str]],
    filter_fn: Filter | None,
) -> NotConverted | None:
    """Return why `convert` does not turn a module; None: it does."""
    known = converter_of(module, among)
    if known is None:
        return of_another_class(module, name)
    own = reason_to_leave(module, known)
    if own is not None:
        return as_it_is(module, name, own, known)
    if filter_fn is not None:
        return None if filter_fn(module, name) else by_filter(module, name)
    if name not in kept:
        return None
    return left(module, name, *kept[name], known.features_of(module))
