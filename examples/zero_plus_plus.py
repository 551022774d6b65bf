"""ZeRO++'s three parts with FSDP2: planes gathered within a node, gradients reduced in MXFP8.

torchrun --nproc-per-node 4 examples/zero_plus_plus.py 20     (steps; or alone, with python)
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hybridq


def main(steps: int = 20) -> float:
    """Return the last step's loss."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    nodes = 2 if world % 2 == 0 else 1  # on a cluster: the number of machines
    device = "cuda" if torch.cuda.is_available() and "RANK" in os.environ else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (nodes, world // nodes), mesh_dim_names=("nodes", "node"))

    torch.manual_seed(0)  # all ranks begin with the same weights
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    hybridq.distributed.prepare_fsdp2(hybridq.convert(model))  # weights travel as planes
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["node"], mp_policy=policy)  # gathers stay within a node
    replicas = (mesh, "nodes") if nodes > 1 else None
    hybridq.distributed.quantized_reduce_scatter(model, "mxfp8", replicas=replicas)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator).to(device)
        with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
            loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
