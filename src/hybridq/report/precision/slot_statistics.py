"""Statistics of one slot in one format: what quantizing its tensor loses. Sums, so that they add.

A monitor takes `measure_slot` of a sample, a report of every call. Sums of several calls, groups or
ranks are added with `+`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import torch

from ...direction import COLUMNWISE, DIRECTIONS, ROWWISE, Direction
from ...formats import Element, PlaneSpec
from ...kernels.inputs import wide_device
from ...nn.autograd.slot_encoder import SlotEncoder
from ...recipes import SlotPlan
from ...reference import unpack
from ...reference.elements import code_values
from ...storage import Plane, TensorStorage
from ..measure import effective_scales

__all__ = [
    "GNR_LINE",
    "OUTLIER",
    "ExpertLoss",
    "SlotStatistics",
    "held_plane",
    "made_planes",
    "measure_plane",
    "measure_slot",
    "rowwise_plane",
]

#: How many median magnitudes of a tensor's values that are not zero an outlier is beyond.
OUTLIER: Final = 10.0
#: Below this ratio of a gradient to its quantization noise training suffers. Source:
#: arXiv:2505.19115.
GNR_LINE: Final = math.sqrt(3.0)
#: Values that are summed in FP64 at a time.
_BAND: Final = 1 << 20
#: Of stochastic planes, so that a report draws nothing from the generators of a run.
_SEED: Final = 0x5EED
#: log2 of scales that a histogram counts as one bin: zero, infinite and NaN ones.
NO_EXPONENT: Final = 1 << 12


@dataclass(frozen=True)
class SlotStatistics:
    """What a plane of a tensor lost: sums over values `x` and what the plane decodes them to, `y`.

    Args:
        values: how many finite pairs `(x, y)` there are.
        noise, signal: sums of `(y - x)^2` and of `x^2` over them.
        bulk_noise, bulk_signal: the same without outliers, values beyond `OUTLIER` median
            magnitudes.
        outliers: how many of these there are.
        nonzero: values that are not zero.
        underflows: of them, those that became zero.
        saturated: values that lie beyond the largest code at their scale by more than half of its
            step, so that a code of more range would be nearer; None behind a transform, where codes
            are not of values.
        bad_inputs: values that are NaN or infinite.
        bad_outputs: finite ones that became so.
        amax: largest magnitude of a finite value.
        nbytes: of planes.
        calls: tensors that were added up.
        scales: how many blocks have a scale of each exponent: floor(log2(scale)), the second
            level's factor within it.
    """

    values: int = 0
    noise: float = 0.0
    signal: float = 0.0
    bulk_noise: float = 0.0
    bulk_signal: float = 0.0
    outliers: int = 0
    nonzero: int = 0
    underflows: int = 0
    saturated: int | None = 0
    bad_inputs: int = 0
    bad_outputs: int = 0
    amax: float = 0.0
    nbytes: int = 0
    calls: int = 0
    scales: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: SlotStatistics) -> SlotStatistics:
        """Return the statistics of both together."""
        made: dict[str, Any] = {
            one.name: _sum(getattr(self, one.name), getattr(other, one.name))
            for one in fields(self)
        }
        return SlotStatistics(**{**made, "amax": max(self.amax, other.amax)})

    @property
    def relative_error(self) -> float | None:
        """`sqrt(noise / signal)`; None where there is no signal to compare with."""
        return _ratio(self.noise, self.signal)

    @property
    def bulk_error(self) -> float | None:
        """The relative error of values that are no outliers: what outliers leave of the rest."""
        return _ratio(self.bulk_noise, self.bulk_signal)

    @property
    def snr_db(self) -> float | None:
        """Signal to noise in decibels; inf without an error."""
        error = self.relative_error
        if error is None:
            return None
        return math.inf if error == 0.0 else -20.0 * math.log10(error)

    @property
    def signal_to_noise(self) -> float | None:
        """Norm of the tensor over the norm of its noise; of gradients see `GNR_LINE`."""
        error = self.relative_error
        if error is None:
            return None
        return math.inf if error == 0.0 else 1.0 / error

    @property
    def underflow_share(self) -> float:
        """Share of values that are not zero and became zero."""
        return self.underflows / max(self.nonzero, 1)

    @property
    def saturation_share(self) -> float | None:
        """Share of values beyond the largest code at their scale."""
        return None if self.saturated is None else self.saturated / max(self.values, 1)

    @property
    def outlier_share(self) -> float:
        """Share of values that are outliers."""
        return self.outliers / max(self.values, 1)

    @property
    def bad(self) -> int:
        """Values that are NaN or infinite, before or after."""
        return self.bad_inputs + self.bad_outputs

    @property
    def severity(self) -> float:
        """By which slots are ranked: inf with a NaN or infinity, else the larger of both errors.

        A plane without signal has none.
        """
        return ExpertLoss.of(self).severity


class ExpertLoss(NamedTuple):
    """What one expert's tensors lose: the sums of `SlotStatistics` that its severity takes.

    A model may have very many experts, so these are few numbers of each.

    Attributes:
        noise, signal, bulk_noise, bulk_signal, underflows, nonzero: as there.
        bad: values that are NaN or infinite, before or after.
    """

    noise: float
    signal: float
    bulk_noise: float
    bulk_signal: float
    underflows: int
    nonzero: int
    bad: int

    @staticmethod
    def of(own: SlotStatistics) -> ExpertLoss:
        """Return these sums of some statistics.

        Args:
            own: any.
        """
        sums = (own.noise, own.signal, own.bulk_noise, own.bulk_signal)
        return ExpertLoss(*sums, own.underflows, own.nonzero, own.bad)

    def plus(self, other: ExpertLoss) -> ExpertLoss:
        """Return the sums of both.

        Args:
            other: of other tensors.
        """
        return ExpertLoss(*map(operator.add, self, other))

    @property
    def severity(self) -> float:
        """As of `SlotStatistics`."""
        if self.bad:
            return math.inf
        errors = _ratio(self.noise, self.signal), _ratio(self.bulk_noise, self.bulk_signal)
        return max(one or 0.0 for one in errors)


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def _ratio(noise: float, signal: float) -> float | None:
    if signal > 0.0:
        return math.sqrt(noise / signal)
    return 0.0 if noise == 0.0 else None


def made_planes(
    x: torch.Tensor,
    plan: SlotPlan,
    slot: str,
    directions: Sequence[Direction] = DIRECTIONS,
    scales: Any = None,
    held: TensorStorage | None = None,
) -> dict[Direction, Plane]:
    """Return the planes that a module's slot makes of x, nothing being recorded.

    Args:
        x: `[rows, cols]`, float32, bfloat16 or float16; not empty.
        plan: of the slot.
        slot: `"input"`, `"weight"` or `"grad_output"`.
        directions: of the planes that are wanted.
        scales: of delayed scaling, where the plan has any.
        held: planes that the module has of the tensor: those that the plan wants are returned.

    Stochastic planes have a seed of their own, so that no generator moves.
    """
    seed = torch.full((1,), _SEED, dtype=torch.int64, device=x.device)
    quiet = () if scales is None else (scales._replace(forward_amaxes=None, backward_amaxes=None),)
    if plan.is_delayed and not quiet:  # as if it were the first tensor: by its own amax
        plan = plan._replace(row_delay="", col_delay="", shares_state=False)
    encoder = SlotEncoder(plan, slot, seed, False, quiet)
    made = encoder.encode(x, ROWWISE in directions, COLUMNWISE in directions)
    found = {}
    for direction, buffers, text in zip(DIRECTIONS, made, (plan.row, plan.col), strict=True):
        if direction in directions:
            spec = PlaneSpec.parse(text.spec).resolve(x.dtype)
            own = held_plane(held, direction, text.spec, x.dtype)
            if own is not None:
                found[direction] = own
                continue
            rows, cols = x.shape
            shape = (rows, cols) if direction == ROWWISE else (cols, rows)
            named = zip((one.name for one in spec.buffers(*shape)), buffers, strict=True)
            found[direction] = Plane(spec, direction, rows, cols, named)
    return found


def held_plane(
    held: TensorStorage | None, direction: Direction, spec: str, dtype: torch.dtype
) -> Plane | None:
    """Return the plane that a module holds of a weight and multiplies as it is, or None.

    Args:
        held: what it holds.
        direction: of the plane.
        spec: text of the one that the plan wants.
        dtype: of the weight.
    """
    plane: Plane | None = None if held is None else getattr(held, direction)
    wanted = PlaneSpec.parse(spec).resolve(dtype)
    return plane if plane is not None and plane.spec == wanted else None


def rowwise_plane(x: torch.Tensor, spec: PlaneSpec) -> Plane:
    """Return the rowwise plane of a tensor that no module's slot quantizes, as `made_planes` does.

    Args:
        x: `[rows, cols]`, not empty.
        spec: of the plane.
    """
    text = spec.plain_text()
    return made_planes(x, SlotPlan(text, text, "original", ""), "input", [ROWWISE])[ROWWISE]


def measure_slot(
    x: torch.Tensor,
    plan: SlotPlan,
    slot: str,
    directions: Sequence[Direction] = DIRECTIONS,
    scales: Any = None,
) -> dict[Direction, SlotStatistics]:
    """Return what each plane of a slot's tensor loses.

    Args:
        x, plan, slot, directions, scales: as for `made_planes`; x may be empty.
    """
    if not x.numel():
        return {direction: SlotStatistics() for direction in directions}
    planes = made_planes(x, plan, slot, directions, scales)
    return {direction: measure_plane(x, plane) for direction, plane in planes.items()}


def measure_plane(x: torch.Tensor, plane: Plane) -> SlotStatistics:
    """Return what a plane lost of the matrix that it was made of.

    Args:
        x: `[rows, cols]`, not empty.
        plane: of it, in either direction.
    """
    where = wide_device(x.device)
    want, got = x.detach().to(torch.float32).to(where), plane.dequantize().to(where)
    magnitude = want.abs()
    some = magnitude[(magnitude > 0) & magnitude.isfinite()]
    limit = OUTLIER * some.median() if some.numel() else magnitude.new_tensor(math.inf)
    at_top = _at_top(plane, where)
    element = plane.spec.format.element
    cut = 1.0 if at_top is None or element is None else _cut(element)
    step = max(1, _BAND // max(1, x.shape[1]))
    sums = torch.zeros(11, dtype=torch.float64, device=where)
    largest = magnitude.new_zeros(())
    for begin in range(0, x.shape[0], step):
        band = slice(begin, begin + step)
        top = None if at_top is None else at_top[band]
        more, most = _sums(want[band], got[band], limit, top, cut)
        sums += more
        largest = torch.maximum(largest, most)
    numbers = torch.cat((sums, largest.to(torch.float64).reshape(1))).tolist()
    noise, signal, bulk_noise, bulk_signal, *counts, amax = numbers
    values, outliers, nonzero, underflows, saturated, bad, made_bad = map(int, counts)
    return SlotStatistics(
        values,
        *(noise, signal, bulk_noise, bulk_signal),
        *(outliers, nonzero, underflows),
        None if plane.spec.signs is not None else saturated,
        *(bad, made_bad, amax, plane.nbytes, 1),
        _exponents(plane),
    )


def _cut(element: Element) -> float:
    """Return what a value is larger by than its largest code, if it was cut.

    By more than half the step to the code below it, where rounding would go on to the next one; and
    by more than FP32 rounds the product of code and scale. A block scale that was itself rounded
    down, as NVFP4's are, moves values by less.
    """
    below, top = sorted({abs(one) for one in code_values(element) if math.isfinite(one)})[-2:]
    return (1.0 + (top - below) / (2.0 * top)) * (1.0 + 2.0**-20)


def _sums(
    want: torch.Tensor, got: torch.Tensor, limit: Any, top: torch.Tensor | None, cut: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums and counts over a band of values, FP64 `[11]`, and its largest magnitude.

    A code behind a scale of zero is an underflow, whatever it is.
    """
    known = want.isfinite()
    both = known & got.isfinite()
    x = torch.where(both, want, 0.0).to(torch.float64)
    noise = (torch.where(both, got, 0.0).to(torch.float64) - x).square()
    signal, magnitude = x.square(), x.abs()
    beyond = both & (magnitude > limit)
    nonzero = both & (want != 0)
    saturated = torch.zeros_like(both)
    if top is not None:
        saturated = both & top & (got != 0) & (magnitude > got.abs().to(torch.float64) * cut)
    sums = (
        *(noise.sum(), signal.sum()),
        *(noise[~beyond].sum(), signal[~beyond].sum()),
        *(both.sum(), beyond.sum(), nonzero.sum(), (nonzero & (got == 0)).sum()),
        *(saturated.sum(), (~known).sum(), (known & ~both).sum()),
    )
    return torch.stack([one.to(torch.float64) for one in sums]), magnitude.amax().to(torch.float32)


def _at_top(plane: Plane, where: torch.device) -> torch.Tensor | None:
    """Return where codes are the largest of their element, bool `[rows, cols]`; None: no codes.

    Args:
        plane: any.
        where: the device of what is returned.
    """
    element = plane.spec.format.element
    if element is None or element.bits > 8 or plane.spec.signs is not None:
        return None
    cols = plane.matrix[1]
    codes = unpack(plane.data.to(where), element, plane.spec.padded(cols))[:, :cols]
    tops = (
        torch.tensor(code_values(element), dtype=torch.float64, device="cpu").abs() >= element.max
    )
    mask = tops.to(where)[codes.to(torch.int64) & ((1 << element.bits) - 1)]
    return mask if plane.direction == ROWWISE else mask.t()


def _exponents(plane: Plane) -> Counter[int]:
    """Return how many scales of a plane have each exponent."""
    scales = effective_scales(plane)
    if scales is None or not scales.numel():
        return Counter()
    is_known = scales.isfinite() & (scales > 0)
    # A factor is an FP32 quotient: what it misses a power of two by does not count.
    _, exponent = torch.frexp(torch.where(is_known, scales, 1.0) * (1.0 + 2.0**-20))
    exponent = torch.where(is_known, exponent - 1, NO_EXPONENT)
    found, counts = exponent.unique(return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))
