"""Who is told how far a conversion is."""

from __future__ import annotations

from ..errors import warn

__all__ = ["Observer"]


class Observer:
    """Is told how far a conversion is; this one only warns. Override what you want to see."""

    def begin(self, nbytes: int) -> None:
        """Take note of how many bytes the source's tensors have."""

    def shard(self, name: str, what: str) -> None:
        """Take note of what is being done to a shard.

        Args:
            name: of the file.
            what: `"checking"`, `"converting"` or `"copying"`.
        """

    def advance(self, nbytes: int) -> None:
        """Take note of bytes of the source that are done."""

    def warn(self, text: str) -> None:
        """Take note of something that the user should know."""
        warn(text)
