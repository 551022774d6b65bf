"""What tells a shard that was written from one that was not."""

from __future__ import annotations

__all__ = ["Writes"]


class Writes:
    """Counts the writes to one piece of memory; shared by all tensors that lie in it.

    Args:
        before: the stamp of what the memory is a copy of; None: of nothing.
    """

    __slots__ = ("_before", "count")

    def __init__(self, before: tuple[object, int] | None = None) -> None:
        self.count = 0
        self._before = before

    @property
    def stamp(self) -> tuple[object, int]:
        """Another one after each write; that of the origin in a copy that was not written."""
        return (self, self.count) if self.count or self._before is None else self._before

    def copied(self) -> Writes:
        """Return the count of memory that has the same values now."""
        return Writes(self.stamp)
