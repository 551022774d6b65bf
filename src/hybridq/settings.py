"""The one mutable state of hybridq: per-thread settings, and every environment variable.

| variable | meaning |
| --- | --- |
| `HYBRIDQ_BACKEND` | force one backend (`reference`, `cpu`, `torch`) in the process |
| `HYBRIDQ_GEMM_CACHE_BYTES` | bytes of decoded, folded or padded operands that are kept; 0: none |
| `HYBRIDQ_CPU_VARIANT` | force a variant of the CPU core: `baseline`, `x86-64-v3`, `x86-64-v4` |

A `threading.local` and not a ContextVar: dynamo traces and guards the former.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Settings", "backend", "cpu_variant", "current", "gemm_cache", "moving", "precision"]

_GEMM_CACHE_NBYTES = 1 << 30


class Settings(threading.local):
    """Settings of the calling thread.

    Attributes:
        backend: name of the forced backend, or None.
        recipe: the recipe that `hybridq.autocast` set, or None where nothing is quantized.
        gemm_cache_nbytes: how many bytes of prepared operands all planes may keep together.
        is_first_microbatch: what `hybridq.autocast` says of modules that are told nothing.
        recipe_task: the autograd graph task in which `recipe` was set, -1 outside a backward.
        delayed_recipe: the last recipe in force of those that keep a history, or None; modules
            that only ever ran compiled update by it.
        delayed_keys: keys of the recipes that are known to keep one.
        model_init: what `hybridq.quantized_model_init` set, or None where parameters keep high
            precision.
        moves_parameters: a module moves its parameters now: copies of them are parameters again.
        scaling_epoch: how many updates of scales there were before the forward that is computed
            again now; -1: none is, or not known.
    """

    def __init__(self) -> None:
        self.backend: str | None = os.environ.get("HYBRIDQ_BACKEND") or None
        self.recipe: object | None = None
        self.recipe_task: int = -1
        self.delayed_recipe: object | None = None
        self.delayed_keys: set[str] = set()
        self.scaling_epoch: int = -1
        self.model_init: object | None = None
        self.moves_parameters: bool = False
        self.is_first_microbatch: bool | None = None
        self.gemm_cache_nbytes: int = _cache_nbytes()


def _cache_nbytes() -> int:
    text = os.environ.get("HYBRIDQ_GEMM_CACHE_BYTES") or str(_GEMM_CACHE_NBYTES)
    if not text.isdecimal():
        raise ValueError(f"HYBRIDQ_GEMM_CACHE_BYTES: must be a number of bytes, got {text!r}")
    return int(text)


_settings = Settings()


def current() -> Settings:
    """Return the settings of the calling thread."""
    return _settings


@contextmanager
def moving() -> Iterator[None]:
    """Let copies of prepared parameters be prepared, as where a module moves its own."""
    previous, _settings.moves_parameters = _settings.moves_parameters, True
    try:
        yield
    finally:
        _settings.moves_parameters = previous


def cpu_variant() -> str | None:
    """Return the CPU core's variant forced by `HYBRIDQ_CPU_VARIANT`, or None."""
    return os.environ.get("HYBRIDQ_CPU_VARIANT") or None


def precision() -> str:
    """Return the precision of GEMMs that name none: that of the recipe in force, else `"auto"`.

    Where the recipe has one for each GEMM of a module, a GEMM outside modules is a forward one.
    """
    precision = getattr(_settings.recipe, "precision", "auto")
    return getattr(precision, "fprop", precision)


@contextmanager
def gemm_cache(nbytes: int) -> Iterator[None]:
    """Limit what GEMMs keep of their operands, for the calling thread; 0 keeps nothing.

    A plane that enters several GEMMs unchanged (a weight over the micro-batches of a step) is
    decoded, folded or padded once and kept until it is written. The limit holds for all planes of
    the process together; what was used longest ago is dropped first.

    Args:
        nbytes: the limit in bytes; 1 GiB unless `HYBRIDQ_GEMM_CACHE_BYTES` says otherwise.

    Raises:
        ValueError: `nbytes` is negative or no integer.

    Example:
        >>> import torch, hybridq
        >>> w = hybridq.quantize(torch.ones(64, 64), "mxfp8")
        >>> with hybridq.gemm_cache(0):
        ...     y = hybridq.gemm(torch.ones(4, 64), w)
    """
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ValueError(f"gemm_cache: nbytes must be an integer of at least 0, got {nbytes!r}")
    previous = _settings.gemm_cache_nbytes
    _settings.gemm_cache_nbytes = nbytes
    try:
        yield
    finally:
        _settings.gemm_cache_nbytes = previous


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
