"""Exceptions, warnings and the warn-once helper of hybridq."""

from __future__ import annotations

import warnings

__all__ = [
    "BackendError",
    "CheckpointError",
    "HybridQWarning",
    "PlaneError",
    "RecipeError",
    "SpecError",
    "warn_once",
]


class SpecError(ValueError):
    """A format, element or PlaneSpec is unknown or contradicts itself."""


class PlaneError(RuntimeError):
    """A tensor lacks the plane that an operation needs."""


class BackendError(RuntimeError):
    """No backend can run the call; the message lists every backend's reason."""


class RecipeError(ValueError):
    """A recipe's quantizers do not make all the GEMMs of a module runnable."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, converted or written as asked; its files are as they were."""


class HybridQWarning(UserWarning):
    """Something works, but not in the way that the caller may expect."""


_seen: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn with `message` the first time that `key` is seen in this process.

    Args:
        key: identity of the situation; a later call with the same key is silent.
        message: what happens and how to avoid it.
    """
    if key in _seen:
        return
    _seen.add(key)
    warnings.warn(message, HybridQWarning, stacklevel=3)
