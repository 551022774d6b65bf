"""hybridq.GroupedLinear under torch.compile: eager's bits, one graph, no break."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from grouped_model import (
    FEATURES,
    by_name,
    grouped,
    run_grouped,
    same,
    tokens_of,
)
from hybridq import CustomRecipe, autocast, recipes

#: Delayed scaling keeps a history by group: tests/nn/delayed_scaling/test_delayed_modules.py.
RECIPES = tuple(name for name in recipes.names() if name != "fp8_delayed")
#: Of the default suite: a scale per tensor, per block, and two kinds of planes.
FEW = ("mxfp8_fwd_nvfp4_bwd",)
SIZES = (5, 0, 40)


def data(sizes=SIZES, dtype=torch.float32, extra: int = 0):
    x = tokens_of(sizes, dtype, extra)
    return x, torch.randn(x.shape[0], FEATURES[1]).to(dtype)


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(name, marks=() if name in FEW else pytest.mark.more) for name in RECIPES),
        "by name",
        pytest.param(None, marks=pytest.mark.more),
    ],
)
def test_compiled_with_device_splits(recipe, fresh) -> None:
    """Eager's bits, one graph for every split, no break; random bytes come from the generator."""
    module = grouped(3, torch.float32)
    recipe = CustomRecipe(by_name) if recipe == "by name" else recipe

    def step(x, splits):
        with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            return module(x, splits)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, dy = data()
    graphs = None
    for sizes in (SIZES, (45, 0, 0), (1, 20, 3)):
        splits = torch.tensor(sizes)
        want = run_grouped(module, x, splits, dy, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(11)
        y = compiled(leaf, splits)
        y.backward(dy)
        same([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]], want)
        assert not counters["graph_break"]
        graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs == 1


@pytest.mark.more
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8_fwd_high_precision_bwd"])
def test_compiled_by_inductor(recipe, fresh) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()

    def step(x, splits):
        with autocast(recipe=recipe):
            return module(x, splits)

    compiled = torch.compile(step, fullgraph=True)
    for sizes in (SIZES, (1, 43, 1)):
        want = run_grouped(module, x, torch.tensor(sizes), dy, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf, torch.tensor(sizes))
        y.backward(dy)
        same([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]], want)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("spec", ["fp8_e4m3", "nvfp4;sr", "mxfp8_32x32", "nvfp4;rows", "bf16"])
def test_opcheck(spec) -> None:
    ops = torch.ops.hybridq
    x, _ = data(dtype=torch.bfloat16)
    offsets = torch.tensor([5, 5, 40], dtype=torch.int32)
    seed = torch.arange(3)
    for source in ("original", "rowwise_dequantized"):
        torch.library.opcheck(
            ops.encode_ragged.default,
            (x, offsets, spec, "nvfp4", None, None, seed),
            {"by_group": True, "col_source": source},
        )
    torch.library.opcheck(ops.amax_ragged.default, (x, offsets, spec, "columnwise"))
    torch.library.opcheck(ops.bias_grad_ragged.default, (x, offsets))


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("recipe", [None, "mxfp8", "bf16"])
def test_compiled_with_host_splits(recipe, fresh) -> None:
    module, (x, dy) = grouped(3, torch.float32), data()

    def step(x, splits):
        with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            return module(x, splits)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for sizes in ([5, 0, 40], [20, 20, 5], [0, 45, 0]):
        want = run_grouped(module, x, sizes, dy, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf, sizes)
        y.backward(dy)
        same([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]], want)
    assert not counters["graph_break"]
