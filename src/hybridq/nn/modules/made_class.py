"""Classes that are made of one of hybridq's and a module's own, for what is converted in place."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final, TypeVar

from torch import nn

__all__ = ["clash", "made_class"]

_Made = TypeVar("_Made", bound=nn.Module)
#: By one of hybridq's classes and a module's own, the class that is made of both.
_classes: Final[dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]]] = {}


def made_class(base: type[_Made], plain: type[nn.Module], name: str | None = None) -> type[_Made]:
    """Return the class that derives from one of hybridq's and from a module's own; made once.

    Copies, pickles and files of its modules name the two, and make it again when they are read.

    Args:
        base: of hybridq, whose methods are found first.
        plain: the module's own class, `plain_class` of the result.
        name: of the result; None: that of `plain`, behind "Quantized".
    """
    found = _classes.get((base, plain))
    if found is None:
        about = {
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
            "__reduce_ex__": _reduced,
            "plain_class": plain,
            "_hybridq_class": base,
            "forward": _forward(base, plain),
        }
        found = type(name or f"Quantized{plain.__name__}", (base, plain), about)
        _classes[base, plain] = found
    return found  # type: ignore[return-value]


def _forward(base: type[nn.Module], plain: type[nn.Module]) -> Any:
    """Return the forward of hybridq's class, with the signature of the module's own.

    Libraries (torchtitan) take arguments apart by the names that they read there.
    """
    one: Any = base.forward
    made = FunctionType(one.__code__, one.__globals__, "forward", one.__defaults__, one.__closure__)
    made.__kwdefaults__, made.__doc__ = one.__kwdefaults__, one.__doc__
    made.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    return made


def _reduced(module: Any, protocol: Any) -> Any:
    kind = type(module)
    return _remade, (kind._hybridq_class, kind.plain_class), module.__getstate__()


def _remade(base: type[nn.Module], plain: type[nn.Module]) -> nn.Module:
    """Return an empty module of the class that is made of both."""
    kind = made_class(base, plain)
    return kind.__new__(kind)


def clash(
    base: type[nn.Module], module: nn.Module, shared: type[nn.Module] = nn.Module
) -> str | None:
    """Return why a class cannot be made: a name that means two things; None: it can.

    Args:
        base: of hybridq.
        module: of the other class.
        shared: what both classes derive from. Its methods both may override: ours call the own.
    """

    def names(kind: type[nn.Module]) -> set[str]:
        return set().union(*(vars(one) for one in kind.__mro__ if not issubclass(shared, one)))

    own = names(type(module))
    own |= {*vars(module), *module._parameters, *module._buffers, *module._modules}
    both = sorted((own & (names(base) | set(base.__annotations__))) - set(dir(shared)))
    return f"it has its own {', '.join(both)}" if both else None
