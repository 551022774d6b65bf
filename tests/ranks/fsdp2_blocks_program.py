"""FSDP2 of block-diagonal maps, heads and shared experts of transformers: stacks and values travel.

Each rank has inputs of its own; the unsharded twin runs the ranks' inputs in turn, and adds the
gradients in the order of the ranks: all bits are equal.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

from foreign_blocks import KINDS, converted, made, run
from hybridq.demo.fsdp import RankOrderSum, mean_in_order
from hybridq.distributed import GatheredWeight, prepare_fsdp2

#: Weights that travel as planes: stacks are what is multiplied.
STACKS = {"gemma": 2, "inkling": 3}


def inputs(kind: str, given: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    return torch.randn_like(given[0]), *given[1:]


def train(recipe: str) -> None:
    for kind in KINDS:
        module, given, _ = made(kind)
        plain = converted(module)
        sharded = copy.deepcopy(plain)
        prepare_fsdp2(nn.ModuleDict({"own": sharded}))
        travel = [one for one in sharded.parameters() if type(one.data) is GatheredWeight]
        assert len(travel) == STACKS.get(kind, 0), kind
        fully_shard(sharded)
        sharded.set_custom_reduce_scatter(RankOrderSum())
        rank, world = dist.get_rank(), dist.get_world_size()
        found = run(sharded, inputs(kind, given, rank), recipe)
        each = [run(plain, inputs(kind, given, one), recipe) for one in range(world)]
        for name, one in each[rank].items():
            got, want = found[name], one
            if name not in ("x", "y"):
                got = got.full_tensor()
                want = mean_in_order([other[name] for other in each])
            assert torch.equal(got, want), f"{kind} {recipe}: {name}"


if __name__ == "__main__":
    main({one.__name__: one for one in (train,)})
