"""A transformer as torchtitan trains it: FSDP2, recomputation, bf16, and a schedule of recipes.

torchrun --nproc-per-node 2 examples/torchtitan_like.py 20     (steps; or alone, with python)
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hybridq


class Model(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 3, vocabulary: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        kind = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
        layers = (hybridq.TransformerLayer(width, 160, 4, **kind) for _ in range(blocks))
        self.layers = nn.ModuleList(layers)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)  # [length, batch, width]
        for layer in self.layers:
            x = hybridq.checkpoint(layer, x)
        return self.output(x)


def main(steps: int = 20) -> float:
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # "nccl" on GPUs
    torch.manual_seed(0)
    model = hybridq.distributed.prepare_fsdp2(Model())  # before fully_shard: planes will travel
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.layers, model):
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = hybridq.RecipeSchedule([(0, "nvfp4"), (0.8, "mxfp8")], total_steps=steps)
    for _ in range(steps):
        ids = (torch.randint(32, (4,)) + 32 * dist.get_rank() + 3 * torch.arange(33)[:, None]) % 128
        with hybridq.autocast(recipe=schedule):
            logits = model(ids[:-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {schedule.current!r} at the end")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
