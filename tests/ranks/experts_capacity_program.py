"""A capacity together with all else: `python experts_capacity_program.py RANK WORLD STORE NAME...`.

The oracle is the same block without a capacity, which waits for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from experts_folding_program import meshes
from experts_program import HIDDEN, LAYOUTS, TOKENS, TOP, Toy, expects, near, step, whole
from rank_program import logged, main
from torch.distributed.device_mesh import init_device_mesh

from hybridq.moe import ExpertRanks, parallelize_experts

MESSAGES = (
    {},
    {"dispatch": "mxfp8", "combine": "mxfp8"},
    {"dispatch": "nvfp4", "combine": "mxfp8"},
)


def made(kind: str, tokens: str, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return a model over ranks of a kind, and this rank's tokens."""
    mesh, tp, ranks = meshes(kind, tokens)
    torch.manual_seed(0)
    model = parallelize_experts(Toy(LAYOUTS["plain"], 8), ranks, **options)
    torch.manual_seed(10 + mesh.get_local_rank("dp"))
    x = torch.randn(tp.size() * TOKENS, HIDDEN)
    return model, x if tokens == "replicated" else x.chunk(tp.size())[tp.get_local_rank()]


def results(model: Any, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    found = step(call, x, "mxfp8", x.numel())
    return [*found, *(whole(parameter.grad) for parameter in model.parameters())]


def folded(kinds: str) -> None:
    """Over ranks of tensor parallelism, eager and compiled, in any format: the same values."""
    for kind in kinds.split(","):
        for tokens in ("replicated", "sequence"):
            for messages in MESSAGES:
                model, x = made(kind, tokens, **messages)
                wanted = results(model, model, x)
                model, x = made(kind, tokens, **messages, capacity=TOP * x.shape[0])
                torch._dynamo.reset()
                compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
                what = (kind, tokens, str(messages))
                for a, b in zip(results(model, model, x), wanted, strict=True):
                    assert torch.equal(a, b), what
                for a, b in zip(results(model, compiled, x), wanted, strict=True):
                    near(a, b, (*what, "compiled"), 1e-6)


def unread() -> None:
    """On a device nothing is read by the host, forward or backward: on `meta`, reading raises."""
    kind = "one"
    for tokens in ("replicated", "sequence"):
        for messages in MESSAGES:
            for capacity in (TOP * TOKENS, None):
                model, x = made(kind, tokens, recipe="mxfp8", **messages, capacity=capacity)
                model(x).sum().backward()  # ranks compare what is new to them, once
                model.to("meta")
                given = torch.empty(x.shape, device="meta", requires_grad=True)
                if capacity is None:
                    expects(RuntimeError, "meta tensor", lambda m=model, g=given: m(g))
                    continue
                for _ in range(2):
                    y = model(given)
                    y.sum().backward()
                assert y.shape == x.shape and given.grad.device.type == "meta"


def overflow(kinds: str) -> None:
    """One rank has too many rows for one other: all that compute its batch are told."""
    for kind in kinds.split(","):
        for tokens in ("replicated", "sequence"):
            mesh, tp, ranks = meshes(kind, tokens)
            model = parallelize_experts(Toy(LAYOUTS["plain"], 8), ranks, capacity=9)
            # Of each rank's eight tokens; the first rank's are all for its own experts.
            top = torch.stack([torch.arange(8 * tp.size()) % 8, torch.full((8 * tp.size(),), 8)], 1)
            if mesh.get_local_rank("dp") == 0:
                top[:8] = torch.tensor([0, 1])
            x, shares = torch.randn(8 * tp.size(), HIDDEN), torch.ones(8 * tp.size(), TOP)
            dist.broadcast(x, 0)
            given = (x, top, shares)
            if tokens == "sequence":
                given = tuple(one.chunk(tp.size())[tp.get_local_rank()] for one in given)
            text = "experts experts: capacity must be the rows that a rank has for one rank"
            expects(RuntimeError, text, lambda m=model, g=given: m.experts(*g))
            given[1][:, 1] = 8
            assert model.experts(*given).shape == given[0].shape  # and afterwards all is well


class Part(NamedTuple):
    """A rank of two replicas of two ranks."""

    mesh: Any
    model: Any


def replica(capacity: int, is_known: bool = True) -> Part:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    replicas = mesh["dp"] if is_known else None
    torch.manual_seed(0)
    model = Toy(LAYOUTS["plain"], 8)
    ranks = ExpertRanks(mesh["ep"], replicas=replicas)
    return Part(mesh, parallelize_experts(model, ranks, dispatch="mxfp8", capacity=capacity))


def replicas() -> None:
    """One rank of one replica has too many rows: the ranks of the other are told, and none waits.

    Behind the forward ranks reduce gradients over the replicas, as FSDP2 does.
    """
    first, rank = dist.get_rank() < 2, dist.get_rank()
    for how in ("eager", "compiled"):
        mesh, model = replica(9)
        torch._dynamo.reset()
        call = torch.compile(model.experts, fullgraph=True, backend="aot_eager")
        call = call if how == "compiled" else model.experts
        top = torch.stack([torch.arange(8) % 8, torch.full((8,), 8)], 1)
        if rank == 0:
            top[:] = torch.tensor([0, 1])
        x, shares = torch.randn(8, HIDDEN), torch.ones(8, TOP)
        text = "more rows than the capacity" if how == "compiled" else "experts experts: capacity"
        expects(RuntimeError, text, lambda c=call, g=(x, top, shares): c(*g))
        top[:, 1] = 8
        call(x, top, shares).sum().backward()
        grad = model.experts.up.grad.to_local()
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        assert bool(grad.any())
    # Where replicas are not known, it is said once; who reduces gradients with others has to say.
    _, model = replica(9, is_known=False)
    with logged() as said:
        for _ in range(2):
            model.experts(x, top, shares)
        if rank == 0:
            top[:] = torch.tensor([0, 1])
        if first:
            text = "capacity must be the rows that a rank has for one rank"
            expects(RuntimeError, text, lambda: model.experts(x, top, shares))
    assert [one.partition("; ")[2] for one in said] == (rank == 0) * [
        "give ExpertRanks(mesh['ep'], replicas=mesh['dp'])"
    ], said
    dist.barrier()


def lanes() -> None:
    """Two ranks of tensor parallelism have other tokens: all ranks of their experts are told."""
    rank = dist.get_rank()
    for kind in ("dp", "all", "tp"):
        _, _, ranks = meshes(kind, "replicated")
        model = parallelize_experts(Toy(LAYOUTS["plain"], 8), ranks)
        torch.manual_seed(0 if rank < 2 else rank)
        x = torch.randn(TOKENS, HIDDEN)
        text = "experts experts: tokens must be the same on all ranks of tensor_parallel"
        expects(RuntimeError, text, lambda m=model, given=x: m(given))
        assert model(torch.ones(TOKENS, HIDDEN)).shape == x.shape


if __name__ == "__main__":
    main(globals())
