"""The one mutable state of hybridq: per-thread settings, and every environment variable.

| variable | meaning |
| --- | --- |
| `HYBRIDQ_BACKEND` | force one backend (`reference`, `cpu`, `torch`, ...) in the process |
| `HYBRIDQ_BACKEND_AUTOLOAD` | 0: no backends of other packages join |
| `HYBRIDQ_GEMM_CACHE_BYTES` | bytes of decoded, folded or padded operands that are kept; 0: none |
| `HYBRIDQ_HUGE_PAGES` | 0: large results on a CPU are in ordinary pages |
| `HYBRIDQ_KEEP_MEMORY` | 1: the C library keeps all memory that this process frees |
| `HYBRIDQ_LOG` | level of the logger `hybridq`: `debug`, `info`, `warning`, `error` |
| `HYBRIDQ_CPU_VARIANT` | force a variant of the CPU core: a name of `hybridq doctor`'s list |

Another variable whose name begins with `HYBRIDQ_` has no effect, and is warned about at the import.

A `threading.local` and not a ContextVar: dynamo traces and guards the former.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import must_be_one_of, warn_once

__all__ = [
    "Settings",
    "backend",
    "cpu_variant",
    "current",
    "gemm_cache",
    "keeps_memory",
    "launched_rank",
    "loads_backends",
    "log_level",
    "moving",
    "precision",
    "uses_huge_pages",
]

_GEMM_CACHE_NBYTES = 1 << 30
_PREFIX = "HYBRIDQ_"
#: Those of the table above, and what the project's own tests read.
_VARIABLES = (
    *("BACKEND", "BACKEND_AUTOLOAD", "GEMM_CACHE_BYTES", "HUGE_PAGES", "KEEP_MEMORY", "LOG"),
    "CPU_VARIANT",
    "EMULATION",
)
_LOG_LEVELS = ("debug", "info", "warning", "error")


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
        is_delayed_last: no outermost `hybridq.autocast` with a recipe without histories came since.
        delayed_keys: keys of the recipes that are known to keep one.
        model_init: what `hybridq.quantized_model_init` set, or None where parameters keep high
            precision.
        moves_parameters: a module moves its parameters now: copies of them are parameters again.
        offload: what `hybridq.offload` set: it is told of planes before they are saved; or None.
        watcher: is shown products, for all that `hybridq.nn.autograd.watch_products` set; or None.
        watchers: their blocks, in the order in which they came.
        in_ring: attention sees the tokens of several ranks (`distributed.context_parallel`).
        scaling_epoch: how many updates of scales there were before the forward that is computed
            again now; -1: none is, or not known.
    """

    def __init__(self) -> None:
        self.backend: str | None = os.environ.get("HYBRIDQ_BACKEND") or None
        self.recipe: object | None = None
        self.recipe_task: int = -1
        self.delayed_recipe: object | None = None
        self.is_delayed_last = False
        self.delayed_keys: set[str] = set()
        self.scaling_epoch: int = -1
        self.model_init: object | None = None
        self.moves_parameters: bool = False
        self.in_ring: bool = False
        self.offload: Any = None
        self.watcher: Any = None
        self.watchers: tuple[Any, ...] = ()
        self.is_first_microbatch: bool | None = None
        self.gemm_cache_nbytes: int = _cache_nbytes()


def _cache_nbytes() -> int:
    text = os.environ.get("HYBRIDQ_GEMM_CACHE_BYTES") or str(_GEMM_CACHE_NBYTES)
    if not text.isdecimal():
        raise ValueError(f"HYBRIDQ_GEMM_CACHE_BYTES: must be a number of bytes, got {text!r}")
    return int(text)


def _warn_of_unknown_variables() -> None:
    """Warn once of each variable that looks like ours and is not, as a misspelt one is."""
    if launched_rank() != 0:
        return
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        rest = name.removeprefix(_PREFIX)
        if rest not in _VARIABLES:
            reason = must_be_one_of(_VARIABLES[:-1], rest)
            warn_once(name, f"{name}: has no effect, what follows {_PREFIX} {reason}")


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


def log_level() -> str | None:
    """Return the level of the logger `hybridq` as `logging` names it, by `HYBRIDQ_LOG`, or None.

    Raises:
        ValueError: it is set to something else.
    """
    text = os.environ.get("HYBRIDQ_LOG") or None
    if text is not None and text.lower() not in _LOG_LEVELS:
        raise ValueError(f"HYBRIDQ_LOG: {must_be_one_of(_LOG_LEVELS, text)}")
    return text and text.upper()


def launched_rank() -> int:
    """Return the rank that torchrun gave this process; 0 where none, or something else, was given.

    The variable is not ours: others may use its name for what is no number.
    """
    text = os.environ.get("RANK") or ""
    return int(text) if text.isdecimal() else 0


def loads_backends() -> bool:
    """Return whether backends of other packages join: unless `HYBRIDQ_BACKEND_AUTOLOAD` is 0.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    return _is_on("HYBRIDQ_BACKEND_AUTOLOAD")


def uses_huge_pages() -> bool:
    """Return whether large results ask for huge pages: unless `HYBRIDQ_HUGE_PAGES` is 0.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    return _is_on("HYBRIDQ_HUGE_PAGES")


def keeps_memory() -> bool:
    """Return whether freed memory is kept for large results: where `HYBRIDQ_KEEP_MEMORY` is 1.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    return _is_on("HYBRIDQ_KEEP_MEMORY", "0")


def _is_on(variable: str, otherwise: str = "1") -> bool:
    text = os.environ.get(variable) or otherwise
    if text not in ("0", "1"):
        raise ValueError(f"{variable}: must be 0 or 1, got {text!r}")
    return text == "1"


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
        name: `"reference"`, `"cpu"`, `"torch"`, ..., that of another package's backend, or None.
            An unknown name raises at the first call that would use it, with the list of backends.

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


_warn_of_unknown_variables()
