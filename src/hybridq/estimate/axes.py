"""What the axes of a run move beside its sharding: tensor, sequence, context, pipeline parallelism.

All formulas are of activations: a rank's tokens by the model's width. Their sources:

- tensor parallelism: two all-reduces per layer each way, or with sequence parallelism an all-gather
  and a reduce-scatter in the place of each (Shoeybi et al. 2019; Korthikanti et al. 2022);
- Ulysses: all-to-alls of queries, keys, values and the output, each way (Jacobs et al. 2023);
- context parallelism: keys and values pass around a ring, and in the backward their gradients too
  (Liu et al. 2023);
- pipelines: idle time and microbatches at a time of 1F1B and its interleaved form (Narayanan et al.
  2021), of zero bubble (Qi et al. 2023) and of ZB-V (Qi et al. 2024), where a forward, a backward
  of inputs and one of weights take the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from ..distributed.pipelines import Formats, PlanePayload, formats_of
from ..errors import must_be_one_of

__all__ = ["SCHEDULES", "Axes", "AxisMoved", "attention_moved", "pipeline_moved", "tensor_moved"]

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Axes:
    """How a run's ranks are spread beside data parallelism, from the innermost axis outwards.

    Args:
        tp: ranks that share matrices.
        sp: ranks that share a sequence and exchange heads (Ulysses); they also shard parameters.
        cp: ranks that share a sequence and pass keys and values around; they also shard parameters.
        pp: ranks that share layers.
        sequence_parallel: tensor-parallel ranks share tokens between their matrices.
        microbatches: of a step.
        schedule: of the pipeline: one of `"gpipe"`, `"1f1b"`, `"interleaved"`,
            `"interleaved_zero_bubble"`, `"zbv"`.
        stages_per_rank: of the interleaved schedules; `"zbv"` has two, the others one.
        communication: as `pipeline_stage` takes it.
        ranks_per_node: neighbouring ranks with a fast network between them; None: not known.

    Raises:
        ValueError: a number is below 1, or does not go with the schedule, or an unknown schedule.
        SpecError: an unknown format.
    """

    tp: int = 1
    sp: int = 1
    cp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    communication: Any = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Axes: schedule {must_be_one_of(SCHEDULES, self.schedule)}")
        for name in ("tp", "sp", "cp", "pp", "microbatches", "ranks_per_node", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Axes: {name} must be an int of at least 1, got {value!r}")
        fixed = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(self.schedule)
        if self.stages_per_rank is not None and fixed not in (None, self.stages_per_rank):
            raise ValueError(
                f"Axes: stages_per_rank of {self.schedule} must be {fixed}, got "
                f"{self.stages_per_rank}"
            )
        formats_of(self.communication, "Axes")

    @property
    def formats(self) -> Formats:
        """What travels between stages."""
        return formats_of(self.communication, "Axes")

    @property
    def stages(self) -> int:
        """Stages on each rank; 2 where an interleaved schedule does not say."""
        return self.stages_per_rank or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold different parts of one model before it is sharded."""
        return self.tp * self.pp

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank of the pipeline has nothing to do."""
        if self.pp == 1 or self.schedule == "zbv":
            return 0.0
        work, idle = self.microbatches * self.stages, self.pp - 1
        if self.schedule == "interleaved_zero_bubble":
            return idle / (3 * work + idle)  # idle for one third of a forward and its backward
        return idle / (work + idle)

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations the first rank holds at most, in all its layers."""
        count, ranks, stages = self.microbatches, self.pp, self.stages
        if self.schedule == "gpipe" or ranks == 1:
            return float(count if self.schedule == "gpipe" else 1)
        if self.schedule in ("1f1b", "zbv"):
            return float(min(ranks, count))
        return min((stages - 1) * ranks + 2 * (ranks - 1) + 1, stages * count) / stages

    def level(self, ranks: int, stride: int) -> str:
        """Return which network a group of ranks needs: "node", "network" or "" if not known.

        Args:
            ranks: of the group.
            stride: between neighbours of it.
        """
        if self.ranks_per_node is None:
            return ""
        return "node" if self.ranks_per_node % (ranks * stride) == 0 else "network"


@dataclass(frozen=True)
class AxisMoved:
    """What collectives of one axis and purpose carry in a step, of the first rank.

    Attributes:
        what: it is for.
        kind: of collective, as `count_traffic` names it.
        ranks: in its group.
        nbytes: bytes that it is given: the larger of its input and its output.
        bf16_nbytes: those of values of 16 bits in the place of planes.
        level: as `Axes.level` says.
    """

    what: str
    kind: str
    ranks: int
    nbytes: int
    bf16_nbytes: int
    level: str = ""


def tensor_moved(axes: Axes, tokens: int, width: int, layers: int) -> list[AxisMoved]:
    """Return what tensor-parallel layers exchange of their activations, in 16 bits.

    Each layer has two pairs of a matrix cut by rows and one cut by columns: of attention, and of
    the feed-forward part. Embedding, head and loss are not counted.

    Args:
        axes: of the run.
        tokens: of the group, in a step.
        width: of the hidden states.
        layers: of the rank.
    """
    nbytes = 2 * layers * tokens * width * 2
    if axes.tp == 1 or not nbytes:
        return []
    kinds = ("all_gather", "reduce_scatter") if axes.sequence_parallel else ("all_reduce",)
    level = axes.level(axes.tp, 1)
    return [
        AxisMoved(f"hidden states, {when}", kind, axes.tp, nbytes, nbytes, level)
        for when in ("forward", "backward")
        for kind in kinds
    ]


def attention_moved(
    axes: Axes, tokens: int, width: int, kv: tuple[int, int], layers: int
) -> list[AxisMoved]:
    """Return what ranks that share sequences exchange in attention, in 16 bits.

    Args:
        axes: of the run.
        tokens: of this rank's part of the sequences, in a step.
        width: of the queries of the rank.
        kv: width of its keys and values together, and heads of each of them.
        layers: of the rank.
    """
    found, (size, heads) = [], kv
    per_value = 2 * layers * tokens
    if axes.sp > 1:
        # KV heads fewer than ranks are repeated.
        copies = max(1, -(-axes.sp // heads))
        nbytes = per_value * (2 * width + size * copies)
        level = axes.level(axes.sp, axes.tp)
        for when in ("forward", "backward"):
            found.append(AxisMoved(f"heads, {when}", "all_to_all", axes.sp, nbytes, nbytes, level))
    if axes.cp > 1:
        level, once = axes.level(axes.cp, axes.tp * axes.sp), per_value * size
        steps = (("forward", axes.cp - 1), ("backward", 2 * axes.cp - 1))
        for when, count in steps:
            nbytes = once * count
            what = f"keys and values, {when}"
            found.append(AxisMoved(what, "send", axes.cp, nbytes, nbytes, level))
    return found


def pipeline_moved(
    axes: Axes, tokens: int, width: int, stride: int, dtype: torch.dtype = torch.bfloat16
) -> list[AxisMoved]:
    """Return what the first rank of a pipeline sends and receives, under the recipe in force.

    Args:
        axes: of the run.
        tokens: of the rank, in a step.
        width: of the hidden states.
        stride: between neighbours of the pipeline.
        dtype: of the activations.
    """
    if axes.pp == 1 or not tokens:
        return []
    rows, count = -(-tokens // axes.microbatches), axes.microbatches
    level, found = axes.level(axes.pp, stride), []
    for is_forward, what in ((True, "activations of stages"), (False, "gradients of stages")):
        spec = axes.formats.spec(is_forward)
        values = rows * width * dtype.itemsize
        one = values if spec is None else PlanePayload(
            spec.resolve(dtype), (rows, width), dtype
        ).nbytes  # fmt: skip
        # Each of its stages but the first has one before it, each but the last one after it.
        ahead = 1 if axes.schedule == "zbv" else axes.stages
        behind = 1 if axes.schedule == "zbv" else axes.stages - 1
        sent, received = (ahead, behind) if is_forward else (behind, ahead)
        for kind, boundaries in (("send", sent), ("recv", received)):
            times = boundaries * count
            if times:
                parts = (axes.pp, times * one, times * values, level)
                found.append(AxisMoved(what, kind, *parts))
    return found
