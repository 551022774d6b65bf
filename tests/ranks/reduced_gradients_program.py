"""Gradients that DDP and FSDP2 reduce by quantized messages, against the same by hand.

By hand: one process has the gradients of all ranks, each rank's part quantized by the public
quantizer, decoded, added in FP32 in the order of ranks, divided, rounded once.
"""

from __future__ import annotations

import copy
import gc
import inspect
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridq
from hybridq.distributed import count_traffic, ddp_hook, quantized_reduce_scatter

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 20))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return (model(batch(step, rank)).float() - 0.3).square().sum()


def rounded(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    if not x.numel() or quantizer is None:
        return x.float()
    return hybridq.quantize(x, quantizer, None).dequantize().float()


def mean(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def reduced(every: list[torch.Tensor], quantizer: Any, kept: Any = None) -> torch.Tensor:
    """An all-reduce of flat tensors by hand; `kept`: residuals of ranks and of sums."""
    world = len(every)
    unit = 1 if quantizer is None else hybridq.PlaneSpec.parse(quantizer).unit(1)
    size = -(-every[0].numel() // (world * unit)) * unit
    if kept is not None:
        every = [x + kept["sent"][r] for r, x in enumerate(every)]
    cut = [[x[r * size : (r + 1) * size] for r in range(world)] for x in every]
    sent = [[rounded(part, quantizer) for part in parts] for parts in cut]
    if kept is not None:
        kept["sent"] = [x - torch.cat(s) for x, s in zip(every, sent, strict=True)]
    sums = [mean([parts[r] for parts in sent]) for r in range(world)]
    if kept is not None:
        sums = [x + r for x, r in zip(sums, kept["reduced"], strict=True)]
    made = [rounded(x, quantizer) for x in sums]
    if kept is not None:
        kept["reduced"] = [x - m for x, m in zip(sums, made, strict=True)]
    return torch.cat(made)


def gradients(model: nn.Module, step: int, world: int) -> list[list[torch.Tensor]]:
    """By rank: the gradients of all parameters."""
    every = []
    for rank in range(world):
        model.zero_grad()
        loss(model, step, rank).backward()
        every.append([p.grad.clone() for p in model.parameters()])
    return every


def ddp_case(quantizer: Any, error_feedback: bool = False) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = network()
    model = DistributedDataParallel(copy.deepcopy(plain))
    model.register_comm_hook(None, ddp_hook(quantizer, error_feedback=error_feedback))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    kept: Any = None
    for step in range(STEPS):
        model.zero_grad()
        loss(model, step, rank).backward()
        every = gradients(plain, step, world)
        # A bucket has gradients in the order of parameters at first, then as they become ready.
        order = list(range(4)) if step == 0 else [3, 2, 1, 0]
        flat = [torch.cat([own[i].flatten() for i in order]) for own in every]
        if error_feedback:
            kept = arranged(kept, flat, quantizer, step)
        made = reduced(flat, quantizer, kept)
        sizes = [every[0][i].numel() for i in order]
        for i, part in zip(order, made.split(sizes), strict=True):
            list(plain.parameters())[i].grad = part.view(every[0][i].shape)
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, own.grad), (quantizer, step, mine.grad - own.grad)
        for optimizer in optimizers:
            optimizer.step()
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, own)


def arranged(kept: Any, flat: list[torch.Tensor], quantizer: str, step: int) -> Any:
    """Residuals by hand, in the order of the step's bucket: it changes after the first step."""
    world, count = len(flat), flat[0].numel()
    if kept is None:
        sent = [torch.zeros(count)] * world
    elif step == 1:
        sizes = [p.numel() for p in network().parameters()]
        sent = [torch.cat(list(reversed(one.split(sizes)))) for one in kept["sent"]]
    else:
        return kept
    unit = hybridq.PlaneSpec.parse(quantizer).unit(1)
    size = -(-count // (world * unit)) * unit
    return {"sent": sent, "reduced": [x * 0 for x in flat[0].split(size)]}


def ddp() -> None:
    for quantizer in ("mxfp8", "nvfp4", None):
        ddp_case(quantizer)
    ddp_case("mxfp4", error_feedback=True)


def overflows() -> None:
    """A step whose gradient overflows on one rank is left out by a GradScaler, on all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for quantizer in ("fp8", "nvfp4", "mxfp8", None):
        for error_feedback in (False, True):
            model = DistributedDataParallel(network())
            hook = ddp_hook(quantizer, error_feedback=error_feedback and quantizer is not None)
            model.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(3):
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.zero_grad()
                value = loss(model, step, rank)
                if step == 1 and rank == world - 1:
                    value = value + float("inf") * next(model.parameters())[0, 0]
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
                stays = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
                assert all(stays) if step == 1 else not any(stays), (quantizer, step, stays)
            assert scaler.get_scale() == 2.0
            assert all(p.isfinite().all() for p in model.parameters())
    unit = fully_shard(network())
    quantized_reduce_scatter(unit, "nvfp4")
    value = loss(unit, 0, rank)
    if rank == 0:
        value = value + float("inf") * value
    value.backward()
    grads = [p.grad.full_tensor() for p in unit.parameters()]
    assert not any(grad.isfinite().all() for grad in grads)


def ddp_memory() -> None:
    """Residuals are as many bytes as said, also after DDP has made other buckets."""
    inner = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = DistributedDataParallel(inner, bucket_cap_mb=0.02)
    hook = ddp_hook("mxfp8", error_feedback=True)
    model.register_comm_hook(None, hook)
    reduced = inspect.getclosurevars(hook).nonlocals["reduced"]
    feedback = inspect.getclosurevars(reduced).nonlocals["feedback"]
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
        kept = [one for held in feedback._residuals.values() for one in (held.sent, held.reduced)]
        kept += feedback._parts.values()
        found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
        every = 4 * sum(p.numel() for p in inner.parameters()) * (1 + 1 / dist.get_world_size())
        assert 0.9 < sum(found.values()) / every < 1.1, (found, every)


def ddp_plain() -> None:
    """Not quantized, the hook is plain DDP: of two ranks bit for bit."""
    rank = dist.get_rank()
    results = []
    for hooked in (True, False):
        model = DistributedDataParallel(network())
        if hooked:
            model.register_comm_hook(dist.group.WORLD, ddp_hook(None))
        loss(model, 0, rank).backward()
        results.append([p.grad for p in model.parameters()])
    for mine, own in zip(*results, strict=True):
        assert torch.equal(mine, own)


def sharded(mesh: Any = None, dtype: Any = None) -> nn.Sequential:
    model = network()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (model[0], model[2]):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def unit_input(own: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    """What FSDP2 gives a unit's reduce-scatter: by rank one row of all its parameters' shards."""
    rows = []
    for rank in range(world):
        parts = []
        for gradient in own:
            size = -(-gradient.shape[0] // world)
            part = gradient.new_zeros(size, *gradient.shape[1:])
            found = gradient[rank * size : (rank + 1) * size]
            part[: found.shape[0]] = found
            parts.append(part.flatten())
        rows.append(torch.cat(parts))
    return rows


def fsdp() -> None:
    """Every unit's shards of gradients are those by hand, and a step's weights with them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for quantizer in ("mxfp8", "nvfp4", None):
        plain, model = network(), sharded()
        quantized_reduce_scatter(model, quantizer)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        for step in range(STEPS):
            model.zero_grad()
            with count_traffic() as traffic:
                loss(model, step, rank).backward()
            assert "reduce_scatter" not in traffic.nbytes_by_kind, traffic
            every = gradients(plain, step, world)
            for unit in (0, 1):
                own = [one[2 * unit : 2 * unit + 2] for one in every]
                rows = [unit_input(one, world) for one in own]
                made = [mean([rounded(one[r], quantizer) for one in rows]) for r in range(world)]
                scatter(list(plain.parameters())[2 * unit : 2 * unit + 2], made)
            for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
                got = mine.grad.full_tensor()
                assert torch.equal(got, own.grad), (quantizer, step, got - own.grad)
            for optimizer in optimizers:
                optimizer.step()
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), own)


def scatter(parameters: list[nn.Parameter], rows: list[torch.Tensor]) -> None:
    """Give parameters the gradients that ranks' rows hold shards of."""
    world, start = len(rows), 0
    for parameter in parameters:
        size = -(-parameter.shape[0] // world)
        count = size * (parameter.numel() // parameter.shape[0])
        parts = [row[start : start + count].view(size, *parameter.shape[1:]) for row in rows]
        parameter.grad = torch.cat(parts)[: parameter.shape[0]].clone()
        start += count


class Branches(nn.Module):
    """A unit of which a forward takes one matrix, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 64, bias=False), nn.Linear(32, 32, bias=False)
        self.same = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        made = [getattr(self, name)(x).square().mean() for name in names.split()]
        return torch.stack(made).sum()


#: Which branches steps take; those of the first and the second have as many values.
TAKEN = ("left", "same", "left", "right left", "same", "right", "left right same", "left")


def branches() -> None:
    """A residual is its parameter's, whichever others are reduced with it: by hand, bit for bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Branches()
    model = fully_shard(copy.deepcopy(plain))
    quantized_reduce_scatter(model, "mxfp4", error_feedback=True)
    kept: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    for step, names in enumerate(TAKEN):
        scale = 100.0 if names == "left" else 1.0
        model.zero_grad()
        branch_loss(model, names, step, rank, scale).backward()
        own = [name for name, _ in plain.named_children() if name in names.split()]
        sent = []
        for r in range(world):
            plain.zero_grad()
            branch_loss(plain, names, step, r, scale).backward()
            grads = [plain.get_submodule(name).weight.grad for name in own]
            rows = [grad.reshape(world, -1) for grad in grads]
            rows = [one + kept[r].get(name, 0.0) for one, name in zip(rows, own, strict=True)]
            wanted = torch.cat(rows, 1)
            sent.append(torch.stack([rounded(row, "mxfp4") for row in wanted]))
            lack = (wanted - sent[-1]).split([one.shape[1] for one in rows], 1)
            kept[r] |= dict(zip(own, lack, strict=True))
        made = torch.stack([mean([one[r] for one in sent]) for r in range(world)])
        parts = made.split([plain.get_submodule(name).weight.numel() // world for name in own], 1)
        for name, part in zip(own, parts, strict=True):
            got = model.get_submodule(name).weight.grad.full_tensor()
            assert torch.equal(got.reshape(world, -1), part), (step, name)
    between = init_device_mesh("cpu", (world, 1), mesh_dim_names=("nodes", "node"))
    model = fully_shard(copy.deepcopy(plain), mesh=between["node"])
    options = {"replicas": (between, "nodes"), "error_feedback": True}
    quantized_reduce_scatter(model, "mxfp4", **options)
    for step, names in enumerate(TAKEN):  # a large gradient's residual stays out of small ones
        scale = 100.0 if names == "left" else 1.0
        model.zero_grad(), plain.zero_grad()
        branch_loss(model, names, step, rank, scale).backward()
        sum(branch_loss(plain, names, step, r, scale) for r in range(world)).backward()
        for name in ("same", "right"):
            if name in names.split() and "left" not in names:
                want = plain.get_submodule(name).weight.grad / world
                got = model.get_submodule(name).weight.grad.full_tensor()
                assert (got - want).norm() < 0.4 * want.norm(), (step, name)


def branch_loss(model: nn.Module, names: str, step: int, rank: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    made: torch.Tensor = model(scale * torch.randn(8, 32, generator=generator), names)
    return made


def fsdp_plain() -> None:
    """Not quantized: FSDP2's own reduce-scatter, of two ranks bit for bit; feedback runs."""
    rank = dist.get_rank()
    results = []
    for quantized in (True, False):
        model = sharded()
        if quantized:
            quantized_reduce_scatter(model, None)
        loss(model, 0, rank).backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
    for mine, own in zip(*results, strict=True):
        assert torch.equal(mine, own)
    exact, sums = results[1], {}
    for error_feedback in (True, False):
        model = sharded()
        quantized_reduce_scatter(model, "mxfp4", error_feedback=error_feedback)
        steps = 8
        for _ in range(steps):  # gradients add up in the shards
            loss(model, 0, rank).backward()
        made = [p.grad.full_tensor() / steps for p in model.parameters()]
        off = [(a - b).abs().mean() for a, b in zip(made, exact, strict=True)]
        sums[error_feedback] = float(sum(off))
    assert sums[True] < 0.4 * sums[False], sums


def zero_plus_plus() -> None:
    """Planes in all-gathers, shards within a node, gradients quantized in and between nodes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "node"))
    plain = network()
    model = hybridq.distributed.prepare_fsdp2(hybridq.convert(network()))
    for unit in (model[0], model[2]):
        fully_shard(unit, mesh=mesh["node"])
    fully_shard(model, mesh=mesh["node"])
    quantized_reduce_scatter(model, "mxfp8", replicas=(mesh, "nodes"))
    loss(model, 0, rank).backward()
    every = gradients(plain, 0, world)
    size = world // 2
    for unit in (0, 1):
        own = [unit_input(one[2 * unit : 2 * unit + 2], size) for one in every]
        rows = []
        for r in range(size):
            # A node of one rank has nothing to scatter.
            fmt = "mxfp8" if size > 1 else None
            nodes = [
                mean([rounded(own[node * size + i][r], fmt) for i in range(size)])
                for node in range(2)
            ]
            rows.append(reduced(nodes, "mxfp8"))
        scatter(list(plain.parameters())[2 * unit : 2 * unit + 2], rows)
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        got = mine.grad.full_tensor()
        assert torch.equal(got, want.grad), got - want.grad


def models_in_turn() -> None:
    """A hook that has served another model, whose memory a new one has, owes it nothing."""

    def gradients(hook: Any) -> tuple[list[torch.Tensor], set[int]]:
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        for number in range(2):
            model.zero_grad()
            loss(model, number, dist.get_rank()).backward()
        own = list(model.parameters())
        return [one.grad.clone() for one in own], {id(one) for one in own}

    wanted, _ = gradients(ddp_hook("mxfp4", error_feedback=True))
    hook, before, are_met = ddp_hook("mxfp4", error_feedback=True), set(), 0
    for _ in range(20):
        got, ids = gradients(hook)
        assert all(map(torch.equal, got, wanted))
        are_met += bool(before & ids)
        before |= ids
        gc.collect()
    assert are_met  # identities were there before


def refused() -> None:
    """What cannot be reduced so says why."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "node"))
    hsdp = fully_shard(network(), mesh=mesh)
    cases = (
        (lambda: quantized_reduce_scatter(network(), "mxfp8"), "must be sharded first"),
        (lambda: quantized_reduce_scatter(hsdp, "mxfp8", replicas=(mesh, 0)), "under HSDP FSDP2"),
    )
    for call, text in cases:
        try:
            call()
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {text}")
    quantized_reduce_scatter(hsdp, "mxfp8")  # within nodes; FSDP2 itself reduces between them
    loss(hsdp, 0, dist.get_rank()).backward()
    assert all(bool(p.grad.full_tensor().any()) for p in hsdp.parameters())


if __name__ == "__main__":
    main(globals(), timeout=20.0)
