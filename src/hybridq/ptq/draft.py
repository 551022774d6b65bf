"""What is to become of the tensors of a file: asked of a scheme, before anything has a place."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats import PlaneSpec
from ..layouts.order import AS_IS, Order
from ..storage import Plane
from .header import Entry, dtype_name
from .record import Record, StoredBuffer
from .source import Shard
from .views import View

__all__ = ["CheckpointScheme", "Draft", "Output", "copied", "encoded", "fixed"]


@dataclass(frozen=True)
class Output:
    """One tensor of the new file.

    Args:
        name, dtype, shape: as the file's header has them.
        nbytes: of it.
        key: direction and name of the plane's buffer that it is; `("", "")`: no plane's.
        convert: makes the file's values of the buffer's and the plane's spec; None: the bytes are
            the same.
        data: its bytes, where they are known.
        order: how the buffer's bytes lie in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    key: tuple[str, str] = ("", "")
    convert: Callable[[torch.Tensor, PlaneSpec], torch.Tensor] | None = None
    data: bytes = b""
    order: Order = AS_IS


@dataclass(frozen=True)
class Draft:
    """One tensor of the source and what it becomes.

    Args:
        entry: the tensor; of one that stands in several, its name, dtype and shape; None: there is
            none, what is written is known.
        outputs: the tensors of the new file.
        view: where the values stand that are encoded; None: it is copied.
        record: how it is quantized; None: it is copied.
        is_kept: its planes are in the source as they are wanted; if `beside` names others, the one
            that the source has is.
        group: of the tensors with which it shares its amax; "": none.
        source_nbytes: of the tensors that it stands in.
        as_stored: makes the plane that the file holds of the one that is encoded; None: it is it.
        is_exact: its MXFP4 planes become NVFP4 by their scales alone, if those allow it.
        beside: of a plane that is kept, or exact: how the other one is made of what that decodes
            to; None: there is no other to make.
        units: numbers of rows and columns that the new files' own cells do not let tiles cut.
    """

    entry: Entry | None
    outputs: tuple[Output, ...]
    view: View | None = None
    record: Record | None = None
    is_kept: bool = False
    group: str = ""
    source_nbytes: int = 0
    as_stored: Callable[[Plane], Plane] | None = None
    is_exact: bool = False
    beside: Record | None = None
    units: tuple[int, int] = (1, 1)


class CheckpointScheme(ABC):
    """What a checkpoint becomes. Tensors have amaxes of their own, unless it says otherwise."""

    @abstractmethod
    def drafts(self, shard: Shard) -> list[Draft]:
        """Return what becomes of the tensors of a file, in their order."""

    def beside(self, drafts: Sequence[Draft]) -> Sequence[Shard]:
        """Return the files whose tensors share an amax with some of these."""
        del drafts
        return ()

    def members(self, group: str) -> Sequence[tuple[Record, View]]:
        """Return the tensors that share an amax."""
        del group
        return ()

    @abstractmethod
    def metadata(self, shard: Shard, drafts: Sequence[Draft]) -> Mapping[str, str]:
        """Return the free strings of the new file that is made of `shard`."""

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return what tells this scheme from another one, as JSON has it."""

    @abstractmethod
    def config(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the model's configuration for the new checkpoint; None: it stays as it is."""

    def names(self) -> Sequence[str]:
        """Return the names of `documents`."""
        return ()

    @abstractmethod
    def replaces(self) -> Sequence[str]:
        """Return names of files of the source that would say something wrong of the new one."""

    def documents(self, tensors: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the JSON files beside a folder's shards.

        Args:
            tensors: the record of each tensor that is quantized, and its file.
        """
        del tensors
        return {}


def copied(entry: Entry, name: str = "") -> Draft:
    """Return what copies a tensor.

    Args:
        entry: the tensor.
        name: its new one; "": as it is.
    """
    output = Output(name or entry.name, entry.dtype, entry.shape, entry.nbytes)
    return Draft(entry, (output,), source_nbytes=entry.nbytes)


def encoded(
    entry: Entry, view: View, record: Record, stored: Sequence[StoredBuffer], **others: Any
) -> Draft:
    """Return what encodes a tensor.

    Args:
        entry: the tensor.
        view: where its values stand.
        record: how it is quantized.
        stored: the tensors that it becomes.
        others: of `Draft`.
    """
    outputs = tuple(
        Output(
            one.name,
            dtype_name(one.dtype),
            one.shape,
            one.nbytes,
            (one.direction, one.buffer),
            one.convert,
        )
        for one in stored
    )
    nbytes = sum(one.nbytes for _, one in view.entries)
    return Draft(entry, outputs, view, record, **{"source_nbytes": nbytes, **others})


def fixed(name: str, value: torch.Tensor) -> Draft:
    """Return what writes a value.

    Args:
        name: of the tensor.
        value: on the CPU.
    """
    data = bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    shape = tuple(value.shape)
    size = math.prod(shape) * value.element_size()
    return Draft(None, (Output(name, dtype_name(value.dtype), shape, size, data=data),))
