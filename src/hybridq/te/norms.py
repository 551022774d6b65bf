"""Norms of hybridq whose `reset_parameters` gives parameters on the meta device memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from .. import nn
from .extra_state import WithoutExtraState
from .meta_device import GetsMemory

__all__ = ["LayerNorm", "OwnNorm", "RMSNorm"]


def _made_by(base: Any) -> Callable[..., None]:
    """Return the `__init__` of `base`, which leaves on the meta device what is made there."""

    @wraps(base.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with GetsMemory.later(self):
            base.__init__(self, *args, **kwargs)

    return __init__


class LayerNorm(GetsMemory, WithoutExtraState, nn.LayerNorm):
    """`hybridq.nn.LayerNorm`.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size:
            as there.
        device, dtype: the same.
    """

    __init__ = _made_by(nn.LayerNorm)


class RMSNorm(GetsMemory, WithoutExtraState, nn.RMSNorm):
    """`hybridq.nn.RMSNorm`.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size:
            as there.
        device, dtype: the same.
    """

    __init__ = _made_by(nn.RMSNorm)


class OwnNorm(GetsMemory, nn.PlainNorm):
    """A norm of a layer's own: of queries, of keys, or of its result."""

    __init__ = _made_by(nn.PlainNorm)
