"""hybridq.offload on a GPU: copies on a stream of their own, with the bits of a run without."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import hybridq


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("saved", ["planes", "all"])
def test_bits_and_memory(saved: str, window: int) -> None:
    torch.manual_seed(0)
    make = {"dtype": torch.bfloat16, "device": "cuda", "activation": "swiglu"}
    layers = nn.ModuleList(hybridq.LayerNormMLP(1024, 2048, **make) for _ in range(6))

    def step(store: object) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        layers.zero_grad()
        x = torch.randn(8192, 1024, device="cuda").bfloat16().requires_grad_()
        held = torch.cuda.memory_allocated()
        with store, hybridq.autocast(recipe="mxfp8"):
            y = x
            for layer in layers:
                y = layer(y)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - held
        y.sum().backward()
        grads = [one.grad.clone() for one in layers.parameters()]
        return [y.detach(), x.grad, *grads], held

    wanted, all_of_it = step(contextlib.nullcontext())
    store = hybridq.offload(*layers, window=window, saved=saved)
    got, held = step(store)
    assert all(map(torch.equal, wanted, got))
    assert held < all_of_it - store.nbytes_out * 0.9
    assert store.nbytes_out == store.nbytes_back > 0
