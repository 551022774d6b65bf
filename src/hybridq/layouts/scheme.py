"""Scheme: how a layout holds one format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..formats import PlaneSpec
from ..storage import Plane
from .order import cells_of
from .part import ROWS, Part, ScalarPart, module_of

__all__ = ["Mark", "Scheme"]


@dataclass(frozen=True)
class Mark:
    """A tensor beside a weight's, the same for all weights of a scheme: it says how they are held.

    Args:
        name: in the file, where `{module}` is the linear's name.
        values: its bytes, by how inputs are quantized.
    """

    name: str
    values: Mapping[str, bytes]

    @property
    def end(self) -> str:
        """The end of its name in a file."""
        return self.name.partition("}")[2]

    def value(self, inputs: str) -> torch.Tensor:
        """Return it, uint8 on the CPU.

        Args:
            inputs: how inputs are quantized.
        """
        return torch.tensor(list(self.values[inputs]), dtype=torch.uint8, device="cpu")

    def file_name(self, weight: str) -> str:
        """Return its name in the file.

        Args:
            weight: name of the weight.
        """
        return self.name.format(module=module_of(weight)).removeprefix(".")


@dataclass(frozen=True)
class Scheme:
    """One format as a layout holds it.

    Args:
        name: of the scheme within its layout: `nvfp4`, `mxfp8`, `mxfp4`, `fp8_tensor`,
            `fp8_channel` or `fp8_block`.
        spec: spec string of what a reader decodes, where `{cols}` is the number of columns.
        parts: the tensors of the file, the codes first.
        input: the scale of a calibrated input, or None where readers take none.
        shares_scale: readers multiply the weights of siblings (q, k and v; gate and up) as one
            and keep one scale for the tensor: they must be quantized with one.
        config: what the layout's configuration says of the weights in this scheme.
        inputs: what it says of the inputs, by how they are quantized: `none` (they stay as they
            are), `dynamic` (each with scales of its own) or `static` (by calibrated scales).
        mark: a tensor beside the parts that readers tell the scheme by, or None.
        rows: readers need rows in multiples of it.
        constants: values of the plane's buffers that no tensor of the file holds.
    """

    name: str
    spec: str
    parts: tuple[Part, ...]
    input: ScalarPart | None = None
    shares_scale: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    mark: Mark | None = None
    rows: int = 1
    constants: Mapping[str, float] = field(default_factory=dict)

    def units(self, cols: int) -> tuple[int, int]:
        """Return the rows and columns of a matrix whose scales lie together in a file.

        Args:
            cols: of the matrix.
        """
        return cells_of((part.order for part in self.parts), self.stored_spec(cols).format.block)

    def stored_spec(self, cols: int) -> PlaneSpec:
        """Return the spec of the rowwise plane that the file holds.

        Args:
            cols: of the matrix.
        """
        return PlaneSpec.parse(self.spec.format(cols=max(cols, 1)))

    def constant_buffers(self, spec: PlaneSpec, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the buffers, by name, that no tensor of the file holds.

        Args:
            spec: of the plane.
            device: of the plane's other buffers.
        """
        own = {one.name: one for one in spec.buffers(0, 0)}
        return {
            name: torch.full(own[name].shape, value, dtype=own[name].dtype, device=device)
            for name, value in self.constants.items()
        }

    def reason_against(self, spec: PlaneSpec, shape: Sequence[int]) -> str | None:
        """Return why planes of `spec` cannot be held, or None if they can.

        Args:
            spec: of a rowwise plane.
            shape: of the matrix, `[rows, cols]`, or of a stack of such.
        """
        rows, cols = shape[-2:]
        stored, own = self.stored_spec(cols).format, spec.format
        if own.is_identity or own.element != stored.element or own.scale != stored.scale:
            return f"{self.name} holds {stored.element} with scales in {stored.scale}"
        if spec.signs is not None:
            return "no reader undoes the random Hadamard transform"
        if spec.row_scaled:
            return "readers know one second-level scale per tensor, not one per row"
        if own.needs_tensor_amax != stored.needs_tensor_amax:
            return f"{self.name} has {'one scale' if stored.block is None else 'blocks'} per tensor"
        if (own.block is None) != (stored.block is None):
            wanted = "one scale per tensor" if stored.block is None else f"blocks {stored.block}"
            return f"{self.name} has {wanted}"
        if own.block is not None and stored.block is not None:
            block = (own.block[0], min(own.block[1], max(cols, 1)) if self.is_channel else 0)
            if self.is_channel and block != stored.block:
                return f"{self.name} has one scale per row"
            if not self.is_channel and (
                own.block[0] % stored.block[0] or own.block[1] % stored.block[1]
            ):
                return f"{self.name} has blocks {stored.block[0]}x{stored.block[1]}"
            if not self.is_channel and cols % stored.block[1]:
                return f"readers of {self.name} need columns in multiples of {stored.block[1]}"
        if not cols and any(part.shape is ROWS for part in self.parts):
            return f"{self.name} has one scale per row, and rows without columns have none"
        if rows % self.rows:
            return f"readers of {self.name} need rows in multiples of {self.rows}"
        return None

    def shape_of(self, codes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the weight whose codes have this shape, or None: of none they can.

        Args:
            codes: shape of the first of the parts in a file.
        """
        dims = len(self.parts[0].shape.of((0, 0)))
        if len(codes) not in (dims, dims + 1):
            return None
        *lead, rows, cols = self.parts[0].shape.buffer_of(codes)
        element = self.stored_spec(1).format.element
        return (*lead, rows, cols * (1 if element is None else element.codes_per_byte))

    @property
    def is_channel(self) -> bool:
        """Whether there is one scale per row, however long it is."""
        return "{cols}" in self.spec

    def as_stored(self, plane: Plane) -> Plane:
        """Return the plane that the file holds: the same values, in the scheme's own blocks.

        The scale of a larger block (16x16 where the file has 1x16) stands for each of the smaller
        ones, so that nothing is rounded. The codes are the same buffer.

        Args:
            plane: rowwise, of a spec that the scheme holds; or a tile of one that cuts no block.
        """
        own, cols = plane.spec.format, plane.cols
        stored = self.stored_spec(cols)
        spec = replace(stored, tensor_bound=plane.spec.tensor_bound)
        if own.block is None or stored.format.block is None or self.is_channel:
            return Plane(spec, plane.direction, plane.rows, cols, plane.buffers)
        high, wide = (a // b for a, b in zip(own.block, stored.format.block, strict=True))
        shape = {one.name: one.shape for one in spec.buffers(plane.rows, cols)}["scale"]
        scale = plane.buffers["scale"]
        if high > 1:
            scale = scale.repeat_interleave(high, 0)[: shape[0]]
        if wide > 1:
            scale = scale.repeat_interleave(wide, 1)[:, : shape[1]]
        buffers: dict[str, torch.Tensor] = {**plane.buffers, "scale": scale.contiguous()}
        return Plane(spec, plane.direction, plane.rows, cols, buffers)
