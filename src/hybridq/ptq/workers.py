"""Threads that each run torch's operations by themselves.

Many small pieces of work share out better among such threads than each piece does among torch's
own: those meet after every operation, and on a busy machine wait for each other most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Final

import torch

__all__ = ["serial_workers"]

#: Seconds after which threads that do not start are an error and not waited for.
_PATIENCE: Final = 300.0


@contextmanager
def serial_workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of `count` threads in which an operation of torch takes one thread.

    Args:
        count: at least 1.
    """
    threads = torch.get_num_threads()
    started = Barrier(count + 1)
    with ThreadPoolExecutor(count, "hybridq-work", _be_serial) as pool:
        for _ in range(count):
            pool.submit(started.wait, _PATIENCE)
        started.wait(_PATIENCE)
        # The number belongs to a thread, but is also what threads begin with that start later.
        torch.set_num_threads(threads)
        yield pool


def _be_serial() -> None:
    torch.get_num_threads()  # before it is first asked, torch forgets what has been set
    torch.set_num_threads(1)
