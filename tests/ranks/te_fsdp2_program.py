"""FSDP2 as a script for Transformer Engine has it, with one word of its imports changed."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from rank_program import main

SCRIPT = """
import torch
import transformer_engine.pytorch as te
from torch.distributed.fsdp import fully_shard
from transformer_engine.common.recipe import MXFP8BlockScaling

torch.manual_seed(0)
model = torch.nn.Sequential(
    te.LayerNormLinear(64, 96, normalization="RMSNorm"), torch.nn.GELU(), te.Linear(96, 64)
)
reference = copy.deepcopy(model)
for block in (model[0], model[2]):
    fully_shard(block)
fully_shard(model)
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
losses = []
for step in range(3):
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        loss = model(batches[step]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
"""


def script() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 1)
    batches = [torch.randn(32, 64) for _ in range(3)]
    names = {"batches": batches, "copy": copy}
    exec(SCRIPT.replace("transformer_engine", "hybridq.te"), names)
    reference, te, losses = names["reference"], names["te"], []
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    for batch in batches:
        with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
            loss = reference(batch).square().mean()
        loss.backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(names["losses"]), torch.tensor(losses))
    for own, want in zip(names["model"].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), want, rtol=1e-5, atol=1e-6)
    assert losses[0] != losses[-1]


if __name__ == "__main__":
    main(globals(), timeout=20.0)
