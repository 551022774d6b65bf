"""What experts over ranks move and hold: dispatch and combine by format, and a rank's experts.

Formulas, of one layer: a rank has `tokens * top` rows; each travels to its expert's rank and back,
and so do gradients: four messages. Of the rows `own / experts` stay on the rank, those of the
experts of its neighbours stay within the node, the rest goes over the network, if experts are asked
for alike. A rank whose experts are asked for more than others, by `imbalance`, or that has more of
them, receives so many times as many rows, and its message is the larger one. Counts, `experts + ep`
numbers of 8 bytes, go ahead.

Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._text import Table, size_text
from ..expert_parallel.plans import experts_by_rank
from ..formats import PlaneSpec
from ..formats.row_format import row_format
from .axes import AxisMoved

__all__ = ["ExpertsPlan", "ExpertsShape", "plan_experts"]


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of a model.

    Args:
        experts: of a layer.
        inner: their width.
        top: how many a token goes to.
        hidden: features of a token.
        layers: that have experts.

    Raises:
        ValueError: a number is below 1, or there are fewer experts than a token goes to.
    """

    experts: int
    inner: int
    top: int
    hidden: int
    layers: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"ExpertsShape: {name} must be an int of at least 1, got {value!r}"
                )
        if self.top > self.experts:
            raise ValueError(
                f"ExpertsShape: top must be at most the experts, got {self.top} of {self.experts}"
            )

    @staticmethod
    def of(text: str, top: int, hidden: int, layers: int) -> ExpertsShape:
        """Return the shape that a text names.

        Args:
            text: `"128x768"`: experts of a layer, and their width.
            top, hidden, layers: as the fields.

        Raises:
            ValueError: it is no such text.
        """
        experts, _, inner = text.partition("x")
        if not (experts.isdigit() and inner.isdigit()):
            raise ValueError(
                f"ExpertsShape: experts must be as 128x768, how many and how wide, got {text!r}"
            )
        return ExpertsShape(int(experts), int(inner), top, hidden, layers)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down."""
        return 3 * self.inner * self.hidden


@dataclass(frozen=True)
class ExpertsPlan:
    """What a rank moves for its experts, and holds; see `plan_experts`.

    Attributes:
        shape: of the experts.
        ep: ranks that have other experts.
        moved: messages of a step, of all layers; bytes of the most asked rank.
        shares: of a rank's rows: that stay on it, that go within its node, and over the network.
        params: of the experts that the first rank has, in all layers.
        arrived_nbytes: values of the rows that a layer of the most asked rank receives.
    """

    shape: ExpertsShape
    ep: int
    moved: tuple[AxisMoved, ...]
    shares: tuple[float, float, float]
    params: int
    arrived_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all messages of a step."""
        return sum(one.nbytes for one in self.moved)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, texts and numbers, for JSON."""
        return {**asdict(self), "nbytes": self.nbytes}

    def table(self) -> Table:
        """Return the table of the messages."""
        rows = [
            (one.what, size_text(one.nbytes), size_text(one.bf16_nbytes), _ratio(one))
            for one in self.moved
        ]
        own, node, network = self.shares
        notes = (
            f"{self.params:,} parameters of experts on the first rank; "
            f"{size_text(self.arrived_nbytes)} of tokens arrive in a layer of the most asked rank.",
            f"Of a rank's rows {own:.1%} stay, {node:.1%} go within the node, {network:.1%} over "
            "the network.",
        )
        titles = ("messages of experts, a step", "bytes", "in BF16", "ratio")
        return Table(f"Experts over {self.ep} ranks", titles, tuple(rows), notes)


def _ratio(one: AxisMoved) -> str:
    return f"{one.nbytes / one.bf16_nbytes:.3f}" if one.bf16_nbytes else ""


def plan_experts(
    shape: ExpertsShape,
    ep: int,
    *,
    tokens: int,
    dispatch: str | tuple[str | None, str | None] | None = None,
    combine: str | tuple[str | None, str | None] | None = None,
    imbalance: float = 1.0,
    ranks_per_node: int | None = None,
) -> ExpertsPlan:
    """Return what the most asked of `ep` ranks moves in a step, and what a rank holds.

    Args:
        shape: of the experts.
        ep: ranks that have other experts.
        tokens: of a rank in a step.
        dispatch, combine: formats, as `hybridq.moe.parallelize_experts` takes them; None: BF16.
        imbalance: rows that the most asked rank receives over the mean; at least what the rank with
            the most experts receives where all are asked for alike.
        ranks_per_node: neighbouring ranks with a fast network; None: all.

    Raises:
        ValueError: a rank would have no expert, or a number is below 1, or the ranks of a node
            neither divide `ep` nor are more.
        SpecError: a format that tokens do not travel in.

    Source: ours.

    Example:
        >>> from hybridq.estimate import ExpertsShape, plan_experts
        >>> shape = ExpertsShape(experts=128, inner=768, top=8, hidden=2048, layers=48)
        >>> made = plan_experts(shape, 64, tokens=8192, dispatch="mxfp8", combine="mxfp8")
        >>> round(made.nbytes / sum(one.bf16_nbytes for one in made.moved), 3)
        0.516
    """
    if ep < 1 or tokens < 0 or not 1 <= imbalance < math.inf:
        raise ValueError(
            "plan_experts: ep must be at least 1, tokens at least 0 and imbalance at least 1, got "
            f"{ep}, {tokens} and {imbalance}"
        )
    near = ep if ranks_per_node is None else min(ranks_per_node, ep)
    if near < 1 or ep % near:
        raise ValueError(
            f"plan_experts: ranks_per_node must divide ep={ep} or be more, got {ranks_per_node}"
        )
    sizes = experts_by_rank(shape.experts, ep)
    rows = int(tokens * shape.top * max(imbalance, sizes[0] * ep / shape.experts))
    moved = []
    for what, given in (("dispatch", dispatch), ("combine", combine)):
        pair = given if isinstance(given, tuple) else (given, given)
        for name, one in zip((what, f"gradient of {what}"), pair, strict=True):
            nbytes = shape.layers * rows * _row_nbytes(one, shape.hidden)
            bf16 = shape.layers * rows * shape.hidden * 2
            moved.append(AxisMoved(f"{name}, {one or 'bf16'}", "all_to_all", ep, nbytes, bf16))
    counts = shape.layers * 8 * max(shape.experts + ep, ep * (sizes[0] + 1))
    moved.append(AxisMoved("counts", "all_to_all", ep, counts, counts))
    parts = (sizes[0], sum(sizes[1:near]), sum(sizes[near:]))
    own, node, network = (part / shape.experts for part in parts)
    return ExpertsPlan(
        shape,
        ep,
        tuple(moved),
        (own, node, network),
        shape.layers * sizes[0] * shape.expert_params,
        rows * shape.hidden * torch.bfloat16.itemsize,
    )


def _row_nbytes(text: str | None, hidden: int) -> int:
    """Return the bytes of a row on its way."""
    if not text:
        return 2 * hidden
    spec = PlaneSpec.parse(row_format("plan_experts", text))
    return spec.resolve(torch.bfloat16).nbytes(1, hidden)
