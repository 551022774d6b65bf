"""The adapter protocol: what an implementation must answer to be held to the vectors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import must_be_one_of
from .case import Array, Buffers, Case

__all__ = ["Adapter", "AdapterError", "adapter_names", "load_adapter", "register_adapter"]


class AdapterError(ValueError):
    """An adapter is unknown, cannot be imported, or lacks a method."""


@runtime_checkable
class Adapter(Protocol):
    """An implementation as the suite sees it. NumPy in and out, float32 for every value.

    A method `gemm(a, b, case)` is optional: buffers of the two planes to their float32 product
    `[rows of a, rows of b]`.
    """

    name: str

    def supports(self, case: Case) -> str | None:
        """Return None, or the reason why this implementation has nothing to say about `case`."""
        ...

    def encode(self, x: Array, case: Case) -> Buffers:
        """Return the buffers of the plane of x, or `{"data": codes}` for a cast.

        Args:
            x: float32 `[rows, cols]`, exact in `case.dtype`; `[n]` for a cast.
            case: the question.
        """
        ...

    def decode(self, buffers: Buffers, case: Case) -> Array:
        """Return the float32 values of a plane's own matrix, or of the codes for an uncast.

        Args:
            buffers: name to array, as `encode` returns them.
            case: the question.
        """
        ...


_factories: dict[str, Callable[[], Adapter]] = {}


def register_adapter(name: str, factory: Callable[[], Adapter]) -> None:
    """Make the adapter that `factory` returns known as `name`.

    Args:
        name: what `load_adapter` takes.
        factory: called without arguments, when the adapter is asked for.
    """
    _factories[name] = factory


def adapter_names() -> tuple[str, ...]:
    """Return the names of the adapters that come with hybridq."""
    return tuple(_factories)


def load_adapter(which: str) -> Adapter:
    """Return the adapter named `which`.

    Args:
        which: a name of `adapter_names()`, or `module:attr`: an adapter, or a class or function
            that returns one without arguments. The current folder is searched too.

    Raises:
        AdapterError: there is none, or it lacks a method; the message says which.
    """
    if which in _factories:
        try:
            return _factories[which]()
        except ModuleNotFoundError as error:
            raise AdapterError(
                f"adapter: {which} needs {error.name}; pip install {error.name}"
            ) from error
    module, colon, attribute = which.partition(":")
    if not (module and colon and attribute):
        raise AdapterError(f"adapter: {must_be_one_of(_factories, which, 'module:attr or ')}")
    return _checked(which, _imported(which, module, attribute))


def _imported(which: str, module: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise AdapterError(f"adapter: cannot load {which!r} ({error})") from error
    return found


def _checked(which: str, found: Any) -> Adapter:
    if isinstance(found, type) or (callable(found) and not isinstance(found, Adapter)):
        try:
            found = found()
        except TypeError as error:
            raise AdapterError(f"adapter: {which!r} must take no arguments ({error})") from error
    missing = [
        name for name in ("name", "supports", "encode", "decode") if not hasattr(found, name)
    ]
    if missing:
        raise AdapterError(f"adapter: {which!r} must have {', '.join(missing)}, got {found!r}")
    return found
