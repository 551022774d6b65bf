"""Starts the ranks of a program in tests/ranks, and holds them to their ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from places import RANKS

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


def run(
    world: int,
    store: Path,
    *names: str,
    program: str = "fsdp2_program.py",
    leaves: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Run scenarios in `world` processes; the outcome of the rank that `leaves` does not matter."""
    file = RANKS / program
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                str(file),
                str(rank),
                str(world),
                str(store),
                *names,
            ],
            env={**os.environ, "TEST_TIMEOUT": str(timeout)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        staying = [process for rank, process in enumerate(ranks) if rank != leaves]
        outcomes = [(one.communicate(timeout=timeout)[1], one.returncode) for one in staying]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    errors = [f"process {n}: {text}" for n, (text, code) in enumerate(outcomes) if code]
    assert not errors, "\n".join(errors)
