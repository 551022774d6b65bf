"""Ranks of experts that are gone, or mean others: `python experts_faults_program.py RANK ...`."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from experts_program import HIDDEN, LAYOUTS, Toy
from rank_program import main
from torch.distributed.device_mesh import DeviceMesh

import hybridq
from hybridq.moe import parallelize_experts


def ends(text: str, action: Any) -> None:
    """Expect an error with this text on this rank, which then ends: its groups are broken."""
    try:
        action()
    except RuntimeError as error:
        assert text in str(error), error
        sys.stdout.flush()
        os._exit(0)
    raise AssertionError(f"no error: {text}")


def dies(where: str) -> None:
    """The last rank is gone in its second step: all others raise."""
    torch.manual_seed(0)
    model: Any = parallelize_experts(Toy(LAYOUTS["plain"], 8), dispatch="mxfp8", combine="mxfp8")
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        x = torch.randn(12, HIDDEN, requires_grad=True)
        with hybridq.autocast(recipe="mxfp8"):
            y = model(x)
        if where == "backward" and is_last and steps:
            y.register_hook(die)
        y.square().sum().backward()

    steps: list[int] = []
    step()
    steps.append(1)
    if where == "forward" and is_last:
        model.experts.register_forward_pre_hook(die)
    texts = {"forward": "experts experts: all 3 ranks of the experts must exchange tokens"}
    ends(texts.get(where, ""), step)


def meshes() -> None:
    """Ranks that give other meshes wait for each other, and are told so when they have waited."""
    rank = dist.get_rank()
    groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in range(2)]
    one, other = (DeviceMesh.from_group(group, "cpu") for group in groups)
    model = Toy(LAYOUTS["plain"], 8)
    text = "parallelize_experts: every rank of the mesh must call it with the same mesh"
    ends(text, lambda: parallelize_experts(model, other if rank else one))


if __name__ == "__main__":
    main(globals(), timeout=60.0)
