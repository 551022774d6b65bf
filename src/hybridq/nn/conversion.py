"""What `convert` turns in a model and what it leaves alone, as a value that can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .left_alone import LEAST_WIDTH, reasons
from .linear import Linear
from .module import QuantizedModule

__all__ = ["Conversion", "conversion"]

#: Filters of `convert`: (module, qualified name) to whether it is turned.
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Conversion:
    """Which linear modules of a model are hybridq's or would be, and which are not; `str` a table.

    Args:
        converted: qualified names of `nn.Linear` that `convert` turns, or has turned.
        left_alone: name and reason of each that stays as it is.
        others: name and class of modules with weights of two or more dimensions that `convert`
            knows nothing of, such as stacked experts; no embeddings, convolutions or norms.
        elements: of weights that are converted, left alone, and of others.
    """

    converted: tuple[str, ...]
    left_alone: tuple[tuple[str, str], ...]
    others: tuple[tuple[str, str], ...]
    elements: tuple[int, int, int]

    @property
    def summary(self) -> str:
        """One line: how many modules, and how much of the weights of matrix products."""
        share = 100 * self.elements[0] / max(sum(self.elements), 1)
        total = len(self.converted) + len(self.left_alone)
        text = f"{len(self.converted)} of {total} nn.Linear, {share:.1f}% of the weights"
        if self.left_alone:
            text += f"; left alone: {_some([f'{n} ({why})' for n, why in self.left_alone])}"
        if self.others:
            text += f"; no nn.Linear: {_some([f'{n} ({kind})' for n, kind in self.others])}"
        return text

    def __str__(self) -> str:
        lines = [f"converted   {name}" for name in self.converted]
        lines += [f"left alone  {name}: {why}" for name, why in self.left_alone]
        lines += [f"no Linear   {name}: {kind}" for name, kind in self.others]
        return "\n".join([*lines, self.summary])


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def conversion(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> Conversion:
    """Return what `convert` does to a model with these arguments, and why; nothing is changed.

    It may be asked before `convert` and after: a module that is turned already counts as converted.

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
    kept = reasons(model, also, least_width)
    converted: list[str] = []
    left: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    elements = [0, 0, 0]
    seen: set[int] = set()
    for name, module in model.named_modules():
        why = None if isinstance(module, QuantizedModule) else _why(module, name, kept, filter_fn)
        weights = [one for one in _weights(module) if id(one) not in seen]
        if isinstance(module, _KNOWN):  # but of a head that has an embedding's weight it counts
            continue
        seen.update(map(id, weights))
        size = sum(one.numel() for one in weights)
        if isinstance(module, nn.Linear) and not isinstance(module, QuantizedModule) and why:
            left.append((name, why))
            elements[1] += size
        elif isinstance(module, nn.Linear | QuantizedModule):
            converted += [name] if isinstance(module, nn.Linear) else []
            elements[0] += size
        elif size:
            others.append((name, type(module).__name__))
            elements[2] += size
    counted = (elements[0], elements[1], elements[2])
    return Conversion(tuple(converted), tuple(left), tuple(others), counted)


#: Modules whose weights meet no matrix product, or another operation.
_KNOWN = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm)


def _why(
    module: nn.Module, name: str, kept: dict[str, tuple[str, str]], filter_fn: Filter | None
) -> str | None:
    """Return why `convert` does not turn a module; None: it does."""
    if type(module) not in (nn.Linear, Linear):
        return f"{type(module).__name__} has a forward of its own"
    if filter_fn is not None:
        return None if filter_fn(module, name) else "filter_fn"
    return ", ".join(kept[name]) if name in kept else None


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters(recurse=False):
        if not is_lazy(parameter) and parameter.dim() >= 2 and parameter.is_floating_point():
            yield parameter
