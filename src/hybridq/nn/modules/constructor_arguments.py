"""What constructors of modules are given, by the types that they write down.

The text "false" would switch an option on, 4.5 features would be 4, and a size or an eps that a
configuration file holds as a text would end in torch's words somewhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, Final, ParamSpec

import torch

__all__ = ["check_count", "checked", "is_whole"]

P = ParamSpec("P")

#: Parameters whose constructor or torch says more of them than the type does.
_CHECKED_ELSEWHERE: Final = ("tp_size", "padding_idx")


def checked(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Return a constructor that refuses what is not of its parameters' types before it begins.

    Of `bool` are bools, and the ints 0 and 1; of `int` whole numbers from 0; of `float` numbers,
    and no texts. Other types are left to the constructor.

    Args:
        init: `__init__` of a module, with annotations.

    Raises:
        TypeError: by what is returned: an argument is of another type.
        ValueError: by what is returned: a whole number is negative.
    """
    known = signature(init)
    checks = _checks(known.parameters)

    @wraps(init)
    def checking(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            given = known.bind(self, *args, **kwargs).arguments
        except TypeError:  # Python's own words, of a missing or an unknown argument
            given = {}
        for name, value in given.items():
            if name in checks:
                checks[name](type(self).__name__, name, value)
        init(self, *args, **kwargs)

    return checking


def _checks(parameters: Mapping[str, Any]) -> dict[str, Callable[[str, str, Any], None]]:
    """Return, by the parameter's name, what checks it."""
    kinds: dict[str, Callable[[str, str, Any], None]] = {
        "bool": _check_switch,
        "int": check_count,
        "int | None": _or_none(check_count),
        "float": _check_number,
        "float | None": _or_none(_check_number),
    }
    return {
        name: kinds[parameter.annotation]
        for name, parameter in parameters.items()
        if name not in _CHECKED_ELSEWHERE and parameter.annotation in kinds
    }


def _or_none(check: Callable[[str, str, Any], None]) -> Callable[[str, str, Any], None]:
    def checking(owner: str, name: str, value: Any) -> None:
        if value is not None:
            check(owner, name, value)

    return checking


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, numpy's and torch's included.

    Args:
        value: anything.
    """
    if isinstance(value, int | torch.SymInt):
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _check_switch(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, bool) and not (is_whole(value) and value in (0, 1)):
        raise TypeError(f"{owner}: {name} must be a bool, got {value!r}")


def check_count(owner: str, name: str, value: Any) -> None:
    """Raise where a size is no whole number from 0; True is none.

    Args:
        owner: the class, for the error.
        name: of the size.
        value: what was given.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative.
    """
    if isinstance(value, bool) or not is_whole(value):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{owner}: {name} must not be negative, got {value}")


def _check_number(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
