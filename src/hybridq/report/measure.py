"""Numbers about a plane: its scales, its codes, its error. Generic over Format.

Work goes through the plane in bands of rows, so that the extra memory does not grow with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ..formats import Element, PlaneSpec
from ..formats.elements import FP32
from ..kernels.inputs import wide, wide_device
from ..kernels.scaled_mm import is_foldable
from ..reference import decode_codes, fold_plane, unpack
from ..reference.elements import code_values
from ..storage import Plane

__all__ = [
    "Codes",
    "ErrorMap",
    "Scales",
    "effective_scales",
    "measure_codes",
    "measure_error",
    "measure_fold",
    "measure_scales",
]

#: Values that are decoded at a time.
_BAND = 1 << 22
#: Rows and columns of a heat map at most.
MAP_LIMIT = 96


@dataclass(frozen=True)
class Codes:
    """How often each code of a plane occurs.

    Args:
        element: what the codes are (of an identity plane: of its values; of a codec's plane FP32,
            what it decodes to).
        keys: a label per bin: the code, or sign and exponent of a wide element.
        values: the number that each bin stands for, ascending; NaN bins last.
        counts: how many there are.
        num_zero, num_saturated, num_nan: zeros; finite values at the element's largest, and
            infinities; NaN.
    """

    element: Element
    keys: tuple[int, ...]
    values: tuple[float, ...]
    counts: tuple[int, ...]
    num_zero: int
    num_saturated: int
    num_nan: int

    @cached_property
    def total(self) -> int:
        """Number of codes."""
        return sum(self.counts)

    def share(self, count: int) -> float:
        """Return `count` as a share of all codes; 0 of an empty plane."""
        return count / self.total if self.total else 0.0


@dataclass(frozen=True)
class Scales:
    """The scales of a plane, as a picture and in numbers.

    Args:
        log2: FP32 `[<= 96, <= 96]`: log2 of the largest scale in each cell, the second level's
            factor within it; NaN where a scale is NaN, -inf where all are 0. None where the format
            has no scales.
        cell: scales in a cell, (rows, columns).
        num_blocks: scales in all.
        num_nan: NaN ones.
        smallest, largest: finite ones, the factor within them; None if there are none.
        factor: (smallest, largest) FP32 factor of the second level, or None.
    """

    log2: torch.Tensor | None
    cell: tuple[int, int]
    num_blocks: int
    num_nan: int
    smallest: float | None
    largest: float | None
    factor: tuple[float, float] | None


@dataclass(frozen=True)
class ErrorMap:
    """How far a plane's values are from those that it is compared with.

    Args:
        against: what it is compared with, in words.
        relative: `||got - want|| / ||want||` over finite values; None if nothing is finite or
            all of `want` is 0.
        largest: largest absolute difference.
        num_not_finite: positions left out because either side is not finite.
        cells: FP32 `[<= 96, <= 96]`: the same relative error in each cell; NaN where it is
            undefined.
        cell: values in a cell of the plane's own matrix, (rows, columns): whole blocks.
    """

    against: str
    relative: float | None
    largest: float
    num_not_finite: int
    cells: torch.Tensor
    cell: tuple[int, int]

    @property
    def snr_db(self) -> float | None:
        """Signal to noise in decibels, inf where there is no error."""
        if self.relative is None:
            return None
        return math.inf if self.relative == 0.0 else -20.0 * math.log10(self.relative)


def _bands(plane: Plane) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yield (first row, end row, buffers) of bands of the plane's own matrix."""
    rows, cols = plane.matrix
    if plane.spec.format.is_python:  # nobody else knows where a codec has its rows
        yield 0, rows, list(plane.tensors)
        return
    side = (plane.spec.format.block or (1, 1))[0]
    step = max(1, _BAND // max(1, cols) // side) * side
    steps = plane.spec.buffers(step, cols)
    doubled = plane.spec.buffers(2 * step, cols)
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        band = []
        for buffer, one, two in zip(plane.tensors, steps, doubled, strict=True):
            if one.shape[0] == two.shape[0]:  # one value for the whole plane
                band.append(buffer)
                continue
            first = begin // step * one.shape[0]
            band.append(buffer[first : first + one.shape[0]])
        yield begin, end, band


def _cells(num: int, block: int) -> int:
    """Return how many values a heat map's cell spans along an axis: whole blocks."""
    blocks = -(-num // block)
    return max(1, -(-blocks // MAP_LIMIT)) * block


def _second_level(plane: Plane) -> torch.Tensor | None:
    """Return the FP64 factors of the second level, `[1]` or one per plane row; None: none."""
    element = plane.spec.format.element
    if plane.amax is None or not plane.amax.numel() or element is None:
        return None
    return wide(plane.amax) / (plane.spec.tensor_bound * element.max)


def effective_scales(plane: Plane) -> torch.Tensor | None:
    """Return what codes are multiplied by: FP64 block scales, the second level's factor within.

    Args:
        plane: any.

    Returns:
        `[block rows, blocks of a row]` of the plane's own matrix; None where there are no scales.
    """
    fmt = plane.spec.format
    if plane.scale is None or fmt.scale is None:
        return None
    scale = plane.scale if plane.scale.dim() == 2 else plane.scale.reshape(1, -1)
    scale = scale.to(wide_device(scale.device))
    if scale.dtype == torch.uint8:
        scale = decode_codes(scale, fmt.scale)
    values, factor = scale.to(torch.float64), _second_level(plane)
    if factor is None:
        return values
    return values * (factor if factor.numel() == 1 else factor.reshape(-1, 1))


def measure_scales(plane: Plane) -> Scales:
    """Return the scales of `plane`, with the second level's factor; a map of the largest ones."""
    factor, scale = _second_level(plane), effective_scales(plane)
    second = None if factor is None else (float(factor.min()), float(factor.max()))
    if scale is None:
        return Scales(None, (1, 1), 0, 0, None, None, second)
    finite = scale[scale.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
    cell = (_cells(scale.shape[0], 1), _cells(scale.shape[1], 1))
    padded = torch.nn.functional.pad(
        scale.abs(), (0, -scale.shape[1] % cell[1], 0, -scale.shape[0] % cell[0])
    )
    grid = padded.reshape(padded.shape[0] // cell[0], cell[0], padded.shape[1] // cell[1], cell[1])
    biggest = grid.amax(dim=(1, 3)) if grid.numel() else grid.sum(dim=(1, 3))
    num_nan = int(scale.isnan().sum())
    log2 = biggest.log2().to(torch.float32).cpu()
    return Scales(log2, cell, scale.numel(), num_nan, low, high, second)


def _fields(data: torch.Tensor, element: Element) -> torch.Tensor:
    """Return sign and exponent of values stored as they are, as integers."""
    signed = {2: torch.int16, 4: torch.int32}[data.element_size()]
    bits = data.contiguous().view(signed).to(torch.int64)
    return (bits >> element.mantissa_bits) & ((2 << element.exponent_bits) - 1)


def _bin_values(element: Element) -> list[float]:
    """Return what each bin of `measure_codes` stands for, in the order of the bins."""
    if element.bits <= 8:
        return list(code_values(element))
    half = 1 << element.exponent_bits
    values = [0.0] + [2.0 ** (field - element.bias) for field in range(1, half - 1)] + [math.inf]
    return values + [-value for value in values]


def measure_codes(plane: Plane) -> Codes:
    """Return how often each code of `plane` occurs.

    The values of an identity plane are counted by sign and exponent: BF16 has 65,536 codes. So are
    those that a codec's plane decodes to.
    """
    fmt = plane.spec.format
    element = FP32 if fmt.is_python else fmt.element
    if element is None:  # an identity plane of an open dtype; planes have theirs fixed
        raise ValueError(f"measure_codes: the plane's element must be known, got {plane.spec}")
    values = _bin_values(element)
    counts = torch.zeros(len(values), dtype=torch.int64, device="cpu")
    zero = saturated = nan = 0
    width = plane.spec.padded(plane.matrix[1])
    for begin, end, buffers in _bands(plane):
        data = buffers[0]
        if fmt.is_python:
            data = _decode(buffers, plane.spec, end - begin, plane.matrix[1])
        if element.bits <= 8:
            codes = unpack(data, element, width).to(torch.int64) & ((1 << element.bits) - 1)
            numbers = None
        else:
            codes, numbers = _fields(data, element), data
        counts += torch.bincount(codes.reshape(-1), minlength=len(values)).cpu()
        if numbers is not None:
            zero += int((numbers == 0).sum())
            nan += int(numbers.isnan().sum())
            saturated += int((numbers.abs() >= element.max).sum())
    if element.bits <= 8:
        table = torch.tensor(values, dtype=torch.float64, device="cpu")
        zero = int(counts[table == 0].sum())
        nan = int(counts[table.isnan()].sum())
        saturated = int(counts[table.abs() >= element.max].sum())
    order = sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), _place(values[i])))
    return Codes(
        element,
        tuple(order),
        tuple(values[i] for i in order),
        tuple(int(counts[i]) for i in order),
        zero,
        saturated,
        nan,
    )


def _place(value: float) -> tuple[float, float]:
    return (0.0, 0.0) if math.isnan(value) else (value, math.copysign(1.0, value))


def measure_fold(plane: Plane) -> int | None:
    """Return how many codes change if a GEMM folds `plane`, or None where it cannot be folded.

    0: the folded plane has the very values of this one.
    """
    if not is_foldable(plane.spec):
        return None
    cols = plane.matrix[1]
    changed = 0
    for begin, end, buffers in _bands(plane):
        buffers = [one.to(wide_device(one.device)) for one in buffers]
        changed += int(fold_plane(buffers, plane.spec, end - begin, cols).changed.item())
    return changed


def _decode(buffers: list[torch.Tensor], spec: PlaneSpec, rows: int, cols: int) -> torch.Tensor:
    return torch.ops.hybridq.decode(buffers, spec.text, rows, cols, torch.float32)


class _Sums:
    """Sums per cell of a heat map, band by band."""

    def __init__(self, plane: Plane) -> None:
        rows, cols = plane.matrix
        block = plane.spec.format.block or (1, 1)
        self.cell = (_cells(rows, block[0]), _cells(cols, block[1]))
        self.shape = (-(-rows // self.cell[0]), -(-cols // self.cell[1]))
        self.noise = torch.zeros(self.shape, dtype=torch.float64, device=wide_device(plane.device))
        self.signal = torch.zeros_like(self.noise)
        self.known = torch.zeros_like(self.noise)  # finite positions
        self.largest = 0.0
        self.num_not_finite = 0

    def add(self, begin: int, got: torch.Tensor, want: torch.Tensor) -> None:
        """Add a band that starts at row `begin`."""
        if not got.numel():
            return
        got, want = got.to(self.noise.device), want.to(self.noise.device)
        is_finite = got.isfinite() & want.isfinite()
        self.num_not_finite += got.numel() - int(is_finite.sum())
        plain = torch.where(is_finite, want, 0.0).to(torch.float64)
        error = torch.where(is_finite, got, 0.0).to(torch.float64) - plain
        self.largest = max(self.largest, float(error.abs().max()))
        row = torch.arange(begin, begin + got.shape[0], dtype=torch.int64, device=got.device)
        index = row // self.cell[0]
        parts = (error.square(), plain.square(), is_finite.to(torch.float64))
        for sums, part in zip((self.noise, self.signal, self.known), parts, strict=True):
            padded = torch.nn.functional.pad(
                part, (0, self.shape[1] * self.cell[1] - part.shape[1])
            )
            columns = padded.reshape(got.shape[0], self.shape[1], self.cell[1]).sum(dim=2)
            sums.index_add_(0, index, columns)

    def result(self, against: str) -> ErrorMap:
        """Return the map of all bands."""
        noise, signal = float(self.noise.sum()), float(self.signal.sum())
        relative = math.sqrt(noise / signal) if signal > 0.0 else None
        if relative is None and noise == 0.0 and bool((self.known > 0).any()):
            relative = 0.0
        cells = (self.noise / self.signal).sqrt()
        cells = torch.where((self.noise == 0.0) & (self.known > 0), 0.0, cells)
        cells = cells.to(torch.float32).cpu()
        return ErrorMap(against, relative, self.largest, self.num_not_finite, cells, self.cell)


def measure_error(plane: Plane, want: torch.Tensor, against: str) -> ErrorMap:
    """Return how far `plane` is from `want`.

    Args:
        plane: any plane.
        want: the plane's own matrix in high precision (transposed for a columnwise plane).
        against: what `want` is, in words.
    """
    sums = _Sums(plane)
    cols = plane.matrix[1]
    for begin, end, buffers in _bands(plane):
        got = _decode(buffers, plane.spec, end - begin, cols)
        sums.add(begin, got, want[begin:end].to(got.device, torch.float32))
    return sums.result(against)
