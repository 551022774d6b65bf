"""Part: one tensor of a file, and how it follows from a buffer of a plane, and back.

All but one kind hold a buffer's own bytes under another dtype and shape, some in another order; so
a file can be written tile by tile, at the places that the plane's own tiles have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from ..formats import PlaneSpec
from ..kernels.inputs import wide
from .order import AS_IS, Order
from .second_level import (
    amax_of_factor,
    amax_of_reciprocal,
    is_near,
    written_factor,
    written_reciprocal,
)

__all__ = [
    "BYTES",
    "FACTOR",
    "FOUR_DIMS",
    "GROUPS_OF_32",
    "ONE_BY_ONE",
    "RECIPROCAL",
    "ROWS",
    "SAME",
    "SCALAR",
    "SWIZZLED",
    "TILED",
    "WORDS",
    "Part",
    "ScalarPart",
    "Shape",
    "Value",
    "module_of",
    "same_shape",
]

_WEIGHT: Final = ".weight"


@dataclass(frozen=True)
class Shape:
    """How a tensor's shape in the file follows from its buffer's.

    Args:
        name: for errors and tables.
        of: the file's shape, from the buffer's.
        buffer_of: the buffer's shape, from the file's.
        packs: elements of the buffer in one of the file.
    """

    name: str
    of: Callable[[tuple[int, ...]], tuple[int, ...]]
    buffer_of: Callable[[tuple[int, ...]], tuple[int, ...]]
    packs: int = 1


#: The buffer's own.
SAME: Final = Shape("same", lambda shape: shape, lambda shape: shape)
#: `[]` for `[1]`.
SCALAR: Final = Shape("scalar", lambda shape: (), lambda shape: (1,))
#: `[1, 1]` for `[1]`, of a stack that has a scale for each matrix.
ONE_BY_ONE: Final = Shape("one by one", lambda shape: (1, 1), lambda shape: (1,))
#: `[rows]` for `[rows, 1]`.
ROWS: Final = Shape("rows", lambda shape: shape[:-1], lambda shape: (*shape, 1))
#: `[rows, bytes / 4]` for `[rows, bytes]`.
WORDS: Final = Shape(
    "words",
    lambda shape: (*shape[:-1], shape[-1] // 4),
    lambda shape: (*shape[:-1], shape[-1] * 4),
    packs=4,
)
#: `[rows, 1, cols, 1]` for `[rows, cols]`, of scales of blocks.
FOUR_DIMS: Final = Shape(
    "four dimensions",
    lambda shape: (shape[0], 1, shape[1], 1),
    lambda shape: (shape[0], shape[2]),
)
#: `[rows, cols / 32, 16]` for packed codes `[rows, cols / 2]`.
GROUPS_OF_32: Final = Shape(
    "groups of 32",
    lambda shape: (*shape[:-1], shape[-1] // 16, 16),
    lambda shape: (*shape[:-2], shape[-2] * 16),
)
#: `[rows, blocks]` filled up to whole tiles of 128 x 4. The codes say what the buffer's own is.
TILED: Final = Shape(
    "tiles",
    lambda shape: (-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4),
    lambda shape: shape,
)
#: `[32 r, 16 c]` for scales `[rows, cols]` in r x c tiles of 128 x 4.
SWIZZLED: Final = Shape(
    "swizzled",
    lambda shape: (-(-shape[0] // 128) * 32, -(-shape[1] // 4) * 16),
    lambda shape: shape,
)


@dataclass(frozen=True)
class Value:
    """What a tensor of the file says, computed from the plane's buffer.

    Args:
        name: for errors and tables.
        is_bytes: the file holds the buffer's own bytes.
        write: the file's FP32 value from `(amax, bound)`; None if is_bytes.
        read: amax, bound and whether exactly, from `(value, largest code)`; None if is_bytes.
    """

    name: str
    is_bytes: bool
    write: Callable[[torch.Tensor, float], torch.Tensor] | None = None
    read: Callable[[torch.Tensor, float], tuple[torch.Tensor, float, bool]] | None = None


BYTES: Final = Value("bytes", True)
#: `amax / (bound * 6)`: values are multiplied with it.
FACTOR: Final = Value("factor", False, written_factor, amax_of_factor)
#: `(bound * 6) / amax`: values are divided by it.
RECIPROCAL: Final = Value("reciprocal", False, written_reciprocal, amax_of_reciprocal)


@dataclass(frozen=True)
class Part:
    """One tensor of the file that a weight becomes.

    Args:
        name: its name, where `{module}` is the weight's without `.weight` and `{weight}` the
            whole one; or `{parent}` what stands before its last dot and `{leaf}` behind it.
        buffer: of the rowwise plane that it is made of.
        dtype: in the file.
        shape: how its shape follows from the buffer's.
        value: how its content does.
        widened: dtypes that are read too, and hold the same values exactly in the buffer's FP32,
            or its bytes.
        order: how its bytes lie, where they are the buffer's.
    """

    name: str
    buffer: str
    dtype: torch.dtype
    shape: Shape = SAME
    value: Value = BYTES
    widened: tuple[torch.dtype, ...] = ()
    order: Order = AS_IS

    @property
    def read_dtypes(self) -> tuple[torch.dtype, ...]:
        """All dtypes that a file may have it in: its own, raw bytes of the same, and `widened`."""
        raw = (torch.uint8, torch.float8_e8m0fnu) if self.dtype == torch.uint8 else ()
        return tuple(dict.fromkeys((self.dtype, *raw, *self.widened)))

    def file_name(self, weight: str) -> str:
        """Return the tensor's name in the file.

        Args:
            weight: name of the weight.
        """
        module = module_of(weight)
        parent, _, leaf = weight.rpartition(".")
        own = {"module": module, "weight": weight, "parent": parent, "leaf": leaf}
        return self.name.format(**own).removeprefix(".")

    def weight_of(self, name: str) -> str | None:
        """Return the name of the weight whose tensor `name` may be, or None.

        Args:
            name: of a tensor of a file.
        """
        field, _, suffix = self.name.partition("}")
        if field == "{parent":
            start, _, end = suffix.partition("{leaf}")
            parent, _, leaf = f".{name.removesuffix(end)}".rpartition(start)
            is_it = name.endswith(end) and leaf and "." not in leaf
            return f"{parent}.{leaf}".removeprefix(".") if is_it else None
        is_module = field == "{module"
        if is_module and name == suffix[1:]:
            return _WEIGHT[1:]  # of a checkpoint of one module
        if not suffix and not is_module:
            return name  # a stack has no module of its own
        if not suffix or not name.endswith(suffix) or name == suffix:
            return None
        return name.removesuffix(suffix) + (_WEIGHT if is_module else "")

    def write(self, buffer: torch.Tensor, spec: PlaneSpec) -> torch.Tensor:
        """Return the tensor of the file.

        Args:
            buffer: of the plane, or of a tile of it if the value is its bytes.
            spec: of the plane.
        """
        if self.value.write is None:
            made = buffer.contiguous()
            if self.order is not AS_IS:
                made = self.order.write(made.view(torch.uint8))
            made = made.reshape(-1).view(self.dtype)  # strides of no elements divide by nothing
        else:
            made = self.value.write(buffer, _bound(spec))
        return made.reshape(self.shape.of(tuple(buffer.shape)))

    def read(
        self, tensor: torch.Tensor, shape: tuple[int, ...], spec: PlaneSpec
    ) -> tuple[torch.Tensor, float | None, bool]:
        """Return the buffer, the tensor bound that it is to be read with, and whether exactly.

        Args:
            tensor: of the file.
            shape: of the buffer.
            spec: of the plane.
        """
        if self.value.read is not None:
            element = spec.format.element
            largest = 1.0 if element is None else element.max
            flat = tensor.to(torch.float32).reshape(shape)
            return self.value.read(flat, largest)
        wanted = {buffer.name: buffer.dtype for buffer in spec.buffers(1, 1)}[self.buffer]
        if wanted == torch.float32 and tensor.dtype != torch.float32:
            if tensor.dtype == torch.uint8:  # E8M0, which only few dtypes' tensors say themselves
                tensor = tensor.view(torch.float8_e8m0fnu)
            return tensor.to(torch.float32).reshape(shape), None, True
        if self.order is not AS_IS:
            tensor = self.order.read(tensor.contiguous().view(torch.uint8), shape)
        made = tensor.contiguous().view(torch.uint8 if wanted is None else wanted)
        return made.reshape(shape), None, True

    def check_near(
        self, name: str, tensor: torch.Tensor, buffer: torch.Tensor, spec: PlaneSpec
    ) -> None:
        """Raise where a buffer that is not exactly what a file says is nowhere near it either.

        Args:
            name: of the tensor.
            tensor: of the file.
            buffer, spec: as `read` returned them.

        Raises:
            CheckpointError: no amax of a plane gives this factor, or nearly.
        """
        value = tensor.double().reshape(-1)
        factor = 1.0 / value if self.value.name == RECIPROCAL.name else value
        if not is_near(buffer.reshape(-1), _bound(spec), factor):
            raise CheckpointError(
                f"layouts: {name!r} is {tensor.item():.9g}, and no amax of a plane gives such a "
                "second-level scale, which must be positive and in FP32 after it has been "
                "multiplied with 2688; export the checkpoint as bf16 or fp32, which decodes it"
            )


def module_of(weight: str) -> str:
    """Return the name of the module of a weight; "" where the weight's own is all there is.

    Args:
        weight: its name.
    """
    return "" if weight == _WEIGHT[1:] else weight.removesuffix(_WEIGHT)


def _bound(spec: PlaneSpec) -> float:
    element = spec.format.element
    return spec.tensor_bound * (1.0 if element is None else element.max)


def same_shape(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether two shapes differ in one 1 at the end at most: `[]` and `[1]`.

    `[]` and `[1, 1]` are not the same: scales of a tensor and of blocks.
    """
    return a == b or (*a, 1) == b or a == (*b, 1)


@dataclass(frozen=True)
class ScalarPart:
    """A scale of activations: one FP32 value of the file that follows from a calibrated amax.

    Args:
        name: in the file, where `{module}` is the linear's name, `{attention}` the attention's.
        slot: of the calibration: `input`, `k` or `v`.
        shape: in the file: `()` or `(1,)`.
        value: `FACTOR` or `RECIPROCAL`.
        bound: what the amax is divided by, or divides.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    value: Value
    bound: float

    def file_name(self, module: str) -> str:
        """Return the tensor's name in the file.

        Args:
            module: name of the linear, or of the attention.
        """
        return self.name.format(module=module, attention=module)

    def module_of(self, name: str) -> str | None:
        """Return the name of the module whose scale `name` is, or None.

        Args:
            name: of a tensor of a file.
        """
        suffix = self.name.partition("}")[2]
        return name.removesuffix(suffix) if name.endswith(suffix) and name != suffix else None

    def write(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the file.

        Args:
            amax: FP32, one value: positive and finite.

        Raises:
            CheckpointError: it is zero, negative, NaN or infinite.
        """
        amax = amax.detach().to(torch.float32).reshape(1)
        if not (bool(torch.isfinite(amax)) and bool(amax > 0.0)):
            raise CheckpointError(
                f"layouts: the amax of a static scale must be positive and finite, got "
                f"{amax.item()} for {self.name!r}; calibrate with data that reaches the module"
            )
        write = written_factor if self.value.write is None else self.value.write
        return write(amax, self.bound).reshape(self.shape)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the amax, FP32 `[1]`, that the tensor of the file stands for, rounded once.

        Of several values (one for each head of a cache) it is the largest amax: that of all.

        Args:
            tensor: of the file.

        Raises:
            CheckpointError: it has no value.
        """
        value = wide(tensor).reshape(-1)
        if not value.numel():
            raise CheckpointError(
                f"layouts: a scale of activations must have a value, got {list(tensor.shape)} for "
                f"{self.name!r}"
            )
        made = self.bound / value if self.value.name == RECIPROCAL.name else value * self.bound
        return made.to(torch.float32).max().reshape(1)
