"""What models of transformers put into their KV caches: keys after rotary embedding, and values.

An attention module writes by `cache.update(keys, values, layer, ...)`, of a cache that it is given.
While it runs, that function of the very cache shows what it is given; nothing else is touched.

Source: transformers 5.23 and 5.24, cache_utils.py, and the attention modules of its models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from .products import plain_name
from .watching import MatrixObserver

__all__ = ["CACHE_ARGUMENTS", "attentions", "cache_argument", "has_cache", "watch_caches"]

#: What models and attention modules call the cache in their forwards: since transformers 5.24,
#: before it, and where a model has states instead of keys and values.
CACHE_ARGUMENTS: Final = (
    *("cache", "past_key_values"),
    *("cache_params", "past_key_value", "layer_past"),
)
#: What they call the number of their layer.
_NUMBERS: Final = ("layer_idx", "layer_id")
#: What configurations call the number of layers; of an encoder's alone in BART's the first is.
_COUNTS: Final = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
#: A component of the name of layers that predict further tokens.
_MTP: Final = ("mtp", "nextn")
#: Caches that a cache of encoder and decoder is made of.
_PARTS: Final = ("self_attention_cache", "cross_attention_cache")


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the cache in a module's forward; None: it takes none.

    Args:
        module: a model or an attention module of transformers.
    """
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def has_cache(given: Mapping[str, Any]) -> bool:
    """Return whether a forward has a KV cache, or is asked to make one, under any of its names.

    Args:
        given: the forward's arguments by name.
    """
    is_given = any(given.get(name) is not None for name in CACHE_ARGUMENTS)
    return is_given or bool(given.get("use_cache"))


def _number(module: nn.Module) -> int | None:
    """Return the number of a module's layer; None: it has none."""
    found = (getattr(module, name, None) for name in _NUMBERS)
    return next((one for one in found if isinstance(one, int)), None)


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that write keys and values into a cache, by name.

    Not those of layers that predict further tokens (MTP, as DeepSeek has it): their number is not
    below the configuration's number of layers, or their name says so. No server keeps their
    cache with the others.

    Args:
        model: any module.
    """
    config = getattr(model, "config", None)
    said = [one for name in _COUNTS if isinstance(one := getattr(config, name, None), int)]
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        number = _number(module)
        if number is None or cache_argument(module) is None:
            continue
        if said and number >= max(said):
            continue
        if any(part.startswith(_MTP) for part in name.lower().split(".")):
            continue
        found[plain_name(name)] = module
    # A layer may be given the cache for the attention inside of it.
    outer = {name for name in found for other in found if other.startswith(f"{name}.")}
    return {name: module for name, module in found.items() if name not in outer}


@contextmanager
def watch_caches(
    of: Iterable[tuple[str, nn.Module]],
    make: Callable[[str, str], MatrixObserver | None],
) -> Iterator[None]:
    """Show what attention modules put into their caches, while the model is called inside.

    Args:
        of: their names and modules, of one model.
        make: called with each name, and `"k"` and `"v"`; what it returns is given matrices
            `[batch * heads * tokens, features]`. None: nobody wants to see them.
    """
    handles: list[Any] = []
    try:
        for name, module in of:
            handles += _at(module, make(name, "k"), make(name, "v"))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _at(module: nn.Module, k: MatrixObserver | None, v: MatrixObserver | None) -> list[Any]:
    """Show what one module puts into a cache."""
    if k is None and v is None:
        return []
    names = list(inspect.signature(module.forward).parameters)
    place, changed = names.index(str(cache_argument(module))), []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        named = (kwargs.get(name) for name in CACHE_ARGUMENTS)
        cache = args[place] if place < len(args) else next(filter(_is_given, named), None)
        for one in (cache, *(getattr(cache, part, None) for part in _PARTS)):
            if one is not None and hasattr(one, "update") and hasattr(one, "__dict__"):
                changed.append((one, vars(one).get("update")))
                vars(one)["update"] = _showing(one.update, k, v)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        while changed:
            cache, own = changed.pop()
            del vars(cache)["update"]
            if own is not None:
                vars(cache)["update"] = own

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]


def _is_given(cache: Any) -> bool:
    return cache is not None  # an empty cache is false


def _showing(
    update: Callable[..., Any], k: MatrixObserver | None, v: MatrixObserver | None
) -> Callable[..., Any]:
    """Return a cache's `update` that shows what it is given."""

    def updated(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for one, see in ((keys, k), (values, v)):
            if see is not None and one.numel():
                see(one.detach().reshape(-1, one.shape[-1]))
        return update(keys, values, *args, **kwargs)

    return updated
