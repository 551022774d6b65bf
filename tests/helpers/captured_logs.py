"""What a test sees of the log: the fixture `caplog`, for the tests that ask for it alone.

pytest's own plugin of that name attaches handlers to every logger that does not propagate, six
times for each test: torch has fifty of those, and a test of a millisecond took two. It is switched
off in pyproject.toml. A warning that no test asks for goes to stderr, as for any program.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CapturedLogs", "captured_logs"]


class CapturedLogs(logging.Handler):
    """The records that reached the root logger, with the names that pytest's fixture has.

    Attributes:
        records: those since the test began, or since `clear`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.records: list[logging.LogRecord] = []
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))  # sets record.message as well
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        """Return the text of each record."""
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        """Return the records as a log shows them."""
        return "\n".join(self._lines)

    def clear(self) -> None:
        """Forget what was said until now; lists that were taken before stay as they are."""
        self.records, self._lines = [], []

    @contextmanager
    def at_level(self, level: int, logger: str | None = None) -> Iterator[None]:
        """Let a logger (None: the root) say what has at least this level."""
        one = logging.getLogger(logger)
        before = one.level
        one.setLevel(level)
        try:
            yield
        finally:
            one.setLevel(before)


@contextmanager
def captured_logs() -> Iterator[CapturedLogs]:
    """Give what is logged in the block."""
    handler = CapturedLogs()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
