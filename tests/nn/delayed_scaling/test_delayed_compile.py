"""Delayed scaling in code that torch compiles: eager's bits and eager's states."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from compilers import BACKENDS
from hybridq.quantizers import DelayedScalingRequest
from hybridq.recipes import CustomRecipe, DelayedScaling
from linear_model import equal

MIXED = hybridq.HybridQuantizer(
    rowwise_quantizer=DelayedScalingRequest(margin=1, amax_history_len=4),
    columnwise_quantizer=DelayedScalingRequest(),
)
DECODED = hybridq.HybridQuantizer(
    rowwise_quantizer=DelayedScalingRequest(),
    columnwise_quantizer=DelayedScalingRequest(),
    columnwise_source="rowwise_dequantized",
)
HALF = hybridq.HybridQuantizer(
    rowwise_quantizer=hybridq.MXFP8Quantizer(), columnwise_quantizer=DelayedScalingRequest()
)
RECIPES = {
    "plain": DelayedScaling(),
    "short": DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo="most_recent"),
    "mixed": CustomRecipe(lambda role: MIXED),
    "decoded": CustomRecipe(lambda role: DECODED),
    "half": CustomRecipe(lambda role: HALF),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def model(dtype=torch.float32) -> nn.Module:
    """A model of known values."""
    torch.manual_seed(0)
    parts = nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24, bias=False)
    return hybridq.convert(nn.Sequential(*parts)).to(dtype)


def train(module, call, recipe, dtype=torch.float32, microbatches=1, together=False, steps=4):
    """All results of some steps, and the states at the end; counts graphs after the first step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1)
    made, first = [], None
    for step in range(steps):
        outputs = []
        for _ in range(microbatches):
            x = torch.randn(16, 32, generator=generator) * (1.0, 4.0, 0.5, 2.0)[step % 4]
            x = x.to(dtype).requires_grad_()
            with hybridq.autocast(recipe=recipe):
                y = call(x)
            outputs.append((x, y))
            if not together:
                y.square().sum().backward()
        for x, y in outputs:
            if together:
                y.square().sum().backward()
            made += [y.detach(), x.grad]
        made += [p.grad.clone() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        first = _graphs() if first is None else first
    assert _graphs() == first
    saved = hybridq.state_dict_with_history(module)
    return made + [saved[key] for key in sorted(saved)], sorted(saved)


@pytest.mark.thinned(1, "slow", few=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_kind_of_state(recipe, backend) -> None:
    one, two = model(), model()
    want, keys = train(one, one, recipe)
    compiled = torch.compile(two, fullgraph=True, backend=backend)
    got, same_keys = train(two, compiled, recipe)
    assert keys == same_keys and equal(got, want)
    assert _graphs() == 1


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_microbatches(dtype, together, backend) -> None:
    """One after the other, and all forwards before all backwards, as pipelines have them."""
    options = {"dtype": dtype, "microbatches": 3, "together": together, "steps": 3}
    one, two = model(dtype), model(dtype)
    want, _ = train(one, one, "fp8_delayed", **options)
    compiled = torch.compile(two, fullgraph=True, backend=backend)
    assert equal(train(two, compiled, "fp8_delayed", **options)[0], want)


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant, backend) -> None:
    one, two = model(), model()
    want, _ = train(one, one, "fp8_delayed")

    def region(x):
        return checkpoint(two, x, use_reentrant=reentrant)

    compiled = torch.compile(region, fullgraph=True, backend=backend)
    assert equal(train(two, compiled, "fp8_delayed")[0], want)


@pytest.mark.more
def test_modules_share_a_graph_and_other_recipes_come_between() -> None:
    blocks = hybridq.convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))))
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16)
    for step in range(3):
        for recipe in ("fp8_delayed", "mxfp8", "fp8_delayed"):
            with hybridq.autocast(recipe=recipe):
                blocks(x).sum().backward()
        hybridq.update_scaling(blocks)
        if step == 0:
            first = _graphs()
    assert _graphs() == first <= 4
    assert len({s["scaling.input.e4m3.scale"].item() for s in map(_states, blocks)}) > 6


def _states(module):
    return hybridq.state_dict_with_history(module)


def test_factories_that_read_names() -> None:
    """Compiled modules tell nobody under which plan they ran: each still updates by its own."""

    def factory(role):
        if role.name == "0":
            return DelayedScalingRequest("E4M3", margin=2, amax_history_len=3)
        return DelayedScalingRequest()

    one, two = model(), model()
    want, keys = train(one, one, CustomRecipe(factory))
    assert "0.scaling.grad_output.e4m3.scale" in keys
    assert "2.scaling.grad_output.e5m2.scale" in keys
    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    assert equal(train(two, compiled, CustomRecipe(factory))[0], want)


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_another_recipe_is_the_last_before_a_step(inside) -> None:
    """What ran compiled says so, also where a graph was there before the module."""
    other = hybridq.Linear(32, 32)

    def steps(module, compiles):
        def call(x):
            with hybridq.autocast(recipe="fp8_delayed"):
                return module(x)

        if compiles and inside:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        elif compiles:
            module.compile(fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        for step in range(3):
            call(torch.ones(4, 32) * (1 + step)).square().sum().backward()
            with hybridq.autocast(recipe="mxfp8"):
                other(torch.ones(4, 32))
            optimizer.step()
            optimizer.zero_grad()
        return _states(module)

    want = steps(model(), False)
    assert want["0.scaling.input.e4m3.scale"].item() == pytest.approx(448 / 3)
    for _ in range(2):
        got = steps(model(), True)
        assert sorted(got) == sorted(want)
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_evaluation_and_the_end_of_training() -> None:
    one, two = model(), model()
    train(one, one, "fp8_delayed")
    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    train(two, compiled, "fp8_delayed")
    before = _states(two)
    x = torch.randn(5, 32) * 100
    one.eval()
    two.eval()
    with torch.no_grad(), hybridq.autocast(recipe="fp8_delayed"):
        assert torch.equal(compiled(x), one(x))
    hybridq.update_scaling()
    after = _states(two)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_eager_and_compiled_steps_take_turns() -> None:
    one, two = model(), model()
    want, _ = train(one, one, "fp8_delayed", steps=6)
    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    # The first step compiles; then eager ones come between.
    turns = iter((compiled, two, compiled, two, two, compiled))
    got, _ = train(two, lambda x: next(turns)(x), "fp8_delayed", steps=6)
    assert equal(got, want)


def test_a_copy_of_a_compiled_model_goes_on() -> None:
    one = model()
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    train(one, compiled, "fp8_delayed")
    two = copy.deepcopy(one)
    want, _ = train(one, one, "fp8_delayed")
    again = torch.compile(two, fullgraph=True, backend="aot_eager")
    assert equal(train(two, again, "fp8_delayed")[0], want)


def test_a_compiled_optimizer_step_says_that_it_updates_nothing() -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with hybridq.autocast(recipe="fp8_delayed"):
        own(torch.randn(4, 32)).sum().backward()
    step = torch.compile(optimizer.step, backend="aot_eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    assert any("hybridq.update_scaling() after it" in str(w.message) for w in seen)
    assert set(_states(own)["0.scaling.input.e4m3.scale"].tolist()) == {1.0}
    hybridq.update_scaling(own)
    assert _states(own)["0.scaling.input.e4m3.scale"].item() != 1.0
