"""Histories of delayed scaling of experts over ranks: `python experts_history_program.py RANK ...`.

What an expert has recorded is what one process records of it, for any number of ranks and replicas;
an expert without tokens keeps what it had.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from experts_program import HIDDEN, LAYOUTS, Toy, expects, near, step
from experts_state_program import FLAT, state_of
from rank_program import main
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hybridq
from hybridq._torch_ranks import process_group
from hybridq.distributed import ScalingHistory
from hybridq.moe import ExpertRanks, parallelize_experts, parameter_groups
from hybridq.nn.delayed_scaling import states_of
from hybridq.recipes import DelayedScaling

EXPERTS, TOKENS = 8, 64
RECIPE = DelayedScaling(amax_history_len=3)


class Masked(Toy):
    """Of every second batch the last three experts get no token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        known = EXPERTS - 3 if bool(x[0, 0] > 0) else EXPERTS
        best = scores[:, :known].topk(2)
        return self.experts(x, best.indices, best.values / best.values.sum(-1, keepdim=True))


def batch(number: int) -> torch.Tensor:
    """Return the tokens of all ranks; larger in each batch, so that scales change."""
    generator = torch.Generator().manual_seed(number)
    x = (1 + number) * torch.randn(TOKENS, HIDDEN, generator=generator)
    x[:, 0] = 1.0 if number % 2 else -1.0
    return x


def built(kind: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a model, and its optimizer.

    Args:
        kind: `all`: dealt out over all ranks; `pairs`: over two, with as many replicas as there
            are; `alone`: over this rank; `plain`: not at all.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model: Any = Masked(LAYOUTS["biased"], EXPERTS)
    if kind != "plain":
        parallelize_experts(model, over(kind), average_gradients=False)
    return model, torch.optim.AdamW(parameter_groups(model), lr=1e-3)


def over(kind: str) -> Any:
    """Return the ranks of a kind; one rank is a replica of no other where the oracle runs."""
    if kind == "all":
        return None
    world, size = dist.get_world_size(), {"pairs": 2, "alone": 1}[kind]
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "ep"))
    return ExpertRanks(mesh["ep"], replicas=mesh["dp"] if kind == "pairs" else mesh["ep"])


def advance(model: Any, optimizer: Any, number: int) -> torch.Tensor:
    """Return the outputs of all tokens in a step; every rank has a part of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = batch(number)
    y, _ = step(model, x.chunk(world)[rank], RECIPE, x.numel())
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
        elif replicas := model.experts.exchange.replicas:
            dist.all_reduce(parameter.grad.to_local(), group=process_group(replicas))
    optimizer.step()
    optimizer.zero_grad()
    parts = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(parts, y.contiguous())
    return torch.cat(parts)


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{part}:{key}": tensor
        for part, state in states_of(model.experts).items()
        for key, tensor in state.exported().items()
    }


def recorded(kind: str) -> None:
    """Histories are those of one process; those of experts without tokens stay."""
    shared, optimizer = built(kind)
    single, other = built("alone")
    last: dict[str, torch.Tensor] = {}
    for number in range(4):
        y, x = advance(shared, optimizer, number), batch(number)
        wanted, _ = step(single, x, RECIPE, x.numel())
        other.step()
        other.zero_grad()
        near(y, wanted, ("output", kind, number), 2e-3 if number else 1e-6)
        mine, whole = histories(shared), histories(single)
        assert mine and mine.keys() <= whole.keys(), mine.keys() - whole.keys()
        for key, tensor in mine.items():
            what = (kind, number, key, tensor, whole[key])
            # Weights of later steps differ by the order of sums, and codes that follow.
            assert torch.allclose(tensor, whole[key], rtol=2e-2 if number else 1e-6, atol=0), what
            place, expert = key.split(":")[1], int(key.split(":")[0].rpartition(".")[2])
            if number % 2 and expert >= EXPERTS - 3 and "weight" not in place:
                assert torch.equal(tensor, last[key]), (*what, last[key])
        last = mine
    sizes, rank = shared.experts.exchange.sizes, shared.experts.exchange.rank
    assert len(states_of(shared.experts)) == 2 * sizes[rank]  # up and down of own experts


def sharded() -> None:
    """With FSDP2 over replicas: gathered as values and as planes, forwards and histories."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = over("pairs")
    for prepared in (False, True):
        models = []
        for own in (over("alone"), ranks):
            torch.manual_seed(0)
            models.append(parallelize_experts(Masked(LAYOUTS["biased"], EXPERTS), own))
        single, shared = models
        if prepared:
            hybridq.distributed.prepare_fsdp2(shared)
        fully_shard(shared.experts, mesh=ranks.replicas)
        fully_shard(shared, mesh=init_device_mesh("cpu", (world,)))
        optimizers = [torch.optim.SGD(parameter_groups(model), lr=0.01) for model in models]
        for number in range(3):
            x, what = batch(number), ("sharded", prepared, number)
            y, _ = step(single, x, RECIPE, x.numel())
            mine, _ = step(shared, x.chunk(world)[rank], RECIPE, x.numel() // world)
            near(mine, y.chunk(world)[rank], what, 2e-2 if number else 2e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found, whole = histories(shared), histories(single)
            assert found and found.keys() <= whole.keys(), what
            for key, tensor in found.items():
                if "grad" not in key:  # each rank's loss is a mean over its own tokens
                    close = torch.allclose(tensor, whole[key], rtol=5e-2 if number else 1e-6)
                    assert close, (*what, key, tensor, whole[key])


def unknown() -> None:
    """Replicas that nobody names: an error on every rank, in the first forward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    model: Any = parallelize_experts(Masked(LAYOUTS["plain"], EXPERTS), mesh["ep"])
    x = batch(0).chunk(world)[rank]
    text = "give ExpertRanks(mesh['ep'], replicas=mesh['dp']) to parallelize_experts"
    expects(RuntimeError, text, lambda: step(model, x, RECIPE, 1))
    step(model, x, DelayedScaling(reduce_amax=False), 1)
    step(model, x, "fp8_current", 1)

    def dealt(experts: Any, replicas: Any, names: Any = None) -> Any:
        given = ExpertRanks(experts, replicas)
        return lambda: parallelize_experts(Masked(LAYOUTS["plain"], EXPERTS), given, plan=names)

    rule = "must deal out the same experts in the same way"
    expects(RuntimeError, rule, dealt(mesh["ep"], mesh["ep"]))
    kind: Any = ValueError if rank == 1 else RuntimeError
    names = ["others"] if rank == 1 else None
    expects(kind, "plan names modules of the model", dealt(mesh["ep"], mesh["dp"], names))
    expects(ValueError, "replicas must be ranks of other meshes", dealt(None, mesh["dp"]))
    expects(TypeError, "replicas: group must be a ProcessGroup", dealt(mesh["ep"], 3))


def save(folder: str) -> None:
    """Train three steps and save; then write down the outputs of two more."""
    model, optimizer = built("all")
    for number in range(3):
        advance(model, optimizer, number)
    state = {**state_of(model, optimizer), "scaling": ScalingHistory(model)}
    dcp.save(state, checkpoint_id=f"{folder}/state")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, histories(model))
    wanted = [advance(model, optimizer, number) for number in (3, 4)]
    if dist.get_rank() == 0:
        torch.save(({k: v for one in found for k, v in one.items()}, wanted), f"{folder}/wanted.pt")


def resume(given: str) -> None:
    """Go on from what other numbers of ranks have saved: `FOLDER,KIND`."""
    folder, kind = given.split(",")
    whole, wanted = torch.load(f"{folder}/wanted.pt")
    model, optimizer = built(kind, seed=5)
    advance(model, optimizer, 9)  # has moments, histories, and other values
    state = {**state_of(model, optimizer), "scaling": ScalingHistory(model)}
    dcp.load(state, checkpoint_id=f"{folder}/state")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    mine = histories(model)
    assert mine
    for key, tensor in mine.items():
        assert torch.equal(tensor, whole[key]), (key, tensor, whole[key])
    for number, one, bound in zip((3, 4), wanted, (1e-6, 1e-2), strict=True):
        near(advance(model, optimizer, number), one, ("resumed", kind, number), bound)


def kept() -> None:
    """A state_dict with histories has those of a rank's own experts, and a copy keeps its ranks."""
    model, optimizer = built("all")
    for number in range(2):
        advance(model, optimizer, number)
    state = hybridq.state_dict_with_history(model)
    other, own = built("all", seed=5)
    other.load_state_dict(state)
    for key, tensor in histories(model).items():
        assert torch.equal(histories(other)[key], tensor), key
    again = copy.deepcopy(model)
    near(
        advance(again, torch.optim.AdamW(parameter_groups(again)), 2),
        advance(other, own, 2),
        "copy",
        1e-6,
    )


if __name__ == "__main__":
    main(globals())
