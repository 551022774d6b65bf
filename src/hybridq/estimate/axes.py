"""What the axes of a run move beside its sharding: tensor, sequence, context, pipeline parallelism.

All formulas are of activations: a rank's tokens by the model's width. Their sources:

- tensor parallelism: two all-reduces per layer each way, or with sequence parallelism an all-gather
  and a reduce-scatter in the place of each (Shoeybi et al. 2019; Korthikanti et al. 2022);
- Ulysses: all-to-alls of queries, keys, values and the output, each way (Jacobs et al. 2023), as
  values or as rowwise planes along the features of a head, a message for each rank;
- context parallelism: ring attention (Liu et al. 2023) as torch computes it by default: one gather
  of all keys and values each way, and their gradients around the ring in FP32;
- pipelines: idle time and microbatches at a time of 1F1B and its interleaved form (Narayanan et al.
  2021), of zero bubble (Qi et al. 2023), ZB-V (Qi et al. 2024) and DualPipeV (DeepSeek-AI 2024),
  where a forward, a backward of inputs and one of weights take the same time. A step ends when its
  last rank has ended. With fewer microbatches than ranks, and of the V schedules with fewer than
  twice as many, the formulas are ours, of the orders that torch's schedules have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from ..distributed.collectives import formats_of_directions
from ..distributed.pipelines import Formats, PlanePayload, formats_of
from ..distributed.sequence import copies_of_heads
from ..errors import must_be_one_of
from ..formats import PlaneSpec

__all__ = ["SCHEDULES", "Axes", "AxisMoved", "attention_moved", "pipeline_moved", "tensor_moved"]

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
#: Their ranks have one stage from the front and one from the end.
_V_SCHEDULES: Final = ("zbv", "dualpipev")


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
            `"interleaved_zero_bubble"`, `"zbv"`, `"dualpipev"`.
        stages_per_rank: of the interleaved schedules; V schedules have two, the others one.
        communication: as `pipeline_stage` takes it.
        ranks_per_node: neighbouring ranks with a fast network between them; None: not known.
            More than the run has: it lies within one node.
        sp_communication: of `sp`, as `sequence_parallel` takes it: a format, a pair of them, or
            None: values.

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
    sp_communication: Any = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Axes: schedule {must_be_one_of(SCHEDULES, self.schedule)}")
        for name in ("tp", "sp", "cp", "pp", "microbatches", "ranks_per_node", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Axes: {name} must be an int of at least 1, got {value!r}")
        fixed = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(self.schedule)
        if self.stages_per_rank is not None and fixed not in (None, self.stages_per_rank):
            raise ValueError(
                f"Axes: stages_per_rank of {self.schedule} must be {fixed}, got "
                f"{self.stages_per_rank}"
            )
        if self.schedule == "dualpipev" and self.pp > 1 and self.microbatches < 2 * self.pp:
            raise ValueError(
                f"Axes: dualpipev must have twice as many microbatches as ranks, got "
                f"{self.microbatches} on {self.pp}"
            )
        formats_of(self.communication, "Axes")
        self.sp_specs  # noqa: B018  (raises)

    @property
    def has_v(self) -> bool:
        """Whether the first rank of the pipeline has its last stage too."""
        return self.schedule in _V_SCHEDULES

    @property
    def formats(self) -> Formats:
        """What travels between stages."""
        return formats_of(self.communication, "Axes")

    @property
    def sp_specs(self) -> tuple[PlaneSpec | None, PlaneSpec | None]:
        """What travels around attention forward and backward; None: values."""
        given = formats_of_directions("Axes: sp_communication", self.sp_communication)
        forward, backward = (PlaneSpec.parse(one) if one else None for one in given)
        return forward, backward

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
        """Share of a step, of all ranks, in which a rank of the pipeline has nothing to do."""
        if self.pp == 1:
            return 0.0
        work = 3 * self.microbatches * self.stages
        return 1 - work / self._duration

    @property
    def _duration(self) -> int:
        """How long a step takes; a forward of a stage takes 1, both backwards 2."""
        count, ranks, stages = self.microbatches, self.pp, self.stages
        through = ranks * stages  # stages that a microbatch passes
        if self.has_v:
            return max(6 * count + ranks - 1, 4 * (count + ranks) - 2)
        if self.schedule == "interleaved_zero_bubble":
            full = 3 * count * stages + ranks - 1
            if count >= ranks:
                return full
            return max(full + (ranks - count) * stages, 2 * (through + count) - 1)
        return 3 * max(count * stages + ranks - 1, count + through - 1)

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations the first rank holds at most, in all its layers."""
        count, ranks, stages = self.microbatches, self.pp, self.stages
        if ranks == 1:
            return 1.0
        if self.schedule == "gpipe":
            return float(count)
        if self.schedule == "zbv":
            return min(ranks, (count + 1) / 2)
        if self.schedule == "dualpipev":
            return ranks + 0.5
        if self.schedule == "1f1b":
            return float(min(ranks, count))
        together = count // max(1, count // ranks)  # microbatches that pass a stage in a row
        last = ranks if self.schedule == "interleaved_zero_bubble" else 2 * ranks - 1
        return min((stages - 1) * together + last, stages * count) / stages

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

    Raises:
        ValueError: Ulysses' ranks do not divide the heads of queries, or those of keys do not.
    """
    found: list[AxisMoved] = []
    size, heads = kv
    per_value = 2 * layers * tokens

    def move(what: str, kind: str, ranks: int, nbytes: int, stride: int, planes: int = -1) -> None:
        own = nbytes if planes < 0 else planes
        found.append(AxisMoved(what, kind, ranks, own, nbytes, axes.level(ranks, stride)))

    if axes.sp > 1:
        # KV heads that the ranks do not divide are repeated.
        copies = copies_of_heads(width * 2 * heads // size, heads, axes.sp)
        nbytes = per_value * (2 * width + size * copies)
        features = size // (2 * heads)
        rows = -(-tokens // axes.microbatches)
        # Each rank's heads of queries, keys and values, and back of the result.
        messages = [rows * one // (features * axes.sp) for one in (width + size * copies, width)]
        for when, spec in zip(("forward", "backward"), axes.sp_specs, strict=True):
            planes = -1
            if spec is not None:
                own = spec.resolve(torch.bfloat16)
                each = sum(own.nbytes(one, features) for one in messages)
                planes = each * axes.sp * axes.microbatches * layers
            move(f"heads, {when}", "all_to_all", axes.sp, nbytes, axes.tp, planes)
    if axes.cp > 1:
        every = per_value * size * axes.cp
        for when in ("forward", "backward"):
            move(f"keys and values, {when}", "all_gather", axes.cp, every, axes.tp * axes.sp)
        move("gradients of keys and values", "all_to_all", axes.cp, 2 * every, axes.tp * axes.sp)
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
        ahead = 1 if axes.has_v else axes.stages
        behind = 1 if axes.has_v else axes.stages - 1
        sent, received = (ahead, behind) if is_forward else (behind, ahead)
        for kind, boundaries in (("send", sent), ("recv", received)):
            times = boundaries * count
            if times:
                parts = (axes.pp, times * one, times * values, level)
                found.append(AxisMoved(what, kind, *parts))
    return found
