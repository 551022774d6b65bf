"""Runs whose collectives a plan over axes must have: `axes_program.py RANK WORLD STORE ...`."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hybridq
from hybridq.distributed import count_traffic
from hybridq.estimate import Axes
from hybridq.estimate.axes import tensor_moved

WIDTH, INNER, TOKENS, LAYERS = 128, 256, 64, 2


def tensor() -> None:
    """Two pairs of matrices for each layer, as attention and a feed-forward part have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    blocks = []
    for _ in range(2 * LAYERS):
        blocks += [nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)]
    model = hybridq.convert(nn.Sequential(*blocks)).bfloat16()
    names = {}
    for pair in range(2 * LAYERS):
        names[str(3 * pair)], names[str(3 * pair + 2)] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, names)
    for recipe in ("mxfp8", "nvfp4_1d_weight", None):
        for _ in range(2):
            x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16).requires_grad_()
            with count_traffic() as traffic:
                with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                    y = model(x)
                y.float().square().mean().backward()
        want = Counter[str]()
        for row in tensor_moved(Axes(tp=dist.get_world_size()), TOKENS, WIDTH, LAYERS):
            want[row.kind] += row.nbytes
        found = traffic.nbytes_by_kind
        # Beside hidden states, formats of two levels reduce amaxes: four bytes for each matrix.
        rest = found["all_reduce"] - want["all_reduce"]
        assert set(found) == {"all_reduce"}, found
        assert rest == 0 if recipe != "nvfp4_1d_weight" else 0 <= rest <= 1024, (recipe, rest)


def inside() -> None:
    """Collectives that a DTensor's operations make by themselves are counted too."""
    world = dist.get_world_size()
    x = DTensor.from_local(torch.ones(4, 6), init_device_mesh("cpu", (world,)), [Shard(0)])
    with count_traffic() as traffic:
        total = x.sum(0)  # partial sums: none yet
        assert not traffic.calls_by_kind, traffic
        made = torch.tanh(total / 8).to_local()  # of whole sums
    assert torch.equal(made, torch.full((6,), world / 2).tanh()), made
    assert traffic.nbytes_by_kind == {"all_reduce": 6 * 4}, traffic


if __name__ == "__main__":
    main(globals(), timeout=60.0)
