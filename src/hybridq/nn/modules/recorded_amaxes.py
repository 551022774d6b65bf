"""Histories of delayed scaling from forwards that quantize nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import settings
from ...errors import warn_once
from ...recipes import Recipe, RecipeSource
from ...recipes.named import source
from ..autograd import WatchedProduct, watch_products
from ..delayed_scaling import ScalingState, places_of, states_of, update_states

__all__ = ["recording_amaxes"]


class _Recorder:
    """Records the amaxes of inputs and weights of products that nothing quantizes.

    Args:
        recipe: whose histories they are for.
    """

    sees_plain = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        #: What has recorded, by id; and how many products were seen.
        self.states: dict[int, ScalingState] = {}
        self.num_products = 0

    @torch.no_grad()
    def __call__(self, product: WatchedProduct) -> None:
        self.num_products += 1
        quantizes = any(plan is not None and not plan.is_plain for plan in product.plans)
        if quantizes or settings.current().recipe is not None:
            return  # what a region inside of this one quantizes records by itself
        module: Any = product.module
        plan = module.plan_of(self.recipe, product.part)
        places = [place.number for place in places_of(plan)]
        if not plan.is_delayed or not places:
            return
        states, x = states_of(module), product.matrix()
        names, ends = [product.part], [x.shape[0]]
        if product.offsets is not None:
            ends = product.offsets.tolist()
            names = [".".join(filter(None, (product.part, str(g)))) for g in range(len(ends))]
        groups, start = [states[name] for name in names], 0
        for state, weight, end in zip(groups, product.weights(), ends, strict=True):
            state.scales(plan, training=False)  # which takes the plan
            amaxes = state.forward_amaxes.data
            for first, tensor in ((0, x[start:end]), (2, weight)):
                own = [place for place in places if place in (first, first + 1)]
                if own and tensor.numel():
                    largest = tensor.detach().abs().amax().float()
                    amaxes[own] = torch.maximum(amaxes[own], largest)
            self.states[id(state)] = state
            start = end


@contextmanager
def recording_amaxes(recipe: RecipeSource | str | os.PathLike[str]) -> Iterator[None]:
    """Context: forwards in high precision make a recipe's histories of inputs and weights.

    At its end they are updated once, so that scales follow from them; those of gradients stay.
    With a process group (`reduce_amax`) every rank must run the same modules in it.

    Args:
        recipe: what `hybridq.autocast` takes; without delayed scaling nothing happens.

    Raises:
        TypeError, ValueError: it is no recipe, or no name of one.

    Warns once where no product of hybridq's modules was seen, as in compiled code.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(8, 8)
        >>> with hybridq.nn.recording_amaxes("fp8_delayed"):
        ...     y = layer(torch.full((2, 8), 2.0))
        >>> hybridq.state_dict_with_history(layer)["scaling.input.e4m3.scale"]
        tensor([224.])
    """
    recorder = _Recorder(source(recipe).current)
    with watch_products(recorder):
        yield
    if not recorder.num_products:
        warn_once(
            "nn.recording_amaxes",
            "calibrating: modules of hybridq must run inside, not compiled, got none; no amax was "
            "recorded",
        )
    update_states(list(recorder.states.values()))
