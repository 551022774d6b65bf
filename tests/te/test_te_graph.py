"""Graphed callables where nothing is captured; histories that are held; writes left out."""

from __future__ import annotations

import pytest
import torch

import hybridq
import hybridq.te as te


@pytest.mark.parametrize("name", ["DelayedScaling", "MXFP8BlockScaling"])
def test_graphed_callables_run_eagerly_where_nothing_is_captured(name: str) -> None:
    torch.manual_seed(0)
    recipe = getattr(te.common.recipe, name)()
    layer, other = te.Linear(32, 16), te.Linear(32, 16)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 32, requires_grad=True)
    made = te.make_graphed_callables(
        layer,
        (x,),
        num_warmup_iters=2,
        fp8_enabled=True,
        fp8_recipe=recipe,
        fp8_weight_caching=True,
    )
    assert made is layer
    with te.autocast(recipe=recipe):
        want = other(x)
    assert torch.equal(made(x, is_first_microbatch=True), want)
    one, two = te.make_graphed_callables((te.Linear(8, 8), torch.sin), ((x[:, :8],), (x,)))
    assert torch.equal(two(x), torch.sin(x)) and one(x[:, :8]).shape == (4, 8)
    with pytest.raises(NotImplementedError, match="sample_kwargs must be None"):
        te.make_graphed_callables(layer, (x,), sample_kwargs={"a": x})
    with pytest.raises(TypeError, match="unknown argument, got warmups=3"):
        te.make_graphed_callables(layer, (x,), warmups=3)


def test_histories_are_held_in_their_own_memory() -> None:
    torch.manual_seed(0)
    layer = hybridq.Linear(32, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step(scale: float) -> None:
        with hybridq.autocast(recipe="fp8_delayed"):
            layer(scale * torch.randn(4, 32)).sum().backward()
        optimizer.step()

    step(1.0)
    before = hybridq.state_dict_with_history(layer)
    before = {key: one.clone() for key, one in before.items()}
    with hybridq.nn.hold_history([layer]):
        for _ in range(3):
            step(100.0)
        during = hybridq.state_dict_with_history(layer)
        assert any(not torch.equal(during[key], before[key]) for key in before)
    after = hybridq.state_dict_with_history(layer)
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_write_is_left_out_by_a_flag() -> None:
    t = hybridq.quantize(torch.ones(4, 32), "mxfp8")
    flag = torch.ones(1)
    assert t.quantize_(torch.zeros(4, 32), noop_flag=flag) is t
    assert torch.equal(t.dequantize(), torch.ones(4, 32))
    t.quantize_(torch.zeros(4, 32), noop_flag=flag.zero_())
    assert torch.equal(t.dequantize(), torch.zeros(4, 32))
