"""What watches products: functions that are shown the matrices of every GEMM of hybridq's modules.

They stand in the settings of the thread, as a recipe does, and see what no hook of a module does:
the matrix behind a norm or an activation, the tokens of each expert, the gradient of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ... import settings
from ...direction import DIRECTIONS, Direction
from ...quantizers import Quantizer
from ...recipes import Plan
from ...storage import TensorStorage
from ..delayed_scaling import Scales

__all__ = [
    "GradientWatcher",
    "ProductWatcher",
    "WatchedProduct",
    "WatchedTensor",
    "needs_of",
    "tell",
    "tensor_watcher",
    "unwatched",
    "watch_products",
    "watcher",
]

#: What is shown the gradient of a product's result, `[rows, out_features]`.
GradientWatcher = Callable[[torch.Tensor], None]


class WatchedProduct(NamedTuple):
    """One product of a module, or one for each group of tokens, as a forward has run it.

    Attributes:
        module: that has the weights.
        part: of the module; `""` if it has one only.
        plans: one for all groups, or one for each; None: nothing is quantized.
        matrix: returns the input in high precision, `[rows, in_features]`; computed when called.
        weights: returns the matrix `[out_features, in_features]` of each group, in high precision,
            or as it decodes where the module holds planes alone.
        result: `[..., out_features]`, without its graph; its `requires_grad` is the module's own.
        scales: of delayed scaling, of each group, or None.
        offsets: int32 `[groups]`, the row at which each group ends; None: there is one group.
        held: returns the planes of each group's weight where the module holds planes, which are
            multiplied as they are where the plan wants the same; None where it does not.
        needs: whether a backward makes dgrad, and whether it makes wgrad. In a forward without
            gradients, as of a checkpoint, what cannot be known there is True.
        numbers: of the groups, among those of all ranks; empty: there is one group.
    """

    module: nn.Module
    part: str
    plans: Sequence[Plan | None]
    matrix: Callable[[], torch.Tensor]
    weights: Callable[[], list[torch.Tensor]]
    result: torch.Tensor
    scales: Sequence[Scales | None]
    offsets: torch.Tensor | None = None
    held: Callable[[], list[TensorStorage | None]] = list
    needs: tuple[bool, bool] = (True, True)
    numbers: Sequence[int] = ()

    def directions(self, slot: str) -> list[Direction]:
        """Return the directions of the planes that the forward and a backward make of a slot.

        Args:
            slot: `"input"`, `"weight"` or `"grad_output"`.
        """
        dgrad, wgrad = self.needs
        is_made = {
            "input": (True, wgrad),
            "weight": (True, dgrad),
            "grad_output": (dgrad, wgrad),
        }[slot]
        return [one for one, is_one in zip(DIRECTIONS, is_made, strict=True) if is_one]

    def held_by(self, group: int) -> TensorStorage | None:
        """Return the planes that the module holds of a group's weight, or None.

        Args:
            group: its number.
        """
        found = self.held()
        return found[group] if found else None


class WatchedTensor(NamedTuple):
    """An operand of a quantized operation that is not a product of a module: of attention.

    Attributes:
        module: that computes.
        tensor: `"query"`, `"key"`, `"value"`, `"attention_weights"`, `"grad_attention"` (of the
            result) or `"grad_scores"`.
        values: in high precision, `[..., features]`; rows of features are what is quantized.
        quantizer: of which the rowwise plane is taken.
        role: its tensor type in a role, as recipes are asked.
        is_gradient: shown in the backward.
    """

    module: nn.Module
    tensor: str
    values: torch.Tensor
    quantizer: Quantizer
    role: str
    is_gradient: bool = False


class ProductWatcher(Protocol):
    """What is shown products: see `watch_products`.

    One with a method `see_tensor`, of a `WatchedTensor`, is shown the operands of quantized
    attention too, which must be neither changed nor kept.
    """

    @property
    def sees_plain(self) -> bool:
        """Whether experts that nothing quantizes are shown too: they run group by group then."""

    def __call__(self, product: WatchedProduct, /) -> GradientWatcher | None:
        """See a product after its forward; return what sees its gradient, or None.

        Args:
            product: its tensors must be neither changed nor kept: copy them.
        """


class _All:
    """All that watch, as one.

    Args:
        watchers: in the order in which they came.
    """

    def __init__(self, watchers: Sequence[ProductWatcher]) -> None:
        self._watchers = watchers
        self.sees_plain = any(one.sees_plain for one in watchers)

    def __call__(self, product: WatchedProduct) -> GradientWatcher | None:
        seen = [one(product) for one in self._watchers]
        return _each([one for one in seen if one is not None])

    @property
    def see_tensor(self) -> Callable[[WatchedTensor], None] | None:
        seen = [getattr(one, "see_tensor", None) for one in self._watchers]
        return _each([one for one in seen if one is not None])


def _each(functions: list[Callable[[Any], None]]) -> Callable[[Any], None] | None:
    """Return what calls all of them, or None for none."""
    if len(functions) < 2:
        return functions[0] if functions else None

    def call(given: Any) -> None:
        for function in functions:
            function(given)

    return call


class _Place:
    """A block of one watcher; any thread may end it.

    Args:
        see: the watcher; None: a screen, those before it are shown nothing.
    """

    def __init__(self, see: ProductWatcher | None) -> None:
        self.see, self.has_ended = see, False


def watcher() -> Any:
    """Return what watches products in this thread; None: nothing does, or code is compiled."""
    if torch.compiler.is_compiling():
        return None
    state = settings.current()
    if state.watcher is not None and any(one.has_ended for one in state.watchers):
        _place(state.watchers)  # another thread ended a block of this one
    return state.watcher


def tensor_watcher() -> Callable[[WatchedTensor], None] | None:
    """Return what is shown operands of quantized attention in this thread, or None."""
    see: Callable[[WatchedTensor], None] | None = getattr(watcher(), "see_tensor", None)
    return see


def needs_of(
    inputs: Iterable[torch.Tensor | None], weights: Iterable[torch.Tensor]
) -> tuple[bool, bool]:
    """Return `WatchedProduct.needs` of a product that runs now.

    Args:
        inputs: what is multiplied is made of; None is no tensor.
        weights: parameters.
    """
    is_known = torch.is_grad_enabled()
    dgrad = any(one is not None and one.requires_grad for one in inputs) or not is_known
    return dgrad, any(one.requires_grad for one in weights)


@contextmanager
def watch_products(see: ProductWatcher) -> Iterator[None]:
    """Show `see` every product of hybridq's modules that runs eagerly in this thread, in the block.

    The modules compute what they do otherwise. A gradient is shown when its backward runs, be it
    after the block. A module that computes in a recomputation is shown again. Blocks may overlap
    and end in any order: each watcher is shown all that runs in its own.

    Args:
        see: called after each product.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.nn.autograd import watch_products
        >>> class Names:
        ...     sees_plain = True
        ...     def __call__(self, product):
        ...         print(type(product.module).__name__, tuple(product.matrix().shape))
        ...         return lambda grad: print("gradient", tuple(grad.shape))
        >>> layer = hybridq.Linear(8, 4)
        >>> with watch_products(Names()):
        ...     y = layer(torch.ones(3, 8))
        Linear (3, 8)
        >>> y.sum().backward()
        gradient (3, 4)
    """
    with _placed(see):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Show nothing that runs in the block to what watches by now.

    A watcher that comes within the block is shown products.
    """
    with _placed(None):
        yield


@contextmanager
def _placed(see: ProductWatcher | None) -> Iterator[None]:
    """Have a watcher among the others in the block, which may end before or after theirs."""
    own = _Place(see)
    _place((*settings.current().watchers, own))
    try:
        yield
    finally:
        own.see, own.has_ended = None, True
        _place(settings.current().watchers)


def _place(places: tuple[_Place, ...]) -> None:
    """Set the watchers of this thread, and what stands for those that are shown products."""
    shown: list[ProductWatcher] = []
    kept = tuple(one for one in places if not one.has_ended)
    for one in kept:
        if one.see is None:
            shown = []
        elif not any(one.see is other for other in shown):
            shown.append(one.see)
    state = settings.current()
    state.watchers = kept
    state.watcher = _All(shown) if shown else None


def tell(see: Any, product: WatchedProduct) -> None:
    """Show a product to what watches, and its gradient when there is one.

    Args:
        see: what `watcher` returned; not None.
        product: that has run.
    """
    result = product.result
    with torch.no_grad():
        wants = see(product._replace(result=_without_graph(result)))
    if wants is not None and result.requires_grad:

        def hook(grad: torch.Tensor) -> None:
            with torch.no_grad():
                wants(grad.reshape(-1, grad.shape[-1]))

        result.register_hook(hook)


def _without_graph(y: torch.Tensor) -> torch.Tensor:
    """Return the values of y, not copied.

    The graph of y holds the hook, and so what sees the gradient. If that held y itself, both would
    stay for good: Python's collector does not see through the graph.
    """
    return y.detach().requires_grad_() if y.requires_grad else y.detach()
