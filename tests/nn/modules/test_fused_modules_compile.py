"""Fused modules under torch.compile(fullgraph=True): eager's bits, no break, no recompilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from compilers import BACKENDS
from hybridq import LayerNormLinear, LayerNormMLP, convert, recipes
from hybridq.recipes import NVFP4BlockScaling, bind, get
from linear_model import equal, run

PLAIN = ("bf16", "high_precision")
STOCHASTIC = tuple(name for name in recipes.names() if bind(get(name)).is_stochastic)
DETERMINISTIC = (
    *(name for name in recipes.names() if name not in (*STOCHASTIC, *PLAIN)),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)
INNER = 40


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _model() -> nn.Module:
    return convert(
        nn.Sequential(
            LayerNormLinear(INNER, 48),
            LayerNormMLP(48, 24, activation="swiglu", normalization="RMSNorm", bias=False),
            LayerNormMLP(48, 24, zero_centered_gamma=True),
        )
    )


def _data(rows):
    return torch.randn(rows, INNER), torch.randn(rows, 48)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_deterministic_recipe(backend):
    """The same bits as eager from the first call on, one graph per recipe, none after that."""
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, dy = _data(35)
    with torch._dynamo.config.patch(recompile_limit=2 * len(DETERMINISTIC)):
        for count, recipe in enumerate(DETERMINISTIC, 1):
            expected = run(model, x, dy, recipe=recipe)
            for _ in range(3):
                assert equal(run(compiled, x, dy, recipe=recipe), expected), recipe
                assert _graphs() == count, recipe


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("recipe", [*STOCHASTIC, *PLAIN])
def test_other_recipes(recipe):
    """Stochastic ones draw from torch's generator; plain ones are torch's modules."""
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, dy = _data(35)
    for _ in range(3):
        torch.manual_seed(2)
        expected = run(model, x, dy, recipe=recipe)
        torch.manual_seed(2)
        assert equal(run(compiled, x, dy, recipe=recipe), expected)
        assert _graphs() == 1


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_recipe_and_under_torch_autocast(backend):
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x, dy = _data(33)
    with torch.autocast("cpu", torch.bfloat16):
        results = [run(m, x, dy.bfloat16(), recipe="mxfp8") for m in (model, compiled, compiled)]
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    assert _graphs() == 1
    for _ in range(2):
        y = compiled(x)
        assert torch.allclose(y, model(x), rtol=1e-4, atol=1e-5)
        assert _graphs() == 2


@pytest.mark.more
def test_dynamic_batch_sizes():
    model = _model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (6, 9, 13, 21):
        x, dy = _data(rows)
        assert equal(run(compiled, x, dy, recipe="mxfp8"), run(model, x, dy, recipe="mxfp8"))
    assert _graphs() <= 2


def test_optional_results():
    module = LayerNormMLP(INNER, 24, return_bias=True, return_layernorm_output=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, INNER)
    results = []
    for m in (module, compiled, compiled):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with recipes.autocast(recipe="mxfp8"):
            y, bias, normed = m(leaf)
        (y.sum() + normed.square().sum()).backward()
        results.append([y, bias, normed, leaf.grad, module.layer_norm_weight.grad.clone()])
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    assert _graphs() == 1


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fwd_mxfp8_bwd"])
def test_checkpoint_under_compile_and_compile_under_checkpoint(recipe):
    model = _model()
    x, dy = _data(12)
    expected = run(model, x, dy, recipe=recipe)
    recompute = nn.Module()
    recompute.inner = model
    recompute.forward = lambda x: checkpoint(model, x, use_reentrant=False)
    inside = torch.compile(recompute, fullgraph=True, backend="aot_eager")
    assert equal(run(inside, x, dy, recipe=recipe), expected)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    recompute.forward = lambda x: checkpoint(compiled, x, use_reentrant=False)
    assert equal(run(recompute, x, dy, recipe=recipe), expected)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_operators_of_the_backward(kind):
    dy, x, gamma = torch.randn(5, 33), torch.randn(5, 33).bfloat16(), torch.randn(33)
    mean = torch.randn(5) if kind == "LayerNorm" else torch.empty(0)
    given = (dy, x, gamma, mean, torch.rand(5), kind, True)
    for needs in ((True, True, True), (False, True, False), (True, False, False)):
        torch.library.opcheck(torch.ops.hybridq.norm_backward, (*given, *needs))
    for name in ("gelu", "swiglu"):
        first = torch.randn(5, 66 if name == "swiglu" else 33)
        torch.library.opcheck(torch.ops.hybridq.activation_backward, (dy, first, name))
    with pytest.raises(ValueError, match=r"norm_backward: dy must be \[5, 33\]"):
        torch.ops.hybridq.norm_backward(dy[1:], *given[1:], True, True, True)
    with pytest.raises(ValueError, match="kind must be one of"):
        torch.ops.hybridq.activation_backward(dy, x, "elu")
