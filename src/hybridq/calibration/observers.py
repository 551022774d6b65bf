"""Observers: what becomes of the values that reach a product, as one amax or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import must_be_one_of
from ..formats import PlaneText

__all__ = [
    "Granularity",
    "Grouped",
    "Max",
    "Observer",
    "Running",
    "RunningMax",
    "check_granularity",
    "grouped",
]

#: What has an amax of its own.
Granularity = Literal["tensor", "token", "channel", "block", "row"]


class Running(ABC):
    """An observer at work on the matrices of one tensor."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor, /) -> None:
        """Take the values of a matrix into account.

        Args:
            rows: `[tokens, features]`, at least one row.
        """

    @abstractmethod
    def amax(self) -> torch.Tensor | None:
        """Return the statistic of all matrices so far, FP32; None: there was none."""

    def begins_again(self) -> bool:
        """Return whether it must see all matrices once more, and prepare for that."""
        return False

    def shared(self) -> tuple[str, torch.Tensor] | None:
        """Return what it has in common with those of other ranks after a pass, FP64 on the CPU.

        Returns:
            `"max"` or `"sum"`, which all of them make of it, and the values; None: nothing.
        """
        return None

    def take_shared(self, values: torch.Tensor) -> None:
        """Take what all ranks have made of `shared`.

        Args:
            values: in its shape.

        Raises:
            TypeError: it has nothing in common with others.
        """
        raise TypeError(f"{type(self).__name__}: nothing is shared with other ranks, got {values}")


@dataclass(frozen=True)
class Observer(ABC):
    """How the statistic of a tensor is made of its values."""

    @abstractmethod
    def start(self, plane: PlaneText | None = None, features: int | None = None) -> Running:
        """Return an observer that has seen nothing yet.

        Args:
            plane: in which the recipe encodes the tensor; None: there is no recipe.
            features: of the matrices that it will see, where what it has in common with those of
                other ranks depends on them; None: it is not known.
        """

    @property
    @abstractmethod
    def text(self) -> str:
        """What files and tables say of it; equal texts are equal observers."""

    @property
    def reads_twice(self) -> bool:
        """Whether it sees the data two times."""
        return False

    def shape(self, features: int, rows: int = 1) -> tuple[int, ...]:
        """Return the shape of the amax of a matrix `[rows, features]`.

        Args:
            features: how many there are.
            rows: how many there are, of a weight; of inputs and outputs they are tokens.
        """
        del features, rows
        return ()

    @property
    def is_by_row(self) -> bool:
        """Whether each row of a matrix has an amax, which only rows of weights can."""
        return False


def check_granularity(where: str, granularity: str, block: int) -> None:
    """Raise where there is no such granularity, or no such block for it.

    Args:
        where: name of the observer, for the error.
        granularity, block: as of `Max`.

    Raises:
        ValueError: there is none.
    """
    if granularity not in get_args(Granularity):
        known = must_be_one_of(get_args(Granularity), granularity)
        raise ValueError(f"{where}: granularity {known}")
    if (granularity == "block") != (block > 0):
        raise ValueError(
            f"{where}: block must be a positive number of channels for the granularity 'block', "
            f"and 0 for others, got {block} for {granularity!r}"
        )


@dataclass(frozen=True)
class Grouped(Observer):
    """Base of observers with a granularity.

    Args:
        granularity: one amax for the `"tensor"` or for each `"channel"` (feature), or for each
            `"block"` of neighbouring channels, over all tokens; or for each `"row"` of a weight,
            which is an output feature. Of `"token"` each token's own amax is one value, and the
            statistic is that of these values.
        block: channels of a block; the last one may have fewer.
    """

    granularity: Granularity = "tensor"
    block: int = 0

    def __post_init__(self) -> None:
        check_granularity(type(self).__name__, self.granularity, self.block)

    def shape(self, features: int, rows: int = 1) -> tuple[int, ...]:
        """Return the shape of the amax of a matrix `[rows, features]`.

        Args:
            features, rows: as of `Observer.shape`.
        """
        if self.granularity in ("tensor", "token"):
            return ()
        if self.granularity == "row":
            return (rows,)
        return (features if self.granularity == "channel" else -(-features // self.block),)

    @property
    def is_by_row(self) -> bool:
        """Whether each row of a matrix has an amax, which only rows of weights can."""
        return self.granularity == "row"

    @property
    def of(self) -> str:
        """The granularity in words; empty for the tensor."""
        if self.granularity == "tensor":
            return ""
        return f" per {self.granularity}" + (f" of {self.block}" if self.block else "")


def grouped(rows: torch.Tensor, granularity: Granularity, block: int) -> torch.Tensor:
    """Return a matrix's values, magnitudes of tokens for `"token"`, as `[values, groups]`.

    Where the last block has fewer channels than the others, NaN stands for those that it lacks.

    Args:
        rows: `[tokens, features]`.
        granularity, block: as of `Max`.
    """
    if granularity == "tensor":
        return rows.reshape(-1, 1)
    if granularity == "token":
        low, high = torch.aminmax(rows, dim=1)
        return torch.maximum(-low, high)[:, None]
    if granularity == "channel":
        return rows
    if granularity == "row":
        return rows.t()
    lacking = -rows.shape[1] % block
    padded = torch.nn.functional.pad(rows, (0, lacking), value=torch.nan) if lacking else rows
    return padded.unflatten(1, (-1, block)).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Max(Grouped):
    """The largest magnitude of all values.

    Args:
        granularity: one amax for the `"tensor"` or for each `"channel"` (feature), or for each
            `"block"` of neighbouring channels, over all tokens; or for each `"row"` of a weight,
            which is an output feature. The largest of `"token"` is the tensor's.
        block: channels of a block; the last one may have fewer.

    Raises:
        ValueError: there is no such granularity, or no such block for it.

    Example:
        >>> import torch
        >>> from hybridq.calibration import Max
        >>> running = Max("channel").start()
        >>> running(torch.tensor([[1.0, -3.0], [-2.0, 0.0]]))
        >>> running.amax()
        tensor([2., 3.])
    """

    def start(self, plane: PlaneText | None = None, features: int | None = None) -> Running:
        """Return an observer that has seen nothing yet.

        Args:
            plane, features: any; the largest magnitude is the same for all.
        """
        del plane, features
        return RunningMax(self)

    @property
    def text(self) -> str:
        """What files and tables say of it."""
        return f"max{self.of}"


class RunningMax(Running):
    """The largest magnitudes so far.

    Args:
        observer: says of what.
    """

    def __init__(self, observer: Grouped) -> None:
        self.observer = observer
        self.value: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, /) -> None:
        own, width = self.observer, rows.shape[1]
        if own.granularity in ("tensor", "token"):
            low, high = torch.aminmax(rows)
        elif own.granularity == "row":
            low, high = torch.aminmax(rows, dim=1)
        else:
            low, high = torch.aminmax(rows, dim=0)
        found = torch.maximum(-low, high).float()  # either keeps a NaN
        if own.granularity == "block":
            found = torch.nn.functional.pad(found, (0, -width % own.block))
            found = found.unflatten(0, (-1, own.block)).amax(1)
        if self.value is not None:
            found = torch.maximum(self.value, found.to(self.value.device))
        self.value = found

    def amax(self) -> torch.Tensor | None:
        return self.value
