"""Percentiles of magnitudes, from a histogram whose size does not grow with the data."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from ..formats import PlaneText
from .observers import Grouped, Running, RunningMax, grouped

__all__ = ["Percentile"]


@dataclass(frozen=True)
class Percentile(Grouped):
    """The smallest magnitude that a percentage of all magnitudes does not exceed.

    With n values it is the one of rank `ceil(n * percent / 100)`, in order of size. Magnitudes are
    counted by exponent and leading mantissa bits, rounded up to these; so the result is at least
    the exact one, and more by a factor of less than `1 + 2**-bits` (magnitudes below `2**-126`:
    by less than `2**(-126 - bits)`). It never exceeds the maximum. With 7 bits, values in BF16
    have their exact percentile. The histogram takes 8 bytes for each bin between the smallest
    and the largest one seen, at most `2**(8 + bits)` bins for each amax.

    Args:
        granularity: of what there is an amax each: `"tensor"`, `"channel"` or `"block"`, and
            `"row"` of weights; of `"token"` it is the percentile of the tokens' own amaxes.
        block: channels of a block; the last one may have fewer.
        percent: above 0 and at most 100.
        bits: mantissa bits of the bins, 0 to 15; None: 7, or 3 for channels, blocks and rows.

    Raises:
        ValueError: an argument has no such value.

    Example:
        >>> import torch
        >>> from hybridq.calibration import Percentile
        >>> running = Percentile(percent=75).start()
        >>> running(torch.tensor([[1.0, -3.0], [-2.0, 100.0]]))
        >>> running.amax()
        tensor(3.)
    """

    percent: float = 99.9
    bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.percent <= 100:
            raise ValueError(
                f"Percentile: percent must be above 0 and at most 100, got {self.percent}"
            )
        if self.bits is not None and not 0 <= self.bits <= 15:
            raise ValueError(f"Percentile: bits must be 0 to 15, got {self.bits}")

    @property
    def mantissa_bits(self) -> int:
        """Mantissa bits of the bins."""
        if self.bits is not None:
            return self.bits
        return 7 if self.granularity in ("tensor", "token") else 3

    def start(self, plane: PlaneText | None = None, features: int | None = None) -> Running:
        """Return an observer that has seen nothing yet.

        Args:
            plane, features: any; the percentile is the same for all.
        """
        del plane, features
        return _RunningPercentile(self)

    @property
    def text(self) -> str:
        """What files and tables say of it."""
        return f"percentile {self.percent:g}{self.of}, {self.mantissa_bits} bits"


class _RunningPercentile(Running):
    """Counts `[groups, bins]`, of the bins between the smallest and the largest one seen."""

    def __init__(self, observer: Percentile) -> None:
        self.observer = observer
        self.largest = RunningMax(observer)
        self.shift = 23 - observer.mantissa_bits
        self.first = 0
        self.counts: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, /) -> None:
        self.largest(rows)
        values = grouped(rows, self.observer.granularity, self.observer.block)
        bits = values.abs().float().view(torch.int32).to(torch.int64)
        bins = (bits + ((1 << self.shift) - 1)) >> self.shift
        known = ~values.isnan()  # NaN: of no channel; a real one is in the largest magnitude
        numbers = torch.arange(values.shape[1], dtype=torch.int64, device=rows.device).expand_as(
            bins
        )[known]
        bins = bins[known]
        if not bins.numel():
            return
        first, last = (int(one) for one in torch.aminmax(bins))
        counts = self._with_bins(first, last, values.shape[1], rows.device)
        width = counts.shape[1]
        places = numbers * width + (bins - self.first)
        found = torch.bincount(places.to(counts.device), minlength=counts.numel())
        counts += found.view(counts.shape)

    def _with_bins(self, first: int, last: int, groups: int, device: torch.device) -> torch.Tensor:
        """Return the counts, with bins from `first` to `last` among them."""
        if self.counts is None:
            self.first = first
            made = torch.zeros(groups, last - first + 1, dtype=torch.int64, device=device)
        else:
            before = max(self.first - first, 0)
            after = max(last - (self.first + self.counts.shape[1] - 1), 0)
            self.first -= before
            made = torch.nn.functional.pad(self.counts, (before, after))
        self.counts = made
        return made

    def amax(self) -> torch.Tensor | None:
        largest = self.largest.amax()
        if largest is None or self.counts is None:
            return largest
        share = Fraction(str(self.observer.percent)) / 100
        total = self.counts.sum(1)
        wanted = [-(-int(one) * share.numerator // share.denominator) for one in total.tolist()]
        ranks = torch.tensor(wanted, dtype=torch.int64, device=total.device)
        below = (self.counts.cumsum(1) < ranks[:, None]).sum(1)
        edges = ((below + self.first) << self.shift).clamp(max=0x7F7FFFFF)
        found = edges.to(torch.int32).view(torch.float32).reshape(largest.shape)
        largest = largest.to(found.device)  # infinity stays what is said of a tensor that has it
        return torch.where(largest.isfinite(), torch.minimum(found, largest), largest)
