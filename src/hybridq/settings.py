"""The one mutable state of hybridq: per-thread settings, and every environment variable.

| variable | meaning |
| --- | --- |
| `HYBRIDQ_BACKEND` | force one backend (`reference`, `cpu`, `torch`) in the process |
| `HYBRIDQ_CPU_VARIANT` | force a variant of the CPU core: `baseline`, `x86-64-v3`, `x86-64-v4` |

A `threading.local` and not a ContextVar: dynamo traces and guards the former.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Settings", "backend", "cpu_variant", "current"]


class Settings(threading.local):
    """Settings of the calling thread.

    Attributes:
        backend: name of the forced backend, or None.
        recipe: the recipe that `hybridq.autocast` set, or None where nothing is quantized.
        recipe_task: the autograd graph task in which `recipe` was set, -1 outside a backward.
    """

    def __init__(self) -> None:
        self.backend: str | None = os.environ.get("HYBRIDQ_BACKEND") or None
        self.recipe: object | None = None
        self.recipe_task: int = -1


_settings = Settings()


def current() -> Settings:
    """Return the settings of the calling thread."""
    return _settings


def cpu_variant() -> str | None:
    """Return the CPU core's variant forced by `HYBRIDQ_CPU_VARIANT`, or None."""
    return os.environ.get("HYBRIDQ_CPU_VARIANT") or None


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force the backend `name` for the calling thread; None lets hybridq choose.

    Args:
        name: `"reference"`, `"cpu"`, `"torch"` or None. An unknown name raises at the first
            call that would use it, with the list of backends.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.backend("reference"):
        ...     t = hybridq.quantize(torch.ones(2, 32), "mxfp8")
        >>> t.dequantize()[0, 0].item()
        1.0
    """
    previous = _settings.backend
    _settings.backend = name
    try:
        yield
    finally:
        _settings.backend = previous
