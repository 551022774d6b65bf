"""FSDP2 of prepared weights that compiled code updates: the bits of the same step without a graph.

Rates are powers of two, so that a fused multiply and add rounds as two operations do.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_program import main
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import prepare_fsdp2

BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
STEPS = 4
Update = Callable[[nn.Module], Callable[[], None]]


def turn(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.copy_(weight - 2.0**-5 * gradient.sign())


def run(recipe: str, update: Update) -> list[torch.Tensor]:
    """Return what a model gives in each of some steps.

    Args:
        recipe: of the forwards.
        update: of a model makes what updates its parameters.
    """
    torch.manual_seed(0)
    model = nn.Sequential(hybridq.Linear(64, 128), nn.GELU(), hybridq.Linear(128, 64))
    prepare_fsdp2(model)
    for block in (model[0], model[2], model):
        fully_shard(block)
    step, found = update(model), []
    for number in range(STEPS):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(32, 64)
        with hybridq.autocast(recipe=recipe):
            y = model(x)
        (y - x).square().mean().backward()
        step()
        model.zero_grad()
        found.append(y.detach())
    return found


def compare(recipe: str, makes: Callable[[bool], Update]) -> None:
    eager, compiled = (run(recipe, makes(is_compiled)) for is_compiled in (False, True))
    for number, (one, other) in enumerate(zip(eager, compiled, strict=True)):
        assert torch.equal(one, other), f"{recipe}: outputs, step {number}"
    assert not torch.equal(eager[0], eager[-1])


def of_optimizer(recipe: str) -> None:
    def makes(is_compiled: bool) -> Update:
        def update(model: nn.Module) -> Callable[[], None]:
            step = torch.optim.SGD(model.parameters(), lr=0.5).step
            return torch.compile(step, backend=BACKEND) if is_compiled else step

        return update

    compare(recipe, makes)


def of_each(recipe: str) -> None:
    """A function of one weight, as torchao's optimizers compile it: `detach` is in front."""

    def makes(is_compiled: bool) -> Update:
        own = torch.compile(turn, backend=BACKEND, fullgraph=True) if is_compiled else turn

        def update(model: nn.Module) -> Callable[[], None]:
            @torch.no_grad()
            def step() -> None:
                for one in model.parameters():
                    own(one.detach(), one.grad)

            return step

        return update

    compare(recipe, makes)


def of_quantized(recipe: str) -> None:
    """It ended the process: the graph wrote memory that such a shard has not."""
    with hybridq.quantized_model_init(recipe):
        model = nn.Sequential(hybridq.Linear(64, 128))
    fully_shard(prepare_fsdp2(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with hybridq.autocast(recipe=recipe):
        model(torch.randn(32, 64)).sum().backward()
    with pytest.raises(Exception, match="step its optimizer without"):
        torch.compile(optimizer.step, backend=BACKEND)()


if __name__ == "__main__":
    main({one.__name__: one for one in (of_optimizer, of_each, of_quantized)})
