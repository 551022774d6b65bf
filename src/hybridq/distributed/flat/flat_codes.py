"""Flat buffers of the codes of many quantized parameters: what ranks gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast
from weakref import ref

import torch

from ..._log import log_once
from ...direction import COLUMNWISE, DIRECTIONS, ROWWISE, Direction
from ...storage import Plane, PlaneStack, TensorStorage, overwrite
from ...tensor import is_flat, is_quantized
from .code_bytes import read_codes, write_codes
from .flat_plane import FlatPlane

__all__ = ["FlatCodes", "FlatParameter", "Pending", "check_once", "flat_parameter"]

_WHERE: Final = "FlatCodes"


class Pending(NamedTuple):
    """What a parameter becomes once the codes of all ranks are there.

    Args:
        buffers: by matrix and by plane that travels, all buffers but the codes.
        whole: in their place the values of the whole parameter, where codes cannot travel.
    """

    buffers: list[list[dict[str, torch.Tensor]]]
    whole: torch.Tensor | None = None


class FlatParameter:
    """A quantized parameter in a flat buffer.

    Args:
        parameter: a QuantizedTensor.
        offset: where its values begin in the flat order.
        number: of the parameter, for messages.

    Raises:
        TypeError, ValueError: its planes cannot be written by ranges, or lie in another tensor.
    """

    def __init__(self, parameter: Any, offset: int, number: int) -> None:
        if not is_quantized(parameter):
            kind = type(parameter).__name__
            raise TypeError(f"{_WHERE}: parameters must be quantized, got {kind} (number {number})")
        if parameter.part is not None or is_flat(parameter):
            raise ValueError(
                f"{_WHERE}: parameters must be whole tensors, got a part or a flat view of one "
                f"(number {number})"
            )
        quantizer = parameter.quantizer_for_write(_WHERE)
        if quantizer.is_stochastic:
            raise ValueError(
                f"{_WHERE}: stochastic rounding would draw for the whole parameter, got "
                f"{quantizer} (number {number}); round weights to nearest"
            )
        self._parameter = ref(parameter)
        self.offset, self.number, self.numel = offset, number, parameter.numel()
        self.shape = tuple(parameter.shape)
        self.pending: Pending | None = None
        #: What `state_now` returned at first.
        self.state = self.state_now()
        storage: TensorStorage = parameter.tensor_storage
        count = 1 if storage.count is None else storage.count
        self.count, self._cols = count, storage.first.cols
        self._rows = storage.first.rows // count
        specs = {plane.direction: plane.spec for plane in storage.planes}
        row, col = specs.get(ROWWISE), specs.get(COLUMNWISE)
        source = quantizer.columnwise_source if col is not None else "original"
        #: Whether the columnwise plane is made of the decoded rowwise one.
        is_exact = row is not None and row.format.storage_dtype == torch.float32
        self.is_decoded = source != "original" and not is_exact
        #: Whether the columnwise plane is the rowwise one, transposed.
        self.derives = row is not None and row == col and row.is_derivable and not self.is_decoded
        kept = (ROWWISE,) if self.derives or (self.is_decoded and row) else DIRECTIONS
        made = [FlatPlane(specs[one], one, self._rows, self._cols) for one in kept if one in specs]
        reasons = [one.problem for one in made if one.problem]
        if self.is_decoded and row is None:
            reasons.append("the columnwise plane is made of a rowwise one that it does not hold")
        #: Why the codes of ranges cannot travel, or "".
        self.reason = "; ".join(dict.fromkeys(reasons))
        #: Those whose codes travel.
        self.planes: tuple[FlatPlane, ...] = () if reasons else tuple(made)
        if reasons:
            log_once(
                f"flat:{quantizer.text}",
                f"quantize_master_weights: the masters of parameters with {quantizer} are summed "
                f"over ranks in FP32, 4 bytes a value: {self.reason}",
            )

    @property
    def parameter(self) -> Any:
        """The parameter.

        Raises:
            RuntimeError: it is gone.
        """
        found = self._parameter()
        if found is None:
            raise RuntimeError(f"{_WHERE}: parameter {self.number} is gone")
        return found

    def state_now(self) -> str:
        """Return the device, the planes and the quantizer of the parameter as they are."""
        storage, quantizer = self.parameter.tensor_storage, self.parameter.quantizer
        planes = [f"{plane.direction} {plane.spec.text}" for plane in storage.planes]
        kind = f"{type(quantizer).__name__} {quantizer.columnwise_source}"
        return f"{storage.first.device}, {', '.join(planes)}, {kind}, {storage.count}"

    @property
    def text(self) -> str:
        """What must be the same on all ranks."""
        return f"{list(self.shape)} at {self.offset}, {self.state.partition(', ')[2]}"

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return of each matrix which of its values a range of the parameter holds.

        Args:
            start, stop: of the parameter, flattened.
        """
        size = self._rows * self._cols
        found = []
        for base in range(0, self.count * size, size) if size else [0] * self.count:
            low, high = max(start, base), min(stop, base + size)
            found.append((low - base, high - base) if low < high else (0, 0))
        return found

    def singles(self, direction: Direction) -> list[Plane]:
        """Return the plane of each matrix; its buffers are views of the parameter's.

        Args:
            direction: of the planes.
        """
        plane = self.parameter.tensor_storage.plane(direction)
        if isinstance(plane, PlaneStack):
            return [plane.single(number) for number in range(plane.count)]
        return [plane]


def check_once(parameters: Sequence[Any], where: str) -> None:
    """Raise where a parameter is given twice, as a tied one is: it has one place and one master.

    Args:
        parameters: any objects.
        where: the function, for the error.

    Raises:
        ValueError: one is there twice.
    """
    first: dict[int, int] = {}
    for number, one in enumerate(parameters):
        if first.setdefault(id(one), number) != number:
            raise ValueError(
                f"{where}: each parameter must be given once, got the same one as number "
                f"{first[id(one)]} and {number}; leave a tied one out"
            )


class FlatCodes:
    """Flat buffers of the codes of quantized parameters that lie one behind another.

    `quantize_master_weights` writes the codes of this rank's ranges here; the caller gathers
    `buffers`, and `post_all_gather_processing` takes the parameters' planes from them. A value has
    as many bits in a buffer as a code has, so a rank's equal part of the flat order is its equal
    part of each buffer. The parameters stay as they are until then, and hold no reference to this.

    Args:
        parameters: QuantizedTensors on one device, whose codes are equally wide in each direction:
            make a FlatCodes for each kind. Each may be in one of them only, the latest.
        offsets: where each begins in the flat order, in values.
        numel: length of the flat order in values, padding included; None: the end of the last
            parameter.

    Attributes:
        buffers: uint8 `[numel * bits / 8]` each, of the rowwise and of the columnwise codes: those
            that do not follow from others. 4-bit codes lie two to a byte, the lower first.

    Raises:
        TypeError: a parameter is not quantized.
        ValueError: offsets do not fit, parameters overlap or are given twice, their codes differ
            in width, or one is rounded stochastically.
        PlaneError: a parameter has no quantizer.

    Source: ours; Megatron-LM's flat parameter buffers.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.distributed import FlatCodes
        >>> weight = hybridq.quantizer("mxfp8", "nvfp4")(torch.randn(64, 32))
        >>> [len(buffer) for buffer in FlatCodes([weight], [0]).buffers]
        [2048, 1024]
    """

    def __init__(
        self, parameters: Sequence[Any], offsets: Sequence[int], numel: int | None = None
    ) -> None:
        parameters, offsets = list(parameters), list(offsets)
        if len(parameters) != len(offsets):
            raise ValueError(
                f"{_WHERE}: each parameter has an offset, got {len(parameters)} parameters and "
                f"{len(offsets)} offsets"
            )
        if any(type(one) is not int or one < 0 for one in offsets):
            raise ValueError(f"{_WHERE}: offsets must be integers, not negative, got {offsets}")
        check_once(parameters, _WHERE)
        pairs = enumerate(zip(parameters, offsets, strict=True))
        self.held = [FlatParameter(one, offset, i) for i, (one, offset) in pairs]
        ends = sorted((one.offset, one.offset + one.numel, one.number) for one in self.held)
        last = max((end for _, end, _ in ends), default=0)
        if numel is not None and (type(numel) is not int or numel < last):
            raise ValueError(f"{_WHERE}: numel must be at least {last}, got {numel}")
        for (_, end, a), (start, _, b) in pairwise(ends):
            if end > start:
                raise ValueError(f"{_WHERE}: parameters must not overlap, got {a} and {b}")
        self.numel = last if numel is None else numel
        devices = {one.device for one in parameters}
        if len(devices) > 1:
            raise ValueError(f"{_WHERE}: parameters must be on one device, got {devices}")
        self.bits = self._widths()
        device = devices.pop() if devices else torch.device("cpu")
        self._buffers = {
            direction: torch.zeros(-(-self.numel * bits // 8), dtype=torch.uint8, device=device)
            for direction, bits in self.bits.items()
        }
        for number, parameter in enumerate(parameters):
            parameter.flat_place = _Place(ref(self), number)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers, uint8, rowwise first."""
        return tuple(self._buffers.values())

    def _widths(self) -> dict[Direction, int]:
        """Return the bits of a code by direction."""
        found: dict[Direction, tuple[int, int]] = {}
        for one in self.held:
            for plane in one.planes:
                bits, first = found.setdefault(plane.direction, (plane.code_bits, one.number))
                if bits != plane.code_bits:
                    raise ValueError(
                        f"{_WHERE}: codes must be equally wide, got {bits} bits in parameter "
                        f"{first} and {plane.code_bits} in {one.number}, {plane.direction}; make a "
                        "FlatCodes for each kind"
                    )
        return {one: found[one][0] for one in DIRECTIONS if one in found}

    def write(self, one: FlatParameter, plane: FlatPlane, start: int, codes: torch.Tensor) -> None:
        """Write the codes of a range of a parameter.

        Args:
            one: of `held`.
            plane: of its planes.
            start: where the range begins in the parameter.
            codes: as `FlatPlane.codes` returns them.
        """
        bits = self.bits[plane.direction]
        write_codes(self._buffers[plane.direction], bits, one.offset + start, codes)

    def take(self, one: FlatParameter) -> None:
        """Give a parameter the planes that were gathered.

        Args:
            one: of `held`; pending.
        """
        pending, parameter = one.pending, one.parameter
        one.pending = None
        if pending is None:
            return
        if pending.whole is not None:
            parameter.quantize_(pending.whole.view(one.shape))
            return
        storage: TensorStorage = parameter.tensor_storage
        for place, plane in enumerate(one.planes):
            size = plane.rows * plane.cols
            for matrix, target in enumerate(one.singles(plane.direction)):
                start, bits = one.offset + matrix * size, self.bits[plane.direction]
                codes = read_codes(self._buffers[plane.direction], bits, start, size)
                dtype = target.data.dtype
                data = plane.data(codes if dtype == torch.uint8 else _as(codes, dtype))
                overwrite(target.data, data)
                for name, buffer in pending.buffers[matrix][place].items():
                    overwrite(target.buffers[name], buffer)
        if one.derives or (one.is_decoded and storage.columnwise is not None):
            self._follow(one)
        for written in storage.planes:
            if written.operand_cache is not None:
                written.operand_cache.forget()
        torch.autograd.graph.increment_version(parameter)

    def _follow(self, one: FlatParameter) -> None:
        """Rewrite columnwise planes that follow from the rowwise ones."""
        quantizer = one.parameter.quantizer
        for row, col in zip(one.singles(ROWWISE), one.singles(COLUMNWISE), strict=True):
            if one.derives:
                made = row.derive()
            else:
                alone = {"rowwise": None, "columnwise": col.spec, "columnwise_usage": True}
                only = replace(quantizer, columnwise_source="original", **alone)
                made = only.encode(row.dequantize(torch.float32)).plane(COLUMNWISE)
            for name, buffer in col.buffers.items():
                if not _is_memory_of(buffer, made.buffers[name]):
                    overwrite(buffer, made.buffers[name])


class _Place(NamedTuple):
    """Where a parameter lies: which FlatCodes, and the how manieth of its parameters."""

    codes: ref[FlatCodes]
    number: int

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy of the parameter lies nowhere."""


def flat_parameter(parameter: Any, where: str) -> tuple[FlatCodes, FlatParameter]:
    """Return the FlatCodes that a parameter lies in, and its place.

    Args:
        parameter: a QuantizedTensor.
        where: the function, for the error.

    Raises:
        ValueError: it lies in none.
    """
    place = cast("_Place | None", getattr(parameter, "flat_place", None))
    codes = None if place is None else place.codes()
    if place is None or codes is None:
        raise ValueError(
            f"{where}: parameters must lie in a FlatCodes that is kept, got one of shape "
            f"{list(parameter.shape)} that lies in none; make FlatCodes(parameters, offsets)"
        )
    return codes, codes.held[place.number]


def _as(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as values; copied where they do not lie at a multiple of the value's size."""
    is_aligned = codes.storage_offset() % dtype.itemsize == 0
    return (codes if is_aligned else codes.clone()).view(dtype)


def _is_memory_of(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two buffers begin in the same place: a plane's own, or a view of it."""
    is_same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return is_same and a.storage_offset() == b.storage_offset()
