"""Copies of experts on other ranks: `python experts_copies_program.py RANK WORLD STORE NAME...`.

The oracle is the same model without copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from experts_program import HIDDEN, LAYOUTS, TOKENS, Toy, expects, near, step, toys, whole
from rank_program import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq.moe import (
    ExpertLoads,
    ExpertRanks,
    copy_experts_,
    expert_copies,
    parallelize_experts,
)


def hot(world: int) -> dict[int, tuple[int, ...]]:
    """Experts of the first and of the last rank, of eight."""
    if world == 2:
        return {0: (1,), 2: (1,), 7: (0,)}
    return {0: (1, 2, 3), 1: (3,), 7: (0,)}


def made(layout: str, recipe: Any, is_copied: bool, **options: Any) -> list[torch.Tensor]:
    """Return outputs and gradients of a second step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, model = toys(layout, 8, **options)
    if is_copied:
        copy_experts_(model, {"experts": hot(world)})
    torch.manual_seed(5 + rank)
    x = torch.randn(TOKENS if rank else 0, HIDDEN)  # a rank without tokens
    for _ in range(2):
        model.zero_grad()
        found = step(model, x, recipe, TOKENS)
    return [*found, *(whole(parameter.grad) for parameter in model.parameters())]


def results() -> None:
    """Results are those without copies; gradients to the order of sums."""
    for layout in LAYOUTS:
        for options in ({}, {"capacity": 80}):
            wanted, found = (made(layout, None, one, **options) for one in (False, True))
            for a, b in zip(found, wanted, strict=True):
                near(a, b, (layout, str(options)), 2e-6)
    messages = {"dispatch": "mxfp8", "combine": "mxfp8"}
    for recipe in ("mxfp8", "mxfp8_fwd_nvfp4_bwd", "fp8_current"):
        wanted, found = (made("plain", recipe, one, **messages) for one in (False, True))
        if "mxfp8" in recipe:  # scales are of a token's own
            assert torch.equal(found[0], wanted[0]), recipe
        # Scales of other rows round otherwise; the router's gradient is a difference of such.
        for at in (0, 1, 4, 5):
            bound = 0.2 if "nvfp4" in recipe else 0.1  # of NVFP4 with random bits 14% each
            near(found[at], wanted[at], (recipe, at), bound)


def states() -> None:
    """Parameters are one, under their names; copies come, change and go between steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    finals = []
    for is_copied in (False, True):
        _, model = toys("biased", 8)
        before = {name: one.shape for name, one in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            if is_copied:
                copy_experts_(model, {"experts": (hot(world), {3: [world - 1]}, {})[number]})
            torch.manual_seed(number)
            step(model, torch.randn(world, TOKENS, HIDDEN)[rank], None, TOKENS)
            for one in model.parameters():
                if not isinstance(one, DTensor):
                    dist.all_reduce(one.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert {name: one.shape for name, one in model.state_dict().items()} == before
        finals.append([whole(one.detach()) for one in model.parameters()])
    for a, b in zip(*finals, strict=True):
        near(a, b, "after three steps", 1e-6)


class Rows(TorchDispatchMode):
    """Rows that each grouped product of this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if "grouped_gemm" in str(func):
            of = [one for one in args if isinstance(one, torch.Tensor) and one.dtype == torch.int32]
            self.ends += [one.tolist() for one in of]
        return func(*args, **(kwargs or {}))


def dealt() -> None:
    """Rows of an expert that all ask for are shared by the ranks that have it, in turn."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, model = toys("plain", 8)
    copies = expert_copies([100] + [1] * 7, world)
    assert copies == {0: tuple(range(1, world))}, copies
    loads = ExpertLoads(model)
    copy_experts_(model, {"experts": copies})
    top, shares = torch.zeros(24, 1, dtype=torch.int64), torch.ones(24, 1)
    x = torch.randn(24, HIDDEN)
    seen = Rows()
    with hybridq.autocast(recipe="mxfp8"), torch.no_grad(), seen:
        model.experts(x, top, shares)
    assert loads.counts["experts"][0] == 24
    assert seen.ends and all(ends[-1] == 24 for ends in seen.ends), (rank, seen.ends)


def folded() -> None:
    """With ranks of tensor parallelism, a capacity, and in one graph."""
    tp = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for is_copied in (False, True):
        torch.manual_seed(0)
        model = Toy(LAYOUTS["plain"], 8)
        ranks = ExpertRanks(tp, tensor_parallel=tp)
        parallelize_experts(model, ranks, dispatch="mxfp8", capacity=2 * TOKENS)
        call: Any = model
        if is_copied:
            copy_experts_(model, {"experts": hot(tp.size())})
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        y, dx = step(call, torch.randn(TOKENS, HIDDEN), "mxfp8", TOKENS)
        found.append([y, dx])
    for a, b in zip(*found, strict=True):
        near(a, b, "folded", 1e-6)


def faults() -> None:
    """What cannot be copied, or differs between ranks, is an error on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single, model = toys("plain", 8)

    def make(copies: Any) -> Any:
        return lambda: copy_experts_(model, {"experts": copies})

    expects(ValueError, "experts must lie over ranks", lambda: copy_experts_(single, {}))
    expects(TypeError, "takes an nn.Module and copies", lambda: copy_experts_(model, [0]))
    text = "copies name modules of experts, experts, got 'other'"
    expects(ValueError, text, lambda: copy_experts_(model, {"other": {}}))
    for wrong, kind, told in (
        ({8: (0,)}, ValueError, "experts: experts must be 0 to 7, got 8"),
        ({0: (world,)}, ValueError, f"ranks must be 0 to {world - 1}, got {world}"),
        ({0: (0,)}, ValueError, "got expert 0 on rank 0 twice"),
        ({0: (1, 1)}, ValueError, "got expert 0 on rank 1 twice"),
        ({0: 1}, TypeError, "expert 0 must have ranks, got 1"),
        ([0], TypeError, "copies must be ranks by expert"),
    ):
        expects(kind, told, make(wrong))
    expects(RuntimeError, "got the copies of experts", make({0: (1,)} if rank else {}))
    kind: Any = RuntimeError if rank else ValueError
    expects(kind, "experts must be 0 to 7, got 9", make({0: (1,)} if rank else {9: (0,)}))
    make({0: (1,)})()
    with hybridq.autocast(recipe="fp8_delayed"):
        text = "under delayed scaling an expert has one history"
        expects(NotImplementedError, text, lambda: model(torch.randn(4, HIDDEN)))


if __name__ == "__main__":
    main(globals())
