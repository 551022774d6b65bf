"""All pairs of formats under FSDP2: `python fsdp2_pairs_program.py RANK WORLD STORE NAME...`.

A weight of every rowwise and every columnwise format, in shards that are even, uneven and
misaligned, is trained for three steps as the unsharded one, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import prepare_fsdp2

#: Rows and columns of the weight. Of 4 ranks each has 32 rows; 24, so that blocks are cut; or 9 and
#: the last one 6, of a number of columns that no block divides.
SHAPES = {"even": (128, 64), "misaligned": (96, 64), "uneven": (33, 40)}
STEPS = 3


class Pair:
    """A factory that quantizes weights in a pair of formats; inputs and gradients in MXFP8."""

    reads_names = False

    def __init__(self, row: str, col: str) -> None:
        self.weight, self.other = hybridq.quantizer(row, columnwise=col), hybridq.quantizer("mxfp8")

    def __call__(self, role: Any) -> Any:
        return self.weight if role.tensor_type == "weight" else self.other


def train(row: str, col: str, what: str) -> None:
    torch.manual_seed(0)
    plain = hybridq.Linear(*SHAPES[what][::-1], dtype=torch.bfloat16)
    sharded = prepare_fsdp2(nn.Sequential(copy.deepcopy(plain)))
    fully_shard(sharded)
    recipe = hybridq.CustomRecipe(Pair(row, col))
    models = (sharded, plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    name = f"{row} and {col}, {what}"
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = torch.randn(16, SHAPES[what][1]).bfloat16()
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            own = x.clone().requires_grad_()
            torch.manual_seed(number)
            with hybridq.autocast(recipe=recipe):
                y = model(own)
            (y.float() - 0.3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append((y.detach(), own.grad))
        for mine, whole, part in zip(*results, ("output", "input's gradient"), strict=True):
            assert torch.equal(mine, whole), f"{name}: {part} of step {number}"
    for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), whole), name


def uniform() -> None:
    """Every format with itself, and with one of another kind in the backward."""
    for row, what in itertools.product(hybridq.formats.names(), SHAPES):
        for col in dict.fromkeys((row, "nvfp4")):
            train(row, col, what)


def pairs(what: str) -> None:
    """Every format with every other."""
    names = hybridq.formats.names()
    for row, col in itertools.product(names, names):
        train(row, col, what)


SCENARIOS = {what: functools.partial(pairs, what) for what in SHAPES}

if __name__ == "__main__":
    main({"uniform": uniform, **SCENARIOS})
