"""The storage of a tensor whose planes were given away: nothing to read, nothing to write."""

from __future__ import annotations

from typing import Final, NoReturn

from ..direction import ROWWISE
from ..errors import PlaneError
from .plane import Plane
from .storage import TensorStorage

__all__ = ["GivenAway"]

_GONE: Final = (
    "its planes were given away (clear, prepare_for_saving, or update_usage of both as False); "
    "what was made of it before still has them"
)


class GivenAway(TensorStorage):
    """A TensorStorage without a plane, which says so to whoever asks for one."""

    def __init__(self) -> None:
        self.rowwise = self.columnwise = None
        self.leads, self.refusal, self.kin = ROWWISE, f"tensor: {_GONE}", []

    @property
    def first(self) -> Plane:
        """Raise: there is none.

        Raises:
            PlaneError: always.
        """
        raise PlaneError(f"tensor: {_GONE}")

    @property
    def ordered(self) -> tuple[Plane, ...]:
        """No plane."""
        return ()

    def check_values(self) -> NoReturn:
        """Raise: there are no values.

        Raises:
            PlaneError: always.
        """
        raise PlaneError(self.refusal)

    def check_write(self, where: str) -> NoReturn:
        """Raise: there is nothing to write into.

        Args:
            where: the function that writes, for the error.

        Raises:
            PlaneError: always.
        """
        raise PlaneError(f"{where}: {_GONE}; quantize anew")

    @property
    def nbytes(self) -> int:
        """No bytes."""
        return 0

    def flatten(self) -> NoReturn:
        """Raise: a copy, a graph or a file would have nothing.

        Raises:
            PlaneError: always.
        """
        raise PlaneError(f"tensor: {_GONE}")
