"""Places of a model where channels of an input can be scaled, and how that is done.

Source: arXiv:2211.10438, equation 3; arXiv:2306.00978, section 3.2.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from ..kernels.inputs import wide
from ..tensor import is_quantized
from .expert_places import hidden_sources, reason_against_experts
from .folds import Fold, folds_of
from .products import SHARED, Product, expert_products, parameter_users
from .scale_sources import LayerSource, Source, multiply

__all__ = ["Place", "input_places", "places", "scale_input"]


@dataclass(frozen=True)
class Place:
    """One input of a model whose channels can be scaled.

    Args:
        consumers: the products of the input; of experts, all those that are given rows of it.
        source: what makes it; None: the consumers scale it themselves.
        repeat: how many heads of the consumers' input come from one head of the source.
        head_width: of a head.
        routers: modules that multiply the input by `weight` `[n, cols]` in high precision. Scales
            are powers of two then.
    """

    consumers: tuple[Product, ...]
    source: Source | None = None
    repeat: int = 1
    head_width: int = 1
    routers: tuple[nn.Module, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the consumers; of several experts the name of their stack."""
        is_one = len(self.consumers) == 1
        return tuple(dict.fromkeys(one.name if is_one else one.key for one in self.consumers))

    @property
    def powers_of_two(self) -> bool:
        """Whether scales are powers of two, which round nothing."""
        return bool(self.routers)

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
            multiply(*_columns_of(product, columns))
        for router in self.routers:
            multiply(cast(torch.Tensor, router.weight), columns)
        if self.source is not None:
            self.source.divide(scales)
            return
        for product in self.consumers:
            scale_input(product.module, 1.0 / columns)


def _columns_of(product: Product, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a product's matrix as it is held, and factors of its columns in a shape that fits."""
    held = _held(product).detach()
    matrix = held if product.expert is None else held[product.expert]
    return matrix, by[:, None] if product.is_in_out else by


#: Why most products have no place.
_UNKNOWN: Final = "no layer before it is known that makes its input for it alone"
#: Of a module whose input is scaled in its forward: the factors, as ModelOpt calls them.
_FACTORS: Final = "pre_quant_scale"


def _scale_rows(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Multiply a module's input by its factors: a forward pre-hook with keywords."""
    if args:
        return (args[0] * module.pre_quant_scale.to(args[0].dtype), *args[1:]), kwargs
    name = "input"
    if name not in kwargs:  # a class of the user's own, or a call that lacks it
        name = next(iter(inspect.signature(module.forward).parameters))
        if name not in kwargs:
            return args, kwargs
    rows = kwargs[name]
    return args, {**kwargs, name: rows * module.pre_quant_scale.to(rows.dtype)}


def scale_input(module: Any, factors: torch.Tensor) -> None:
    """Let a linear layer multiply its input by factors first.

    They are a buffer of the module, `pre_quant_scale`, so that files have them.

    Args:
        module: a linear layer.
        factors: `[in_features]`.

    Source: the name and the meaning are ModelOpt's.
    """
    if _FACTORS in module._buffers:
        factors = wide(module.pre_quant_scale) * factors
        module.pre_quant_scale = factors.to(module.weight.dtype).to(module.weight.device)
        return
    own = factors.to(module.weight.dtype).to(module.weight.device)
    module.register_buffer(_FACTORS, own)
    module.register_forward_pre_hook(_scale_rows, with_kwargs=True)


def places(model: nn.Module, of: tuple[Product, ...]) -> tuple[list[Place], dict[str, str]]:
    """Return the places of a model where scales fold into what makes the input.

    Those of the table first, in its order; then the hidden values of each expert in a stack.

    Args:
        model: any module.
        of: the products that are quantized.

    Returns:
        The places, each with a quantized consumer at least; and the other products by name, those
        of experts by their stack's, with why their inputs have no place.
    """
    table = _Table(model, of)
    for name, block in model.named_modules():
        for fold in folds_of(type(block)):
            table.add(name, block, fold)
    sources, reasons = hidden_sources(of, table.users)
    made = [*table.made, *(Place((one,), source) for one, source in sources.items())]
    placed = {one for place in made for one in place.consumers}
    left = {}
    for product in of:
        if product not in placed:
            why = reasons.get(product.key) or table.reasons.get(id(product.module))
            left[product.key] = why or _UNKNOWN
    return made, left


class _Table:
    """The folds of a model's blocks, as places; and why others hold of nothing.

    Args:
        model: any module.
        of: the products that are quantized.
    """

    def __init__(self, model: nn.Module, of: Iterable[Product]) -> None:
        self.users = parameter_users(model)
        children = (one for m in model.modules() for one in m._modules.values())
        self.homes = Counter(id(one) for one in children if one is not None)
        self.made: list[Place] = []
        self.reasons: dict[int, str] = {}
        self._of: dict[int, list[Product]] = {}
        for one in of:
            self._of.setdefault(id(one.module), []).append(one)

    def add(self, name: str, block: nn.Module, fold: Fold) -> None:
        """Add the place that a fold is of a block, if a product there is quantized."""
        inner = {path: _at(block, path) for path in (fold.source, *fold.readers)}
        here = [inner[path] for path in fold.readers if path not in fold.routers]
        if not any(_is_first(one) for module in here for one in self._of.get(id(module), ())):
            return
        experts: tuple[Product, ...] = ()
        why = self._in_two_places(block, fold) or _against(fold, inner, self.users)
        if why is None and fold.experts is not None:
            experts = self._experts(f"{name}.{fold.experts}", inner[fold.experts])
            why = reason_against_experts(experts, self.users)
        if why is not None:
            self.reasons.update({id(module): why for module in here})
            return
        layers = [self._layer(f"{name}.{path}", inner[path]) for path in fold.consumers]
        consumers = (*layers, *experts)
        routers = tuple(inner[path] for path in fold.routers)
        self.made.append(_place(block, fold, inner, consumers, routers))

    def _in_two_places(self, block: nn.Module, fold: Fold) -> str | None:
        """Return which of a fold's modules another block has, too, and scales for its own input."""
        for path in (fold.source, *fold.readers):
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                inside = ".".join(parts[:depth])
                if self.homes[id(_at(block, inside))] > 1:
                    return f"{inside} is in two places of the model"
        return None

    def _layer(self, name: str, module: nn.Module) -> Product:
        found = self._of.get(id(module))
        return found[0] if found else Product(name.lstrip("."), module)

    def _experts(self, name: str, module: nn.Module) -> tuple[Product, ...]:
        """Return the first products of a module of experts; none if it is no such module."""
        found = [one for one in self._of.get(id(module), ()) if _is_first(one)]
        made = found or expert_products(name.lstrip("."), module)
        return tuple(one for one in made if _is_first(one))


def _is_first(product: Product) -> bool:
    """Return whether a product multiplies what its module is given."""
    return product.layout is None or product.parameter in product.layout.first


def _at(block: nn.Module, path: str) -> Any:
    inside: Any = block
    for part in path.split("."):
        inside = getattr(inside, part, None)
    return inside


def _against(fold: Fold, inner: dict[str, Any], users: Counter[int]) -> str | None:
    """Return why a fold does not hold of a block's layers; None: it does."""
    for path, module in inner.items():
        if path == fold.experts:
            continue
        weight = getattr(module, "weight", None)
        is_norm = path == fold.source and fold.kind != "linear"
        if not isinstance(weight, torch.Tensor):
            return f"{path} has no weight"
        if Product(path, module).is_part:
            return f"the weight of {path} is on several ranks; scale before it is dealt out"
        if is_quantized(weight):
            return f"the weight of {path} is quantized already"
        if any(users[id(one)] > 1 for one in module.parameters(recurse=False)):
            return f"a parameter of {path} is another module's, too"
        if weight.dim() != (1 if is_norm else 2):
            return f"{path} is a {type(module).__name__}, not the layer that the table knows"
        if is_norm or path in fold.routers:
            continue
        if not isinstance(module, nn.Linear):
            return f"{path} is a {type(module).__name__}, not the layer that the table knows"
        if type(module).forward is not nn.Linear.forward and not _is_own(module):
            return f"{path} is a {type(module).__name__} with a forward of its own"
    return None


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "hybridq"


def _place(
    block: nn.Module,
    fold: Fold,
    inner: dict[str, Any],
    consumers: tuple[Product, ...],
    routers: tuple[nn.Module, ...],
) -> Place:
    source, cols = inner[fold.source], consumers[0].weight().shape[1]
    channels = source.weight.shape[0]
    width = channels
    if fold.attention is not None:
        attention = _at(block, fold.attention)
        width = getattr(attention, "head_dim", None) or attention.attention_head_size
    made = LayerSource(source, fold.kind)
    return Place(consumers, made, cols // channels, width, routers)


def input_places(
    groups: Iterable[tuple[Product, ...]], left: Mapping[str, str], users: Mapping[int, int]
) -> tuple[list[Place], dict[str, str]]:
    """Return places whose consumers scale their input themselves; and the products still left.

    Args:
        groups: products of one input together.
        left: products without a place: name to why.
        users: of each parameter, by its id, how many modules hold it: none of two is scaled.
    """
    made, rest = [], dict(left)
    for group in groups:
        if any(one.is_part for one in group):
            why = "its weight is on several ranks; scale before it is dealt out"
            rest.update({one.name: why for one in group})
        elif all(_is_linear(one) for one in group):
            shared = {one for one in group if users[id(_held(one))] > 1}
            rest.update({one.name: SHARED for one in shared})
            own = tuple(one for one in group if one not in shared)
            made += [Place(own)] if own else []
            for one in own:
                rest.pop(one.name, None)
    return made, rest


def _held(product: Product) -> Any:
    """Return the parameter that holds a product's matrix, as its module has it."""
    return getattr(product.module, product.parameter)


def _is_linear(product: Product) -> bool:
    """Return whether a product is a linear layer with a plain weight `[out, in]`."""
    weight = _held(product)
    is_matrix = product.expert is None and weight.dim() == 2 and not product.is_in_out
    return is_matrix and isinstance(product.module, nn.Linear) and not is_quantized(weight)
