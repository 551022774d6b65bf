"""Sampler: what a monitor is shown in a sampled step, and what it measures of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from .._torch_private import graph_task_id
from ..direction import DIRECTIONS, Direction
from ..distributed.scaling_history import plain_named_modules
from ..nn.autograd import WatchedProduct
from ..recipes import Plan, SlotPlan
from ..report import SlotStatistics, measure_slot
from ..report.precision.slot_statistics import held_plane
from .over_ranks import Sample

__all__ = ["Sampler", "names_of"]

#: Rows of a band start at multiples of this, so that columnwise blocks are those of the run.
_UNIT: Final = 128


class Sampler:
    """A product watcher that measures a part of what it is shown.

    Args:
        names: of the model's modules, by identity.
        rows: of each matrix, at most so many are quantized again.
        turn: which layers are quantized again: those that `takes` says.
        takes: is given the number of a layer in the order of the forward.
    """

    #: Experts that nothing quantizes run as they do.
    sees_plain = False

    def __init__(
        self, names: dict[int, str], rows: int, turn: int, takes: Callable[[int], bool]
    ) -> None:
        self._names, self._rows, self._turn, self._takes = names, rows, turn, takes
        self._seen: dict[str, int] = {}
        self.amaxes: dict[tuple[str, str], torch.Tensor] = {}
        self.planes: dict[tuple[str, str, Direction], SlotStatistics] = {}
        #: Tokens of groups, by layer and the groups' numbers among those of all ranks.
        self._tokens: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def __call__(self, product: WatchedProduct) -> Callable[[torch.Tensor], None] | None:
        """Measure the forward of a product; return what measures its gradient."""
        module: Any = product.module
        own = self._names.get(id(module))
        if own is None or not module.training:
            return None
        layer = f"{own}.{product.part}" if own and product.part else own or product.part
        is_whole = self._takes(self._seen.setdefault(layer, len(self._seen)))
        if graph_task_id() == -1:  # no recomputation, whose forward has been seen
            weights = product.weights()
            x = product.matrix()
            x = x.reshape(-1, x.shape[-1])
            if product.offsets is not None:
                ends = product.offsets.to(torch.int64)
                counts = ends.diff(prepend=ends.new_zeros(1))
                place = (layer, tuple(product.numbers))
                known = self._tokens.get(place)
                self._tokens[place] = counts if known is None else known + counts
            self._slot(layer, product, "input", x, is_whole)
            self._weights(layer, product, weights, is_whole)
        return lambda grad: self._slot(layer, product, "grad_output", grad.detach(), is_whole)

    def _weights(
        self, layer: str, product: WatchedProduct, weights: list[torch.Tensor], is_whole: bool
    ) -> None:
        for group, weight in enumerate(weights):
            self._amax(layer, "weight", weight)
            if is_whole and group == self._turn % len(weights):
                self._measure(layer, product, group, "weight", weight)

    def _slot(
        self, layer: str, product: WatchedProduct, slot: str, x: torch.Tensor, is_whole: bool
    ) -> None:
        self._amax(layer, slot, x)
        if not is_whole:
            return
        if product.offsets is None:
            self._measure(layer, product, 0, slot, x)
            return
        ends = [0, *product.offsets.tolist()]
        groups = [g for g in range(len(ends) - 1) if ends[g] < ends[g + 1] <= len(x)]
        if groups:  # one of those with tokens, another one each time
            g = groups[self._turn % len(groups)]
            self._measure(layer, product, g, slot, x[ends[g] : ends[g + 1]])

    def _amax(self, layer: str, slot: str, x: torch.Tensor) -> None:
        if not x.numel():
            return
        low, high = x.aminmax()
        amax = torch.maximum(high.float(), -low.float())
        known = self.amaxes.get((layer, slot))
        self.amaxes[layer, slot] = amax if known is None else torch.maximum(known, amax)

    def _measure(
        self, layer: str, product: WatchedProduct, group: int, slot: str, x: torch.Tensor
    ) -> None:
        plans, scales = product.plans, product.scales or [None]
        plan: Plan | None = plans[group % len(plans)]
        own: SlotPlan | None = None if plan is None else getattr(plan, slot)
        if own is None or plan is None or plan.is_plain or not x.numel():
            return
        held = product.held_by(group) if slot == "weight" else None
        texts = dict(zip(DIRECTIONS, (own.row, own.col), strict=True))
        # What the module holds is multiplied as it is: nothing is lost. Where it holds one plane,
        # the other comes from the same values (FSDP2 gathers it for the backward).
        is_held = {
            one: held_plane(held, one, text.spec, x.dtype) is not None
            for one, text in texts.items()
        }
        are_all = any(is_held.values()) and own.col_source == "original"
        made = [one for one in product.directions(slot) if not (are_all or is_held[one])]
        if not made:
            return
        found = measure_slot(self._band(x), own, slot, made, scales[group % len(scales)])
        for direction, statistics in found.items():
            if texts[direction].is_plain:
                continue
            key = (layer, slot, direction)
            known = self.planes.get(key)
            self.planes[key] = statistics if known is None else known + statistics

    def _band(self, x: torch.Tensor) -> torch.Tensor:
        """Return some rows of x: a band, its last row the one with the largest value of all.

        So a scale of the whole tensor is that of the run.
        """
        if len(x) <= self._rows:
            return x
        starts = range(0, len(x) - self._rows + 1, _UNIT)
        start = starts[self._turn % len(starts)]
        at = x.abs().argmax() // x.shape[1]
        return torch.cat((x[start : start + self._rows - 1], x[at].unsqueeze(0)))

    @property
    def layers(self) -> int:
        """How many layers were seen."""
        return len(self._seen)

    def sample(self, step: int) -> Sample:
        """Return what was measured, on the host.

        Args:
            step: its number.
        """
        amaxes = {key: float(one) for key, one in self.amaxes.items()}
        made = Sample(step, amaxes, self.planes)
        for (layer, numbers), tokens in self._tokens.items():
            made.add_tokens(layer, dict(zip(numbers, tokens.tolist(), strict=True)))
        return made


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules by identity; wrappers of torch are left out of them.

    Args:
        model: any, compiled, wrapped by DistributedDataParallel, or not.
    """
    found: dict[int, str] = {}
    for name, module in plain_named_modules(model):
        found.setdefault(id(module), name)
    return found
