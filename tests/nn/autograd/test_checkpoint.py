"""Recomputation: bitwise the gradients of a run without it, wherever the backward runs."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import hybridq
from hybridq.nn import Linear
from hybridq.recipes import autocast
from linear_model import Recorder, equal

RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", None)


def _model():
    return nn.Sequential(Linear(40, 48), nn.GELU(), nn.Dropout(0.2), Linear(48, 24))


def _context(recipe):
    return autocast(recipe=recipe) if recipe else contextlib.nullcontext()


def _run(model, x, dy, recipe, region=None, backward=None, between=None):
    """One step; `region(model, x)` is the forward, `backward(run)` runs the backward."""
    model.zero_grad()
    torch.manual_seed(4)
    leaf = x.detach().clone().requires_grad_()
    with _context(recipe):
        y = region(model, leaf) if region else model(leaf)
    if between:
        between(model, x)
    (backward or (lambda run: run()))(lambda: y.backward(dy))
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]


def _inside_another(recipe):
    def backward(run):
        with autocast(recipe=recipe):
            run()

    return backward


def _disabled(run):
    with autocast(enabled=False):
        run()


def _in_a_thread(run):
    failures = []

    def work():
        try:
            run()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


BACKWARDS = {
    "outside": lambda run: run(),
    "inside fp8_current": _inside_another("fp8_current"),
    "inside nvfp4": _inside_another("nvfp4"),
    "disabled": _disabled,
    "thread": _in_a_thread,
}


def _eval_forward(model, x):
    state = torch.get_rng_state()
    with torch.no_grad(), autocast(recipe="fp8_current"):
        model.eval()(x)
    model.train()
    torch.set_rng_state(state)


def _other_training_forward(model, x):
    state = torch.get_rng_state()
    with autocast(recipe="fp8_current"):
        model(x)
    model(x)
    torch.set_rng_state(state)


BETWEEN = {"nothing": None, "eval": _eval_forward, "other recipe": _other_training_forward}


def _region(use_reentrant, function=checkpoint):
    return lambda model, x: function(model, x, use_reentrant=use_reentrant)


#: On a GPU the backward runs in a thread of torch's own, which no `with` block has ever reached.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=DEVICES)
def case(request):
    torch.manual_seed(0)
    x, dy = torch.randn(6, 40), torch.randn(6, 24)
    return _model().to(request.param), x.to(request.param), dy.to(request.param)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bitwise_equal_gradients(case, recipe, use_reentrant, backward, between):
    expected = _run(*case, recipe)
    got = _run(*case, recipe, _region(use_reentrant), BACKWARDS[backward], BETWEEN[between])
    assert equal(expected, got)


def test_recipes_of_this_file_differ(case):
    """Else a wrong recipe in a recomputation would not be noticed."""
    results = [_run(*case, recipe) for recipe in (*RECIPES, "fp8_current")]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_really_recomputes(case, use_reentrant):
    model, x, dy = case
    x = x.clone().requires_grad_()
    with autocast(recipe="mxfp8"), Recorder() as forward:
        y = checkpoint(model, x, use_reentrant=use_reentrant)
    with Recorder() as backward:
        y.backward(dy)
    assert len(forward.encodes) == 4  # x and w of two layers
    assert len(backward.encodes) == 6  # the same again, and two gradients


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_nested_and_sequential(case, recipe, use_reentrant):
    def nested(model, x):
        def inner(x):
            return checkpoint(model[:2], x, use_reentrant=use_reentrant)

        return checkpoint(lambda x: model[2:](inner(x)), x, use_reentrant=use_reentrant)

    def sequential(model, x):
        return checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)

    expected = _run(*case, recipe)
    for region in (nested, sequential):
        for backward in ("outside", "inside nvfp4", "thread"):
            assert equal(expected, _run(*case, recipe, region, BACKWARDS[backward]))


def test_autocast_inside_the_region(case):
    def region(model, x):
        def forward(x):
            with autocast(recipe="mxfp8"):
                return model(x)

        return checkpoint(forward, x, use_reentrant=False)

    expected = _run(*case, "mxfp8")
    for outer in (None, "nvfp4"):
        for backward in BACKWARDS.values():
            assert equal(expected, _run(*case, outer, region, backward))


def test_torch_autocast_and_a_recipe_together(case):
    model, x, dy = case

    def mixed(model, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return model(x)

    def region(model, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return checkpoint(model, x, use_reentrant=False)

    dy = dy.bfloat16()
    expected = _run(model, x, dy, "nvfp4", mixed)
    assert equal(expected, _run(model, x, dy, "nvfp4", region))


def test_only_some_layers_are_recomputed(case):
    def region(model, x):
        return model[3](model[2](checkpoint(model[:2], x, use_reentrant=False)))

    assert equal(_run(*case, "nvfp4"), _run(*case, "nvfp4", region))


class Foreign(torch.autograd.Function):
    """A checkpoint implementation that hybridq knows nothing of."""

    @staticmethod
    def forward(ctx, model, x):
        ctx.model, ctx.rng = model, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.rng)
        with torch.enable_grad():
            y = ctx.model(x)
        torch.set_rng_state(state)
        torch.autograd.backward(y, dy)
        return None, x.grad


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_foreign_implementations_use_the_last_training_forward(case, recipe, backward):
    if case[1].is_cuda:
        pytest.skip("the Foreign of this test keeps the CPU's generator only")

    def region(model, x):
        return Foreign.apply(model, x)

    got = _run(*case, recipe, region, BACKWARDS[backward], _eval_forward)
    assert equal(_run(*case, recipe), got)


def test_a_recipe_that_is_set_in_a_backward_counts():
    layer, seen = Linear(32, 32), []

    def hook(grad):
        with autocast(recipe="fp8_current"), Recorder() as recorder, torch.no_grad():
            layer(grad)
        seen.extend(recorder.encodes)

    x = torch.randn(3, 32, requires_grad=True)
    with autocast(recipe="mxfp8"):
        y = layer(x)
    y.register_hook(hook)
    y.sum().backward()
    assert len(seen) == 2 and all("tensor" in row for row, _ in seen)


def _generator() -> str:
    """The name under which this torch runs its non-reentrant checkpoint."""
    from hybridq.recipes import replay

    return next(name for name in replay._GENERATORS if hasattr(torch.utils.checkpoint, name))


@pytest.mark.more
def test_importing_patches_nothing_and_the_first_module_does():
    code = (
        "import torch.utils.checkpoint as c\n"
        f"name = {_generator()!r}\n"
        "before = c.CheckpointFunction.forward, getattr(c, name)\n"
        "import hybridq, hybridq.nn\n"
        "now = c.CheckpointFunction.forward, getattr(c, name)\n"
        "assert now == before\n"
        "hybridq.nn.Linear(2, 2)\n"
        "now = c.CheckpointFunction.forward, getattr(c, name)\n"
        "assert now[0] is not before[0] and now[1] is not before[1]\n"
        "hybridq.nn.Linear(2, 2)\n"
        "assert c.CheckpointFunction.forward is now[0]\n"
        "import torch.distributed._composable.checkpoint_activation as a\n"
        "assert getattr(a, name, now[1]) is now[1]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_torch_without_the_entry_points_is_said(monkeypatch, caplog):
    from hybridq.recipes import replay

    monkeypatch.setattr(replay, "_installed", threading.Event())
    for name in replay._GENERATORS:
        monkeypatch.delattr(torch.utils.checkpoint, name, raising=False)
    monkeypatch.setattr(
        torch.utils.checkpoint.CheckpointFunction, "forward", staticmethod(lambda ctx, other: None)
    )
    replay.install()
    (said,) = caplog.messages
    assert re.search("cannot carry recipes.*other arguments.*gone", said)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_our_own_function_is_the_same(case, recipe, use_reentrant):
    expected = _run(*case, recipe)
    assert equal(_run(*case, recipe, _region(use_reentrant, hybridq.checkpoint)), expected)
    assert equal(_run(*case, recipe, lambda model, x: hybridq.checkpoint(model, x)), expected)


@pytest.mark.parametrize("function", [checkpoint, hybridq.checkpoint])
@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_recomputation_saves_products_and_runs_the_rest_again(case, recipe, function):
    model, x, dy = case
    names = (torch.ops.hybridq.gemm.default, torch.ops.aten.addmm.default)
    policy = functools.partial(create_selective_checkpoint_contexts, list(names))
    expected = _run(model, x, dy, recipe)
    ran = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran[op] += 1
            return op(*args, **(kwargs or {}))

    def region(model, x):
        return function(model, x, use_reentrant=False, context_fn=policy)

    def backward(run):
        with Watch():
            run()

    assert equal(_run(model, x, dy, recipe, region, backward), expected)
    if recipe:
        # dgrad and wgrad of two modules; no product of the forward again, but its casts.
        assert ran[torch.ops.hybridq.gemm.default] == 4
        assert ran[torch.ops.hybridq.encode.default] > 2
    else:
        assert ran[torch.ops.aten.addmm.default] == 0


def test_arguments_of_our_function():
    x = torch.ones(2, 4)
    assert torch.equal(hybridq.checkpoint(torch.add, x, x, tp_group=None), x + x)
    with pytest.raises(TypeError, match=r"checkpoint: function must be callable, got int"):
        hybridq.checkpoint(3, x)
    with pytest.raises(NotImplementedError, match=r"distribute_saved_activations must be left out"):
        hybridq.checkpoint(torch.neg, x, distribute_saved_activations=True)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_reentrant_recomputation_returns_the_bias_that_is_added_later(recipe: str | None) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(5)
        layer, x = hybridq.Linear(64, 32, return_bias=True), torch.randn(8, 64, requires_grad=True)
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            run = (
                functools.partial(hybridq.checkpoint, layer, use_reentrant=True)
                if recomputes
                else layer
            )
            y, bias = run(x)
        assert layer.bias.is_leaf  # else the backward would never end
        (y + bias).square().sum().backward()
        found.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
