"""Where a model's inputs can be scaled, and the runs that show the channels of each."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels.inputs import wide, wide_device
from .gptq_matrix import Hessian
from .places import Place, input_places, places
from .products import Product, parameter_users
from .stages import Plan, Stage, plan

__all__ = ["Channels", "Search"]


class Channels:
    """Largest and mean magnitudes of the channels of an input, and its Hessian if wanted.

    Args:
        weight: `[rows, cols]`, a matrix that multiplies it.
        with_hessian: a Hessian is made, too.
    """

    def __init__(self, weight: torch.Tensor, with_hessian: bool) -> None:
        cols = weight.shape[1]
        self.amax = torch.zeros(cols, dtype=torch.float64, device=wide_device(weight.device))
        self.total = torch.zeros_like(self.amax)
        self.tokens = 0
        self.hessian = Hessian(cols, weight.device) if with_hessian else None

    def __call__(self, rows: torch.Tensor) -> None:
        """Add an input `[tokens, cols]`."""
        magnitudes = wide(rows.abs())
        self.amax = torch.maximum(self.amax, magnitudes.amax(0))
        self.total += magnitudes.sum(0)
        self.tokens += rows.shape[0]
        if self.hessian is not None:
            self.hessian.add(rows)


@dataclass(frozen=True)
class Search:
    """The places of a model, and the run that shows their inputs; Hessians are made if wanted."""

    order: Plan
    places: tuple[Place, ...]
    left: Mapping[str, str]
    with_hessian: bool

    @staticmethod
    def of(
        model: nn.Module,
        data: Iterable[Any],
        of: tuple[Product, ...],
        step: str,
        in_front: bool,
        with_hessian: bool,
    ) -> Search:
        """Return the places for these products."""
        folded, left = places(model, of)
        beside = [one for place in folded for one in place.consumers if one not in of]
        order = plan(model, data, (*of, *beside), step, squares=with_hessian)
        groups = [group for stage in order.stages for group in stage.groups]
        made = []
        for place in folded:
            why = _against(place, groups)
            if why is None:
                made.append(place)
            else:
                left.update(dict.fromkeys(place.names, why))
        if in_front:
            names = {one.name for place in made for one in place.consumers}
            unplaced = [group for group in groups if group[0].name not in names]
            fronts, left = input_places(unplaced, left, parameter_users(model))
            made += fronts
        return Search(order, tuple(made), left, with_hessian)

    def stages(self) -> Iterator[tuple[Place, dict[Product, Channels]]]:
        """Yield each place with what its consumers saw, when the last of them has seen all."""
        groups = [group for stage in self.order.stages for group in stage.groups]
        first = {one: group[0] for group in groups for one in group}
        waiting, seen = list(self.places), dict[Product, Channels]()
        for stage in self.order.stages:
            here = {group[0] for group in stage.groups}
            wanted = {first[o] for place in waiting for o in place.consumers if o in first} & here
            if not wanted:
                continue
            seen |= self._observed(stage, wanted)
            later = []
            for place in waiting:
                own = [one for one in place.consumers if one in first]  # some experts have none
                if all(first[one] in seen for one in own):
                    yield place, {one: seen[first[one]] for one in own}
                else:
                    later.append(place)
            waiting = later
            kept = {first[o] for place in waiting for o in place.consumers if o in first}
            seen = {one: channels for one, channels in seen.items() if one in kept}

    def _observed(self, stage: Stage, wanted: Container[Product]) -> dict[Product, Channels]:
        """Return what the first products of groups were given in a run."""
        seen: dict[Product, Channels] = {}

        def makes(product: Product) -> Channels | None:
            if product in wanted:
                seen[product] = Channels(product.weight(), self.with_hessian)
            return seen.get(product)

        self.order.observe(stage, makes)
        return seen


def _against(place: Place, groups: list[tuple[Product, ...]]) -> str | None:
    """Return why a place is none, as a run has shown; None: it is one.

    Args:
        place: of the table, or of experts.
        groups: the products of one input together. Experts are given rows of one, each its own.
    """
    own = [group for group in groups if not set(group).isdisjoint(place.consumers)]
    if not own:
        is_expert = place.consumers[0].expert is not None
        return "no token reached it" if is_expert else "no batch reached it"
    layers = {one for one in place.consumers if one.expert is None}
    of_layers = [set(group) for group in own if not layers.isdisjoint(group)]
    if (layers and of_layers != [layers]) or not set().union(*own) <= set(place.consumers):
        return "its input is not what the layers that the table names multiply, they alone"
    return None
