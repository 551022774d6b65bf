"""The values of a plan: how a run is spread over ranks, and what each of them holds and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from .._text import Table, size_text
from ..errors import must_be_one_of

__all__ = ["Held", "Moved", "RunPlan", "Sharding"]

_POLICIES: Final = ("fsdp", "hsdp", "ddp")
_NOTES: Final = (
    "Each: bytes per parameter. In BF16: without the recipe, the same parameters and optimizer.",
    "+ masters: BF16 parameters, with masters and moments in FP32 (hybridq.optim.AdamW).",
    "Of a collective: bytes of an all-gather's output, a reduce-scatter's input, an all-reduce's",
    "buffer. A ring of n ranks moves (n-1)/n of them per rank, and of an all-reduce's twice that.",
)


@dataclass(frozen=True)
class Sharding:
    """How a run is spread over ranks.

    Args:
        world: ranks.
        policy: `"fsdp"`, `"hsdp"` (sharded over `shard` ranks, replicated over groups of them), or
            `"ddp"` (whole models).
        shard: of `"hsdp"`: ranks that share one model.
        param_dtype: that modules compute in, and that planes are made from; None: the parameters'
            own. As in FSDP2's `MixedPrecisionPolicy`.
        reduce_dtype: that gradients are reduced in; None: `param_dtype`. DDP reduces in the
            parameters' own dtype.
        reshard_after_forward: of `fully_shard`: None frees units after the forward and keeps the
            rest of the model, True frees all, False nothing.
        units: names of the modules that `fully_shard` is called on beside the model; None: the
            children of each outermost `nn.ModuleList` and `nn.ModuleDict`.

    Raises:
        ValueError: `world` or `shard` is below 1, `shard` does not divide `world`, or goes with
            another policy, or `policy` is unknown.
    """

    world: int
    policy: str = "fsdp"
    shard: int | None = None
    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    reshard_after_forward: bool | None = None
    units: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ValueError(f"Sharding: policy {must_be_one_of(_POLICIES, self.policy)}")
        if type(self.world) is not int or self.world < 1:
            raise ValueError(f"Sharding: world must be an int of at least 1, got {self.world!r}")
        if (self.shard is not None) != (self.policy == "hsdp"):
            raise ValueError(
                f"Sharding: shard goes with policy hsdp, and with no other, got shard={self.shard} "
                f"with {self.policy}"
            )
        if self.shard is not None and (self.shard < 1 or self.world % self.shard):
            raise ValueError(
                f"Sharding: shard must divide world, got {self.shard} with world {self.world}"
            )

    @property
    def ranks(self) -> int:
        """Ranks that share one model."""
        return {"fsdp": self.world, "hsdp": self.shard or 1, "ddp": 1}[self.policy]

    @property
    def replicas(self) -> int:
        """Models, each on `ranks` ranks."""
        return self.world // self.ranks


@dataclass(frozen=True)
class Held:
    """Memory of the rank with the largest shards.

    Attributes:
        what: it is for.
        nbytes: bytes.
        bf16_nbytes: what the same run holds without a recipe, quantized parameters and masters.
        bf16_masters_nbytes: what a run without a recipe holds whose parameters are BF16, with
            masters and moments in FP32 as `hybridq.optim.AdamW` keeps them.
    """

    what: str
    nbytes: int
    bf16_nbytes: int
    bf16_masters_nbytes: int


@dataclass(frozen=True)
class Moved:
    """What collectives of one purpose carry in a step.

    Attributes:
        what: it is for.
        kind: of collective, as `count_traffic` names it.
        ranks: in its group.
        num_values: parameters that it is about.
        nbytes: bytes that it is given on a rank: the larger of its input and its output.
        bf16_nbytes, bf16_masters_nbytes: those of the two runs without a recipe, as of `Held`.
    """

    what: str
    kind: str
    ranks: int
    num_values: int
    nbytes: int
    bf16_nbytes: int
    bf16_masters_nbytes: int

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes that each parameter costs."""
        return self.nbytes / self.num_values

    @property
    def network_nbytes(self) -> int:
        """Bytes that a rank sends where the ranks form a ring."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.nbytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class RunPlan:
    """What each rank of a run holds and moves; see `plan`.

    Attributes:
        recipe: its key, or `"bf16"`.
        num_params: of the whole model.
        sharding: over ranks.
        memory: by purpose.
        traffic: of one step, by purpose.
    """

    recipe: str
    num_params: int
    sharding: Sharding
    memory: tuple[Held, ...]
    traffic: tuple[Moved, ...]

    def nbytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of a step by kind of collective, as `count_traffic` counts them."""
        found: Counter[str] = Counter()
        for moved in self.traffic:
            found[moved.kind] += moved.nbytes
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    @property
    def held_nbytes(self) -> int:
        """Bytes of all memory that the plan knows of."""
        return _sums(self.memory)[0]

    @property
    def held_bf16_nbytes(self) -> int:
        """Bytes of the same memory in the run without a recipe."""
        return _sums(self.memory)[1]

    @property
    def held_bf16_masters_nbytes(self) -> int:
        """Bytes of the same memory in the run of BF16 parameters with FP32 masters."""
        return _sums(self.memory)[2]

    @property
    def moved_nbytes(self) -> int:
        """Bytes of all collectives of a step."""
        return _sums(self.traffic)[0]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, texts and numbers, for JSON."""
        made = asdict(self)
        for name in ("param_dtype", "reduce_dtype"):
            dtype = made["sharding"][name]
            made["sharding"][name] = None if dtype is None else str(dtype).removeprefix("torch.")
        for row, moved in zip(made["traffic"], self.traffic, strict=True):
            row["network_nbytes"] = moved.network_nbytes
            row["bytes_per_parameter"] = moved.bytes_per_parameter
        return made

    def table(self) -> Table:
        """Return a table: memory, then traffic, each beside the two runs without a recipe."""
        rows: list[tuple[str, str, str, Held | Moved]] = []
        for held in (*self.memory, Held("memory in all", *_sums(self.memory))):
            rows.append((held.what, "", "", held))
        for moved in self.traffic:
            kind = f"{moved.kind} of {moved.ranks}"
            rows.append((moved.what, kind, f"{moved.bytes_per_parameter:.3g}", moved))
        rows.append(("traffic in all", "", "", Held("", *_sums(self.traffic))))
        shape = self.sharding
        ranks = f"{shape.world} ranks" + (f" in groups of {shape.shard}" if shape.shard else "")
        return Table(
            f"{self.recipe}, {self.num_params / 1e9:.4g}e9 parameters, {shape.policy} on {ranks}: "
            "one rank, one step",
            ("", "collective", "each", "size", "in BF16", "ratio", "+ masters", "ratio"),
            tuple((what, kind, each, *_beside(one)) for what, kind, each, one in rows),
            _NOTES,
        )

    def __str__(self) -> str:
        return str(self.table())


def _sums(parts: Sequence[Held | Moved]) -> tuple[int, int, int]:
    return (
        sum(one.nbytes for one in parts),
        sum(one.bf16_nbytes for one in parts),
        sum(one.bf16_masters_nbytes for one in parts),
    )


def _beside(one: Held | Moved) -> tuple[str, ...]:
    found = [size_text(one.nbytes)]
    for other in (one.bf16_nbytes, one.bf16_masters_nbytes):
        found += [size_text(other), f"{one.nbytes / other:.3f}" if other else "-"]
    return tuple(found)
