"""An all-gather whose result is the planes that arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..._torch_ranks import functional_all_gather, functional_all_to_all, wait_tensor
from ...direction import ROWWISE
from ...kernels.operators import StatedFunction
from ...quantizers import Quantizer
from ...storage import Plane, TensorStorage
from ...tensor import QuantizedTensor, matrix_shape
from .calls import Call, dual, run
from .handle import CollectiveHandle

__all__ = ["gather_planes"]


def gather_planes(
    call: Call, x: torch.Tensor, quantizer: Quantizer, seed: torch.Tensor | None, async_op: bool
) -> Any:
    """Return the QuantizedTensor of the tensors of all ranks, or a handle of it.

    Args:
        call: of the all-gather.
        x: this rank's tensor.
        quantizer: of the planes.
        seed: int64 `[1]` or None.
        async_op: return a handle.

    Raises:
        ValueError: planes cannot be put together along that dimension, or a boundary between
            ranks cuts a block of one.
    """
    _check(call, x, quantizer)
    own = replace(quantizer, amax_group=call.name if _needs_amax(quantizer) else None)
    if seed is not None:
        seed = seed + call.rank * call.world
    planes = list(own.encode(x.detach().reshape(matrix_shape(x.shape)), seed=seed).ordered)
    first = planes[0]
    if first.spec.is_derivable and all(plane.spec == first.spec for plane in planes):
        planes = [first]  # the other one follows from it
    layouts = [_Layout.of(call, plane) for plane in planes]
    payload = torch.cat([_bytes(b) for plane in planes for b in plane.tensors])
    given = [sum(layout.nbytes(size) for layout in layouts) for size in call.own]
    if len(set(given)) == 1:
        arrives = functional_all_gather(payload, call.world, call.name)
    else:
        repeated = payload.repeat(call.world)
        counts = [payload.shape[0]] * call.world
        arrives = functional_all_to_all(repeated, given, counts, call.name)
    received = _Received(call, layouts, given, arrives, quantizer)

    def finish() -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            made: torch.Tensor = _GatheredPlanes.apply(x, received)
            return made
        return received.tensor(x)

    return CollectiveHandle(finish) if async_op else finish()


def _needs_amax(quantizer: Quantizer) -> bool:
    specs = (quantizer.rowwise, quantizer.columnwise)
    return any(spec is not None and spec.needs_tensor_amax for spec in specs)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _check(call: Call, x: torch.Tensor, quantizer: Quantizer) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "all_gather: as_planes is for eager code; gather values in compiled code"
        )
    if call.dim not in (0, x.dim() - 1):
        raise ValueError(
            "all_gather: as_planes needs dim to be the first or the last one, got "
            f"{call.dim} of {x.dim()}"
        )
    axis = _axis(call, x)
    last = max((rank for rank, size in enumerate(call.own) if size), default=0)
    rows = matrix_shape(x.shape)[0] // max(x.shape[0], 1) if axis == 0 and x.dim() > 1 else 1
    specs = [quantizer.rowwise if quantizer.makes_rowwise else None]
    specs.append(quantizer.columnwise if quantizer.makes_columnwise else None)
    for number, spec in enumerate(specs):
        unit = 1 if spec is None else spec.unit(axis if number == 0 else 1 - axis)
        if any(size * rows % unit for size in call.own[:last]):
            raise ValueError(
                f"all_gather: as_planes needs parts that end at the ends of blocks, {unit} "
                f"{'rows' if axis == 0 else 'columns'}, got sizes {call.own}; gather values "
                "instead, or take other sizes"
            )


def _axis(call: Call, x: torch.Tensor) -> int:
    return 1 if call.dim == x.dim() - 1 else 0


class _Layout:
    """The plane of each rank's part: a spec, a direction, and how the part's size makes it.

    Args:
        plane: of this rank's part.
        axis: of the logical matrix, along which parts stand.
        per: rows or columns of the matrix for an index along the dimension.
    """

    def __init__(self, plane: Plane, axis: int, per: int) -> None:
        self.spec, self.direction = plane.spec, plane.direction
        self._axis, self._per = axis, per
        self._rows, self._cols = plane.rows, plane.cols

    @staticmethod
    def of(call: Call, plane: Plane) -> _Layout:
        size = (plane.rows, plane.cols)
        axis = 1 if call.dim else 0
        own = call.own[call.rank]
        return _Layout(plane, axis, size[axis] // own if own else 1)

    def part(self, size: int) -> tuple[int, int]:
        """Return rows and columns of a part."""
        cut = size * self._per
        return (cut, self._cols) if self._axis == 0 else (self._rows, cut)

    def _matrix(self, size: int) -> tuple[int, int]:
        rows, cols = self.part(size)
        return (rows, cols) if self.direction == ROWWISE else (cols, rows)

    def nbytes(self, size: int) -> int:
        """Return the bytes of a part's plane."""
        return self.spec.nbytes(*self._matrix(size))

    def plane(self, piece: torch.Tensor, size: int, shared: dict[str, torch.Tensor]) -> Plane:
        """Return a part's plane.

        Args:
            piece: its bytes.
            size: of the part.
            shared: buffers of the whole, which the first part gives and all parts take.
        """
        rows, cols = self.part(size)
        buffers, start = {}, 0
        for buffer in self.spec.buffers(*self._matrix(size)):
            dtype = buffer.dtype or piece.dtype
            nbytes = buffer.numel * dtype.itemsize
            own = piece.narrow(0, start, nbytes).clone().view(dtype).view(buffer.shape)
            buffers[buffer.name] = own
            start += nbytes
        made = Plane(self.spec, self.direction, rows, cols, buffers)
        for name, grows in made.spread(self._axis).items():
            if not grows:
                made.buffers[name] = shared.setdefault(name, made.buffers[name])
        return made


class _Received:
    """What has arrived, or will have.

    Args:
        call: of the all-gather.
        layouts: of the planes that were sent.
        given: bytes of each rank.
        arrives: uint8, to be waited for.
        quantizer: of the result.
    """

    def __init__(
        self,
        call: Call,
        layouts: list[_Layout],
        given: list[int],
        arrives: torch.Tensor,
        quantizer: Quantizer,
    ) -> None:
        self.call, self._layouts, self._given = call, layouts, given
        self._arrives, self._quantizer = arrives, quantizer

    def tensor(self, x: torch.Tensor) -> QuantizedTensor:
        """Return the tensor of the whole.

        Args:
            x: this rank's tensor.
        """
        pieces = wait_tensor(self._arrives).split(self._given)
        axis = _axis(self.call, x)
        wholes, starts = [], [0] * len(pieces)
        for layout in self._layouts:
            shared: dict[str, torch.Tensor] = {}
            parts = []
            for rank, size in enumerate(self.call.own):
                nbytes = layout.nbytes(size)
                piece = pieces[rank].narrow(0, starts[rank], nbytes)
                starts[rank] += nbytes
                if size:
                    parts.append(layout.plane(piece, size, shared))
            whole = Plane.cat(parts, axis, torch.clone) if parts else None
            if whole is None:
                raise ValueError("all_gather: as_planes needs values, got empty tensors only")
            wholes.append(whole)
        shape = list(x.shape)
        shape[self.call.dim] = sum(self.call.own)
        storage = self._storage(wholes)
        return QuantizedTensor.make(storage, shape, x.dtype, quantizer=self._quantizer)

    def _storage(self, wholes: list[Plane]) -> TensorStorage:
        made = {plane.direction: plane for plane in wholes}
        quantizer = self._quantizer
        if len(wholes) == 1 and quantizer.makes_rowwise and quantizer.makes_columnwise:
            other = wholes[0].derive()
            made[other.direction] = other
        return TensorStorage(made.get("rowwise"), made.get("columnwise"), wholes[0].direction)


class _GatheredPlanes(StatedFunction):
    """The planes of the whole; the gradient of what they stand for comes back as of values."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: _Received) -> torch.Tensor:
        ctx.call = received.call
        return received.tensor(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return run(dual(ctx.call), grad), None
