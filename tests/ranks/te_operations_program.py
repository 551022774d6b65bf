"""An MLP of Transformer Engine's operations whose features lie over ranks, as Megatron-Core's."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from rank_program import main

import hybridq.te as te
from hybridq.te import ops


def parts() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, second = torch.randn(96, 64) / 8, torch.randn(64, 96) / 8
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    for spread in (False, True):
        for recipe in (None, te.common.recipe.MXFP8BlockScaling()):
            whole = ops.Sequential(ops.BasicLinear(64, 96), ops.ReLU(), ops.BasicLinear(96, 64))
            own = ops.Sequential(
                *([ops.AllGather(dist.group.WORLD)] if spread else []),
                ops.BasicLinear(64, 96 // world),
                ops.ReLU(),
                ops.BasicLinear(96 // world, 64),
                ops.ReduceScatter() if spread else ops.AllReduce(dist.group.WORLD),
            )
            own = pickle.loads(pickle.dumps(copy.deepcopy(own)))
            low = 1 if spread else 0
            with torch.no_grad():
                whole[0].weight.copy_(first)
                whole[2].weight.copy_(second)
                own[low].weight.copy_(first.chunk(world)[rank])
                own[low + 2].weight.copy_(second.chunk(world, 1)[rank])
            given = (x.chunk(world)[rank] if spread else x).clone().requires_grad_()
            inp = x.clone().requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y, want = own(given), whole(inp)
            y.backward(dy.chunk(world)[rank] if spread else dy)
            want.backward(dy)
            grad, of_input = given.grad, inp.grad
            if spread:
                want, of_input = want.chunk(world)[rank], of_input.chunk(world)[rank]
            else:
                dist.all_reduce(grad)  # of the ranks' own features
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grad, of_input, rtol=1e-4, atol=1e-4)
            for made, all_of_it, dim in (
                (own[low], whole[0], 0), (own[low + 2], whole[2], 1),
            ):  # fmt: skip
                part = all_of_it.weight.grad.chunk(world, dim)[rank]
                torch.testing.assert_close(made.weight.grad, part, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main(globals(), timeout=20.0)
