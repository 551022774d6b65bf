"""What tells a shard that was written from one that was not."""

from __future__ import annotations

__all__ = ["Writes"]


class Writes:
    """Tells the writes to one piece of memory; shared by all tensors that lie in it.

    Args:
        before: the stamp of what the memory is a copy of; None: of nothing.
    """

    __slots__ = ("_memory", "stamp")

    def __init__(self, before: tuple[object, int] | None = None) -> None:
        self._memory = object()
        #: Another one after each write; that of the origin in a copy that was not written.
        self.stamp: tuple[object, int] = (self._memory, 0) if before is None else before

    def note(self) -> None:
        """Note a write."""
        self.stamp = (self._memory, self.stamp[1] + 1)

    def copied(self) -> Writes:
        """Return the count of memory that has the same values now."""
        return Writes(self.stamp)
