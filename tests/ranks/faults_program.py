"""Ranks that differ, or fail: `python faults_program.py RANK WORLD STORE NAME...`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import check_ranks, prepare_fsdp2

#: The rank that does something else.
ODD = 1
TIMEOUT = 10.0


def built(
    sizes: tuple[int, ...] = (40, 100, 36), dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model, and its unsharded twin."""
    made = []
    for prepare in (prepare_fsdp2, None):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
        made.append(hybridq.convert(model).to(dtype))
        if prepare is not None:
            prepare(made[-1])
    for layer in made[0]:
        fully_shard(layer)
    fully_shard(made[0])
    return made[0], made[1]


def run(model: nn.Module, recipe: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    if x is None:
        first = next(model.parameters())
        x = torch.ones(8, first.shape[1], dtype=first.dtype)
    torch.manual_seed(7)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach()


def fails(what: str, action: Callable[[], Any], *texts: str) -> None:
    """Check that `action` raises on every rank, with the same message."""
    try:
        action()
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError(f"{what}: nothing was raised")
    for text in texts:
        assert text in message, f"{what}: {text!r} not in {message!r}"
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert len(set(messages)) == 1, f"{what}: {messages}"


class Unlike:
    """A factory whose gradients are quantized otherwise on one rank: no gather shows it."""

    reads_names = False

    def __call__(self, role: Any) -> Any:
        is_odd = dist.get_rank() == ODD and role.tensor_type == "grad_output"
        return hybridq.quantizer("fp8_e5m2" if is_odd else "mxfp8")


def differ_at_start() -> None:
    is_odd = dist.get_rank() == ODD
    sides = "on ranks 0, 2"

    def forward(recipe: Any, *args: Any) -> Callable[[], Any]:
        return lambda: run(built(*args)[0], recipe)

    odd = "mxfp8" if is_odd else "nvfp4"
    fails("recipe", forward(odd), "fsdp2: every rank", "0:input", "on rank 1", sides, "mxfp8")
    fails("no recipe", forward(None if is_odd else "nvfp4"), "0:input", "none on rank 1", sides)
    fails("gradients", forward(hybridq.CustomRecipe(Unlike())), "0:grad_output", "on rank 1")
    wide = (40, 100 + is_odd, 36)
    fails("shape", forward("mxfp8", wide), "parameter number 0: 0.weight [100, 40]", "[101, 40]")
    fails("depth", forward("mxfp8", (40, 100, 36, 8)[: 3 + is_odd]), "4 on ranks 0, 2; 6 on rank 1")
    kind = torch.float32 if is_odd else torch.bfloat16
    fails("dtype", forward("mxfp8", (40, 100), kind), "torch.float32 gathered as planes on rank 1")
    with hybridq.backend("reference" if is_odd else None):
        fails("backend", forward("mxfp8"), "the backend: chosen on ranks 0, 2; reference on rank 1")
    model = hybridq.convert(nn.Sequential(nn.Linear(8, 8)))
    model[0].weight.requires_grad_(not is_odd)
    fails("frozen", lambda: check_ranks(model), "check_ranks: every", "frozen on rank 1")
    model[0].weight.requires_grad_(True)
    check_ranks(model, recipe="mxfp8")
    check_ranks(model, dist.group.WORLD)
    fails("asked", lambda: check_ranks(model, recipe=odd), "rowwise", "on rank 1")
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    own_recipe = hybridq.recipes.DelayedScaling(amax_reduction_group=own)
    check_ranks(model, recipe=own_recipe)  # groups have names of their own


def differ_later() -> None:
    is_odd = dist.get_rank() == ODD
    like = lambda role: hybridq.quantizer("mxfp8")  # noqa: E731
    pairs = [("mxfp8", "nvfp4"), ("mxfp8", None), (None, "mxfp8"), ("fp8_current", "fp8_block")]
    for before, odd in [*pairs, (hybridq.CustomRecipe(like), hybridq.CustomRecipe(Unlike()))]:
        model, _ = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            run(model, before)
            optimizer.step()
        recipe = odd if is_odd else before
        texts = ("fsdp2: every rank must compute alike", "on ranks 0, 2, another on rank 1")
        fails(f"{before} and {odd}", lambda m=model, r=recipe: run(m, r), *texts)


def change_together() -> None:
    """What is agreed may change between all phases; nothing is gathered twice for long."""

    class Inside(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hybridq.autocast(recipe=self.recipe):
                return super().forward(x)

    torch.manual_seed(0)
    plain, model = (Inside(*(hybridq.Linear(48, 48) for _ in range(2))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fully_shard(prepare_fsdp2(model))
    x = torch.randn(8, 48)
    for recipe in ("mxfp8", "mxfp8", "nvfp4", "nvfp4"):
        plain.recipe = model.recipe = recipe
        for _ in range(2):
            before = hybridq.distributed.wire_nbytes(model)
            y = [one(x) for one in (plain, model)]
            assert torch.equal(*y), recipe
            with torch.no_grad():
                assert torch.equal(plain(x), model(x)), recipe
            y[1].sum().backward()
            gathered = hybridq.distributed.wire_nbytes(model) - before
        # Weights in the root are gathered before its forward sets a recipe: as they are.
        assert gathered < 3 * 2 * 48 * 48 * 4 * 1.01, gathered


def change_uneven_shards() -> None:
    """FSDP2 takes as many tensors from uneven shards as in the first gather, whatever is sent."""
    for recipes in (("nvfp4", "mxfp8", None, "nvfp4"), (None, "nvfp4", "fp8_current", None)):
        sharded, plain = built((40, 100, 35))
        for recipe in recipes:
            for _ in range(2):
                y = [run(model, recipe) for model in (sharded, plain)]
                assert torch.equal(*y), (recipes, recipe)


def nan_in_a_weight() -> None:
    for recipe in ("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd"):
        for value in (float("nan"), -float("inf")):
            sharded, plain = built()
            with torch.no_grad():
                plain[0].weight[50, 3] = value  # a row of the odd rank
                plain[1].weight[35, 99] = value  # the last rank's
            sharded.load_state_dict(
                {
                    name: torch.distributed.tensor.distribute_tensor(tensor, own.device_mesh, [s])
                    for (name, tensor), own in zip(
                        plain.state_dict().items(), sharded.parameters(), strict=True
                    )
                    for s in own.placements
                }
            )
            y = [run(model, recipe) for model in (sharded, plain)]
            if value != value:  # infinity may saturate
                assert y[1].isnan().any(), recipe
            assert torch.equal(y[0].view(torch.int16), y[1].view(torch.int16)), (recipe, value)
            for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
                grads = mine.grad.full_tensor(), whole.grad
                assert torch.allclose(*grads, rtol=2e-2, equal_nan=True), (recipe, value)


def nan_in_a_batch() -> None:
    for recipe in ("fp8_delayed", "mxfp8", "nvfp4"):
        sharded, plain = built()
        batches = [torch.randn(8, 40).bfloat16() for _ in range(dist.get_world_size())]
        batches[ODD][2, 3] = float("nan")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
        run(sharded, recipe, batches[dist.get_rank()])
        for batch in batches:
            run(plain, recipe, batch)
        for mine, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            grads = mine.grad.full_tensor(), whole.grad
            assert torch.equal(grads[0].isnan(), grads[1].isnan()), recipe
            assert grads[0].isnan().any()
        optimizer.step()  # joins reductions on every rank
        y = run(sharded, recipe, torch.ones(8, 40).bfloat16())
        outputs = [torch.empty_like(y) for _ in batches]
        dist.all_gather(outputs, y)
        assert all(torch.equal(y.isnan(), other.isnan()) for other in outputs) and y.isnan().any()


def ends(what: Callable[[], None]) -> None:
    """Run steps until another rank is gone; that must raise, and not wait for ever."""
    model, _ = built()
    run(model, "nvfp4")
    dist.barrier()
    if dist.get_rank() == ODD:
        what()
    try:
        for _ in range(100):
            run(model, "nvfp4")
    except RuntimeError:
        os._exit(0)  # a group that lost a rank cannot be left in peace
    raise AssertionError("nothing was raised")


def dies() -> None:
    ends(lambda: os._exit(7))


def stalls() -> None:
    ends(signal.pause)


if __name__ == "__main__":
    main(globals(), TIMEOUT if {"dies", "stalls"} & set(sys.argv) else 120.0)
