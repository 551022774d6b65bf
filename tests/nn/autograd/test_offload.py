"""hybridq.offload: planes that go out and come back, with the bits of a run that keeps them.

On a CPU the copies are made within its memory, so that what moves, when, and with which bits can be
looked at. `moved` counts bytes on both ways; what must move is counted by hooks of the test's own.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import hybridq
from hybridq.nn.autograd import offload as ours  # the function; its module is beside it


def blocks(kind: str, count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    make = {
        "linear": lambda: hybridq.Linear(64, 64, dtype=torch.bfloat16),
        "fused": lambda: hybridq.LayerNormMLP(64, 96, activation="swiglu", dtype=torch.bfloat16),
        "grouped": lambda: Groups(),
    }[kind]
    return nn.ModuleList(make() for _ in range(count))


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = hybridq.GroupedLinear(2, 64, 64, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, [len(x) // 2, len(x) - len(x) // 2])


def step(layers: nn.ModuleList, recipe: str, store: object = None, checkpoint: bool = False):
    """Return the result and all gradients; what is random has one seed."""
    torch.manual_seed(1)
    layers.zero_grad()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    y = x

    def forward(y: torch.Tensor) -> torch.Tensor:
        with hybridq.autocast(recipe=recipe):
            for layer in layers:
                y = hybridq.checkpoint(layer, y) if checkpoint else layer(y)
        return y

    if store is None:
        y = forward(x)
    else:
        with store:
            y = forward(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *[one.grad for one in layers.parameters()]]


def saved_planes(layers: nn.ModuleList, recipe: str) -> list[int]:
    """Bytes of quantized planes that each layer saves."""
    found = [0] * len(layers)
    with hybridq.autocast(recipe=recipe):
        y = torch.randn(32, 64).bfloat16().requires_grad_()
        for i, layer in enumerate(layers):

            def pack(one: torch.Tensor, i: int = i) -> torch.Tensor:
                is_plane = one.dtype in (torch.uint8,) or (one.dtype == torch.float32)
                found[i] += one.nbytes if is_plane and one.numel() > 1 else 0
                return one

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
                y = layer(y)
    return found


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("kind", ["linear", "fused", "grouped"])
def test_bits_are_those_of_a_run_that_keeps_everything(kind, recipe, window) -> None:
    layers = blocks(kind)
    kept = step(layers, recipe)
    kept = [one.clone() for one in kept]
    for saved in ("planes", "all"):
        store = hybridq.offload(*layers, window=window, saved=saved)
        assert all(map(torch.equal, kept, step(layers, recipe, store)))
        assert store.nbytes_out == store.nbytes_back > 0


@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_the_last_layers_never_move(window) -> None:
    layers = blocks("linear")
    each = saved_planes(layers, "mxfp8")
    # Columnwise planes of 32 tokens by 64, and of the weight: a byte for a value, and scales.
    assert each == [32 * 64 + 64 + 64 * 64 + 2 * 64] * 4
    store = hybridq.offload(*layers, window=window)
    step(layers, "mxfp8", store)
    assert store.nbytes_out == store.nbytes_back == sum(each[: 4 - window])


def test_a_layer_is_a_call_where_none_is_named() -> None:
    layers = blocks("linear")
    store = hybridq.offload(window=1)
    step(layers, "mxfp8", store)
    assert store.nbytes_out == sum(saved_planes(layers, "mxfp8")[:3])


def test_memory_here_is_let_go_of_and_comes_in_ahead(monkeypatch) -> None:
    layers = blocks("linear")
    store = hybridq.offload(*layers, window=1)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with store, hybridq.autocast(recipe="mxfp8"):
        y = x
        for layer in layers:
            y = layer(y)
    here = lambda: sorted(  # noqa: E731
        layer
        for layer, given in store._of_layer.items()
        if any(one() is not None and one().here is not None for one in given)
    )
    assert here() == [4]
    order: list[int] = []
    fetch = type(store)._fetch

    def watch(self: object, saved: object) -> None:
        if saved.here is None:
            order.append(saved.layer)
        fetch(self, saved)

    monkeypatch.setattr(type(store), "_fetch", watch)
    y.sum().backward()
    assert list(dict.fromkeys(order)) == [3, 2, 1]
    del y
    gc.collect()
    assert here() == []


def test_two_backwards_of_one_graph() -> None:
    layers = blocks("linear", 2)
    store = hybridq.offload(*layers, window=0)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with store, hybridq.autocast(recipe="mxfp8"):
        y = layers[1](layers[0](x)).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)
    assert store.nbytes_back == 2 * store.nbytes_out


def test_kept_and_quantized_weights_stay() -> None:
    layers = blocks("linear", 1)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    columns = 32 * 64 + 64
    with hybridq.offload(window=0) as store, hybridq.autocast(recipe="mxfp8"):
        layers[0](x, is_first_microbatch=True).sum().backward()
        assert store.nbytes_out == columns
    with hybridq.quantized_model_init("mxfp8"):
        layers = blocks("linear", 1)
    with hybridq.offload(window=0) as store, hybridq.autocast(recipe="mxfp8"):
        layers[0](x).sum().backward()
    assert store.nbytes_out == columns
    with hybridq.offload(*layers, window=0, saved="all") as store, hybridq.autocast(recipe="mxfp8"):
        layers[0](x).sum().backward()
    assert store.nbytes_out == columns


@pytest.mark.parametrize("saved", ["planes", "all"])
def test_checkpointing_inside(saved) -> None:
    layers = blocks("fused")
    kept = [one.clone() for one in step(layers, "nvfp4", checkpoint=True)]
    store = hybridq.offload(*layers, window=1, saved=saved)
    assert all(map(torch.equal, kept, step(layers, "nvfp4", store, checkpoint=True)))
    assert (store.nbytes_out > 0) == (saved == "all")


def test_a_write_after_the_forward_is_an_error() -> None:
    layers = blocks("linear", 2)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    with hybridq.offload(*layers, window=2, saved="all"):
        y = torch.exp(layers[0](x))
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_outside_nothing_moves_and_steps_repeat() -> None:
    layers = blocks("linear")
    store = hybridq.offload(*layers)
    step(layers, "mxfp8", store)
    once = store.nbytes_out
    step(layers, "mxfp8")
    assert store.nbytes_out == once
    step(layers, "mxfp8", store)
    assert store.nbytes_out == 2 * once and not layers[0]._forward_pre_hooks
    assert hybridq.settings.current().offload is None


def test_the_peers_names() -> None:
    layers = blocks("linear")
    kept = [one.clone() for one in step(layers, "mxfp8")]
    context, sync = hybridq.get_cpu_offload_context(True, 2, 4)
    torch.manual_seed(1)
    layers.zero_grad()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    y = x
    for layer in layers:
        with context, hybridq.autocast(recipe="mxfp8"):
            assert context.inside_context is True
            y = layer(y)
        y = sync(y)
    assert context.inside_context is False
    y.float().square().sum().backward()
    assert all(map(torch.equal, kept, [y, x.grad, *[one.grad for one in layers.parameters()]]))
    assert context.nbytes_out == sum(saved_planes(layers, "mxfp8")[:2])
    off, same = hybridq.get_cpu_offload_context()
    with off:
        assert same(x) is x


def test_arguments() -> None:
    layer = hybridq.Linear(64, 64)
    with pytest.raises(TypeError, match="layers must be modules, got list"):
        ours([layer])
    with pytest.raises(TypeError, match="window must be an int, got bool"):
        ours(layer, window=True)
    with pytest.raises(ValueError, match="window must not be negative, got -1"):
        ours(layer, window=-1)
    with pytest.raises(ValueError, match=r"saved must be one of .*got 'some'"):
        ours(layer, saved="some")
    with pytest.raises(ValueError, match="saved='all' needs the layers"):
        ours(saved="all")
    with pytest.raises(NotImplementedError, match="offload_weights must be False"):
        hybridq.get_cpu_offload_context(True, offload_weights=True)
    with pytest.raises(ValueError, match="num_layers must be 0 to model_layers=2, got 3"):
        hybridq.get_cpu_offload_context(True, 3, 2)
