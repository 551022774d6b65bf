"""report and advise on several ranks: `python report_program.py RANK WORLD STORE NAME`."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.converters import register_experts
from hybridq.moe import ExpertsLayout, parallelize_experts
from hybridq.report import PrecisionReport
from own_experts import OwnExperts

WIDTH = 64


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return hybridq.convert(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))


def batch(rank: int) -> torch.Tensor:
    """Of each rank other tokens, and as many."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(32, WIDTH, generator=generator) * (1 + rank)


def check_sums(found: PrecisionReport, world: int) -> None:
    """Every row is what one process finds on each rank's batch, added."""
    alone = [
        hybridq.report(
            model(), batch(one), ["nvfp4"], recipe="mxfp8", loss=mean_square, group="alone"
        )
        for one in range(world)
    ]
    assert found.ranks == world
    assert math.isclose(found.loss, sum(one.loss for one in alone) / world, rel_tol=1e-6)
    assert len(found.slots) == len(alone[0].slots)
    for row in found.slots:
        key = (row.layer, row.tensor, row.direction, row.format)
        parts = [
            one.statistics
            for other in alone
            for one in other.slots
            if (one.layer, one.tensor, one.direction, one.format) == key
        ]
        assert len(parts) == world
        noise, signal = (sum(getattr(one, name) for one in parts) for name in ("noise", "signal"))
        error = math.sqrt(noise / signal)
        assert math.isclose(row.statistics.relative_error, error, rel_tol=1e-5), key
        assert row.statistics.values == sum(one.values for one in parts)


def sums() -> None:
    """Of a model that each rank has whole, and of one whose parameters FSDP2 shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    given = {"recipe": "mxfp8", "loss": mean_square}
    for shards in (False, True):
        own = model()
        if shards:
            for layer in own:
                fully_shard(layer)
            fully_shard(own)
        found = hybridq.report(own, batch(rank), ["nvfp4"], **given)
        check_sums(found, world)
        if shards:  # gradients are divided by the number of ranks when they are reduced, not before
            continue
        texts = [None] * world
        dist.all_gather_object(texts, found.to_json())
        assert len(set(texts)) == 1
    mine = hybridq.report(model(), batch(rank), ["nvfp4"], group="alone", **given)
    assert mine.ranks == 1


def bad() -> None:
    """The first NaN of any rank is named with its rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = batch(rank)
    if rank == world - 1:
        x[3, 40] = math.nan
    found = hybridq.report(model(), x, recipe="mxfp8", loss=mean_square)
    assert (found.first_bad.rank, found.first_bad.layer) == (world - 1, "0")
    assert (found.first_bad.tensor, found.first_bad.block) == ("input", (3, 1))


def fails() -> None:
    """Where a rank fails, every rank raises."""
    rank = dist.get_rank()
    x = batch(rank)[:, : WIDTH - rank]
    try:
        hybridq.report(model(), x, recipe="mxfp8", loss=mean_square)
    except RuntimeError as error:
        text = str(error)
    assert ("every rank must come to the end" in text) == (rank == 0), text


def advice() -> None:
    """All ranks get one recipe, though each measures times of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    given = {"loss": mean_square, "candidates": ["mxfp8"], "budget": 0.5}
    for prefer in ("memory", "speed"):
        found = hybridq.advise(model(), batch(rank), prefer=prefer, **given)
        texts = [None] * world
        dist.all_gather_object(texts, found.to_json())
        assert len(set(texts)) == 1
        assert prefer == "speed" or "mxfp8" in found.to_toml()


def experts() -> None:
    """An expert of the second rank that loses most, and one that has a NaN, have their numbers."""
    torch.manual_seed(0)
    layout = ExpertsLayout()
    own = nn.ModuleDict({"experts": OwnExperts(layout, sizes=(3, 64, 32))})
    with torch.no_grad():
        own["experts"].down_proj[2].mul_(1e-6)[0, 0] = 0.02
    register_experts(OwnExperts, layout)
    model = parallelize_experts(hybridq.convert(own))
    x, weights = torch.randn(24, WIDTH), torch.rand(24, 2)
    top = torch.arange(48).reshape(24, 2) % 3

    def loop(model: nn.Module) -> torch.Tensor:
        return mean_square(model["experts"](x, top, weights))

    found = hybridq.report(model, loop, recipe="nvfp4")
    worst = next(row for row in found.worst(99) if row.tensor == "weight")
    assert (worst.layer, worst.direction, worst.worst_expert) == ("experts.down_proj", "rowwise", 2)
    assert sorted(worst.experts) == [0, 1, 2]
    if dist.get_rank() == 1:
        with torch.no_grad():
            model["experts"].gate_up_proj.to_local()[0, 3, 4] = math.nan
    bad = hybridq.report(model, loop, recipe="nvfp4").first_bad
    assert (bad.rank, bad.tensor, bad.group, bad.position) == (1, "weight", 2, (3, 4))


if __name__ == "__main__":
    main(globals(), timeout=30.0)
