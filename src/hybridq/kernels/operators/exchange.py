"""`torch.ops.hybridq.all_to_all_bytes`: bytes from each rank to each, by sizes that all know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from .library import operator

__all__ = ["exchanges_bytes"]

#: Returns what arrives, of bytes, sizes, rank and name of the group, once it was waited for.
_Way = Callable[[torch.Tensor, list[int], int, str], torch.Tensor]
_W = TypeVar("_W", bound=_Way)
_ways: list[_Way] = []


def exchanges_bytes(function: _W) -> _W:
    """Make a function the one that sends them: it knows process groups, which kernels do not.

    Args:
        function: takes the arguments of the operator.
    """
    _ways.append(function)
    return function


def _exchange(payload: torch.Tensor, nbytes: list[int], rank: int, group: str) -> torch.Tensor:
    if not _ways:
        raise RuntimeError(
            "all_to_all_bytes: hybridq.distributed must be imported before, got a graph alone"
        )
    return _ways[0](payload, nbytes, rank, group)


def _fake(payload: torch.Tensor, nbytes: list[int], rank: int, group: str) -> torch.Tensor:
    arrives = 0
    for size in nbytes[rank :: math.isqrt(len(nbytes))]:
        arrives = arrives + size
    return payload.new_empty(arrives)


operator(
    "all_to_all_bytes(Tensor payload, SymInt[] nbytes, int rank, str group) -> Tensor",
    _exchange,
    _fake,
)
