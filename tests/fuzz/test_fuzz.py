"""The fuzzer of the public door, briefly and with fixed seeds; `make fuzz` is the long run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz.policy import Wrong, attempt
from places import TESTS


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuzz", "--folder", str(folder), *arguments]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)


def test_the_public_door_keeps_its_rules(tmp_path) -> None:
    """Some seconds of what `make fuzz` does: the same steps every time, in a process apart."""
    done = _run("--rounds", "2", "--seed", "0", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stdout and "operations" in done.stdout


def test_an_internal_error_is_told_from_a_refusal() -> None:
    def leak() -> None:
        None.shape  # type: ignore[attr-defined]  # noqa: B018

    with pytest.raises(Wrong, match="AttributeError"):
        attempt(leak, "leak")
    _, error = attempt(lambda: torch.zeros(2).view(3), "view")
    assert isinstance(error, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["crash", "hang", "wrong"])
def test_the_runner_reports_what_kills_the_process(tmp_path, what) -> None:
    done = _run("--rounds", "2", "--timeout", "15", "--break", what, folder=tmp_path)
    assert done.returncode == 1
    assert "--seed 0 --rounds 1" in done.stdout
    assert (tmp_path / "failure-0.txt").read_text().count("\n") > 2
