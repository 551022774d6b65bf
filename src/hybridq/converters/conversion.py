"""What `convert` converts in a model and what it leaves alone, as a value that can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..nn import QuantizedModule
from .converter import Converter
from .exclusions import LEAST_WIDTH, reason_by_name, reasons
from .table import LINEAR, converter_of, converters, converters_with

__all__ = ["Conversion", "conversion", "keep_report", "kind_of", "report_of"]

#: Where a model has what `convert` did to it: an attribute that no state_dict knows.
_REPORT: Final = "conversion_report"

#: Filters of `convert`: (module, qualified name) to whether it is converted.
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Conversion:
    """Which modules of a model are hybridq's or would be, and which are not; `str` a table.

    Args:
        converted: qualified names of the modules that `convert` converts, or has converted.
        left_alone: name and reason of each that stays as it is, though it is of a kind that is
            converted.
        others: name and class of modules with weights of two or more dimensions that no converter
            knows; no embeddings, convolutions or norms.
        elements: of weights that are converted, left alone, and of others.
        kinds: of modules: the name of the converter, how many are converted, and how many there
            are.
    """

    converted: tuple[str, ...]
    left_alone: tuple[tuple[str, str], ...]
    others: tuple[tuple[str, str], ...]
    elements: tuple[int, int, int]
    kinds: tuple[tuple[str, int, int], ...] = ()

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

    def __str__(self) -> str:
        lines = [f"converted   {name}" for name in self.converted]
        lines += [f"left alone  {name}: {why}" for name, why in self.left_alone]
        lines += [f"not known   {name}: {kind}" for name, kind in self.others]
        return "\n".join([*lines, self.summary])


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
        left alone  lm_head: heads, the name lm_head
        1 of 2 nn.Linear, 50.0% of the weights; left alone: lm_head (heads, the name lm_head)
    """
    also = also if isinstance(also, str) else tuple(also)
    among = converters_with(also)
    kept = reasons(model, also, least_width, among)
    converted: list[str] = []
    left: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
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
        kind, why = kind_of(module, among), None
        if kind is None and isinstance(module, _KNOWN):
            if "embeddings" in also and isinstance(module, nn.Embedding):
                left.append((name, f"{type(module).__name__} has a forward of its own"))
            continue
        weights = [one for one in _weights(module) if id(one) not in seen]
        if kind is not None and kind.only_with is not None:
            weights = []  # no product has them; but that of a head that shares one counts
        seen.update(map(id, weights))
        size = sum(one.numel() for one in weights)
        if not isinstance(module, QuantizedModule):
            own, place = owners.get(id(module), (module, name))
            why = _why(own, place, among, kept, filter_fn)
        if kind is not None:
            count = kinds.setdefault(kind.name, [0, 0])
            count[0] += why is None
            count[1] += 1
        if kind is not None and why is not None:
            left.append((name, why))
            elements[1] += size
        elif kind is not None or isinstance(module, QuantizedModule):
            converted += [] if kind is None else [name]
            elements[0] += size
        elif size:
            others.append((name, type(module).__name__))
            elements[2] += size
    counted = (elements[0], elements[1], elements[2])
    by_kind = tuple((one, made, total) for one, (made, total) in kinds.items())
    return Conversion(tuple(converted), tuple(left), tuple(others), counted, by_kind)


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
    if known is None:  # the built-in ones first: several kinds may become one class
        known = next((one for one in reversed(converters()) if one.made(module)), None)
    if known is None and isinstance(module, nn.Linear):
        return LINEAR
    return known


def _why(
    module: nn.Module,
    name: str,
    among: tuple[Converter, ...],
    kept: dict[str, tuple[str, str]],
    filter_fn: Filter | None,
) -> str | None:
    """Return why `convert` does not turn a module; None: it does."""
    known = converter_of(module, among)
    if known is None:
        return _of_another_class(module, name)
    own = None if known.keeps is None else known.keeps(module)
    if own is not None:
        return own
    if filter_fn is not None:
        return None if filter_fn(module, name) else "filter_fn"
    return ", ".join(kept[name]) if name in kept else None


def _of_another_class(module: nn.Module, place: str) -> str:
    """Return why a module that derives from `nn.Linear` stays: its name, or its class."""
    by_name = reason_by_name(place)
    if by_name is not None:
        return f"{by_name}, the name {place}"
    name = type(module).__name__
    if type(module) is NonDynamicallyQuantizableLinear:
        return "its nn.MultiheadAttention multiplies by the weight itself"
    if type(module).forward is nn.Linear.forward:
        return f"{name} is a class of its own, which hybridq.register_converter takes"
    return f"{name} has a forward of its own"


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters(recurse=False):
        if not is_lazy(parameter) and parameter.dim() >= 2 and parameter.is_floating_point():
            yield parameter
