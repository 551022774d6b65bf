"""DistributedDataParallel over converted models: `python ddp_program.py RANK WORLD STORE NAME...`.

The oracle is one process that runs the ranks' microbatches in turn, with the ranks' seeds, and adds
FP32 gradients in the order of the ranks. Of two ranks any reduction does so; of more, a hook does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import hybridq

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd", "fp8_delayed")
MICROBATCHES = 2
STEPS = 3


class Model(nn.Module):
    """A linear layer, fused modules, and experts that not all ranks give tokens to."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = hybridq.Linear(24, 40, **options)
        self.norm = hybridq.LayerNormLinear(40, 36, **options)
        self.mlp = hybridq.LayerNormMLP(36, 56, activation="swiglu", **options)
        self.experts = hybridq.GroupedLinear(3, 36, 20)

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        return self.experts(self.mlp(self.norm(torch.tanh(self.up(x)))), splits)


def in_rank_order(world: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the ranks' mean gradient, added in their order."""
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(total / world)
    return made


def microbatch(model: nn.Module, recipe: str, step: int, rank: int, number: int) -> None:
    seed = 1000 * step + 10 * rank + number
    x = torch.randn(12, 24, generator=torch.Generator().manual_seed(seed))
    splits = [0, 12, 0] if rank % 2 else [5, 3, 4]
    torch.manual_seed(seed)
    with hybridq.autocast(recipe=recipe):
        y = model(x, splits)
    (y - 0.3).square().sum().backward()


def one_process(model: nn.Module, recipe: str, step: int, world: int, count: int) -> None:
    """Give `model` the gradients of all ranks."""
    totals: list[torch.Tensor] = []
    for rank in range(world):
        model.zero_grad()
        for number in range(count):
            microbatch(model, recipe, step, rank, number)
        own = [p.grad.clone() for p in model.parameters()]
        totals = own if not totals else [a + b for a, b in zip(totals, own, strict=True)]
    for parameter, total in zip(model.parameters(), totals, strict=True):
        parameter.grad = total / world


def train(recipe: str, count: int, **options: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Model()
    model = DistributedDataParallel(copy.deepcopy(plain), **options)
    if world > 2:
        # torch wants annotations that are no texts, or none.
        model.register_comm_hook(world, lambda state, bucket: in_rank_order(state, bucket))
    hybridq.distributed.check_ranks(model, recipe=recipe)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(STEPS):
        for number in range(count):
            is_last = number + 1 == count
            with contextlib.nullcontext() if is_last else model.no_sync():
                microbatch(model, recipe, step, rank, number)
        optimizers[0].step()
        one_process(plain, recipe, step, world, count)
        pairs = list(zip(model.module.named_parameters(), plain.parameters(), strict=True))
        for (name, mine), own in pairs:
            assert torch.equal(mine.grad, own.grad), f"{recipe}, step {step}: gradient of {name}"
        optimizers[1].step()
        for (name, mine), own in pairs:
            assert torch.equal(mine, own), f"{recipe}, step {step}: {name}"
        for optimizer in optimizers:
            optimizer.zero_grad()
    histories = [hybridq.state_dict_with_history(m) for m in (model.module, plain)]
    names = [name for name in histories[0] if "scaling." in name]
    assert bool(names) == (recipe == "fp8_delayed")
    for name in names:
        assert torch.equal(histories[0][name], histories[1][name]), name


def recipes() -> None:
    for recipe in RECIPES:
        train(recipe, 1)


def policies() -> None:
    train("mxfp8", MICROBATCHES)
    train("fp8_delayed", MICROBATCHES)
    train("mxfp8", 1, static_graph=True)
    train("nvfp4", MICROBATCHES, gradient_as_bucket_view=True)
    train("nvfp4", 1, static_graph=True, gradient_as_bucket_view=True)
    train("mxfp8", 1, bucket_cap_mb=0.001)  # many buckets


def quantized() -> None:
    """Quantized parameters: the first rank's at the start, whose masters go on alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for recipe in ("mxfp8_fwd_nvfp4_bwd", "nvfp4", "fp8_current"):
        models = []
        for seed in (rank, 0):
            torch.manual_seed(seed)
            with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
                models.append(Model())
        plain, inner = models[1], models[0]
        with torch.no_grad():  # the first rank sends decoded values, and all ranks quantize them
            for parameter in plain.parameters():
                if hasattr(parameter, "get_high_precision_init_val"):
                    parameter.copy_(parameter.dequantize())
        model = DistributedDataParallel(inner)
        optimizers = [hybridq.optim.AdamW(m.parameters(), lr=0.05) for m in (inner, plain)]
        for step in range(STEPS):
            model.zero_grad()
            microbatch(model, recipe, step, rank, 0)
            one_process(plain, recipe, step, world, 1)
            for optimizer in optimizers:
                optimizer.step()
        for (name, own), want in zip(inner.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.dequantize(), want.dequantize()), f"{recipe} {name}"
            masters = [o.state[p] for o, p in zip(optimizers, (own, want), strict=True)]
            for key in masters[0]:
                assert torch.equal(masters[0][key], masters[1][key]), f"{recipe} {name} {key}"


def main_grad() -> None:
    """Gradients that modules add to main_grad are none that DistributedDataParallel reduces."""
    inner = hybridq.Linear(24, 24, fuse_wgrad_accumulation=True)
    inner.weight.main_grad = torch.zeros(24, 24)
    model = DistributedDataParallel(inner)
    x = torch.ones(4, 24)
    with hybridq.autocast(recipe="mxfp8"):
        try:
            model(x)
        except RuntimeError as error:
            assert "DistributedDataParallel does not reduce" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        with model.no_sync():  # whoever reduces main_grad
            model(x).sum().backward()
    assert inner.weight.main_grad.abs().max() > 0
    with torch.no_grad():
        model(x)


def flat_parameters() -> None:
    """Gathers of torch's FullyShardedDataParallel write a flat parameter, and are no steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for recipe, has_own in itertools.product(("fp8_delayed", "mxfp8"), (True, False)):
        torch.manual_seed(0)
        plain = Model()
        model = FullyShardedDataParallel(
            copy.deepcopy(plain), device_id=torch.device("cpu"), use_orig_params=has_own
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, plain)]
        for step in range(STEPS):
            for number in range(MICROBATCHES):
                is_last = number + 1 == MICROBATCHES
                with contextlib.nullcontext() if is_last else model.no_sync():
                    microbatch(model, recipe, step, rank, number)
            one_process(plain, recipe, step, world, MICROBATCHES)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model):
            for name, own in plain.named_parameters():
                mine = functools.reduce(getattr, name.split("."), model.module)
                assert torch.equal(mine, own), f"{recipe}, {has_own}: {name}"


def uneven() -> None:
    """The last rank has one batch more: the others stand in for its reductions of gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Model()
    model = DistributedDataParallel(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, plain)]
    last = world - 1
    with Join([model]):
        for step in range(STEPS + (rank == last)):
            model.zero_grad()
            microbatch(model, "mxfp8", step, rank, 0)
            optimizers[0].step()
    for step in range(STEPS):
        one_process(plain, "mxfp8", step, world, 1)
        optimizers[1].step()
    plain.zero_grad()
    microbatch(plain, "mxfp8", STEPS, last, 0)
    for parameter in plain.parameters():
        parameter.grad /= world
    optimizers[1].step()
    for (name, mine), own in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, own), name
    try:
        with Join([model]):
            microbatch(model, "fp8_delayed", 0, rank, 0)
    except RuntimeError as error:
        assert "take a recipe with reduce_amax=False" in str(error), error
    else:
        raise AssertionError("nothing was raised")


def differ() -> None:
    model = DistributedDataParallel(Model())
    try:
        hybridq.distributed.check_ranks(model, recipe=RECIPES[dist.get_rank() % 2])
    except RuntimeError as error:
        assert "the quantizer of module.up:input" in str(error), error
    else:
        raise AssertionError("nothing was raised")


if __name__ == "__main__":
    main(globals())
