"""`hybridq.Linear` beside `nn.Linear`: forward and backward on the device, and the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hybridq

from .case import Bench, Case
from .timing import Sample

__all__ = ["HOST_GOALS", "RECIPE_GOALS", "host_samples", "layer_cases", "recipes"]

#: Least ratio to nn.Linear in BF16: what Transformer Engine reaches on an H200 NVL.
RECIPE_GOALS = {"fp8_current": 1.57, "fp8_block": 1.40}

#: Most times the host time of nn.Linear, for one eager forward.
HOST_GOALS = {"no recipe": 1.5, "quantized": 6.0}

#: Recipes that many people use first: a budget may end the list early.
_FIRST = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd")


def recipes() -> tuple[str, ...]:
    """Return the names of all recipes that quantize anything."""
    known = [name for name in hybridq.recipes.names() if name not in ("bf16", "high_precision")]
    return (*_FIRST, *(name for name in known if name not in _FIRST))


def _step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: str) -> Callable[[], Any]:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        if recipe:
            with hybridq.autocast(recipe=recipe):
                y = layer(x)
        else:
            y = layer(x)
        y.backward(dy)
        return y, x.grad  # type: ignore[return-value]

    return run


def layer_cases(bench: Bench) -> list[Case]:
    """Return one training step per recipe; the first case is nn.Linear in BF16."""
    tokens, inner, outer = bench.linear
    flops = 6 * tokens * inner * outer
    layers: dict[tuple[type, bool], tuple[nn.Module, torch.Tensor, torch.Tensor]] = {}

    def parts(
        kind: type[nn.Module], has_bias: bool
    ) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        key = (kind, has_bias)  # by the class: both are named Linear
        if key not in layers:
            layer = kind(inner, outer, has_bias, device=bench.device, dtype=torch.bfloat16)
            x = bench.randn(tokens, inner, torch.bfloat16, 0).clone().requires_grad_()
            layers[key] = (layer, x, bench.randn(tokens, outer, torch.bfloat16, 0))
        return layers[key]

    def case(
        name: str,
        kind: type[nn.Module],
        recipe: str,
        compiled: bool = False,
        has_bias: bool = False,
    ) -> Case:
        words = ", bias" if has_bias else ""

        def make(i: int) -> Callable[[], Any]:
            layer, x, dy = parts(kind, has_bias)
            return _step(torch.compile(layer) if compiled else layer, x, dy, recipe)

        return Case(
            "linear",
            name + words,
            bench.linear,
            make,
            f"nn.Linear{words}" if kind is not nn.Linear else "",
            flops=flops,
            goal=RECIPE_GOALS.get(recipe),
            footprint=2 * (tokens * inner + inner * outer + 2 * tokens * outer),
            is_headline=True,
        )

    found = [case("nn.Linear", nn.Linear, "")]
    found += [case(name, hybridq.Linear, name) for name in _FIRST]
    # nn.Linear has a bias unless one says otherwise: what follows a product costs of its own.
    found.append(case("nn.Linear", nn.Linear, "", has_bias=True))
    found += [case(name, hybridq.Linear, name, has_bias=True) for name in _FIRST]
    found += [case(name, hybridq.Linear, name) for name in recipes()[len(_FIRST) :]]
    if bench.device == "cuda":  # compiling costs tens of seconds, so last
        found.append(case("mxfp8, compiled", hybridq.Linear, "mxfp8", compiled=True))
    return found


def host_samples(bench: Bench, rounds: int = 30, calls: int = 50) -> Iterator[tuple[str, Sample]]:
    """Yield the host's microseconds for one eager forward of a tiny layer, interleaved."""
    tokens, inner, outer = bench.host
    x = torch.randn(tokens, inner, device=bench.device, dtype=torch.bfloat16)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    plain, ours = nn.Linear(inner, outer, **options), hybridq.Linear(inner, outer, **options)

    def quantized(name: str) -> Callable[[], Any]:
        def run() -> torch.Tensor:
            with hybridq.autocast(recipe=name):
                return ours(x)

        return run

    cases: dict[str, Callable[[], Any]] = {
        "nn.Linear": lambda: plain(x),
        "no recipe": lambda: ours(x),
        **{name: quantized(name) for name in recipes()[:5]},
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    wait = torch.cuda.synchronize if bench.device == "cuda" else lambda: None
    for round_index in range(rounds + 2):
        for name, call in cases.items():
            wait()  # a full queue would make the host wait
            start = time.perf_counter()
            for _ in range(calls):
                call()
            passed = time.perf_counter() - start
            if round_index >= 2:
                found[name].append(1e6 * passed / calls)
    for name, values in found.items():
        yield name, Sample(tuple(values))
