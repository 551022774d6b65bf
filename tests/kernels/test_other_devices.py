"""Devices that are neither a CPU nor of CUDA, with FP64 and without; `other_device_program.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from places import HELPERS

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="the device of these tests needs a compiler"
)


def _run(has_float64: bool, *names: str) -> str:
    """Run scenarios on such a device, and return what they print."""
    paths = [str(HELPERS), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(HELPERS / "other_device_program.py")),
            *(str(int(has_float64)), *names),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parent,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stderr


def test_without_float64() -> None:
    names = ("planes", "products", "modules", "autocast", "quantized", "compiled", "tools", "told")
    said = _run(False, *names)
    assert said.count("are quantized and decoded by the CPU, copied there and back") == 1, said


def test_with_float64() -> None:
    said = _run(True, "planes", "products", "autocast", "tools", "told_float64")
    assert "on the slow PyTorch reference backend" in said
