"""`plan_axes`: a plan of a dense transformer whose ranks share more than data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .._text import Table, size_text
from ..recipes import Recipe, autocast
from .axes import Axes, AxisMoved, attention_moved, pipeline_moved, tensor_moved
from .dense_shape import DenseShape
from .run_plan import RunPlan, Sharding
from .run_planner import plan

__all__ = ["AxesPlan", "plan_axes"]


@dataclass(frozen=True)
class AxesPlan:
    """What the first rank of a run over several axes holds and moves; see `plan_axes`.

    Attributes:
        axes: of the run.
        sharded: the plan of this rank's part of the model over its data-parallel ranks.
        levels: of each row of its traffic, the network that it needs: "node", "network" or "".
        moved: what the axes move beside it.
        bubble: share of a step in which the rank waits for others of its pipeline.
        in_flight: microbatches whose activations it holds at most.
    """

    axes: Axes
    sharded: RunPlan
    levels: tuple[str, ...]
    moved: tuple[AxisMoved, ...]
    bubble: float
    in_flight: float

    def nbytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of a step by kind of collective, as `count_traffic` counts them."""
        found = Counter(self.sharded.nbytes_by_kind())
        for one in self.moved:
            found[one.kind] += one.nbytes
        return dict(found)

    def nbytes_by_level(self) -> dict[str, int]:
        """Return the bytes of a step by network: within a node, and between nodes."""
        found: Counter[str] = Counter()
        for row, level in zip(self.sharded.traffic, self.levels, strict=True):
            found[level] += row.nbytes
        for one in self.moved:
            found[one.level] += one.nbytes
        return dict(found)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, texts and numbers, for JSON."""
        made = self.sharded.as_dict()
        for row, level in zip(made["traffic"], self.levels, strict=True):
            row["level"] = level
        return {
            **made,
            "axes": asdict(self.axes),
            "axes_traffic": [asdict(one) for one in self.moved],
            "bubble": self.bubble,
            "microbatches_in_flight": self.in_flight,
            "nbytes_by_level": self.nbytes_by_level(),
        }

    def tables(self) -> list[Table]:
        """Return the table of the rank's part of the model, and that of the axes."""
        rows = [
            (
                one.what,
                f"{one.kind} of {one.ranks}",
                one.level,
                size_text(one.nbytes),
                size_text(one.bf16_nbytes),
                f"{one.nbytes / one.bf16_nbytes:.3f}",
            )
            for one in self.moved
        ]
        levels = self.nbytes_by_level()
        rows += [
            (f"all traffic, {level}", "", level, size_text(nbytes), "", "")
            for level, nbytes in sorted(levels.items())
            if level
        ]
        axes = ", ".join(f"{n} {getattr(self.axes, n)}" for n in ("tp", "sp", "cp", "pp"))
        notes = (
            f"Pipeline: {self.bubble:.1%} of a step idle, activations of {self.in_flight:g} "
            "microbatches at a time.",
        )
        own = Table(
            f"{axes}: activations, one rank, one step",
            ("", "collective", "level", "size", "in 16 bits", "ratio"),
            tuple(rows),
            notes,
        )
        return [self.sharded.table(), own]


def plan_axes(
    shape: DenseShape,
    recipe: Recipe | str | None,
    axes: Axes,
    sharding: Sharding,
    *,
    tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AxesPlan:
    """Return what the first rank of a run holds and moves whose ranks share more than data.

    Parameters are those of the rank's part of the layers and of their matrices
    (`DenseShape.model`), sharded over the ranks that are left, and planned by `plan`. The first
    rank of a pipeline has the embedding, and the most activations. Formulas and sources of the rest
    stand in the docstring of `hybridq.estimate.axes`.

    Args:
        shape: of the model.
        recipe: as for `plan`.
        axes: tensor, sequence, context and pipeline parallelism.
        sharding: of what is left; `world` counts all ranks of the run.
        tokens: of a rank in a step, all microbatches together; ranks that share a sequence have a
            part of it each.
        dtype: of the parameters.
        options: `optimizer`, `quantized_params`, `masters`, `moments`, as for `plan`.

    Returns:
        An AxesPlan.

    Raises:
        ValueError: the axes or `ranks_per_node` do not divide `world`, or the axes the shape, or as
            `plan` raises it.

    Source: ours, but for the formulas.

    Example:
        >>> from hybridq.estimate import Axes, DenseShape, Sharding, plan_axes
        >>> axes = Axes(tp=8, pp=4, microbatches=16, communication="mxfp8", ranks_per_node=8)
        >>> made = plan_axes(DenseShape.of(70e9), "mxfp8", axes, Sharding(256), tokens=65536)
        >>> f"{made.bubble:.2f}", [one.level for one in made.moved]
        ('0.16', ['node', 'node', 'network', 'network'])
    """
    world = sharding.world
    ranks = axes.model_ranks
    if world % (ranks * axes.sp * axes.cp):
        raise ValueError(
            f"plan_axes: tp * pp * sp * cp must divide world, got {axes.tp} * {axes.pp} * "
            f"{axes.sp} * {axes.cp} with world {world}"
        )
    if axes.pp * axes.stages > shape.layers and axes.pp > 1:
        raise ValueError(
            f"plan_axes: a pipeline must have a layer for each stage, got {shape.layers} layers "
            f"for {axes.pp * axes.stages} stages"
        )
    if shape.heads % (axes.tp * axes.sp):
        raise ValueError(
            f"plan_axes: tp * sp must divide the heads, got {axes.tp} * {axes.sp} with "
            f"{shape.heads} heads"
        )
    if axes.ranks_per_node is not None:
        # A run that one node has room for lies within it.
        axes = replace(axes, ranks_per_node=min(axes.ranks_per_node, world))
        if world % (axes.ranks_per_node or 1):
            raise ValueError(
                f"plan_axes: ranks_per_node must divide world, got {axes.ranks_per_node} with "
                f"world {world}"
            )
    stages = axes.stages if axes.pp > 1 else 1
    layers = -(-shape.layers // (axes.pp * stages)) * stages
    # The last stage lies on the first rank of a V.
    has_head = axes.pp == 1 or axes.has_v
    own = shape.model(dtype, layers=layers, parts=axes.tp, has_head=has_head)
    left = replace(sharding, world=world // ranks)
    held = math.ceil(tokens / axes.microbatches * axes.in_flight)
    made = plan(own, recipe, left, tokens=held, **options)
    kv_heads = -(-shape.kv_heads // axes.tp)
    width, kv = shape.hidden // axes.tp, kv_heads * shape.kv_size // shape.kv_heads
    # Tensor-parallel ranks have the same tokens.
    moved = tensor_moved(axes, tokens, shape.hidden, layers)
    moved += attention_moved(axes, tokens, width, (kv, kv_heads), layers)
    with autocast(enabled=recipe is not None, recipe=recipe):
        moved += pipeline_moved(axes, tokens, shape.hidden, world // axes.pp)
    strides = [
        axes.tp * (left.ranks if row.what == "gradients of shards" else 1) for row in made.traffic
    ]
    levels = tuple(
        axes.level(row.ranks, stride) for row, stride in zip(made.traffic, strides, strict=True)
    )
    return AxesPlan(axes, made, levels, tuple(moved), axes.bubble, axes.in_flight)
