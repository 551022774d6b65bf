"""What is written to a module after it is made: an option takes effect, or says that it cannot.

A class has a table `_written_options` of checks by the option's name. A check is given the module,
the name and the value, and returns what the module keeps; what follows from the value it sets
itself. Names that are in no table are anybody's: programs keep attributes of their own on modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from ...errors import must_be_one_of

__all__ = [
    "Check",
    "WrittenOptions",
    "finite_eps",
    "one_of",
    "probability",
    "said",
    "settled",
    "switch",
]

#: What is asked where an option is written: module, name, value.
Check = Callable[[Any, str, Any], Any]


class WrittenOptions(nn.Module):
    """Base of modules whose options are checked wherever they are written.

    `__dict__`, by which copies and pickles come, and class attributes are not looked at.
    """

    #: By name, what checks an option; those of the classes that a class derives from hold too.
    _written_options: ClassVar[Mapping[str, Check]] = {}
    _option_checks: ClassVar[Mapping[str, Check]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found: dict[str, Check] = {}
        for one in reversed(cls.__mro__):
            found.update(vars(one).get("_written_options", {}))
        cls._option_checks = found

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._option_checks.get(name)
        super().__setattr__(name, value if check is None else check(self, name, value))


def said(module: Any, text: str) -> str:
    """Return what an error says, which begins with the module's class.

    Args:
        module: that was written to.
        text: what must be, and what it got.
    """
    return f"{type(module).__name__}: {text}"


def settled(module: Any, name: str, value: Any) -> Any:
    """Return the value; raise where it is another one than the module was made with.

    Args:
        module: any.
        name: of the option.
        value: that is written.

    Raises:
        AttributeError: it differs.
    """
    was = module.__dict__.get(name, value)
    if was is not value and was != value:
        text = f"{name} is settled when the module is made, as {was!r}, got {value!r}"
        raise AttributeError(said(module, f"{text}; make another module"))
    return value


def switch(module: Any, name: str, value: Any) -> bool:
    """Return the value as a bool.

    Args:
        module: any.
        name: of the option.
        value: a bool, or the int 0 or 1.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(said(module, f"{name} must be a bool, got {value!r}"))
    return bool(value)


def _number(module: Any, name: str, value: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(said(module, f"{name} must be a number, got {value!r}"))
    return float(value)


def finite_eps(module: Any, name: str, value: Any) -> float:
    """Return what a norm adds to its sum, as a float.

    Args:
        module: any.
        name: of the option.
        value: a number.

    Raises:
        TypeError: it is none.
        ValueError: it is negative or not finite.
    """
    number = _number(module, name, value)
    if not 0.0 <= number < math.inf:
        raise ValueError(said(module, f"{name} must be finite and at least 0, got {value}"))
    return number


def probability(module: Any, name: str, value: Any) -> float:
    """Return a probability below 1, as a float.

    Args:
        module: any.
        name: of the option.
        value: a number.

    Raises:
        TypeError: it is none.
        ValueError: it is not in [0, 1).
    """
    number = _number(module, name, value)
    if not 0.0 <= number < 1.0:
        raise ValueError(said(module, f"{name} must be in [0, 1), got {value}"))
    return number


def one_of(*known: str) -> Check:
    """Return the check of an option that is one of some texts.

    Args:
        known: the texts.
    """

    def check(module: Any, name: str, value: Any) -> Any:
        if value not in known:
            raise ValueError(said(module, f"{name} {must_be_one_of(known, value)}"))
        return value

    return check
