"""Tokens by copies into other ranks' memory: `python experts_symmetric_program.py RANK WORLD ...`.

Ranks map files of each other, in place of GPUs' memory (`shared_buffers.py`). The oracle is the
process group's all-to-all, to the bit.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts_program import HIDDEN, LAYOUTS, TOKENS, TOP, Block, Toy, expects, step, whole
from rank_program import logged, main
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq._torch_ranks import functional_all_to_all, wait_tensor
from hybridq.distributed import count_traffic
from hybridq.distributed.collectives import symmetric
from hybridq.moe import (
    ExpertRanks,
    combine,
    convert_experts,
    copy_experts_,
    dispatch,
    overlap_shared_experts,
    parallelize_experts,
    permute,
    route_plan,
)
from shared_buffers import SharedMemory, shared_buffers

MESSAGES: tuple[dict[str, Any], ...] = (
    {},
    {"dispatch": "mxfp8", "combine": "mxfp8"},
    {"dispatch": ("nvfp4", "mxfp8"), "combine": (None, "nvfp4")},
)


def memory(**options: Any) -> SharedMemory:
    """Return new memory, in a folder that all ranks know."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        number = memory.__dict__["number"] = memory.__dict__.get("number", 0) + 1
        folder = Path(f"{sys.argv[3]}.memory") / str(number)
        folder.mkdir(parents=True)
        made = [str(folder)]
    dist.broadcast_object_list(made)
    return SharedMemory(Path(made[0]), **options)


class Exchanges(TorchDispatchMode):
    """Counts exchanges by the group, and by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"all_to_all_single": 0, "all_to_all_bytes": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = str(func).split(".")[1]
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], what: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b), what


def of_rank(table: list[list[int]], seed: int) -> torch.Tensor:
    """Return the random bytes that this rank sends."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 256, (sum(table[rank]),), dtype=torch.uint8, generator=generator)


def by_copies(table: list[list[int]], seed: int) -> torch.Tensor:
    every = [size for row in table for size in row]
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    payload = of_rank(table, seed)
    return wait_tensor(torch.ops.hybridq.all_to_all_bytes(payload, every, rank, name))


def by_group(table: list[list[int]], seed: int) -> torch.Tensor:
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    arrives = [row[rank] for row in table]
    payload = of_rank(table, seed)
    return wait_tensor(functional_all_to_all(payload, arrives, table[rank], name))


def tables() -> list[list[list[int]]]:
    """Bytes of each rank for each: uneven, some none, small and larger in turn, and nothing."""
    world, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    made = [
        torch.randint(0, most, (world, world), generator=generator)
        for most in (30, 200, 7, 3000, 3000)
    ]
    made[1][0] = 0
    made[3][:, -1] = 0
    made[4].fill_diagonal_(0)
    return [one.tolist() for one in [*made, torch.zeros(world, world, dtype=torch.int64)]]


def raw() -> None:
    """What arrives is what the group's all-to-all brings, while memory grows on all ranks alike."""
    with shared_buffers(memory()) as own:
        for _ in range(2):
            for number, table in enumerate(tables()):
                assert torch.equal(by_copies(table, number), by_group(table, number)), number
        needed = [max(map(sum, zip(*table, strict=True))) for table in tables()]
        assert own.sizes == sorted(own.sizes) and len(own.sizes) >= 3, own.sizes
        assert max(needed) <= own.sizes[-1] < 2 * max(needed) + 64, (needed, own.sizes)
        assert all(size % 64 == 0 for size in own.sizes)
        assert own.barriers == 2 * 2 * (len(tables()) - 1)  # of nothing there are none


def results(x: torch.Tensor, recipe: Any, change: Any = None, **options: Any) -> list[Any]:
    """Return outputs and gradients of two steps."""
    torch.manual_seed(0)
    model = parallelize_experts(Toy(LAYOUTS["biased"], 8), **options)
    if change is not None:
        change(model)
    made = []
    for _ in range(2):
        model.zero_grad()
        made += [*step(model, x, recipe, 1), *(whole(one.grad) for one in model.parameters())]
    return made


def blocks(which: str) -> None:
    """A block of experts: `all` formats or one, with a capacity and without."""
    rank, world = dist.get_rank(), dist.get_world_size()
    formats, recipes = (
        (MESSAGES, (None, "mxfp8")) if which == "all" else (MESSAGES[1:2], ("mxfp8",))
    )
    for counts in ([TOKENS] * world, [0, 11, 0, 5][:world], [0] * world):
        torch.manual_seed(1)
        x = torch.randn(sum(counts), HIDDEN).split(counts)[rank]
        for messages in formats:
            for capacity in (None, TOP * TOKENS):
                for recipe in recipes:
                    options = {**messages, "capacity": capacity}
                    with shared_buffers(memory()) as own, Exchanges() as seen:
                        found = results(x, recipe, **options, transport="symmetric")
                    # By the group go the counts of two steps alone.
                    calls = {"all_to_all_single": 2, "all_to_all_bytes": 8}
                    assert seen.counts == calls, seen.counts
                    assert bool(own.barriers) == (capacity is not None or any(counts))
                    what = (counts, str(options), recipe)
                    same(found, results(x, recipe, **options), what)


def together() -> None:
    """With copies of experts, shared experts meanwhile, and tokens that lanes have the same of."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN)
    messages = {"dispatch": "mxfp8", "combine": "mxfp8"}

    def copy(model: Any) -> None:
        copy_experts_(model, {"experts": {0: range(1, world)}})

    with shared_buffers(memory()) as own:
        found = results(x, "mxfp8", copy, **messages, transport="symmetric")
        assert own.barriers
    same(found, results(x, "mxfp8", copy, **messages), "copies")

    dist.broadcast(x, 0)
    tp = init_device_mesh("cpu", (world,))
    ranks = {"mesh": ExpertRanks(tp, tensor_parallel=tp), **messages}
    with shared_buffers(memory()):
        found = results(x, "mxfp8", **ranks, transport="symmetric")
    same(found, results(x, "mxfp8", **ranks), "lanes")

    class Shared(Toy):
        def __init__(self, layout: Any, experts: int) -> None:
            super().__init__(layout, experts)
            self.shared_experts = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.shared_experts(x)

    made = []
    for transport in ("symmetric", "group"):
        torch.manual_seed(0)
        model = parallelize_experts(Shared(LAYOUTS["plain"], 8), **messages, transport=transport)
        assert overlap_shared_experts(model) == ["shared_experts"]
        with shared_buffers(memory()):
            made.append([*step(model, x, "mxfp8", 1), *(whole(p.grad) for p in model.parameters())])
    same(*made, "meanwhile")


def groups() -> None:
    """Groups have memory of their own: experts over pairs of ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(rank)
    x = torch.randn(TOKENS + rank, HIDDEN)
    options = {"mesh": ExpertRanks(mesh["ep"], replicas=mesh["dp"]), "dispatch": "mxfp8"}
    with shared_buffers(memory()) as own:
        found = results(x, "mxfp8", **options, transport="symmetric")
        assert own.barriers
    same(found, results(x, "mxfp8", **options), "groups")


def flying() -> None:
    """Two messages under way at once, and the order of waits does not matter."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    made = []
    rows = [torch.randn(TOP * count, HIDDEN) for count in (12 + rank, 30)]
    tops = [torch.rand(len(one) // TOP, 3 * world).topk(TOP).indices for one in rows]
    for transport in ("symmetric", "group"):
        given = [one.clone().requires_grad_() for one in rows]
        with shared_buffers(memory()):
            plans = [route_plan(top, 3 * world, transport=transport)[1] for top in tops]
            pairs = list(zip(given, plans, strict=True))
            ways = [dispatch(x, plan, "mxfp8", "nvfp4", async_op=True) for x, plan in pairs]
            there = [way.wait() for way in reversed(ways)][::-1]
            back = [
                combine(2 * y, plan, None, "mxfp8", async_op=True)
                for y, plan in zip(there, plans, strict=True)
            ]
            back = [one.wait() for one in back]
            sum(one.square().sum() for one in back).backward()
        made.append([one.detach() for one in (*there, *back)] + [one.grad for one in given])
    same(*made, "two at once")


def compiled() -> None:
    """With a capacity a block is one graph, which has the bits of the group's graph."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN)
    options = {"dispatch": "mxfp8", "combine": "mxfp8", "capacity": TOP * TOKENS}
    made = []
    for transport in ("symmetric", "group"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize_experts(Toy(LAYOUTS["plain"], 8), **options, transport=transport)
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        with shared_buffers(memory()) as own:
            for _ in range(2):
                model.zero_grad()
                found = step(call, x, "mxfp8", 1)
            assert own.barriers == (16 if transport == "symmetric" else 0)
        made.append([*found, *(whole(one.grad) for one in model.parameters())])
    same(*made, "graph")


def ordered() -> None:
    """With a slow rank bytes are right; without one of the barriers they are not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    table = [[64] * world for _ in range(world)]
    for left_out in ((), (0,), (1,)):
        with shared_buffers(memory(left_out=left_out, slow=world - 1)) as own:
            found = [by_copies(table, seed) for seed in range(3)]
            own.done()
        wrong = sum(not torch.equal(one, by_group(table, seed)) for seed, one in enumerate(found))
        told: list[Any] = [None] * world
        dist.all_gather_object(told, wrong)
        assert bool(sum(told)) == bool(left_out), (left_out, told, rank)


class Failing(SharedMemory):
    """Memory that one rank cannot have, or cannot map."""

    what = "buffer"
    after = 0

    def _fail(self, what: str) -> None:
        if what == self.what and len(self.sizes) > self.after and dist.get_rank() == 1:
            raise RuntimeError("out of symmetric memory\nC++ frames")

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        made = super().buffer(nbytes, device)
        self._fail("buffer")
        return made

    def handle(self, buffer: torch.Tensor, name: str) -> Any:
        made = super().handle(buffer, name)
        self._fail("handle")
        return made


def refused() -> None:
    """Where one rank cannot have it, all stay with the group's all-to-all, and the log says why."""
    rank = dist.get_rank()
    started = tables()
    for what, after in (("buffer", 0), ("handle", 0), ("buffer", 1)):
        own = Failing(memory().folder)
        own.what, own.after = what, after
        hybridq.errors._seen.clear()
        with shared_buffers(own), logged() as said:
            for number, table in enumerate(started):
                found, wanted = by_copies(table, number), by_group(table, number)
                assert torch.equal(found, wanted), (what, after, number)
            assert bool(own.barriers) == bool(after)
        if rank == 0:
            text = "though symmetric memory was asked for: out of symmetric memory (rank 1 of"
            assert len(said) == 1 and text in said[0], said
    kept = symmetric.socket.gethostname
    for gethostname, text in ((lambda: f"node-{rank % 2}", "its ranks are on 2 hosts"), (kept, "")):
        symmetric.socket.gethostname = gethostname
        with shared_buffers(memory()) if text else nullcontext(), logged() as said:
            same([by_copies(started[0], 0)], [by_group(started[0], 0)], text)
        if rank == 0:
            assert len(said) == 1 and (text or "no symmetric memory on cpu") in said[0], said
    symmetric._rooms.clear()
    hybridq.errors._seen.clear()
    with logged() as said:  # and so does a block of experts
        found = results(torch.ones(4, HIDDEN), "mxfp8", transport="symmetric")
    same(found, results(torch.ones(4, HIDDEN), "mxfp8"), "refused")
    assert len(said) == (rank == 0), said


def traffic() -> None:
    """Bytes by copies are counted as those by the group, and the table of counts beside them."""
    world = dist.get_world_size()
    x = torch.randn(TOKENS, HIDDEN)
    top = torch.rand(TOKENS, 8).topk(TOP).indices
    found = []
    for transport in ("symmetric", "group"):
        routes, plan = route_plan(top, 8, transport=transport)
        with shared_buffers(memory()), count_traffic() as counted:
            route_plan(top, 8, transport=transport)
            dispatch(permute(x, routes), plan, "mxfp8")
        assert counted.calls_by_kind == {"all_to_all": 2}
        found.append(counted.nbytes_by_kind["all_to_all"])
    assert found[0] - found[1] == 8 * world * world


def faults() -> None:
    """Transports that are none, or differ between ranks: an error on every rank."""
    rank = dist.get_rank()
    top = torch.zeros(4, 1, dtype=torch.int64)
    layout = LAYOUTS["plain"]

    def dealt(transport: Any) -> Any:
        return lambda: parallelize_experts(
            convert_experts(Block(layout, 8), layout), transport=transport
        )

    text = "transport must be one of group, symmetric, got 'symetric'; did you mean 'symmetric'?"
    expects(ValueError, text, dealt("symetric"))
    expects(ValueError, text, lambda: route_plan(top, 8, transport="symetric"))
    own: Any = "symmetric" if rank else "group"
    expects(RuntimeError, "got the transport: ", dealt(own))
    text = "route_plan: options must be the same"
    expects(RuntimeError, text, lambda: route_plan(top, 16, transport=own))
    expects(RuntimeError, text, lambda: route_plan(top, 16, capacity=8 + rank))
    expects(RuntimeError, "sizes must be the same", lambda: route_plan(top, 17 + rank))


def dies() -> None:
    """A rank that is gone in the middle of an exchange ends the others."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = parallelize_experts(
        Toy(LAYOUTS["plain"], 8), dispatch="mxfp8", transport="symmetric"
    )
    own = memory()
    with shared_buffers(own):
        step(model, torch.randn(12, HIDDEN), "mxfp8", 1)
        if rank == world - 1:
            handle = next(iter(symmetric._rooms.values())).handle
            handle.barrier = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(model, torch.randn(12, HIDDEN), "mxfp8", 1)
        except RuntimeError:
            os._exit(0)
    raise AssertionError("no error")


if __name__ == "__main__":
    main(globals(), timeout=60.0)
