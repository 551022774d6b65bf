"""Experts over ranks, two halves of a batch: while tokens of one travel, the other is computed.

torchrun --nproc-per-node 2 examples/two_batch_overlap.py 20     (steps; or alone, with python)
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import hybridq
from hybridq.moe import combine, dispatch, permute, route_plan, unpermute


class Block(nn.Module):
    """A mixer for every token, and eight experts, dealt out over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.router = hybridq.Linear(64, 64), nn.Linear(64, 8)
        self.experts = hybridq.GroupedLinear(8 // dist.get_world_size(), 64, 64)

    def run(self, x):  # each yield: something was sent, and the other half's turn has come
        x = x + self.mixer(x)
        shares, chosen = self.router(x).softmax(-1).topk(2)
        routes, plan = route_plan(chosen, 8)
        sent = dispatch(permute(x, routes), plan, "mxfp8", "mxfp8", async_op=True)
        yield
        order, inverse, ends = plan.arrived
        y = self.experts(sent.wait()[order], ends.diff(prepend=ends.new_zeros(1)))
        back = combine(y[inverse.flatten()], plan, "mxfp8", "mxfp8", async_op=True)
        yield
        yield x + unpermute(back.wait(), shares, routes, x.dtype)


def main(steps: int = 20) -> float:  # returns the last step's loss
    alone = {} if dist.is_torchelastic_launched() else {"rank": 0, "world_size": 1}
    dist.init_process_group("gloo", store=dist.HashStore() if alone else None, **alone)
    torch.manual_seed(0)
    block = Block()
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(256, 64, generator=generator)
        with hybridq.autocast(recipe="mxfp8"):
            *_, halves = zip(*map(block.run, x.chunk(2)), strict=True)  # both in turn
        loss = (torch.cat(halves) - x.flip(1)).square().mean() / dist.get_world_size()
        loss.backward()
        for parameter in (*block.mixer.parameters(), *block.router.parameters()):
            dist.all_reduce(parameter.grad)  # experts' gradients are sums of all ranks already
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
