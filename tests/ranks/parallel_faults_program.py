"""Ranks of tensor parallelism that differ, or fail: `python parallel_faults_program.py ...`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main

import hybridq
from hybridq.distributed import check_ranks

#: The rank that does something else.
ODD = 1
TIMEOUT = 8.0
WIDTH = 64


def network(sequence_parallel: bool = False) -> Any:
    torch.manual_seed(dist.get_rank())
    options = {"tp_group": dist.group.WORLD, "set_parallel_mode": True}
    return hybridq.LayerNormMLP(
        WIDTH, 32 * dist.get_world_size(), sequence_parallel=sequence_parallel, **options
    )


def step(module: Any, recipe: str, tokens: int = 32) -> None:
    with hybridq.autocast(recipe=recipe):
        y = module(torch.ones(tokens, 2, WIDTH))
    y.square().sum().backward()


def ends(run: Callable[[], Any]) -> None:
    """Run steps, in which every rank must raise, and not wait for ever."""
    try:
        for _ in range(100):
            run()
    except RuntimeError:
        os._exit(0)  # a group that lost a rank cannot be left in peace
    raise AssertionError("nothing was raised")


def leaves(where: str, what: Callable[[], Any]) -> None:
    """Have the odd rank leave within a forward or a backward."""
    module = network()
    step(module, "nvfp4")
    dist.barrier()
    if dist.get_rank() == ODD:
        if where == "forward":  # behind the collectives of the first product
            module.register_forward_pre_hook(lambda *_: what())
        else:
            module.fc2_weight.register_hook(lambda _: what())
    ends(lambda: step(module, "nvfp4"))


def dies(where: str) -> None:
    leaves(where, lambda: os._exit(7))


def stalls(where: str) -> None:
    leaves(where, signal.pause)


def compared() -> None:
    """`check_ranks` names what differs, on every rank, before anything is computed."""
    is_odd = dist.get_rank() == ODD
    recipe = "mxfp8" if is_odd else "nvfp4"
    wide = hybridq.Linear(WIDTH, 32 * (1 + is_odd))
    other = network() if not is_odd else hybridq.LayerNormMLP(WIDTH, 32)
    for model in (network(), wide, other):
        try:
            check_ranks(model, recipe=recipe if model is not wide else "nvfp4")
        except RuntimeError as error:
            assert "on rank 1" in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {model}")


if __name__ == "__main__":
    main(globals(), TIMEOUT)
