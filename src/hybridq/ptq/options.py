"""How a conversion runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ConvertOptions"]

_LEAST_MEMORY: Final = 64 << 20
_DEFAULT_MEMORY: Final = 1 << 30


@dataclass(frozen=True)
class ConvertOptions:
    """How a conversion runs; none of it changes a byte of the result.

    Args:
        memory: bytes that it may take beside what Python and torch take; at least 64 MiB. A tensor
            that needs more is converted in tiles.
        measure: find each tensor's error; takes about as long as quantizing.
        strict: refuse NaN and infinity instead of warning.
        overwrite: delete what another run of this command has written to the target.

    Raises:
        ValueError: less memory than that.
    """

    memory: int = _DEFAULT_MEMORY
    measure: bool = True
    strict: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.memory < _LEAST_MEMORY:
            raise ValueError(
                f"ConvertOptions: memory must be at least {_LEAST_MEMORY} bytes, got {self.memory}"
            )
