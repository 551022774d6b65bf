"""FSDP2 of converted experts: `python fsdp2_experts_program.py RANK WORLD STORE NAME...`.

Each rank has tokens of its own; the unsharded twin runs the ranks' batches in turn, and adds the
gradients in FP32, in the order of the ranks, on both sides: so all bits are equal.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_program import values
from rank_program import main
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hybridq
from experts_oracle import HYBRID
from hybridq.demo.fsdp import RankOrderSum, mean_in_order
from hybridq.distributed import GatheredWeight, prepare_fsdp2, wire_nbytes
from hybridq.moe import ExpertsLayout, convert_experts
from own_experts import HIDDEN, OwnExperts, clamped, routing

LAYOUTS = (
    ExpertsLayout(),
    ExpertsLayout(
        gate_up_bias="b1",
        down_bias="b2",
        is_transposed=True,
        is_concatenated=False,
        activation=clamped,
    ),
)
STEPS = 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Blocks(nn.Module):
    """Blocks of experts one after the other, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(convert_experts(OwnExperts(one), one) for one in LAYOUTS)
        for number, block in enumerate(self.blocks):
            block.set_name(f"blocks.{number}")

    def forward(self, x: torch.Tensor, indices: Any, weights: Any) -> torch.Tensor:
        for block in self.blocks:
            own = 1 * x  # its gradients are summed by themselves, sharded or not
            x = x + block(own, indices, weights.to(x.dtype))
        return x


def batch(number: int, rank: int) -> tuple[Any, ...]:
    torch.manual_seed(10 * number + rank)
    return torch.randn(23, HIDDEN).bfloat16(), *routing(23, seed=100 * number + rank)


def step(model: nn.Module, recipe: Any, number: int, rank: int) -> torch.Tensor:
    torch.manual_seed(number)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = model(*batch(number, rank))
    (y.float() - 0.3).square().mean().backward()
    return y.detach()


def train(recipe: Any, what: str) -> None:
    torch.manual_seed(0)
    plain = Blocks()
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    kinds = [type(one) for one in sharded.parameters()]
    assert kinds.count(GatheredWeight) == 4, kinds
    for block in sharded.blocks:
        fully_shard(block, mp_policy=POLICY)
    fully_shard(sharded, mp_policy=POLICY)
    for block in (*sharded.blocks, sharded):
        block.set_custom_reduce_scatter(RankOrderSum())
    own, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (sharded, plain))
    for number in range(STEPS):
        y = step(sharded, recipe, number, dist.get_rank())
        own.step()
        own.zero_grad()
        model, found, outputs = copy.deepcopy(plain).bfloat16(), [], []
        for rank in range(dist.get_world_size()):
            outputs.append(step(model, recipe, number, rank))
            found.append([one.grad.float() for one in model.parameters()])
            model.zero_grad()
        for one, parts in zip(plain.parameters(), zip(*found, strict=True), strict=True):
            one.grad = mean_in_order(parts).to(one.dtype)
        other.step()
        assert torch.equal(y, outputs[dist.get_rank()]), f"{what}: outputs, step {number}"
    mine = values(sharded)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(mine[name], tensor), f"{what}: {name} differs"
    if recipe is not None:
        plain_nbytes = 2 * STEPS * 2 * sum(one.numel() for one in plain.parameters())
        assert 0 < wire_nbytes(sharded) < 0.7 * plain_nbytes, what


def recipes() -> None:
    """MXFP8; other formats in the two directions, with an amax for each expert."""
    train("mxfp8", "mxfp8")
    train(HYBRID.recipe(), "hybrid")


def more() -> None:
    """No recipe, stochastic and derived planes."""
    for recipe in (None, "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "nvfp4"):
        train(recipe, str(recipe))


if __name__ == "__main__":
    main({one.__name__: one for one in (recipes, more)})
