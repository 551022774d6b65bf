"""Blocks of experts whose tokens are DTensors: `python experts_placed_program.py RANK WORLD ...`.

Norm and router are DTensors over the ranks of tensor parallelism, and so is what experts are given.
One process has the batches of all ranks: results and gradients must be its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from experts_folding_program import EXPERTS, LENGTHS, batch, meshes
from experts_program import HIDDEN, INNER, LAYOUTS, TOP, Block, alone, expects, near, whole
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hybridq
from hybridq.moe import (
    ExpertLoads,
    ExpertRanks,
    ExpertsLayout,
    convert_experts,
    parallelize_experts,
)

PLACED = {"replicated": Replicate(), "sequence": Shard(1)}


class Router(nn.Linear):
    """As products and sums: torch 2.10 has no `linear` of DTensors whose middle axis is dealt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


class Mixture(nn.Module):
    """A norm, a router and experts; tokens of three axes, or flat."""

    def __init__(self, layout: str, is_flat: bool = False) -> None:
        super().__init__()
        own = LAYOUTS[layout]
        self.is_flat = is_flat
        self.norm, self.router = nn.LayerNorm(HIDDEN), Router(HIDDEN, EXPERTS)
        self.experts = convert_experts(Block(own, EXPERTS), own)
        self.experts.leaves_all_plain = lambda recipe: False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = h.flatten(0, 1) if self.is_flat else h
        odds = self.router(h).softmax(-1)
        top = odds.topk(TOP).indices
        chosen = odds.gather(-1, top)  # torch 2.10 has no gradients of a DTensor's topk
        shares = chosen / chosen.sum(-1, keepdim=True)
        return x + self.experts(h, top, shares).view(x.shape)


def placed(model: Any, mesh: Any) -> Any:
    """Make the parameters of norm and router DTensors that every rank has whole."""
    for module in (model.norm, model.router):
        for name, parameter in list(module.named_parameters()):
            own = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            setattr(module, name, nn.Parameter(own))
    return model


def check(
    kind: str,
    tokens: str,
    layout: str = "plain",
    recipe: Any = None,
    is_flat: bool = False,
    told: str | None = None,
    is_compiled: bool = False,
    **options: Any,
) -> None:
    """Compare a step with one process that has all batches."""
    # What is said of plain tokens is nothing that DTensors need: they say it themselves.
    mesh, tp, ranks = meshes(kind, told or tokens)
    batches, number = mesh.size(0), mesh.get_local_rank("dp")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Mixture(layout, is_flat))
    single, shared = models
    if recipe is not None:
        parallelize_experts(single, alone(), **options)
    parallelize_experts(placed(shared, tp), ranks, **options)
    length = LENGTHS[tokens]
    what = (kind, tokens, layout, str(recipe), is_flat)
    for one in range(batches):
        x = batch(one, length)[0].requires_grad_()
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            y = single(x)
        (y.square().sum() / batches).backward()
        if one == number:
            own, own_x = y.detach(), x
    placement = PLACED[tokens]
    x = distribute_tensor(batch(number, length)[0], tp, [placement]).requires_grad_()
    call = shared
    if is_compiled:
        call = torch.compile(shared, fullgraph=True, backend="aot_eager", dynamic=False)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    assert type(y) is DTensor and y.placements == (placement,) and y.shape == own.shape, what
    near(y.detach().full_tensor(), own, (*what, "y"), 1e-6)
    loss = y.square().sum()
    (loss.full_tensor() if type(loss) is DTensor else loss).backward()
    near(whole(x.grad) / batches, own_x.grad, (*what, "x"), 1e-6)
    for (name, p), q in zip(shared.named_parameters(), single.parameters(), strict=True):
        grad = whole(p.grad).clone()
        dist.all_reduce(grad)
        near(grad / dist.get_world_size(), whole(q.grad), (*what, name), 2e-6)


def results(kinds: str) -> None:
    """Values, placement and gradients are those of one process."""
    for kind in kinds.split(","):
        for tokens in PLACED:
            check(kind, tokens)
            check(kind, tokens, "biased")
        check(kind, "replicated", "input", is_flat=True)
        check(kind, "sequence", told="replicated")
        check(kind, "replicated", told="sequence")


def quantized(kinds: str) -> None:
    """Messages and products in MXFP8."""
    for kind in kinds.split(","):
        for tokens in PLACED:
            check(kind, tokens, recipe="mxfp8", dispatch="mxfp8", combine="mxfp8")


def graphs() -> None:
    """With a capacity the block is one graph."""
    for tokens in PLACED:
        check("one", tokens, recipe="mxfp8", dispatch="mxfp8", capacity=128, is_compiled=True)


def step(call: Any, x: DTensor) -> list[torch.Tensor]:
    own = x.detach().clone().requires_grad_()
    with hybridq.autocast(recipe="mxfp8"):
        y = call(own)
    loss = y.square().sum()
    (loss.full_tensor() if type(loss) is DTensor else loss).backward()
    return [y.detach().to_local(), own.grad.to_local()]


def sizes() -> None:
    """One graph serves all numbers of tokens, where each step uses one and the same DeviceMesh.

    torch 2.13 takes two meshes that are equal for one where it looks up what an operator gives, and
    for two where it divides a graph: a mesh made twice ends in `Node tangents_2 was invalid`.
    """
    _, tp, ranks = meshes("one", "replicated")
    for tokens, is_flat in (("replicated", False), ("sequence", False), ("replicated", True)):
        for dynamic, most in ((True, 1), (None, 2)) if tokens == "sequence" else ((True, 1),):
            torch.manual_seed(0)
            model = placed(Mixture("plain", is_flat), tp)
            parallelize_experts(model, ranks, dispatch="mxfp8", capacity=TOP * 3 * 16)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            call = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            for length in (8, 12, 10):
                x = distribute_tensor(batch(0, length)[0], tp, [PLACED[tokens]])
                for a, b in zip(step(call, x), step(model, x), strict=True):
                    near(a, b, (tokens, is_flat, dynamic, length), 1e-6)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs <= most, (tokens, is_flat, dynamic, graphs)


def sorted_rows() -> None:
    """Experts that take rows sorted by expert: the same on all ranks, or refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = init_device_mesh("cpu", (world,))
    layout = ExpertsLayout("up", "down", takes="sizes")
    torch.manual_seed(0)
    single, shared = (convert_experts(Block(layout, EXPERTS), layout) for _ in range(2))
    shared.load_state_dict(single.state_dict())
    parallelize_experts(shared, ExpertRanks(tp, tensor_parallel=tp))
    x, sizes = torch.randn(31, HIDDEN), torch.tensor([3, 0, 7, 1, 9, 2, 8, 1])
    with hybridq.autocast(recipe="mxfp8"):
        wanted = single(x, sizes)
        for own in (sizes, distribute_tensor(sizes, tp, [Replicate()])):
            y = shared(distribute_tensor(x, tp, [Replicate()]), own)
            near(y.to_local(), wanted, "sizes", 1e-6)
        given = DTensor.from_local(x, tp, [Shard(0)])
        text = "tokens sorted by expert must be Replicate()"
        expects(ValueError, text, lambda: shared(given, sizes))
    assert rank < world and shared.up.shape[-1] in (INNER, HIDDEN)


def faults() -> None:
    """What cannot be taken is an error on every rank, that says what to do."""
    world = dist.get_world_size()
    tp = init_device_mesh("cpu", (world,))

    def made(ranks: Any) -> Any:
        torch.manual_seed(0)
        return parallelize_experts(Mixture("plain"), ranks).experts

    x = torch.randn(4, 6, HIDDEN)
    top, shares = torch.zeros(4, 6, TOP, dtype=torch.int64), torch.ones(4, 6, TOP)

    def given(*placements: Any) -> Any:
        return [
            DTensor.from_local(one, tp, [placement], run_check=False)
            for one, placement in zip((x, top, shares), placements, strict=True)
        ]

    experts = made(ExpertRanks(tp, tensor_parallel=tp))
    same = Replicate()
    text = "must be DTensors or plain tensors, all of them, got 1 DTensors of 3"
    mixed = [given(same, same, same)[0], top, shares]
    expects(TypeError, text, lambda: experts(*mixed))
    text = "must be whole rows on each rank, got a DTensor"
    for other in (Partial(), Shard(2)):
        own = given(other, Shard(1), Shard(1))
        expects(ValueError, text, lambda own=own: experts(*own))
    for other in (Replicate(), Shard(0)):
        own = given(other, Shard(1), Shard(1))
        expects(ValueError, "must be of the same tokens", lambda own=own: experts(*own))
    own = given(same, same, same)
    text = "give ExpertRanks(..., tensor_parallel=that mesh)"
    expects(ValueError, text, lambda: made(tp)(*own))
    two = init_device_mesh("cpu", (world, 1))
    both = [DTensor.from_local(one, two, [same, same]) for one in (x, top, shares)]
    expects(ValueError, "over one mesh of one dimension", lambda: experts(*both))
    torch.manual_seed(0)
    loads = ExpertLoads(experts)
    experts(*own)
    assert loads.counts[""].tolist() == [48, *[0] * (EXPERTS - 1)]
    alone_there = Mixture("plain").experts
    with hybridq.autocast(recipe="mxfp8"):
        expects(TypeError, "where each rank has all experts", lambda: alone_there(*own))


if __name__ == "__main__":
    main(globals())
