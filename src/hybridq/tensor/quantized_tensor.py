"""QuantizedTensor: a pair of planes that is a torch.Tensor.

One wrapper subclass and one `__torch_dispatch__`; the marker subclasses of `named.py` hold no
behaviour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..direction import DIRECTIONS
from ..errors import PlaneError
from ..formats import BUFFER_NAMES
from ..storage import Plane, PlaneLayout, StorageLayout, TensorStorage
from . import aten

__all__ = ["QuantizedTensor", "SavedTensor", "prepare_for_saving", "restore_from_saved"]


#: Family of formats to the marker subclass that `isinstance` sees; filled by `named.py`.
_markers: dict[str, type[torch.Tensor]] = {}


def _marker(storage: TensorStorage) -> type[torch.Tensor]:
    """Return the class of a tensor with this storage: that of its format, or the hybrid's."""
    formats = {plane.spec.format for plane in storage.planes}
    family = next(iter(formats)).family if len(formats) == 1 else "hybrid"
    return _markers.get(family, QuantizedTensor)


class QuantizedTensor(torch.Tensor):
    """A tensor `(..., K)` held as quantized planes of the matrix `[prod(...), K]`.

    Built by a Quantizer; `make` is the constructor for code that already has a storage.

    Attributes:
        tensor_storage: the pair of planes.
        quantizer: the Quantizer that made it, used by `update_quantized` and in-place writes;
            None: such writes raise.

    Example:
        >>> import torch, hybridq
        >>> t = hybridq.quantize(torch.randn(4, 64), "mxfp8", columnwise="nvfp4")
        >>> t.rowwise.scale.shape, t.columnwise.data.shape
        (torch.Size([4, 2]), torch.Size([64, 2]))
    """

    tensor_storage: TensorStorage
    quantizer: Any

    def __init_subclass__(cls, family: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if family:
            _markers[family] = cls

    @staticmethod
    def make(
        storage: TensorStorage,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        quantizer: Any = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return the tensor of `shape` and nominal `dtype` that `storage` holds.

        Args:
            storage: its planes' logical matrix is `[prod(shape[:-1]), shape[-1]]`.
            shape: logical shape; `()` and `(n,)` are a matrix of one row.
            dtype: what the tensor appears as and dequantizes to.
            quantizer: the Quantizer for later writes.
            requires_grad: as of any tensor.
        """
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            _marker(storage),
            tuple(shape),
            dtype=dtype,
            device=storage.first.device,
            requires_grad=requires_grad,
        )
        tensor.tensor_storage = storage
        tensor.quantizer = quantizer
        return tensor

    # ---- what it is made of

    @property
    def rowwise(self) -> Plane | None:
        """The rowwise plane of the matrix `[prod(shape[:-1]), shape[-1]]`, or None."""
        return self.tensor_storage.rowwise

    @property
    def columnwise(self) -> Plane | None:
        """The columnwise plane, stored as the rowwise plane of the transposed matrix, or None."""
        return self.tensor_storage.columnwise

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all buffers, a shared one counted once."""
        return self.tensor_storage.nbytes

    def get_usages(self) -> dict[str, bool]:
        """Return which planes exist, `{"rowwise": ..., "columnwise": ...}`."""
        return {"rowwise": self.rowwise is not None, "columnwise": self.columnwise is not None}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop a plane, or add one that the other determines exactly.

        Args:
            rowwise_usage, columnwise_usage: True, False, or None to leave it as it is.

        Raises:
            PlaneError: a plane is asked for that is neither there nor derivable, or none is left.
        """
        have = self.get_usages()
        self.tensor_storage = self.tensor_storage.with_usage(
            have["rowwise"] if rowwise_usage is None else rowwise_usage,
            have["columnwise"] if columnwise_usage is None else columnwise_usage,
        )

    # ---- conversion

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of this shape.

        The rowwise plane is decoded if there is one, else the columnwise. The gradient is passed
        through unchanged (straight-through).

        Args:
            dtype: of the result; None: the tensor's nominal dtype.
        """
        return _Dequantize.apply(self, dtype or self.dtype)

    def quantize_(self, source: torch.Tensor) -> QuantizedTensor:
        """Write `source` into this tensor through its quantizer, in place; return self."""
        return self.quantizer_for_write("quantize_").update_quantized(source, self)

    def quantizer_for_write(self, where: str) -> Any:
        """Return the quantizer, or raise that `where` needs one."""
        if self.quantizer is None:
            raise PlaneError(
                f"{where}: the tensor has no quantizer; make it by one, or dequantize first"
            )
        return self.quantizer

    def float(self) -> torch.Tensor:
        """Return the values in FP32 (dequantized, as `.half()` and `.bfloat16()` are)."""
        return self.dequantize(dtype=torch.float32)

    def half(self) -> torch.Tensor:
        """Return the values in FP16."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> torch.Tensor:
        """Return the values in BF16."""
        return self.dequantize(dtype=torch.bfloat16)

    # ---- torch's protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name, _ in self.tensor_storage.named_buffers()]
        return names, (self.tensor_storage.flatten()[1], self.dtype, self.quantizer)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        layout, dtype, quantizer = context
        storage = _assemble(list(inner.values()), layout, outer_size)
        return QuantizedTensor.make(storage, outer_size, dtype, quantizer=quantizer)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return aten.dispatch(func, args, kwargs or {})

    def remake(
        self,
        storage: TensorStorage,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        quantizer: Any = None,
    ) -> QuantizedTensor:
        """Return a tensor of another storage, shape or dtype, and of this one's quantizer."""
        return QuantizedTensor.make(
            storage,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            quantizer=quantizer or self.quantizer,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffers, layout = self.tensor_storage.flatten()
        plain = tuple((p.spec, p.direction, p.slots) for p in layout)
        args = (buffers, plain, tuple(self.shape), self.dtype, self.requires_grad, self.quantizer)
        return _rebuild, args

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = QuantizedTensor.make(
            self.tensor_storage.map(lambda buffer: buffer.detach().clone()),
            self.shape,
            self.dtype,
            quantizer=self.quantizer,
            requires_grad=self.requires_grad,
        )
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        lines = [f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}"]
        for direction in DIRECTIONS:
            plane = getattr(self.tensor_storage, direction)
            lines.append(f"  {direction}={plane!r}" if plane else f"  {direction}=None")
        return ",\n".join(lines) + ")"

    # ---- saving for backward by hand

    def prepare_for_saving(self) -> tuple[list[torch.Tensor], SavedTensor]:
        """Return the unique buffers, as plain tensors for `ctx.save_for_backward`, and the rest."""
        buffers, layout = self.tensor_storage.flatten()
        saved = SavedTensor(layout, tuple(self.shape), self.dtype, self.quantizer, len(buffers))
        return buffers, saved


class SavedTensor:
    """A QuantizedTensor without its buffers."""

    __slots__ = ("count", "dtype", "layout", "quantizer", "shape")

    def __init__(
        self,
        layout: StorageLayout,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Any,
        count: int,
    ) -> None:
        self.layout = layout
        self.shape = shape
        self.dtype = dtype
        self.quantizer = quantizer
        self.count = count

    def restore_from_saved(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[QuantizedTensor, Sequence[torch.Tensor]]:
        """Return the tensor made of the first buffers of `tensors`, and the rest of them."""
        storage = _assemble(tensors[: self.count], self.layout, self.shape)
        made = QuantizedTensor.make(storage, self.shape, self.dtype, quantizer=self.quantizer)
        return made, tensors[self.count :]


def prepare_for_saving(
    *tensors: torch.Tensor | None,
) -> tuple[list[torch.Tensor | None], list[SavedTensor | None]]:
    """Take tensors apart for `ctx.save_for_backward`; `restore_from_saved` inverts it.

    Args:
        tensors: QuantizedTensor, plain tensor or None each.

    Returns:
        The flat list of plain tensors (None stays None), and one entry per argument.
    """
    flat: list[torch.Tensor | None] = []
    entries: list[SavedTensor | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            buffers, saved = tensor.prepare_for_saving()
            flat += buffers
            entries.append(saved)
        else:
            flat.append(tensor)
            entries.append(None)
    return flat, entries


def restore_from_saved(
    entries: Sequence[SavedTensor | None], saved: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the tensors that `prepare_for_saving` took apart."""
    rest: Sequence[Any] = list(saved)
    tensors: list[torch.Tensor | None] = []
    for entry in entries:
        if entry is None:
            tensors.append(rest[0])
            rest = rest[1:]
        else:
            tensor, rest = entry.restore_from_saved(rest)
            tensors.append(tensor)
    return tensors


class _Dequantize(torch.autograd.Function):
    """Decode; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return aten.dequantize(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _assemble(
    buffers: Sequence[torch.Tensor], layout: StorageLayout, shape: Sequence[int]
) -> TensorStorage:
    return TensorStorage.unflatten(buffers, layout, *matrix_shape(shape))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return `[rows, cols]` of the matrix that a tensor of `shape` is quantized as."""
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def _rebuild(
    buffers: list[torch.Tensor],
    layout: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    quantizer: Any,
) -> QuantizedTensor:
    from_layout = tuple(PlaneLayout(*plane) for plane in layout)
    storage = _assemble(buffers, from_layout, shape)
    return QuantizedTensor.make(
        storage, shape, dtype, quantizer=quantizer, requires_grad=requires_grad
    )


torch.serialization.add_safe_globals([_rebuild])


def _buffer_property(direction: str, name: str) -> property:
    def get(self: QuantizedTensor) -> torch.Tensor | None:
        plane = getattr(self.tensor_storage, direction)
        return None if plane is None else plane.buffers.get(name)

    return property(get, doc=f"The `{name}` buffer of the {direction} plane, or None.")


for _direction in DIRECTIONS:
    for _name in BUFFER_NAMES:
        setattr(QuantizedTensor, f"_{_direction}_{_name}", _buffer_property(_direction, _name))
