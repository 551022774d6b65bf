"""Ranks of tensor parallelism that differ, or fail: `python parallel_faults_program.py ...`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import hybridq
from hybridq.distributed import ColwiseParallel, check_ranks
from hybridq.nn.modules import rank_agreement

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


def styled() -> Any:
    """A linear module that a style deals out, with planes of its tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = hybridq.Linear(WIDTH, 32 * dist.get_world_size(), name="up")
    return parallelize_module(module, mesh, ColwiseParallel(input_layouts=Shard(0)))


def at_first_use() -> None:
    """Without `check_ranks` the first forward that differs is an error on every rank."""
    is_odd = dist.get_rank() == ODD
    recipes = "nvfp4", "mxfp8"
    for make in (network, lambda: network(True), styled):
        module = make()
        step(module, "fp8_current")
        for run, names in (
            (lambda m=module: step(m, recipes[is_odd]), r"formats must be.*mxfp8.* on rank 1"),
            (lambda m=module: step(m, "mxfp8", 32 + 32 * is_odd), r"shape must be.* on rank 1"),
        ):
            try:
                run()
            except RuntimeError as error:
                text = str(error)
                assert re.search(names, text) and type(module).__name__ in text, text
            else:
                raise AssertionError(f"nothing was raised: {type(module).__name__}, {names}")
        step(module, "mxfp8")  # nothing is in flight


def goes_back() -> None:
    """A rank that alone returns to an earlier recipe raises, and says whom it waited for."""
    module, recipes = network(), ("nvfp4", "mxfp8")
    for recipe in (*recipes, *recipes):  # all of them may, any number of times
        step(module, recipe)
    try:
        step(module, recipes[dist.get_rank() != ODD])
    except RuntimeError as error:
        text = str(error)
        if dist.get_rank() == ODD:
            assert "LayerNormMLP fc1: every rank" in text and "new on rank 1" in text, text
        os._exit(0)
    raise AssertionError("nothing was raised")


def changes() -> None:
    """Ranks compare once for each change of recipe, and not between changes."""
    module, count = network(), []
    kept = rank_agreement.compare

    def counted(*given: Any) -> None:
        count.append(given)
        kept(*given)

    rank_agreement.compare = counted
    for recipe in ("nvfp4", "nvfp4", "mxfp8", "mxfp8", "nvfp4", "nvfp4"):
        step(module, recipe)
    rank_agreement.compare = kept
    assert len(count) == 2 * 3, len(count)  # two parts


def many_lengths() -> None:
    """Lengths that are new in every step are compared a few times, and never again."""
    module, count = network(True), []
    kept = rank_agreement.compare

    def counted(*given: Any) -> None:
        count.append(given)
        kept(*given)

    rank_agreement.compare = counted
    for length in range(32, 32 * 9, 32):
        step(module, "mxfp8", length)
        step(module, "mxfp8", length)
    rank_agreement.compare = kept
    assert len(count) == 2 * 4, len(count)  # two parts


if __name__ == "__main__":
    main(globals(), TIMEOUT)
