"""What torch.compile has compiled runs eagerly for a while, for any number of users at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["running_eagerly"]


class _Users(ExitStack):
    """Those that need it now, in all threads: torch's stance is one of the process, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.count = threading.Lock(), 0


_users = _Users()


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Run what is compiled eagerly in the block, its graphs kept.

    Blocks may overlap and end in any order: the first one sets torch's stance, and the last one
    restores what it was. Where nothing is compiled yet, nothing is done.

    Example:
        >>> import torch
        >>> from hybridq._eager import running_eagerly
        >>> with running_eagerly():
        ...     torch.compile(torch.sin)(torch.zeros(1))
        tensor([0.])
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _users.lock:
        if not _users.count:
            _users.enter_context(torch.compiler.set_stance("force_eager"))
        _users.count += 1
    try:
        yield
    finally:
        with _users.lock:
            _users.count -= 1
            if not _users.count:
                _users.close()
