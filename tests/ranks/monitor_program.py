"""A monitor over ranks: `python monitor_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.converters import register_experts
from hybridq.distributed import prepare_fsdp2
from hybridq.moe import ExpertsLayout, parallelize_experts
from hybridq.monitoring import Alarms, MonitorRecord
from own_experts import OwnExperts


def steps(model: nn.Module, x: torch.Tensor, group: object) -> list[MonitorRecord | None]:
    """Two steps of training, the first of them sampled."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    with hybridq.monitor(model, 2, layers=None, group=group) as watch:
        for _ in range(2):
            with hybridq.autocast(recipe="mxfp8"):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(watch.step())
    return found


def fsdp2() -> None:
    """Sums of ranks that see halves are those of one process that sees all."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    plain = hybridq.convert(nn.Sequential(*layers), least_width=0).bfloat16()
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    fully_shard(sharded)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(32 * world, 64, dtype=torch.bfloat16)
    mine, none = steps(sharded, x.chunk(world)[rank], dist.group.WORLD)
    whole, _ = steps(plain, x, None)
    assert mine is not None and whole is not None and none is None and mine.ranks == world
    # Weights are gathered as planes, which are multiplied as they are: no plane is made of them.
    made = [one for one in whole.slots if one.tensor != "weight" or one.direction is None]
    assert [one.place for one in mine.slots] == [one.place for one in made]
    for one, other in zip(mine.slots, made, strict=True):
        if one.tensor == "grad_output":  # of a mean over half as many values
            continue
        if one.tensor == "weight":  # as it decodes
            assert one.amax == pytest.approx(other.amax, rel=2**-4), one.place
            continue
        assert one.amax == other.amax, one.place
        assert (one.underflow, one.saturation) == (other.underflow, other.saturation), one.place
        if one.direction:
            assert one.snr_db == pytest.approx(other.snr_db, rel=1e-9), one.place


def other_steps() -> None:
    """A rank that counts other steps than the others is an error on every rank."""
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64)), least_width=0)
    every = 2 if dist.get_rank() else 1
    watch = hybridq.monitor(model, every, group=dist.group.WORLD)
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.ones(4, 64)).sum().backward()
    watch.step()
    with pytest.raises(RuntimeError, match=r"must count the same steps, got \[1, 2\]"):
        for _ in range(2 if dist.get_rank() else 1):
            watch.step()
    watch.close()


def experts() -> None:
    """Three experts over two ranks, one of them idle, are counted as one process counts them."""
    torch.manual_seed(0)
    layout = ExpertsLayout()
    whole = nn.ModuleDict({"experts": OwnExperts(layout, sizes=(3, 64, 32))})
    register_experts(OwnExperts, layout)
    hybridq.convert(whole)
    dealt = parallelize_experts(copy.deepcopy(whole))
    x, weights = torch.randn(24, 64), torch.rand(24, 2)
    top = torch.tensor([0, 1]).expand(24, 2)
    alarms = Alarms(dead_after=1, amax_jump=None)

    def seen(model: nn.Module, group: object, part: slice) -> MonitorRecord:
        with hybridq.monitor(model, 1, group=group, alarms=alarms) as watch:
            with hybridq.autocast(recipe="mxfp8"):
                model["experts"](x[part], top[part], weights[part]).square().mean().backward()
            record = watch.step()
        assert record is not None
        return record

    rank = dist.get_rank()
    alone = seen(whole, None, slice(None))
    mine = seen(dealt, dist.group.WORLD, slice(12 * rank, 12 * rank + 12))
    layers = ("experts.gate_up_proj", "experts.down_proj")
    assert alone.experts == {one: {0: 24, 1: 24, 2: 0} for one in layers}, alone.experts
    assert mine.experts == alone.experts
    dead = [(one.kind, one.place) for one in mine.alarms]
    assert dead == [("dead_after", f"{layer}/2") for layer in layers], dead
    own = seen(dealt, None, slice(12 * rank, 12 * rank + 12))
    parts = ({0: 24, 1: 24}, {2: 0})
    assert own.experts == dict.fromkeys(layers, parts[rank]), own.experts


if __name__ == "__main__":
    main({"fsdp2": fsdp2, "other_steps": other_steps, "experts": experts})
