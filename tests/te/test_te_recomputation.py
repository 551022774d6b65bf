"""Recomputation as scripts of Transformer Engine ask for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridq
import hybridq.te as te
from hybridq.te.common import recipe

NVFP4 = recipe.NVFP4BlockScaling()


def gradients(module: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """The result of `run(x)`, and all gradients."""
    torch.manual_seed(0)
    module.zero_grad()
    x = torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=NVFP4):
        y = run(x)
    y.square().sum().backward()
    return [y, x.grad, *(one.grad for one in module.parameters())]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("checkpoint", [te.checkpoint, hybridq.checkpoint])
def test_arguments_by_keyword_reach_the_function(checkpoint: Any, use_reentrant: bool) -> None:
    layer = te.Linear(64, 32)
    seen = []

    def run(x: torch.Tensor, *, scale: float, mask: torch.Tensor) -> torch.Tensor:
        seen.append(scale)
        return layer(x * scale) * mask

    mask = torch.arange(32) % 2
    plain = gradients(layer, lambda x: run(x, scale=2.0, mask=mask))
    options: dict[str, Any] = {"use_reentrant": use_reentrant, "preserve_rng_state": True}
    again = gradients(layer, lambda x: checkpoint(run, x, scale=2.0, mask=mask, **options))
    assert_same(plain, again)
    assert seen == [2.0] * 3


def test_a_module_that_runs_again_saves_less_and_gives_the_same_bits() -> None:
    plain, again = te.LayerNormMLP(64, 128), te.LayerNormMLP(64, 128, checkpoint=True)
    again.load_state_dict(plain.state_dict())
    saved = {}
    for name, one in (("plain", plain), ("again", again)):
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, te.autocast(recipe=NVFP4):
            one(torch.randn(32, 64, requires_grad=True))
        saved[name] = sum(tensor.nbytes for tensor in kept)
    assert saved["again"] < saved["plain"]
    assert_same(gradients(plain, plain), gradients(again, again))
    with torch.no_grad():
        assert torch.equal(plain(torch.ones(2, 64)), again(torch.ones(2, 64)))
