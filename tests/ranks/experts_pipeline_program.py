"""Experts over the ranks of each pipeline stage: `python experts_pipeline_program.py RANK ...`.

Four ranks: two stages, the experts of each over its two ranks, which have tokens of their own. One
process runs the microbatches in turn, each on the tokens of both ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from experts_program import HIDDEN, LAYOUTS, Toy, alone, near, whole
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

import hybridq
from hybridq.distributed import pipeline_stage
from hybridq.moe import clip_grad_norm_, parallelize_experts, parameter_groups

MICROBATCHES, ROWS, STEPS = 4, 24, 3


class Block(nn.Module):
    """A norm and a mixture of experts, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mixture = Toy(LAYOUTS["plain"], 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.norm(x))


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets `[microbatches, 2 * ROWS, HIDDEN]`: of both ranks of a stage."""
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, MICROBATCHES, 2 * ROWS, HIDDEN, generator=generator)
    return both[0], both[1]


class Boundary(torch.autograd.Function):
    """What a stage keeps of an activation, and of its gradient: each row by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.name = name
        return x.clone() if name is None else hybridq.quantize(x.detach(), name, None).dequantize()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.name is not None:
            grad = hybridq.quantize(grad, ctx.name, None).dequantize()
        return grad, None


def one_step(modules: list[nn.Module], number: int, recipe: Any, between: Any) -> torch.Tensor:
    """Return the losses of all microbatches on one process, gradients accumulated."""
    losses = []
    for chunk, (x, target) in enumerate(zip(*batch(number), strict=True)):
        with hybridq.autocast(
            enabled=recipe is not None, recipe=recipe, is_first_microbatch=chunk == 0
        ):
            for place, module in enumerate(modules):
                x = Boundary.apply(x, between) if place else x
                x = module(x)
        loss = loss_of(x, target)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def check(kind: Any, recipe: Any, format_: Any, sharded: bool = False) -> None:
    """Losses, gradients, norms and trained parameters are those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    place, number = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    own = [place] if kind in (Schedule1F1B, ScheduleGPipe) else [place, place + 2]
    count = 2 * len(own)
    options = {"dispatch": format_, "combine": format_}
    oracle = blocks(count)
    modules = {i: copy.deepcopy(oracle[i]) for i in own}
    for module in oracle:
        parallelize_experts(module, alone(), **options)
    stages = []
    for i, module in modules.items():
        parallelize_experts(module, mesh["ep"], **options)
        if sharded:
            fully_shard(
                module, mesh=mesh["ep"], ignored_params=set(module.mixture.experts.parameters())
            )
        given = {"group": mesh.get_group("pp"), "replicas": mesh["ep"], "communication": format_}
        stages.append(pipeline_stage(module, i, count, "cpu", **given))
    schedule = kind(stages[0] if len(own) == 1 else stages, MICROBATCHES, loss_fn=loss_of)
    held = nn.ModuleList(modules.values())
    optimizers = [
        torch.optim.SGD(parameter_groups(one), lr=0.05) for one in (held, nn.ModuleList(oracle))
    ]
    for step in range(STEPS):
        what = (kind.__name__, str(recipe), format_, sharded, step)
        wanted = one_step(oracle, step, recipe, format_)
        x, target = (one.unflatten(1, (2, ROWS))[:, number].flatten(0, 1) for one in batch(step))
        losses: list[torch.Tensor] = []
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            schedule.step(
                *((x,) if place == 0 else ()),
                **({"target": target, "losses": losses} if place == 1 else {}),
            )
        if losses:
            mean = torch.stack(losses).detach()
            dist.all_reduce(mean, group=mesh.get_group("ep"))
            near(mean / 2, wanted, (*what, "losses"), 1e-6)
        for parameter in held.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
                parameter.grad /= 2
        bound = 2e-6 if not step else 1e-5
        for i, module in modules.items():
            pairs = zip(module.named_parameters(), oracle[i].parameters(), strict=True)
            for (name, p), q in pairs:
                near(whole(p.grad), whole(q.grad), (*what, i, name), bound)
        mine = clip_grad_norm_(held.parameters(), 1e9).square()
        dist.all_reduce(mine, group=mesh.get_group("pp"))
        near(
            mine.sqrt(),
            clip_grad_norm_([p for m in oracle for p in m.parameters()], 1e9),
            what,
            bound,
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def schedules() -> None:
    """Schedules and formats; what is sent between stages and to experts alike."""
    for format_ in (None, "mxfp8"):
        check(Schedule1F1B, None, format_)
        check(Schedule1F1B, "mxfp8", format_)
    check(ScheduleGPipe, "mxfp8", "mxfp8")
    check(ScheduleInterleaved1F1B, "mxfp8", "mxfp8")


def sharded() -> None:
    """With FSDP2 over the ranks of a stage, experts apart."""
    check(Schedule1F1B, "mxfp8", "mxfp8", sharded=True)


if __name__ == "__main__":
    main(globals(), timeout=60.0)
