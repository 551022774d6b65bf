"""Experts over ranks of tensor parallelism: `python experts_folding_program.py RANK WORLD ...`.

Dense layers are split over one mesh, experts dealt out over another one of the same ranks. One
process has the batches of all ranks: losses, logits, router logits and gradients must be its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts_program import HIDDEN, LAYOUTS, TOP, Block, alone, expects, near, whole
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hybridq
from hybridq.distributed import count_traffic, reduce_sequence_parallel_gradients
from hybridq.moe import ExpertRanks, convert_experts, parallelize_experts

BATCH, LABELS, EXPERTS = 3, 12, 8
#: Of a sequence; what ranks have the same of, they need not divide.
LENGTHS = {"replicated": 11, "sequence": 12}


class Mixture(nn.Module):
    """A router whose logits are kept, experts, and a shared one."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        own = LAYOUTS[layout]
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = convert_experts(Block(own, EXPERTS), own)
        # Also without a recipe by the grouped products: the class has no forward of its own.
        self.experts.leaves_all_plain = lambda recipe: False
        self.logits: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        self.logits.append(logits.detach())
        best = logits.softmax(-1).topk(2)
        shares = best.values / best.values.sum(-1, keepdim=True)
        return self.experts(tokens, best.indices, shares).view_as(x)


class Layer(nn.Module):
    """A dense block of two products, and a mixture of experts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.mixture = Mixture(layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm1(x))))
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(layout) for _ in range(2))
        self.head = nn.Linear(HIDDEN, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Meshes(NamedTuple):
    """Which ranks do what; `tp` the inner dimension of all ranks."""

    whole: Any
    tp: Any
    ranks: ExpertRanks


def meshes(kind: str, tokens: Any) -> Meshes:
    """Return the meshes of a kind: experts over `tp`, over `all` ranks, or over `dp`."""
    world = dist.get_world_size()
    size = world if kind == "one" else 2
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    experts = {"one": tp, "tp": tp, "dp": mesh["dp"], "all": None}[kind]
    replicas = {"tp": mesh["dp"], "dp": tp}.get(kind)
    return Meshes(mesh, tp, ExpertRanks(experts, replicas, tp, tokens))


def built(layout: str) -> Any:
    torch.manual_seed(0)
    return Model(layout)


def split(model: Any, mesh: Any, tokens: str) -> Any:
    """Split the dense layers by torch's plans; mark what sees tokens of its own alone."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if tokens == "sequence":
        norm = {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
        plan = {
            **norm,
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        own = [model.head, *(layer.mixture.router for layer in model.layers)]
        for parameter in (one for module in own for one in module.parameters()):
            parameter.sequence_parallel = True
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def batch(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of one batch."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, length, HIDDEN, generator=generator)
    return x, torch.randint(0, LABELS, (BATCH, length), generator=generator)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum over this rank's tokens, over the tokens of the whole batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def check(
    kind: str, tokens: str, layout: str = "plain", recipe: Any = None, **options: Any
) -> None:
    """Compare a step with one process that has all batches."""
    mesh, tp, ranks = meshes(kind, tokens)
    batches, number, lane = mesh.size(0), mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    single, shared = built(layout), built(layout)
    if recipe is not None:
        single, shared = hybridq.convert(single), hybridq.convert(shared)
        parallelize_experts(single, alone(), **options)
    parallelize_experts(split(shared, tp, tokens), ranks, **options)
    length = LENGTHS[tokens]
    count = BATCH * length
    wanted = torch.zeros(())
    for one in range(batches):
        x, labels = batch(one, length)
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            logits = single(x)
        loss = loss_of(logits, labels, count) / batches
        loss.backward()
        wanted += loss.detach()
        if one == number:
            of_batch = logits.detach()
    x, labels = batch(number, length)
    part = slice(None)
    if tokens == "sequence":
        part = slice(lane * length // tp.size(), (lane + 1) * length // tp.size())
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        logits = shared(x[:, part])
    what, bound = (kind, tokens, layout, str(recipe)), 1e-6
    near(logits.detach(), of_batch[:, part], (*what, "logits"), bound)
    loss = loss_of(logits, labels[:, part], count)
    loss.backward()
    reduce_sequence_parallel_gradients(shared, tp.get_group())
    total = loss.detach()
    dist.all_reduce(total)
    total /= batches * (1 if tokens == "sequence" else tp.size())
    near(total, wanted, (*what, "loss"), bound)
    for mine, own in zip(shared.layers, single.layers, strict=True):
        routed = own.mixture.logits[number].unflatten(0, (BATCH, length))[:, part]
        near(mine.mixture.logits[0], routed.flatten(0, 1), (*what, "router logits"), bound)
    for (name, p), q in zip(shared.named_parameters(), single.parameters(), strict=True):
        grad = whole(p.grad).clone()
        dist.all_reduce(grad)
        near(grad / dist.get_world_size(), whole(q.grad), (*what, name), 2 * bound)


def replicated(kinds: str) -> None:
    """Tokens are the same on the ranks of tensor parallelism."""
    for kind in kinds.split(","):
        for layout in ("plain", "two", "input", "scaled"):
            check(kind, "replicated", layout)
        check(kind, "replicated", "biased")


def sequence(kinds: str) -> None:
    """Each rank of tensor parallelism has a part of each sequence."""
    for kind in kinds.split(","):
        for layout in ("plain", "two", "input"):
            check(kind, "sequence", layout)


def quantized(kinds: str) -> None:
    """Products, messages and dense layers in MXFP8: planes are those of one process."""
    for kind in kinds.split(","):
        check(kind, "replicated", recipe="mxfp8", dispatch="mxfp8", combine="mxfp8")
        check(kind, "replicated", "two", "mxfp8", dispatch="nvfp4", combine="nvfp4")


def shares() -> None:
    """A rank sends its share of the tokens that all have, and no more."""
    world = dist.get_world_size()
    tp = init_device_mesh("cpu", (world,))
    tokens = world * 16
    indices = (torch.arange(tokens * TOP) % EXPERTS).view(tokens, TOP)
    x, weights = torch.randn(tokens, HIDDEN), torch.ones(tokens, TOP)
    dist.broadcast(x, 0)
    sent = []
    for ranks in (ExpertRanks(tp, tensor_parallel=tp), ExpertRanks(tp)):
        experts = convert_experts(Block(LAYOUTS["plain"], EXPERTS), LAYOUTS["plain"])
        parallelize_experts(experts, ranks)
        with torch.no_grad():
            experts(x, indices, weights)  # ranks compare what is new to them
            with count_traffic() as traffic:
                experts(x, indices, weights)
        sent.append(traffic.nbytes_by_kind["all_to_all"])
    counts = 8 * (EXPERTS + world)  # and a number beside them
    assert (sent[0] - counts) * world == sent[1] - counts, (sent, counts)


def faults() -> None:
    """Tokens that are not the same, or ranks that are none: an error on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = init_device_mesh("cpu", (world,))

    def made(ranks: Any) -> Any:
        return parallelize_experts(Mixture("plain"), ranks)

    shared = made(ExpertRanks(tp, tensor_parallel=tp))
    torch.manual_seed(rank)
    text = "tokens must be the same on all ranks of tensor_parallel"
    expects(RuntimeError, text, lambda: shared(torch.randn(2, 5, HIDDEN)))
    expects(RuntimeError, text, lambda: shared(torch.zeros(2, 5 + rank, HIDDEN)))
    shared(torch.ones(2, 5, HIDDEN))
    expects(TypeError, "tensor_parallel: group must be", lambda: made(ExpertRanks(tp, None, 3)))
    expects(ValueError, "ExpertRanks: tokens must be", lambda: ExpertRanks(tp, None, tp, "other"))
    kind = "sequence" if rank else "replicated"
    text = "got the ranks of a batch, and what tokens they have"
    expects(RuntimeError, text, lambda: made(ExpertRanks(tp, None, tp, kind)))


if __name__ == "__main__":
    main(globals())
