"""FSDP2 of modules whose weights travel as values: `[in, out]`, of convolutions, of embeddings.

Beside them a `Linear`, whose planes travel. Each rank has tokens of its own; the unsharded twin
runs the ranks' batches in turn, and adds the gradients in the order of the ranks: all bits are
equal.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_program import check_equal
from rank_program import logged, main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.demo.fsdp import RankOrderSum, mean_in_order
from hybridq.distributed import GatheredWeight, prepare_fsdp2

STEPS = 2


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 34))
        self.bias = nn.Parameter(torch.randn(34))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class QuantizedColumns(hybridq.nn.ForeignLinear, Columns):
    holds_transposed = True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.stem = nn.Conv1d(24, 48, 2, 2)
        self.columns = Columns()
        self.up = nn.Linear(34, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.up(self.columns(x))


def batch(number: int, rank: int) -> torch.Tensor:
    torch.manual_seed(10 * number + rank)
    return torch.randint(0, 40, (3, 10))


def step(model: nn.Module, recipe: str, number: int, rank: int) -> torch.Tensor:
    torch.manual_seed(number)
    with hybridq.autocast(recipe=recipe):
        y = model(batch(number, rank))
    (y - 0.3).square().mean().backward()
    return y.detach()


def train(recipe: Any) -> None:
    torch.manual_seed(0)
    hybridq.register_converter(
        hybridq.converters.Converter("Columns", Columns, QuantizedColumns, is_in_out=True)
    )
    plain = hybridq.convert(Model(), also=["embeddings"])
    with logged() as messages:
        sharded = prepare_fsdp2(copy.deepcopy(plain))
    said = [one for one in messages if "columns.weight" in one]
    assert len(said) == (dist.get_rank() == 0), messages
    kinds = {name: type(one.data) for name, one in sharded.named_parameters()}
    assert [name for name, kind in kinds.items() if kind is GatheredWeight] == ["up.weight"]
    fully_shard(sharded)
    sharded.set_custom_reduce_scatter(RankOrderSum())
    own, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (sharded, plain))
    for number in range(STEPS):
        y = step(sharded, recipe, number, dist.get_rank())
        own.step()
        own.zero_grad()
        found, outputs = [], []
        for rank in range(dist.get_world_size()):
            outputs.append(step(plain, recipe, number, rank))
            found.append([one.grad for one in plain.parameters()])
            plain.zero_grad()
        for one, parts in zip(plain.parameters(), zip(*found, strict=True), strict=True):
            one.grad = mean_in_order(parts)
        other.step()
        other.zero_grad()
        assert torch.equal(y, outputs[dist.get_rank()]), f"{recipe}: outputs, step {number}"
    check_equal(sharded, plain, recipe)


if __name__ == "__main__":
    main({one.__name__: one for one in (train,)})
