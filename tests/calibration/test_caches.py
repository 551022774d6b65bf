"""KV caches under every name that forwards have for them, without transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration.caches import CACHE_ARGUMENTS, attentions, cache_argument, has_cache


class Cache:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        self.keys.append(keys)


class Attention(nn.Module):
    """Writes keys and twice their values into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx, self.proj = 0, nn.Linear(16, 16)

    def run(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        y = self.proj(x)
        if cache is not None:
            cache.update(y, 2 * y, self.layer_idx)
        return y


def attention(name: str) -> Attention:
    """One whose forward calls the cache `name`."""
    space: dict[str, Any] = {"Attention": Attention}
    forward = f"def forward(self, x, {name}=None): return self.run(x, {name})"
    exec(f"class Named(Attention):\n    {forward}", space)
    made: Attention = space["Named"]()
    return made


@pytest.mark.parametrize("by_place", [False, True])
@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_keys_and_values_are_seen_under_every_name(name: str, by_place: bool) -> None:
    model, cache, x = nn.Sequential(attention(name)), Cache(), torch.randn(4, 16)

    def step(model: nn.Module) -> None:
        model[0](x, cache) if by_place else model[0](x, **{name: cache})

    found = hybridq.calibrate(model, step, slots=("k", "v"))
    assert found.amax("0", "k") == cache.keys[0].abs().max()
    assert found.amax("0", "v") == 2 * cache.keys[0].abs().max()
    assert "update" not in vars(cache)


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_forward_with_a_cache_is_known_by_every_name(name: str) -> None:
    assert cache_argument(attention(name)) == name and list(attentions(attention(name))) == [""]
    assert has_cache({name: Cache()}) and not has_cache({name: None})
    assert has_cache({"use_cache": True}) and not has_cache({"use_cache": False})


def test_what_is_no_cache_is_not_touched() -> None:
    """A module may call a dict so, whose `update` is another thing."""
    model, table = attention("cache"), {}
    model.run = lambda x, cache: model.proj(x)
    hybridq.calibrate(model, lambda one: one(torch.randn(2, 16), cache=table))
    assert table == {}
