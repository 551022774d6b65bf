"""Said: what files say of how they are quantized, beside names, dtypes and shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Said"]


@dataclass(frozen=True)
class Said:
    """What the files of a checkpoint say of themselves.

    Args:
        names: of all tensors.
        headers: the free strings in the header of each file.
        marks: the bytes of each tensor that says how a module is held (`Layout.is_mark`), by name.
    """

    names: tuple[str, ...]
    headers: tuple[Mapping[str, str], ...]
    marks: Mapping[str, bytes]

    @property
    def metadata(self) -> dict[str, str]:
        """The strings of all headers; of what several say, the last one's."""
        return {key: value for one in self.headers for key, value in one.items()}
