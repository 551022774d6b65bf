"""A distributed optimizer like Megatron-LM's: flat buffers, FP32 shards, quantized parameters.

torchrun --nproc-per-node 2 examples/flat_optimizer.py 20    (steps; or alone, with python)
"""

from __future__ import annotations

import os
import sys
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

import hybridq
from hybridq.distributed import FlatCodes, post_all_gather_processing, quantize_master_weights


def main(steps: int = 20, recipe: str = "mxfp8_fwd_nvfp4_bwd") -> float:
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # "nccl" on GPUs
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
        kind = {"bias": False, "dtype": torch.bfloat16}  # biases would have a buffer of their own
        layers = hybridq.Linear(64, 160, **kind), nn.GELU(), hybridq.Linear(160, 64, **kind)
    params = list((model := nn.Sequential(*layers)).parameters())
    *starts, end = (0, *accumulate(one.numel() for one in params))
    numel = -(-end // (2 * world)) * 2 * world  # even parts: two 4-bit codes lie in a byte
    flat, grads = FlatCodes(params, starts, numel), torch.zeros(numel, dtype=torch.bfloat16)
    values = torch.cat([one.get_high_precision_init_val().flatten() for one in params])
    low, part = rank * numel // world, numel // world
    values = nn.functional.pad(values, (0, numel - end))[low : low + part]
    shard = nn.Parameter(values.float())  # all in FP32 that a rank keeps
    optimizer = torch.optim.AdamW([shard], lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 64).roll(rank)
        with hybridq.autocast(recipe=recipe):
            loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x.roll(1, 1))
        loss.backward()
        torch.cat([one.grad.flatten() for one in params], out=grads[:end])
        dist.reduce_scatter(grad := grads.new_empty(part), list(grads.chunk(world)))
        shard.grad = grad.float() / world
        optimizer.step()
        model.zero_grad()
        ends = [min(low + part, s + p.numel()) for p, s in zip(params, starts, strict=True)]
        cuts = [(s, max(low, s), end) for s, end in zip(starts, ends, strict=True)]
        masters = [shard[a - low : b - low] if a < b else None for _, a, b in cuts]
        offsets = [a - s if a < b else None for s, a, b in cuts]
        quantize_master_weights(params, masters, offsets, dist.group.WORLD)
        for codes in flat.buffers:
            dist.all_gather(list(codes.chunk(world)), codes.chunk(world)[rank].clone())
        post_all_gather_processing(params)
    print(f"rank {rank}: loss {loss.item():.3f}")
    return dist.destroy_process_group() or loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
