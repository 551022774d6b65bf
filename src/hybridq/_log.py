"""The logger `hybridq`: what a program may want to know, and nobody has done wrong.

A slower way that is taken, or what torch lacks, is logged once in a process, as a warning, by the
first rank alone. Mistakes are no part of this: they are exceptions, or `HybridQWarning`.
"""

from __future__ import annotations

import logging
from typing import Final

import torch.distributed as dist

from . import settings
from .errors import is_first

__all__ = ["LOGGER", "log_once"]

LOGGER: Final = logging.getLogger("hybridq")


def log_once(key: str, message: str) -> None:
    """Log `message` as a warning the first time that `key` is seen in this process.

    Args:
        key: identity of the situation; a later call with the same key is silent.
        message: what happens and how to avoid it.
    """
    if is_first(key):
        LOGGER.warning(message)


def _is_of_first_rank(record: logging.LogRecord) -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return settings.launched_rank() == 0


def _set_up() -> None:
    LOGGER.addFilter(_is_of_first_rank)
    level = settings.log_level()
    if level is not None:
        LOGGER.setLevel(level)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # or a handler of the root would print it again


_set_up()
