"""Experts in stacks: where scales of their hidden channels go, and which stacks take scales.

Source: arXiv:2211.10438, equation 3; that a scale passes through `activation(gate) * up` by way of
up is the same as in a dense gated layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..moe import ExpertsLayout
from ..tensor import is_quantized
from .products import Product
from .scale_sources import multiply

__all__ = ["ExpertSource", "hidden_sources", "reason_against_experts"]

#: Functions with `f(c x) = c f(x)` for positive c.
_HOMOGENEOUS: Final = ("relu",)


@dataclass(frozen=True)
class ExpertSource:
    """The rows of an expert's first matrix that make its hidden channels: up, not the gate.

    Args:
        module: of experts.
        layout: how it holds them; `reason_against_up` has none against it.
        expert: whose.
    """

    module: Any
    layout: ExpertsLayout
    expert: int

    def divide(self, scales: torch.Tensor) -> None:
        name, bias = self.layout.first[-1], self.layout.first_biases[-1]
        matrix = getattr(self.module, name).detach()[self.expert]
        rows = self._up(matrix.t() if self.layout.is_transposed else matrix)
        multiply(rows, (1.0 / scales)[:, None])
        if bias is not None:
            multiply(self._up(getattr(self.module, bias).detach()[self.expert]), 1.0 / scales)

    def _up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the part of the first product's channels that is up."""
        if not self.layout.has_gate or len(self.layout.first) == 2:
            return rows
        return rows[rows.shape[0] // 2 :] if self.layout.is_concatenated else rows[1::2]


def reason_against_up(layout: ExpertsLayout) -> str | None:
    """Return why no scale of hidden channels can go into an expert's up; None: one can.

    The hidden values are `activation(gate) * up`, linear in up; without a gate, `relu(up)`.

    Args:
        layout: of the experts.
    """
    if layout.gate_up is None:
        return "its experts are one product, which nothing of theirs comes before"
    if not isinstance(layout.activation, str):
        return "its activation is a function of its own, through which no scale is known to pass"
    if layout.has_gate or layout.activation in _HOMOGENEOUS:
        return None
    return f"no scale passes through its activation {layout.activation}, and there is no gate"


def reason_against_experts(own: tuple[Product, ...], users: Mapping[int, int]) -> str | None:
    """Return why matrices of a module of experts cannot be scaled; None: they can.

    Args:
        own: their products; none where the module is not known to hold experts.
        users: of each parameter, by its id, how many modules have it.
    """
    if not own or own[0].layout is None:
        return "its experts are held in a way that is not known"
    module, layout = own[0].module, own[0].layout
    if own[0].is_part:
        return "its experts are on several ranks; scale before they are dealt out"
    if layout.passes_others:
        return "experts among its own give what they are given"
    for name in dict.fromkeys((*(one.parameter for one in own), *layout.weights)):
        weight = getattr(module, name)
        if is_quantized(weight):
            return f"its {name} is quantized already"
        if weight.dim() != 3 or not weight.is_floating_point() or hasattr(weight, "full_tensor"):
            return f"its {name} is no stack of plain matrices on this rank"
    biases = [one for one in layout.first_biases if one is not None]
    for name in (*layout.weights, *biases):
        if users[id(getattr(module, name))] > 1:
            return f"its {name} is another module's, too"
    return None


def hidden_sources(
    of: Iterable[Product], users: Mapping[int, int]
) -> tuple[dict[Product, ExpertSource], dict[str, str]]:
    """Return what makes the hidden values of experts in stacks, for each second product.

    Args:
        of: the products that are quantized.
        users: of each parameter, by its id, how many modules have it.

    Returns:
        The sources; and the stacks of second matrices that have none, by name, with why.
    """
    made: dict[Product, ExpertSource] = {}
    reasons: dict[str, str] = {}
    for one in of:
        layout = one.layout
        if layout is None or one.expert is None or one.parameter != layout.down:
            continue
        if one.key not in reasons:
            why = reason_against_experts((one,), users) or reason_against_up(layout)
            if why is None:
                made[one] = ExpertSource(one.module, layout, one.expert)
            else:
                reasons[one.key] = why
    return made, reasons
