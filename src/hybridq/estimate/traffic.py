"""Counting what collectives carry, from the tensors that they are given."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from .._torch_private import TorchDispatchMode

__all__ = ["Traffic", "count_traffic"]

#: Namespaces of torch's collectives, eager and functional; and of ours by symmetric memory.
_NAMESPACES: Final = ("c10d", "_c10d_functional", "hybridq")
#: Beginnings of their names, without underscores, and the kind that they are.
_KINDS: Final = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}


class Traffic:
    """What collectives carried, by kind; see `count_traffic`.

    Attributes:
        nbytes_by_kind: `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, `"send"`, ...: bytes.
        calls_by_kind: how many there were.
    """

    def __init__(self) -> None:
        self.nbytes_by_kind: dict[str, int] = {}
        self.calls_by_kind: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes_by_kind.values())

    def add(self, kind: str, nbytes: int) -> None:
        """Count one collective.

        Args:
            kind: of it.
            nbytes: the larger of what it was given and what came out.
        """
        self.nbytes_by_kind[kind] = self.nbytes_by_kind.get(kind, 0) + nbytes
        self.calls_by_kind[kind] = self.calls_by_kind.get(kind, 0) + 1

    def __repr__(self) -> str:
        return f"Traffic({self.nbytes_by_kind})"


def _has_dtensor(types: Iterable[type]) -> bool:
    """Return whether a DTensor is among the arguments; nobody has one who has not imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in types)


def _kind(func: Any) -> str | None:
    """Return the kind of collective that an operator is; None: none."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace not in _NAMESPACES:
        return None
    plain = name.replace("_", "")
    return next((kind for start, kind in _KINDS.items() if plain.startswith(start)), None)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


class _Mode(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_dtensor(types):
            return NotImplemented  # the collectives that it makes inside come here by themselves
        result = func(*args, **(kwargs or {}))
        kind = _kind(func)
        if kind is not None:
            # What goes in and what comes out are arguments of their own: the larger one counts.
            self._traffic.add(kind, max(map(_nbytes, (*args, result)), default=0))
        return result


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes of all collectives of this rank inside the context.

    Counted are the tensors that collectives are given, whatever they hold: of an all-gather its
    output, of a reduce-scatter its input, of an all-reduce its buffer, padding included; of what a
    rank sends to another (`"send"`) or receives (`"recv"`) the tensor, once on either side. Each
    operation passes through Python meanwhile, so a step takes longer.

    Returns:
        A context; its target is a `Traffic`, which is complete when the context ends.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.distributed.count_traffic() as traffic:
        ...     torch.ones(3).sum()  # no collective
        tensor(3.)
        >>> traffic.nbytes
        0
    """
    traffic = Traffic()
    with _Mode(traffic):
        yield traffic
