"""Experts over ranks whose sizes are known before, and what runs while their tokens travel.

`python experts_overlap_program.py RANK WORLD STORE NAME...`; the oracle is the model with neither.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from experts_program import (
    HIDDEN,
    INNER,
    LAYOUTS,
    TOKENS,
    TOP,
    Block,
    Toy,
    expects,
    near,
    step,
    toys,
    whole,
)
from rank_program import main
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hybridq
from hybridq.moe import (
    ExpertLoads,
    balance_biases_,
    combine,
    convert_experts,
    dispatch,
    overlap_shared_experts,
    parallelize_experts,
    permute,
    permute_experts_,
    route_plan,
)


def capacity() -> None:
    """With a capacity outputs and gradients are the same to the bit, and sizes known before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = LAYOUTS["biased"]
    for recipe in ("mxfp8", "mxfp8_fwd_nvfp4_bwd"):
        for counts in ([9] * world, [0, 11, 0, 5][:world]):
            made = []
            for rows in (None, 2 * max(counts), 40):
                torch.manual_seed(2)
                experts = convert_experts(Block(layout, 7), layout)
                parallelize_experts(experts, dispatch="mxfp8", capacity=rows)
                x = torch.randn(sum(counts), HIDDEN).split(counts)[rank].requires_grad_()
                top = torch.randint(0, 4, (sum(counts), TOP)).split(counts)[rank]
                top[::4, 1] = 7  # of no expert
                torch.manual_seed(3)
                with hybridq.autocast(recipe=recipe):
                    y = experts(x, top, torch.ones(top.shape))
                y.square().sum().backward()
                grads = [whole(parameter.grad) for parameter in experts.parameters()]
                made.append([y.detach(), x.grad, *grads])
            for other in made[1:]:
                for a, b in zip(made[0], other, strict=True):
                    if "nvfp4" in recipe:  # random bits lie elsewhere
                        near(b, a, ("capacity", recipe), 0.2)
                    else:
                        assert torch.equal(a, b), (recipe, counts)
    x, top = torch.randn(8, HIDDEN), torch.full((8, TOP), 0)
    top[:, 1] = 1 if rank == 0 else 7  # the first rank alone has many
    routes, plan = route_plan(top, 7, capacity=16)
    rows = permute(x, routes)
    arrived = dispatch(rows, plan)
    assert arrived.shape[0] == plan.num_received == 16 * world
    own = routes.offsets[-1]
    back = combine(arrived, plan)
    assert torch.equal(back[:own], rows[:own]) and not back[own:].any()
    expects(RuntimeError, "got 15 for 16", lambda: route_plan(top, 7, capacity=15))
    for wrong in (0, -1, 1.5, True, "all"):
        call = partial(route_plan, top, 7, capacity=wrong)
        expects(ValueError, "capacity must be rows", call)
    experts = convert_experts(Block(layout, 7), layout)
    expects(ValueError, "capacity must be", lambda: parallelize_experts(experts, capacity=0))
    own = 7 + rank
    expects(RuntimeError, "the capacity", lambda: parallelize_experts(experts, capacity=own))


def graphs() -> None:
    """With a capacity a block of experts is one graph, forward and backward."""
    rank = dist.get_rank()
    for recipe in ("mxfp8", "nvfp4", "fp8_current"):
        torch.manual_seed(0)
        made = []
        plain = Toy(LAYOUTS["plain"], 8)
        parallelize_experts(plain, dispatch="mxfp8", combine="mxfp8", capacity=TOP * TOKENS)
        x = torch.randn(2, TOKENS, HIDDEN)[rank % 2]
        for model in (plain, torch.compile(plain, fullgraph=True, backend="aot_eager")):
            for _ in range(2):
                plain.zero_grad()
                found = step(model, x, recipe, 1)
            made.append([*found, *(whole(parameter.grad) for parameter in plain.parameters())])
        for a, b in zip(*made, strict=True):
            near(b, a, ("graph", recipe), 1e-6)


class Shared(Toy):
    """Experts for every token beside the routed ones."""

    def __init__(self, order: str) -> None:
        super().__init__(LAYOUTS["plain"], 8)
        self.shared_experts = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "before":
            return self.shared_experts(x) + super().forward(x)
        y = super().forward(x)
        if self.order == "none":
            return y
        given = {"same": x, "view": x.view(2, -1, HIDDEN), "other": 2 * x}[self.order]
        return y + self.shared_experts(given).view(y.shape)


@contextmanager
def logged() -> Any:
    """Give the names of the operators that run in the block, in order, those of interest."""
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = str(func).split(".")[1]
            if name in ("all_to_all_single", "wait_tensor", "addmm", "mm"):
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Log():
        yield seen


def overlapped() -> None:
    """Shared experts run while tokens travel, forward and backward; values stay."""
    rank = dist.get_rank()
    for order in ("same", "view", "other", "before", "none"):
        made = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = Shared(order)
            parallelize_experts(model, dispatch="mxfp8", combine="mxfp8")
            if overlaps:
                assert overlap_shared_experts(model) == ["shared_experts"]
                assert overlap_shared_experts(model) == ["shared_experts"]  # again: nothing more
            for _ in range(2):
                torch.manual_seed(rank)
                x = torch.randn(TOKENS, HIDDEN)
                model.zero_grad()
                found = step(model, x, "mxfp8", 1)
            made.append(
                [*found, *(whole(one.grad) for one in model.parameters() if order != "none")]
            )
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b), order
        if order != "same":
            continue
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe="mxfp8"), logged() as forward:
            y = model(own)
        # Counts, then tokens; both products of the shared experts, then the tokens are waited for.
        first = forward.index("all_to_all_single", forward.index("all_to_all_single") + 1)
        assert forward[first : first + 4] == ["all_to_all_single", "addmm", "addmm", "wait_tensor"]
        with logged() as backward:
            y.sum().backward()
        sends = [at for at, name in enumerate(backward) if name == "all_to_all_single"]
        assert len(sends) == 2, backward
        after = backward[sends[1] + 1 :]
        assert after.index("wait_tensor") == 4 and set(after[:4]) == {"mm"}, backward
    expects(
        ValueError,
        "call parallelize_experts before",
        lambda: overlap_shared_experts(Toy(LAYOUTS["plain"], 8)),
    )
    _, routed = toys("plain", 8)
    expects(ValueError, "give names=", lambda: overlap_shared_experts(routed))
    expects(TypeError, "must be an nn.Module", lambda: overlap_shared_experts(3))


def loads() -> None:
    """Counts of all ranks' tokens, and biases that move alike on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    single, shared = toys("plain", 8)
    of_one, of_all = ExpertLoads(single), ExpertLoads(shared)
    torch.manual_seed(1)
    x = torch.randn(world * TOKENS, HIDDEN)
    step(single, x, "mxfp8", 1), step(shared, x.chunk(world)[rank], "mxfp8", 1)
    found = of_all.total()["experts"]
    assert torch.equal(found, of_one.counts["experts"]) and found.sum() == TOP * world * TOKENS
    bias = torch.zeros(8)
    told = balance_biases_(shared, of_all, 0.5, biases={"experts": bias})
    assert told == {"experts": int(found.max()) * 8 / int(found.sum())}
    assert torch.equal(bias, 0.5 * torch.sign(found.float().mean() - found))
    expects(
        ValueError,
        "permute before parallelize_experts",
        lambda: permute_experts_(shared, {"experts": list(range(8))}, routers=("router",)),
    )


def asynchronous() -> None:
    """What is computed between start and wait runs while bytes travel, and so does its backward."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for quantizer in (None, "mxfp8"):
        made = []
        for is_async in (False, True):
            torch.manual_seed(rank)
            x, w = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, HIDDEN)
            x.requires_grad_(), w.requires_grad_()
            top = torch.rand(TOKENS, 3 * world).topk(TOP).indices
            routes, plan = route_plan(top, 3 * world)
            rows = x[routes.tokens]  # which has second derivatives
            if is_async:
                under_way = dispatch(rows, plan, quantizer, quantizer, async_op=True)
                other = x @ w
                arrived = under_way.wait()
                back = combine(2 * arrived, plan, quantizer, quantizer, async_op=True)
                assert back.wait() is back.wait()
                y = back.wait()
            else:
                arrived = dispatch(rows, plan, quantizer, quantizer)
                other = x @ w
                y = combine(2 * arrived, plan, quantizer, quantizer)
            loss = y.square().sum() + other.sin().sum()
            with logged() as seen:
                grads = torch.autograd.grad(loss, (x, w), retain_graph=True)
            if is_async:  # of the dispatch: sent, the product's two, then waited for
                sends = [at for at, name in enumerate(seen) if name == "all_to_all_single"]
                between = seen[sends[1] + 1 :]
                assert between[:3] == ["mm", "mm", "wait_tensor"], seen
            again = torch.autograd.grad(loss, (x, w), retain_graph=True)
            made.append([y.detach(), *grads, *again])
            if quantizer is None:
                (first,) = torch.autograd.grad(loss, x, create_graph=True)
                made[-1] += torch.autograd.grad(first.square().sum(), (x, w))
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b), quantizer


if __name__ == "__main__":
    main(globals())
