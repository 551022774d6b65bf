"""Backends of torch.compile for tests: one that traces, and one that makes machine code."""

from __future__ import annotations

import shutil

import pytest

_NEEDED = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
_MACHINE_CODE = "inductor"
#: The second compiles what the first has traced: outside the slow tests a few of it will do.
BACKENDS = ["aot_eager", pytest.param(_MACHINE_CODE, marks=[pytest.mark.slow, _NEEDED])]
#: For those few.
BOTH_BACKENDS = ["aot_eager", pytest.param(_MACHINE_CODE, marks=[pytest.mark.more, _NEEDED])]
