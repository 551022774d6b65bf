"""Places of a model where channels of an input can be scaled, and how that is done.

Source: arXiv:2211.10438, equation 3; arXiv:2306.00978, section 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..tensor import is_quantized
from .folds import Fold, folds_of
from .products import Product

__all__ = ["Place", "input_places", "places", "scale_input"]


@dataclass(frozen=True)
class Place:
    """One input of a model whose channels can be scaled.

    Args:
        consumers: the products of the input.
        source: the layer that makes it; None: the consumers scale it themselves.
        kind: of the source, as Fold has it.
        repeat: how many heads of the consumers' input come from one head of the source.
        head_width: of a head.
    """

    consumers: tuple[Product, ...]
    source: Any = None
    kind: str = "linear"
    repeat: int = 1
    head_width: int = 1

    def gathered(self, statistic: torch.Tensor, largest: bool) -> torch.Tensor:
        """Return a statistic `[cols]` of the input as one of the source's channels, `[n]`.

        Args:
            statistic: of each input channel.
            largest: of channels that come from one, take the largest; else the mean.
        """
        heads = statistic.reshape(-1, self.repeat, self.head_width)
        return (heads.amax(1) if largest else heads.mean(1)).reshape(-1)

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales `[n]` of the source's channels as those of the input's, `[cols]`."""
        heads = scales.reshape(-1, 1, self.head_width)
        return heads.expand(-1, self.repeat, -1).reshape(-1)

    def apply(self, scales: torch.Tensor) -> None:
        """Divide what the source makes by scales, and multiply the consumers' columns, in place.

        In exact arithmetic the model computes what it did. Each parameter is rounded once.

        Args:
            scales: FP64 `[n]`, positive.
        """
        columns = self.spread(scales)
        for product in self.consumers:
            module: Any = product.module
            _multiply(module.weight, columns)
        if self.source is None:
            for product in self.consumers:
                scale_input(product.module, 1.0 / columns)
            return
        if self.kind == "linear":
            _multiply(self.source.weight, (1.0 / scales)[:, None])
        elif self.kind == "zero_centered_norm":
            _assign(self.source.weight, (1.0 + self.source.weight.double()) / scales - 1.0)
        else:
            _multiply(self.source.weight, 1.0 / scales)
        if getattr(self.source, "bias", None) is not None:
            _multiply(self.source.bias, 1.0 / scales)


def _multiply(parameter: torch.Tensor, by: torch.Tensor) -> None:
    _assign(parameter, parameter.detach().to(torch.float64) * by)


def _assign(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values.to(parameter.dtype))


#: Of a module whose input is scaled in its forward: the factors, as ModelOpt calls them.
_FACTORS: Final = "pre_quant_scale"


def _scale_rows(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Multiply a module's input by its factors: a forward pre-hook."""
    return (args[0] * module.pre_quant_scale.to(args[0].dtype), *args[1:])


def scale_input(module: Any, factors: torch.Tensor) -> None:
    """Let a linear layer multiply its input by factors first.

    They are a buffer of the module, `pre_quant_scale`, so that files have them.

    Args:
        module: a linear layer.
        factors: `[in_features]`.

    Source: the name and the meaning are ModelOpt's.
    """
    if _FACTORS in module._buffers:
        module.pre_quant_scale = (module.pre_quant_scale.double() * factors).to(module.weight.dtype)
        return
    module.register_buffer(_FACTORS, factors.to(module.weight.dtype))
    module.register_forward_pre_hook(_scale_rows)


def places(model: nn.Module, of: tuple[Product, ...]) -> tuple[list[Place], dict[str, str]]:
    """Return the places of a model where scales fold into the layer before, in the table's order.

    Args:
        model: any module.
        of: the products that are quantized.

    Returns:
        The places, each with a quantized consumer at least; and the other products by name, with
        why their inputs have no place.
    """
    wanted = {id(one.module): one for one in of if one.expert is None}
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    made, reasons = [], {}
    found: set[int] = set()
    for name, block in model.named_modules():
        for fold in folds_of(type(block)):
            inner = {path: _at(block, path) for path in (fold.source, *fold.consumers)}
            here = [inner[path] for path in fold.consumers]
            if not any(id(module) in wanted for module in here):
                continue
            why = _against(fold, inner, users)
            if why is None:
                made.append(_place(name, block, fold, inner, wanted))
                found.update(map(id, here))
            else:
                reasons.update({id(module): why for module in here})
    left = {}
    for product in of:
        if id(product.module) not in found:
            left[product.name] = reasons.get(id(product.module), _reason(product))
    return made, left


def _at(block: nn.Module, path: str) -> Any:
    inside: Any = block
    for part in path.split("."):
        inside = getattr(inside, part, None)
    return inside


def _against(fold: Fold, inner: dict[str, Any], users: Counter[int]) -> str | None:
    """Return why a fold does not hold of a block; None: it does."""
    for path, module in inner.items():
        weight = getattr(module, "weight", None)
        is_norm = path == fold.source and fold.kind != "linear"
        if not isinstance(weight, torch.Tensor):
            return f"{path} has no weight"
        if weight.dim() != (1 if is_norm else 2) or not (is_norm or isinstance(module, nn.Linear)):
            return f"{path} is a {type(module).__name__}, not the layer that the table knows"
        if is_quantized(weight):
            return f"the weight of {path} is quantized already"
        if any(users[id(one)] > 1 for one in module.parameters(recurse=False)):
            return f"a parameter of {path} is another module's, too"
        if type(module).forward is not nn.Linear.forward and not (is_norm or _is_own(module)):
            return f"{path} is a {type(module).__name__} with a forward of its own"
    return None


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "hybridq"


def _place(
    name: str, block: nn.Module, fold: Fold, inner: dict[str, Any], wanted: dict[int, Product]
) -> Place:
    consumers = tuple(
        wanted.get(id(inner[path])) or Product(f"{name}.{path}" if name else path, inner[path])
        for path in fold.consumers
    )
    source, cols = inner[fold.source], inner[fold.consumers[0]].weight.shape[1]
    channels = source.weight.shape[0]
    width = channels
    if fold.attention is not None:
        attention = _at(block, fold.attention)
        width = getattr(attention, "head_dim", None) or attention.attention_head_size
    return Place(consumers, source, fold.kind, cols // channels, width)


def input_places(
    groups: Iterable[tuple[Product, ...]], left: Mapping[str, str]
) -> tuple[list[Place], dict[str, str]]:
    """Return places whose consumers scale their input themselves; and the products still left.

    Args:
        groups: products of one input together.
        left: products without a place: name to why.
    """
    made, rest = [], dict(left)
    for group in groups:
        if all(_is_linear(one) for one in group):
            made.append(Place(group))
            for one in group:
                rest.pop(one.name, None)
    return made, rest


def _is_linear(product: Product) -> bool:
    """Return whether a product is a linear layer with a plain weight `[out, in]`."""
    weight = getattr(product.module, product.parameter)
    is_matrix = product.expert is None and weight.dim() == 2 and not product.is_in_out
    return is_matrix and isinstance(product.module, nn.Linear) and not is_quantized(weight)


def _reason(product: Product) -> str:
    if product.expert is not None:
        return "it is an expert in a stack"
    return "no layer before it is known that makes its input for it alone"
