"""Delayed scaling in modules of several parts: each part, and each group, has its own history."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridq

STEPS = 3


def _step(module, optimizer, x, *args):
    with hybridq.autocast(recipe="fp8_delayed"):
        y = module(x, *args)
    (y.float() ** 2).sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [y.detach(), *grads]


class _Parts(torch.nn.Module):
    """What LayerNormMLP does, of separate modules; the norm and the activation are ours."""

    def __init__(self, mlp: hybridq.LayerNormMLP) -> None:
        super().__init__()
        self.gamma, self.beta = mlp.layer_norm_weight, mlp.layer_norm_bias
        self.fc1 = hybridq.Linear(mlp.hidden_size, 2 * mlp.ffn_hidden_size)
        self.fc2 = hybridq.Linear(mlp.ffn_hidden_size, mlp.hidden_size)
        for part in ("fc1", "fc2"):
            for kind in ("weight", "bias"):
                setattr(getattr(self, part), kind, getattr(mlp, f"{part}_{kind}"))
        self.norm, self.activation = mlp._norm_call().prologue, mlp._activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from hybridq.nn.autograd.prologue import apply

        hidden = self.fc1(apply(x, self.norm, self.gamma, self.beta))
        return self.fc2(apply(hidden, self.activation, None, None))


def test_each_part_of_an_mlp_has_its_history() -> None:
    torch.manual_seed(0)
    fused = hybridq.LayerNormMLP(48, 64, activation="swiglu")
    parts = _Parts(copy.deepcopy(fused))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (fused, parts)]
    for number in range(STEPS):
        x = torch.randn(20, 48) * 3**number  # so that the scales move
        got = _step(fused, optimizers[0], x)
        want = _step(parts, optimizers[1], x)
        assert torch.equal(got[0], want[0]), number
    by_name = dict(fused.named_parameters())
    for part in ("fc1", "fc2"):
        own = getattr(parts, part)
        assert torch.equal(by_name[f"{part}_weight"], own.weight)
        mine, theirs = fused._scaling[part], own._scaling[""]
        assert torch.equal(mine.forward_stats, theirs.forward_stats)
        assert torch.equal(mine.backward_stats, theirs.backward_stats)
        assert not torch.equal(mine.forward_stats, -torch.ones(4))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_microbatches_of_groups_are_no_steps(single, on_device) -> None:
    """The parameter tells of a step; a part of it has no gradient, and a cast is new each time."""
    torch.manual_seed(0)
    sizes = [5, 0, 17]
    grouped = hybridq.GroupedLinear(3, 24, 40, single_grouped_weight=single)
    layers = [hybridq.Linear(24, 40) for _ in sizes]
    with torch.no_grad():
        for g, layer in enumerate(layers):
            layer.weight.copy_(grouped.weight[g] if single else getattr(grouped, f"weight{g}"))
            layer.bias.copy_(getattr(grouped, f"bias{g}"))
    splits = torch.tensor(sizes, dtype=torch.int32) if on_device else sizes
    batches = [torch.randn(22, 24) * 3**number for number in range(3)]

    def loop(x):
        parts = zip(layers, x.split(sizes), strict=True)
        return torch.cat([layer(part) for layer, part in parts])

    # One after the other: an update is one of all modules.
    seen = []
    for forward in (loop, lambda x: grouped(x, splits)):
        for x in batches:
            with hybridq.autocast(recipe="fp8_delayed"), torch.autocast("cpu", torch.bfloat16):
                seen.append(forward(x))
            seen[-1].float().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_each_group_has_its_history(single, on_device) -> None:
    torch.manual_seed(0)
    sizes = [5, 0, 17]
    grouped = hybridq.GroupedLinear(3, 24, 40, single_grouped_weight=single)
    layers = torch.nn.ModuleList(hybridq.Linear(24, 40) for _ in sizes)
    with torch.no_grad():
        for g, layer in enumerate(layers):
            whole = grouped.weight[g] if single else getattr(grouped, f"weight{g}")
            layer.weight.copy_(whole)
            layer.bias.copy_(getattr(grouped, f"bias{g}"))

    def loop(x):
        return torch.cat([m(part) for m, part in zip(layers, x.split(sizes), strict=True)])

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (grouped, layers)]
    for number in range(STEPS):
        x = torch.randn(22, 24) * 3**number
        splits = torch.tensor(sizes) if on_device else sizes
        got = _step(grouped, optimizers[0], x, splits)[0]
        with hybridq.autocast(recipe="fp8_delayed"):
            want = loop(x)
        (want.float() ** 2).sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(got, want.detach()), number


@pytest.mark.more
def test_a_transformer_layer_trains_and_compiles() -> None:
    torch.manual_seed(0)
    eager = hybridq.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (eager, compiled)]
    for number in range(STEPS):
        x = torch.randn(6, 2, 32) * 2**number
        results = []
        for module, optimizer in zip((eager, run), optimizers, strict=True):
            with hybridq.autocast(recipe="fp8_delayed"):
                y = module(x)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(y.detach())
        assert torch.equal(*results), number
