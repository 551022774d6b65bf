"""The page "The life of a forward": its steps are those of a traced call, its files exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridq
from hybridq.kernels.cpu import product_reason, tiles_reason
from places import ROOT

PAGE = (ROOT / "docs" / "design" / "life-of-a-forward.md").read_text()
SOURCES = Path(hybridq.__file__).parent  # of a wheel, too
STEP = re.compile(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", re.M)


def traced(layer: torch.nn.Module, x: torch.Tensor) -> list[tuple[str, str]]:
    """The functions of hybridq that a forward calls, in order: file below `src/hybridq`, name."""
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCES):
            calls.append((str(file.relative_to(SOURCES)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return calls


def test_the_steps_are_those_of_a_call() -> None:
    steps = [(file, name.rpartition(".")[2]) for file, name in STEP.findall(PAGE)]
    assert len(steps) == 14
    if product_reason() is not None or tiles_reason() is None:
        steps = steps[:12]  # such a CPU decodes and multiplies in one, as the page says
    layer = hybridq.Linear(256, 128, dtype=torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    with hybridq.autocast(recipe="mxfp8"):
        layer(x)
        calls = iter(traced(layer, x))
    for step in steps:
        assert step in calls, f"{step} is not called, or not after the steps before it"


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.(?:py|h|cpp|cu))`", PAGE))))
def test_every_file_exists(file: str) -> None:
    top = ROOT if file.startswith("csrc/") else SOURCES
    assert (top / file).is_file()


def test_the_shapes_are_those_of_the_planes() -> None:
    t = hybridq.quantize(torch.randn(64, 256, dtype=torch.bfloat16), "mxfp8", columnwise="mxfp8")
    shapes = [list(b.shape) for p in (t.rowwise, t.columnwise) for b in (p.data, p.scale)]
    assert "uint8 `{}` and `{}`, `{}` and `{}`".format(*shapes) in PAGE
    assert f"`{t.rowwise.spec}`" in PAGE
