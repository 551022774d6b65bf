"""Rows of a precision report: of each plane of a slot, of each product, and of bad values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from ...direction import Direction
from .slot_statistics import GNR_LINE, ExpertLoss, SlotStatistics

__all__ = ["KEYS", "BadValue", "ProductShape", "ProductStatistics", "SlotRow"]


@dataclass(frozen=True)
class SlotRow:
    """What one plane of a slot loses in one format.

    Args:
        layer: qualified name of the module in the model, and of its part.
        role: name that recipes are asked by; empty where `hybridq.convert` was not called.
        tensor: `"input"`, `"weight"` or `"grad_output"`; of quantized attention `"query"`,
            `"key"`, `"value"`, `"attention_weights"`, `"grad_attention"` or `"grad_scores"`.
        direction: of the plane; operands of attention have a rowwise one.
        format: as `hybridq.recipe` takes it.
        in_run: the run itself multiplies this plane; else it is what would be.
        statistics: of all its tensors.
        order: of the first of them among all that the run made.
        loss_change: what the slot's own format changes of the loss; None: it was not asked.
        experts: what each expert's tensors lose, by its number among those of all ranks; of those
            that had tokens. Empty: the layer has none.
    """

    layer: str
    role: str
    tensor: str
    direction: Direction
    format: str
    in_run: bool
    statistics: SlotStatistics
    order: int = 0
    loss_change: float | None = None
    experts: Mapping[int, ExpertLoss] = field(default_factory=dict, repr=False)

    @property
    def worst_expert(self) -> int | None:
        """Number of the expert with the largest severity; None: there are none."""
        return max(self.experts, key=lambda one: self.experts[one].severity, default=None)

    @property
    def severity(self) -> float:
        """By which rows are ranked: that of all tensors, or of the worst expert if it is larger."""
        worst = self.worst_expert
        own = self.statistics.severity
        return own if worst is None else max(own, self.experts[worst].severity)

    @property
    def is_plain(self) -> bool:
        """Whether the plane is the tensor as it is."""
        return self.format == "bf16"

    @property
    def gradient_to_noise(self) -> float | None:
        """Of a gradient its norm over that of its quantization noise; None of other tensors."""
        return self.statistics.signal_to_noise if self.tensor.startswith("grad_") else None

    @property
    def is_below_line(self) -> bool:
        """Whether it is a gradient below sqrt(3) times its noise. Source: arXiv:2505.19115."""
        ratio = self.gradient_to_noise
        return ratio is not None and ratio < GNR_LINE

    def value(self, key: str) -> float | None:
        """Return a number to sort by, larger being worse; None: there is none.

        Args:
            key: one of `KEYS`.
        """
        if key == "gradient_to_noise":
            ratio = self.gradient_to_noise
            return None if ratio is None else -ratio
        if key == "snr_db":
            return None if self.statistics.snr_db is None else -self.statistics.snr_db
        if key in ("loss_change", "severity"):
            own: float | None = getattr(self, key)
            return own
        found: float | None = getattr(self.statistics, key)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON can hold them: None where one is not finite."""
        own = self.statistics
        scales = {str(key): count for key, count in sorted(own.scales.items())}
        numbers = {
            "relative_error": own.relative_error,
            "bulk_error": own.bulk_error,
            "snr_db": own.snr_db,
            "underflow_share": own.underflow_share,
            "saturation_share": own.saturation_share,
            "outlier_share": own.outlier_share,
            "amax": own.amax,
            "gradient_to_noise": self.gradient_to_noise,
            "loss_change": self.loss_change,
            "severity": self.severity,
        }
        return {
            "layer": self.layer,
            "tensor": self.tensor,
            "direction": self.direction,
            "format": self.format,
            "in_run": self.in_run,
            **{key: _finite(one) for key, one in numbers.items()},
            "values": own.values,
            "not_finite": own.bad,
            "worst_expert": self.worst_expert,
            "scale_exponents": scales,
        }


#: What rows may be sorted by, the worst first.
KEYS: Final = (
    *("severity", "relative_error", "bulk_error", "snr_db", "underflow_share"),
    *("saturation_share", "outlier_share", "amax", "gradient_to_noise", "loss_change", "bad"),
)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class ProductStatistics:
    """What quantized operands add to the result of a GEMM; the exact one is of the same operands.

    Args:
        layer: as in `SlotRow`.
        gemm: `"fprop"`, `"dgrad"` or `"wgrad"`.
        format: of both operands, or `"a x b"`.
        in_run: as in `SlotRow`.
        noise, signal: sums of squares of the difference, and of the exact result, in FP64.
    """

    layer: str
    gemm: str
    format: str
    in_run: bool
    noise: float
    signal: float

    @property
    def relative_error(self) -> float | None:
        """Norm of the difference over that of the exact result; None: undefined."""
        if not math.isfinite(self.noise) or not math.isfinite(self.signal):
            return None
        if self.signal == 0.0:
            return 0.0 if self.noise == 0.0 else None
        return math.sqrt(self.noise / self.signal)

    def __add__(self, other: ProductStatistics) -> ProductStatistics:
        """Return the sums of both."""
        return replace(self, noise=self.noise + other.noise, signal=self.signal + other.signal)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "layer": self.layer,
            "gemm": self.gemm,
            "format": self.format,
            "in_run": self.in_run,
            "relative_error": self.relative_error,
        }


@dataclass(frozen=True)
class ProductShape:
    """Sizes of a layer's products, for those who ask how fast they are.

    Args:
        layer, role: as in `SlotRow`.
        module_type: of its roles.
        rows: of the input, in each of its calls.
        features: (in, out).
        groups: matrices that share the rows.
        plan: what the run computes under; None: nothing is quantized.
    """

    layer: str
    role: str
    module_type: str
    rows: tuple[int, ...]
    features: tuple[int, int]
    groups: int = 1
    plan: Any = None


@dataclass(frozen=True)
class BadValue:
    """The first value of a run that is NaN or infinite.

    Args:
        layer: as in `SlotRow`.
        tensor: as in `SlotRow`, `"output"` of the forward's GEMM, or the name of a bias.
        direction: of the plane that first has it; of a value that arrives so, rowwise.
        block: (row, column) of the block in that plane's own matrix, of which it is the first; of
            groups of tokens, in that of its group.
        position: (row, column) of the value in the logical matrix; of all groups' tokens.
        value: as text.
        is_made: the value was finite, and quantizing made it so, or multiplying.
        order: among all tensors of the run.
        rank: that has it; 0 without ranks.
        group: number of the expert that has it, among those of all ranks; None: there are none.
    """

    layer: str
    tensor: str
    direction: Direction
    block: tuple[int, int]
    position: tuple[int, int]
    value: str
    is_made: bool
    order: int
    rank: int = 0
    group: int | None = None

    def __str__(self) -> str:
        made = "made by quantizing" if self.is_made else "there already"
        if self.tensor == "output":
            made = "made by the forward's GEMM"
        where = f"row {self.position[0]}, column {self.position[1]}"
        return (
            f"first {self.value}: {self.layer or '(model)'}, {self.tensor}"
            f"{'' if self.group is None else f' of expert {self.group}'}, {self.direction}, "
            f"block {self.block[0]}, {self.block[1]} ({where}); {made}"
        )


def first_position(mask: torch.Tensor) -> tuple[int, int]:
    """Return row and column of the first True of a matrix that has one."""
    at = int(mask.reshape(-1).to(torch.uint8).argmax())
    return at // mask.shape[1], at % mask.shape[1]


def joined(rows: Sequence[SlotRow]) -> SlotRow:
    """Return the rows of one slot over calls or ranks as one."""
    first = min(rows, key=lambda row: row.order)
    whole = SlotStatistics()
    experts: dict[int, ExpertLoss] = {}
    for row in rows:
        whole += row.statistics
        for number, own in row.experts.items():
            experts[number] = experts[number].plus(own) if number in experts else own
    return replace(first, statistics=whole, experts=dict(sorted(experts.items())))
