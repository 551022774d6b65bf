"""One rank of a test of several processes: `python SOME_program.py RANK WORLD STORE NAME...`.

A program's scenarios are its functions; `NAME=TEXT` calls one with that text. `rank_runs.run`
starts the ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["logged", "main"]


def main(scenarios: dict[str, Any], timeout: float = 120.0) -> None:
    """Run the scenarios that the command line names, as its rank.

    Args:
        scenarios: functions by name.
        timeout: of a collective, in seconds.
    """
    faulthandler.enable()
    # A rank that waits says where.
    faulthandler.dump_traceback_later(0.9 * float(os.environ.get("TEST_TIMEOUT", "300")), exit=True)
    rank, world, store, *names = sys.argv[1:]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what imports have made stays: collections are fast
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=timeout),
    )
    for name in names:
        function, _, text = name.partition("=")
        scenarios[function](*([text] if text else []))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def logged() -> Iterator[list[str]]:
    """Give what the logger `hybridq` is told in the block: rank 0 alone says anything."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("hybridq"), Kept()
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
