"""Floating-point operations of products, by the module that runs them, counted in one forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.flop_counter import flop_registry

from .._torch_private import TorchDispatchMode
from ..kernels.inputs import PRODUCT_FLOPS
from ..nn import PatchConv
from ..nn.modules import is_patch_conv
from ..recipes import autocast
from ..tensor import is_quantized

__all__ = ["FlopCount", "count_flops"]

_aten = torch.ops.aten


@dataclass
class FlopCount:
    """Floating-point operations of one forward, a multiplication and an addition being two.

    Attributes:
        linear: of products with a parameter of the model, by the name of the module that runs them;
            of convolutions those whose patches do not overlap.
        other: of all other products: attention scores and values, convolutions.
        weights: of a module with linear products, the qualified name of the parameter that most of
            its operations are with; not of one that casts its weights.
        users: of a parameter, the modules that multiply by it.
    """

    linear: dict[str, int] = field(default_factory=dict)
    other: dict[str, int] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)


def count_flops(model: nn.Module, input: Any) -> FlopCount:
    """Return the operations of one forward of `model`, by module.

    The model runs once as it is, in evaluation mode and outside of `hybridq.autocast`, without
    gradients.

    Args:
        model: any module.
        input: its argument; a tuple of arguments; or a dict of named ones.

    Raises:
        TypeError: `model` is no module.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"count_flops: model must be an nn.Module, got {type(given).__name__}")
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    counter = _Counter(model, names)
    with _evaluating(model), torch.no_grad(), autocast(enabled=False), counter.following():
        if isinstance(input, Mapping):
            model(**input)
        elif isinstance(input, tuple):
            model(*input)
        else:
            model(input)
    return counter.result(model)


def _is_product(module: nn.Module) -> bool:
    """Return whether a module is a convolution that is a product."""
    return isinstance(module, PatchConv) or is_patch_conv(module)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    were = [(module, module.training) for module in model.modules()]
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no children, nor shows its products
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        for module, was in were:
            module.training = was


class _Counter(TorchDispatchMode):
    """Adds up what operators compute, for the innermost module that is running."""

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self._running = [""]
        named = list(model.named_parameters())
        self._in_memory = {
            one.untyped_storage()._cdata: name for name, one in named if type(one.data) in _PLAIN
        }
        self._by_id = {id(one): name for name, one in named}
        #: By module and parameter, "" for one that is not known by its name.
        self._products: dict[str, Counter[str]] = {}
        #: By module: of products with something else, and of what is not linear.
        self.without: Counter[str] = Counter()
        self.other: Counter[str] = Counter()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count inside, and follow which module runs."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), self._running[-1]))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in _LINEAR:
            flops = _LINEAR[packet](*args, **kwargs, out_val=result)
            # What is added, a bias, stands first there; it is no matrix of the product.
            among = (*args[1:], args[0]) if packet in _ADDS_FIRST else args
            weight = next(
                (found for one in among if (found := self._weight(one)) is not None), None
            )
            if weight is None:
                self.without[self._running[-1]] += flops
            else:
                self._products.setdefault(self._running[-1], Counter())[weight] += flops
        elif packet in _OTHER:
            self.other[self._running[-1]] += _OTHER[packet](*args, **kwargs, out_val=result)
        return result

    def _weight(self, value: Any) -> str | None:
        """Return the name of the parameter that an argument is, or is a view of; None: of none.

        "" is what is made of quantized ones.
        """
        if isinstance(value, list):
            return next((one for one in map(self._weight, value) if one is not None), None)
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._by_id:
            return self._by_id[id(value)]
        if is_quantized(value):
            return ""
        return (
            self._in_memory.get(value.untyped_storage()._cdata) if type(value) in _PLAIN else None
        )

    def result(self, model: nn.Module) -> FlopCount:
        """Return what was counted.

        A module that casts its weights multiplies by none of its parameters as such: of one that
        has matrices and no product with them, all products are taken as linear.

        Args:
            model: that ran.
        """
        owners = {
            name
            for name, module in model.named_modules()
            if any(one.dim() >= 2 for one in module.parameters(recurse=False))
        }
        patches = {name for name, one in model.named_modules() if _is_product(one)}
        count = FlopCount({name: sum(made.values()) for name, made in self._products.items()})
        count.weights = {name: made.most_common(1)[0][0] for name, made in self._products.items()}
        for name, made in self._products.items():
            for weight in made:
                count.users[weight] = (*count.users.get(weight, ()), name)
        for name, flops in self.other.items():
            (count.linear if name in patches else count.other)[name] = flops
        for name, flops in self.without.items():
            is_linear = name in owners and name not in self._products
            found = count.linear if is_linear else count.other
            found[name] = found.get(name, 0) + flops
        return count


_PLAIN: Final = (torch.Tensor, nn.Parameter)


def _shapes(count: Callable[..., int]) -> Callable[..., int]:
    """Return a count that is asked with shapes, for a registry whose entries take tensors."""

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        del out_val, kwargs
        return count(*(one.shape for one in args if isinstance(one, torch.Tensor)))

    return counted


def _mv(matrix: torch.Size, vector: torch.Size) -> int:
    return 2 * math.prod(matrix)


def _addmv(bias: torch.Size, matrix: torch.Size, vector: torch.Size) -> int:
    return 2 * math.prod(matrix)


def _grouped_mm(a: torch.Size, b: torch.Size, *_: torch.Size) -> int:
    """Tokens `[T, K]` by matrices `[E, K, N]`; of stacks on both sides, each pair."""
    return 2 * math.prod(a) * b[-1]


def _layer(x: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Of a recurrent layer, one direction: each token by both weights, the gates of all in one."""
    return 2 * math.prod(x.shape[:-1]) * sum(one.numel() for one in args[:2])


def _recurrence(
    x: torch.Tensor, weights: Any, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """Of all layers and directions: a list of their weights and biases."""
    return 2 * math.prod(x.shape[:-1]) * sum(one.numel() for one in weights if one.dim() == 2)


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: torch.Size) -> int:
    """Scores of every query and key, and the values by them; grouped heads count each query's."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _of_torch(name: str) -> dict[Any, Callable[..., int]]:
    packet = getattr(_aten, name, None)
    return {} if packet not in flop_registry else {packet: flop_registry[packet]}


#: Products of matrices.
_LINEAR: Final[dict[Any, Callable[..., int]]] = {
    **_of_torch("mm"),
    **_of_torch("addmm"),
    **_of_torch("bmm"),
    **_of_torch("baddbmm"),
    **_of_torch("_scaled_mm"),
    _aten.mv: _shapes(_mv),
    _aten.addmv: _shapes(_addmv),
    _aten._grouped_mm: _shapes(_grouped_mm),
    _aten.mkldnn_rnn_layer: _layer,
    _aten._cudnn_rnn: _recurrence,
    _aten.miopen_rnn: _recurrence,
    **{getattr(torch.ops.hybridq, name): count for name, count in PRODUCT_FLOPS.items()},
}
#: Those whose first argument is added to the product.
_ADDS_FIRST: Final = (_aten.addmm, _aten.baddbmm, _aten.addmv)
#: What is no product of matrices.
_OTHER: Final[dict[Any, Callable[..., int]]] = {
    **_of_torch("convolution"),
    **{
        getattr(_aten, name): _shapes(_attention)
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        )
    },
}
