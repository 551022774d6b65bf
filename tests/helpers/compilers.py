"""Backends of torch.compile for tests: one that traces, and one that makes machine code."""

from __future__ import annotations

import shutil

import pytest

_NEEDED = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
#: The second compiles what the first has traced: in the default suite a few tests of it will do.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.more, _NEEDED])]
