"""What tools watch is freed with the graph: no tensor of a layer stays alive afterwards."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybridq


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp = hybridq.Linear(32, 32), hybridq.LayerNormMLP(32, 64)
        self.experts = hybridq.GroupedLinear(2, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(self.mlp(self.first(x)), [20, 12])
        return y


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def step(model: nn.Module, has_backward: bool, watch: Any = None) -> None:
    """Run one step, with what counts it."""
    with hybridq.autocast(recipe="mxfp8"):
        loss = square(model(torch.ones(32, 32)))
    if has_backward:
        loss.backward()
    if watch is not None:
        watch.step()


def use(tool: str, model: nn.Module, has_backward: bool, folder: Path) -> None:
    """Use a tool once."""
    x = torch.ones(32, 32)
    if tool == "monitor":
        with hybridq.monitor(model, 1, layers=None) as watch:
            step(model, has_backward, watch)
    elif tool == "trace":
        with hybridq.trace(folder / "a", model) as writer:
            step(model, has_backward, writer)
    elif tool == "report":
        hybridq.report(model, x, recipe="mxfp8", loss=square, backward=has_backward)
    elif tool == "advise":
        options: Any = {"candidates": ["mxfp8"], "prefer": "memory", "device": "b200"}
        hybridq.advise(model, x, loss=square, **options)
    else:
        step(model, has_backward)


@pytest.mark.parametrize(
    ("tool", "has_backward"),
    [(tool, has) for tool in ("nothing", "monitor", "trace", "report") for has in (True, False)]
    + [("advise", True)],
)
def test_outputs_and_inputs_are_freed(tool: str, has_backward: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, seen = hybridq.convert(Net()), list[Any]()

    def keep(_module: nn.Module, given: Any, y: torch.Tensor) -> None:
        seen.extend((weakref.ref(y), weakref.ref(given[0])))

    for layer in model.children():
        layer.register_forward_hook(keep)
    use(tool, model, has_backward, tmp_path)
    gc.collect()
    assert len(seen) >= 6
    assert [one() for one in seen] == [None] * len(seen)
