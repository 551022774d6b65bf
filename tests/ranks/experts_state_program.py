"""Training with experts over ranks: `python experts_state_program.py RANK WORLD STORE NAME...`.

Optimizers, clipping, checkpoints of other numbers of ranks, and replicas by FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from experts_program import (
    HIDDEN,
    LAYOUTS,
    TOKENS,
    Block,
    Toy,
    alone,
    near,
    step,
    summed,
    toys,
    whole,
)
from rank_program import main
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.moe import convert_experts, parallelize_experts


def training() -> None:
    """Steps of an optimizer, clipping, and checkpoints between numbers of ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single, shared = toys("plain", 8, dispatch="mxfp8", average_gradients=False)
    parallelize_experts(single, alone(), dispatch="mxfp8", average_gradients=False)
    torch.manual_seed(1)
    x = torch.randn(world * TOKENS, HIDDEN)
    groups = [hybridq.moe.parameter_groups(model) for model in (single, shared)]
    optimizers = [torch.optim.AdamW(own, lr=1e-2) for own in groups]
    for number in range(3):
        norms = []
        for model, optimizer in zip((single, shared), optimizers, strict=True):
            part = x if model is single else x.chunk(world)[rank]
            optimizer.zero_grad()
            y, _ = step(model, part, "mxfp8", x.numel())
            if model is shared:
                summed(model)
            norms.append(hybridq.moe.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            if model is single:
                wanted = y
        near(norms[1], norms[0], ("norm", number), 1e-5)
        near(y, wanted.chunk(world)[rank], ("step", number), 1e-5)
    for a, b in zip(single.parameters(), shared.parameters(), strict=True):
        near(whole(b.data), whole(a.data), "trained", 1e-4)


def built(seed: int = 0) -> tuple[Any, Any]:
    """Return a model over all ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = parallelize_experts(
        Toy(LAYOUTS["biased"], 8), dispatch="mxfp8", average_gradients=False
    )
    return model, torch.optim.AdamW(hybridq.moe.parameter_groups(model), lr=1e-2)


def advance(model: Any, optimizer: Any, number: int) -> torch.Tensor:
    """Return the outputs of all ranks' tokens in a step; the tokens are the same on any ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(number)
    x = torch.randn(64, HIDDEN)
    y, _ = step(model, x.chunk(world)[rank], "mxfp8", x.numel())
    summed(model)
    optimizer.step()
    optimizer.zero_grad()
    parts = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(parts, y.contiguous())
    return torch.cat(parts)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def save(folder: str) -> None:
    """Train two steps and save; then write down the outputs of two more."""
    model, optimizer = built()
    for number in range(2):
        advance(model, optimizer, number)
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/state")
    wanted = [advance(model, optimizer, number) for number in (2, 3)]
    if dist.get_rank() == 0:
        torch.save(wanted, f"{folder}/wanted.pt")


def resume(folder: str) -> None:
    """Go on from what other numbers of ranks have saved."""
    model, optimizer = built(seed=5)
    advance(model, optimizer, 9)  # has moments, and other values
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/state")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    wanted = torch.load(f"{folder}/wanted.pt")
    for number, one in zip((2, 3), wanted, strict=True):
        near(advance(model, optimizer, number), one, ("resumed", number), 3e-5)


def replicas() -> None:
    """Experts over pairs of ranks, their shards over the pairs, by FSDP2."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    for prepared in (False, True):
        for recipe in ("mxfp8", "fp8_block"):  # an expert's amax is of one replica's tokens
            single, shared = toys("plain", 8, mesh=mesh["ep"], dispatch="mxfp8")
            parallelize_experts(single, alone(), dispatch="mxfp8")
            if prepared:
                hybridq.distributed.prepare_fsdp2(shared)
            fully_shard(shared.experts, mesh=mesh["dp"])
            fully_shard(shared, mesh=init_device_mesh("cpu", (world,)))
            torch.manual_seed(1)
            x = torch.randn(world * TOKENS, HIDDEN)
            optimizers = [
                torch.optim.SGD(hybridq.moe.parameter_groups(model), lr=0.5)
                for model in (single, shared)
            ]
            for number in range(2):
                y, _ = step(single, x, recipe, x.numel())
                own, _ = step(shared, x.chunk(world)[rank], recipe, x.numel() // world)
                what = ("replicas", prepared, recipe, number)
                # Blocks along tokens, for the gradient of weights, are of one replica's too.
                near(own, y.chunk(world)[rank], what, 2e-3 if number else 2e-5)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


def planned() -> None:
    """What a step moves is what is planned."""
    world = dist.get_world_size()
    layout, top = LAYOUTS["plain"], 2
    shape = hybridq.estimate.ExpertsShape(8, 96, top, HIDDEN)
    indices = (torch.arange(TOKENS * top) % 8).view(TOKENS, top)  # as many rows for each expert
    for formats in (None, "mxfp8", ("nvfp4", None), "fp8_1x128"):
        torch.manual_seed(0)
        experts = convert_experts(Block(layout, 8), layout).bfloat16()
        parallelize_experts(experts, dispatch=formats, combine=formats)
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        given = (x, indices, torch.ones(TOKENS, top, dtype=torch.bfloat16))
        experts(*given)  # ranks compare what is new to them
        with hybridq.distributed.count_traffic() as traffic:
            experts(*given).sum().backward()
        made = hybridq.estimate.plan_experts(
            shape, world, tokens=TOKENS, dispatch=formats, combine=formats
        )
        assert traffic.nbytes_by_kind["all_to_all"] == made.nbytes, (formats, traffic, made)
        assert made.params == sum(one.to_local().numel() for one in experts.parameters())


if __name__ == "__main__":
    main(globals())
