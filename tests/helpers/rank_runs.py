"""Starts the ranks of a program in tests/ranks, and holds them to their ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from places import HELPERS, RANKS

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    """Return the process that starts ranks (`rank_server.py`); it ends with this one."""
    paths = [str(RANKS), str(HELPERS), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(RANKS / "rank_server.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_ranks(
    source: str,
    ranks: list[list[str]],
    folder: Path,
    *,
    file: str = "program.py",
    leaves: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Run a program once for each rank, all at the same time.

    Args:
        source: its text.
        ranks: of each rank the program's arguments.
        folder: for what the ranks print.
        file: its name in tracebacks.
        leaves: a rank whose outcome does not matter, and which need not end.
        timeout: seconds; a rank that takes longer says where it is, and is ended.
    """
    errors = [folder / f"rank-{rank}.txt" for rank in range(len(ranks))]
    request = {
        "source": source,
        "file": file,
        "ranks": ranks,
        "errors": [str(file) for file in errors],
        "leaves": leaves,
        "timeout": timeout,
    }
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    statuses = json.loads(server.stdout.readline())
    said = [
        f"rank {rank}, status {status}: {file.read_text(errors='replace')[-8000:]}"
        for rank, (status, file) in enumerate(zip(statuses, errors, strict=True))
        if status
    ]
    assert not said, "\n".join(said)


def run(
    world: int,
    store: Path,
    *names: str,
    program: str = "fsdp2_program.py",
    leaves: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Run scenarios of a program in `world` processes; see `run_ranks`."""
    file = RANKS / program
    ranks = [[str(rank), str(world), str(store), *names] for rank in range(world)]
    run_ranks(file.read_text(), ranks, store.parent, file=str(file), leaves=leaves, timeout=timeout)
