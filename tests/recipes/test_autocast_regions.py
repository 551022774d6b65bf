"""Regions of autocast whose code runs later than the region, or beside another one's."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
import torch

import hybridq
from hybridq import settings, te

autocasting = importlib.import_module("hybridq.recipes.autocast")


async def coroutine(layer: Any, x: Any) -> Any:
    return layer(x)


def generator(layer: Any, x: Any) -> Any:
    yield layer(x)


async def async_generator(layer: Any, x: Any) -> Any:
    yield layer(x)


class Model(torch.nn.Linear):
    """A class of a user's."""


@pytest.mark.parametrize("context", [hybridq.autocast, te.autocast])
@pytest.mark.parametrize("function", [coroutine, generator, async_generator, Model])
def test_what_runs_after_its_call_is_not_decorated(function, context) -> None:
    with pytest.raises(TypeError, match=r"decorates functions that have computed .* got an? "):
        context(recipe=None)(function)


def test_functions_are_decorated() -> None:
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    with hybridq.autocast(recipe="mxfp8"):
        wanted = layer(x)
    assert torch.equal(hybridq.autocast(recipe="mxfp8")(lambda a: layer(a))(x), wanted)
    assert torch.equal(hybridq.autocast(recipe="mxfp8")(layer)(x), wanted)
    assert not torch.equal(layer(x), wanted)


def test_regions_of_tasks_that_overlap_raise_and_leave_nothing_behind(monkeypatch) -> None:
    monkeypatch.setattr(autocasting, "has_compiled", lambda: False)
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    plain = layer(x)

    async def serve(*recipes: str) -> list[Any]:
        inside: list[str] = []
        all_inside, may_run = asyncio.Event(), asyncio.Event()

        async def ask(recipe: str) -> None:
            with hybridq.autocast(recipe=recipe):
                inside.append(recipe)
                if len(inside) == len(recipes):
                    all_inside.set()
                await may_run.wait()  # they wake in the order in which they came
                layer(x)

        tasks = [asyncio.ensure_future(ask(recipe)) for recipe in recipes]
        await all_inside.wait()
        may_run.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for recipes in (("mxfp8", "nvfp4"), ("mxfp8", "mxfp8", "mxfp8"), ("nvfp4", "mxfp8", "nvfp4")):
        found = asyncio.run(serve(*recipes))
        told = [one for one in found if isinstance(one, RuntimeError)]
        assert told and "must be left in the reverse order" in str(told[0])
        assert torch.equal(layer(x), plain)


def test_an_error_that_leaves_an_overlapped_region_is_not_hidden(monkeypatch) -> None:
    monkeypatch.setattr(autocasting, "has_compiled", lambda: False)
    first, second = hybridq.autocast(recipe="mxfp8"), hybridq.autocast(recipe="nvfp4")
    with pytest.raises(KeyError), first:
        second.__enter__()
        raise KeyError
    with pytest.raises(RuntimeError, match="reverse order"):
        second.__exit__(None, None, None)
    assert settings.current().recipe is None


def test_regions_that_nest_are_as_before(monkeypatch) -> None:
    monkeypatch.setattr(autocasting, "has_compiled", lambda: False)
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    outer = hybridq.autocast(recipe="mxfp8")
    with outer:
        wanted = layer(x)
        with hybridq.autocast(enabled=False):
            assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        with outer, hybridq.autocast(recipe="mxfp8", precision="exact"):
            assert torch.equal(layer(x), wanted)
        assert torch.equal(layer(x), wanted)
    assert settings.current().recipe is None
