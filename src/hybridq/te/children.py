"""Which class of `hybridq.te` stands for which of hybridq's, inside of other modules too."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from .. import nn
from .over_ranks import OverRanks

__all__ = ["join", "own_children"]

#: The door's class of each of hybridq's that it derives from.
_CLASSES: Final[dict[type, type]] = {}


def join(cls: Any, place: str = "") -> None:
    """Let modules of hybridq's class that are made inside of others be of this one.

    Args:
        cls: of `hybridq.te`, derived from a class of `hybridq.nn`.
        place: what `__module__` says of it: Transformer Engine's path, by which scripts know its
            modules (`type(module).__module__.startswith(...)`). Examples in its docstring still
            belong to the module that it stands in.
    """
    _CLASSES[next(base for base in cls.__mro__ if base.__module__.startswith(nn.__name__))] = cls
    if place:
        vars(sys.modules[cls.__module__]).setdefault("__test__", {})[cls.__name__] = cls
        cls.__module__ = place


def own_children(module: torch.nn.Module) -> None:
    """Let the modules inside of a module be of the door's classes, which have the read-outs.

    Args:
        module: just made of hybridq's.
    """
    child: Any
    for child in module.modules():
        own = _CLASSES.get(type(child))
        if own is not None:
            child.__class__ = own  # of the same attributes
            if issubclass(own, OverRanks):
                child.take_from_parent()
