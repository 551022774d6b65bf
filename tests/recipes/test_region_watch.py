"""A region of `autocast` that quantizes nothing is warned of: once, and only where it is wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import HybridQWarning
from hybridq.recipes import autocast, region_watch

X = torch.ones(2, 32)
HOOKS = nn.modules.module._global_forward_pre_hooks


@pytest.fixture
def watch(monkeypatch):
    """The watch of a process that has done nothing yet."""
    made = region_watch.RegionWatch()
    monkeypatch.setattr(region_watch, "has_compiled", lambda: False)
    for name in ("recipes.autocast", "recipes.bind", "nn.modules.quantized_module"):
        monkeypatch.setattr(import_module(f"hybridq.{name}"), "WATCH", made)
    yield made
    assert not HOOKS


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def elsewhere(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_model_that_was_not_converted(watch):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    message = r"2 calls of torch.nn.Linear .*hybridq.convert"
    with pytest.warns(HybridQWarning, match=message) as said, autocast(recipe="mxfp8"):
        model(X)
    assert said[0].filename == __file__
    assert not watch.is_open


def test_it_is_said_once(watch):
    model = nn.Linear(32, 32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for recipe in ("mxfp8", "nvfp4"):
            with autocast(recipe=recipe), torch.no_grad():
                model(X)
    assert len(said) == 1


def test_modules_that_run_in_another_thread(watch):
    layer = hybridq.Linear(32, 32)
    message = "without a recipe in another thread"
    with pytest.warns(HybridQWarning, match=message), autocast(recipe="mxfp8"):
        elsewhere(lambda: layer(X))


def train(model):
    with autocast(recipe="mxfp8"):
        model(X)


def other_thread_with_a_recipe(model):
    with autocast(recipe="mxfp8"):
        elsewhere(lambda: train(hybridq.convert(nn.Sequential(model))))


def fails(model):
    with pytest.raises(RuntimeError), autocast(recipe="mxfp8"):
        model(X)
        raise RuntimeError


def nested(model):
    converted = hybridq.convert(nn.Sequential(nn.Linear(32, 32)))
    with autocast(recipe="mxfp8"):
        with autocast(recipe="nvfp4"):
            model(X)
        converted(X)


def high_precision(model):
    for recipe in ("bf16", "high_precision"):
        with autocast(recipe=recipe):
            model(X)


def not_enabled(model):
    with autocast(enabled=False, recipe="mxfp8"):
        model(X)


def converted(model):
    own = hybridq.convert(nn.Sequential(nn.Linear(32, 32)))
    with autocast(recipe="mxfp8"):
        own(model(X))  # a layer that was left alone runs before


def optimizer_and_data(model):
    model(X).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    with autocast(recipe="mxfp8"):
        optimizer.step()
        list(torch.utils.data.DataLoader(list(X)))
        nn.functional.gelu(X)


def quantized_weights(model):
    model.weight = nn.Parameter(hybridq.quantize(model.weight.data, "mxfp8"), requires_grad=False)
    with autocast(recipe="mxfp8"), torch.no_grad():
        model(X)


def outside_of_modules(model):
    with autocast(recipe="mxfp8"):
        hybridq.gemm(hybridq.quantize(X, "mxfp8"), hybridq.quantize(X, "mxfp8"))


def another_thread_meanwhile(model):
    with autocast(recipe="mxfp8"):
        elsewhere(lambda: model(X))  # not of this region


@pytest.mark.parametrize(
    "use",
    [
        other_thread_with_a_recipe,
        *(fails, nested, high_precision, not_enabled, converted, optimizer_and_data),
        *(quantized_weights, outside_of_modules, another_thread_meanwhile),
    ],
)
def test_what_is_no_mistake(watch, silent, use):
    use(nn.Linear(32, 32))


def test_nothing_is_watched_once_something_is_quantized(watch, silent):
    train(hybridq.Linear(32, 32))
    assert not watch.is_open
    train(nn.Linear(32, 32))


def test_regions_without_a_linear_layer_are_watched_for_a_while(watch, silent):
    for _ in range(region_watch.MOST_REGIONS):
        assert watch.is_open
        with autocast(recipe="mxfp8"):
            nn.ReLU()(X)
    assert not watch.is_open


def test_compiled_code_is_left_alone(watch, silent, monkeypatch):
    monkeypatch.setattr(region_watch, "has_compiled", lambda: True)
    with autocast(recipe="mxfp8"):
        assert not HOOKS
    assert not watch.is_open


def test_what_is_compiled_inside_of_a_region_is_one_graph(watch):
    layer = hybridq.Linear(32, 32)
    with autocast(recipe="mxfp8"):
        assert HOOKS
        y = torch.compile(lambda x: layer(x), fullgraph=True, backend="aot_eager")(X)
        assert torch.equal(layer(X), y) and not watch.is_open


def test_a_strict_export_is_told_what_stands_in_its_way(watch, recwarn):
    layer = hybridq.Linear(32, 32)

    def exported():
        with autocast(recipe="mxfp8"):
            return torch.export.export(nn.Sequential(layer), (X,), strict=True)

    try:
        exported()
    except Exception as error:
        # Errors have notes from Python 3.11 on; before, it is a warning.
        notes = [*getattr(error, "__notes__", ()), *(str(one.message) for one in recwarn)]
        assert any("strict=True) traces no hooks" in note for note in notes)
    assert not watch.is_open
    with autocast(recipe="mxfp8"):
        assert torch.equal(exported().module()(X), layer(X))


@pytest.mark.more
def test_in_a_process_of_its_own():
    code = """
import torch, hybridq
for _ in range(2):
    with hybridq.autocast(recipe="mxfp8"):
        torch.nn.Linear(32, 32)(torch.ones(2, 32))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stderr
    assert done.count("autocast: nothing was quantized: 1 calls of torch.nn.Linear") == 1
