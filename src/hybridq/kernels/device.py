"""What depends on the kind of a device."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch

__all__ = ["has_autocast", "without_autocast"]

# Asked once: dynamo cannot trace the question in every torch.
_AUTOCAST_DEVICES: Final = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(kind)
)


def has_autocast(kind: str) -> bool:
    """Return whether torch.autocast is on for devices of `kind`; some do not know it (meta)."""
    return kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> Any:
    """Return a context in which torch.autocast touches nothing, for code that settles dtypes."""
    if has_autocast(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
