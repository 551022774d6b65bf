"""QuantizedTensor: a pair of planes that is a torch.Tensor.

One wrapper subclass and one `__torch_dispatch__`; the marker subclasses of `named.py` hold no
behaviour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from .._torch_private import leave_frame_alone, no_torch_function, refuse_memory
from ..direction import DIRECTIONS
from ..errors import PlaneError
from ..formats import BUFFER_NAMES
from ..storage import Plane, PlaneLayout, StorageLayout, TensorStorage
from . import aten
from .by_class import MadeByClass
from .in_graph import PlaneEntry, assemble, entries, quantizer_of, runs_at_once
from .initial import KeepsInitial, attach_initial, copy_attributes, keep_initial
from .memory import Memory
from .rows import Part, assign_copied
from .straight_through import decoded, decoded_rows, row_index
from .table import (
    HIGH,
    buffer_property,
    check_no_grad,
    check_tensor,
    dequantize,
    is_flat,
    is_quantized,
    matrix_shape,
)
from .unprepared import Unprepared
from .usage import used

__all__ = ["QuantizedTensor", "assemble_planes"]


#: Family of formats to the marker subclass that `isinstance` sees; filled by `named.py`.
_markers: dict[str, type[torch.Tensor]] = {}


def _marker(storage: TensorStorage) -> type[torch.Tensor]:
    """Return the class of a tensor with this storage: that of its format, or the hybrid's."""
    one, row, col = storage.first.spec.format, storage.rowwise, storage.columnwise
    is_one = row is None or col is None or row.spec.format == col.spec.format
    return _markers.get(one.family if is_one else "hybrid", QuantizedTensor)


def _make_in_graph(
    buffers: list[torch.Tensor],
    planes: list[PlaneEntry],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantizer: str | None,
    requires_grad: bool,
) -> QuantizedTensor:
    """Return `make` of what a node of a graph can take."""
    known = None if quantizer is None else quantizer_of(quantizer)
    storage = assemble(buffers, planes)
    return QuantizedTensor.make(storage, shape, dtype, quantizer=known, requires_grad=requires_grad)


@runs_at_once
def _is_node() -> bool:
    """Have dynamo keep `_make_in_graph` as a node; it must not have seen that function before."""
    torch.compiler.allow_in_graph(_make_in_graph)
    return True


class QuantizedTensor(MadeByClass, Unprepared, Memory, KeepsInitial, torch.Tensor):
    """A tensor `(..., K)` held as quantized planes of the matrix `[prod(...), K]`.

    Built by a Quantizer; `make` is the constructor for code that already has a storage.

    Attributes:
        tensor_storage: the pair of planes.
        quantizer: the Quantizer that made it, used by `update_quantized` and in-place writes;
            None: such writes raise.
        part: None, or where this view lies in a tensor that is written as a whole only.

    Example:
        >>> import torch, hybridq
        >>> t = hybridq.quantize(torch.randn(4, 64), "mxfp8", columnwise="nvfp4")
        >>> t.rowwise.scale.shape, t.columnwise.data.shape
        (torch.Size([4, 2]), torch.Size([64, 2]))
    """

    tensor_storage: TensorStorage
    quantizer: Any
    part: Part | None = None

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
            shape: logical shape; `()` and `(n,)` are a matrix of one row, or `(n,)` is the flat
                view of a matrix of several.
            dtype: what the tensor appears as and dequantizes to: FP32, BF16 or FP16.
            quantizer: the Quantizer for later writes.
            requires_grad: as of any tensor.

        Raises:
            TypeError: `dtype` is another one.
        """
        if dtype not in HIGH:
            raise TypeError(f"make: dtype must be float32, bfloat16 or float16, got {dtype}")
        if torch.compiler.is_dynamo_compiling() and _is_node():
            text = None if quantizer is None else quantizer.text
            return _make_in_graph(*entries(storage), tuple(shape), dtype, text, requires_grad)
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            _marker(storage),
            shape if isinstance(shape, tuple) else tuple(shape),
            dtype=dtype,
            device=storage.first.buffers["data"].device,
            requires_grad=requires_grad,
        )
        refuse_memory(tensor)
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
            PlaneError: a plane is asked for that is neither there nor derivable, would have another
                spec than the quantizer's, or none is left; both given as False are `clear`.
        """
        if rowwise_usage is False and columnwise_usage is False:
            return self.clear()
        have = self.get_usages()
        self.tensor_storage, self.quantizer = used(
            self.tensor_storage,
            self.quantizer,
            have["rowwise"] if rowwise_usage is None else rowwise_usage,
            have["columnwise"] if columnwise_usage is None else columnwise_usage,
        )
        self.take_class()

    def take_class(self) -> None:
        """Become of the class of the planes as they are, where other ones have come."""
        self.__class__ = _marker(self.tensor_storage)  # type: ignore[assignment]

    # ---- conversion

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of this shape.

        The plane that has the values is decoded: the rowwise one if there is one, else the
        columnwise, and of a transposed tensor that of what it is the transpose of. The gradient is
        passed through unchanged (straight-through).

        Args:
            dtype: of the result; None: the tensor's nominal dtype.
        """
        return decoded(self, dtype or self.dtype)

    def dequantize_rows(
        self, index: slice | torch.Tensor | Sequence[int], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `dequantize()[index]` of a matrix, decoding only those rows.

        Without a rowwise plane, a slice decodes the blocks that it touches, and an index decodes
        the whole tensor. The gradient of the rows is that of the tensor, zero elsewhere.

        Args:
            index: a slice of step 1, a list of integers, or an integer tensor `[n]`; negative
                ones count from the end.
            dtype: of the result; None: the tensor's nominal dtype.

        Returns:
            Plain tensor `[n, cols]`.

        Raises:
            ValueError: the tensor is not 2-D, or a slice has another step.
            TypeError: the index is not one of these.
            IndexError: a row does not exist.

        Example:
            >>> import torch, hybridq
            >>> t = hybridq.quantize(torch.ones(100, 32), "nvfp4")
            >>> t.dequantize_rows([3, 97]).shape, t.dequantize_rows(slice(-5, None)).shape
            (torch.Size([2, 32]), torch.Size([5, 32]))
        """
        if self.dim() != 2:
            raise ValueError(f"dequantize_rows: the tensor must be 2-D, got {tuple(self.shape)}")
        if isinstance(index, slice):
            if index.step not in (None, 1):
                raise ValueError(f"dequantize_rows: a slice must have step 1, got {index.step}")
        else:
            index = row_index(index, self)
        return decoded_rows(self, index, dtype or self.dtype)

    # ---- writes

    def quantize_(self, source: torch.Tensor, *, noop_flag: Any = None) -> QuantizedTensor:
        """Write `source`, which must not require grad, through the quantizer; return self.

        Nothing is written where `noop_flag`, FP32 `[1]`, is 1. Reading it waits for a device."""
        is_off = noop_flag is not None and float(noop_flag) == 1.0
        return self if is_off else self.write(source, "quantize_")

    @property
    def own_quantizer(self) -> Any:
        """The quantizer, that of the whole tensor for a part of one, or None."""
        return self.quantizer if self.part is None else self.part.quantizer

    def quantizer_for_write(self, where: str) -> Any:
        """Return the quantizer; PlaneError that names the operation `where` if there is none."""
        if self.own_quantizer is None:
            raise PlaneError(
                f"{where}: the tensor has no quantizer; make it by one, or dequantize first"
            )
        return self.own_quantizer

    def write(self, source: torch.Tensor, where: str) -> QuantizedTensor:
        """Quantize `source` into this tensor's buffers; return self.

        A part of a tensor that cannot be written piecewise rewrites all of that tensor.

        Args:
            source: of this tensor's shape.
            where: name of the operation, for errors.

        Raises:
            TypeError: `source` is no tensor.
            PlaneError, ValueError: the tensor has no quantizer; the shapes differ.
            RuntimeError: `source` requires grad, outside `torch.no_grad()`.
        """
        check_tensor(source, where)
        check_no_grad(source, where)
        quantizer = self.quantizer_for_write(where)
        if self.part is None and not is_flat(self):
            return quantizer.update_quantized(source, self)
        if tuple(source.shape) != tuple(self.shape):
            raise ValueError(
                f"{where}: source must have the target's shape {tuple(self.shape)}, got "
                f"{tuple(source.shape)}"
            )
        plain = source.dequantize() if is_quantized(source) else source
        storage = self.tensor_storage
        if self.part is not None:
            storage, plain = self.part.storage, self.part.merged(plain.detach())
        shape = (storage.first.rows, storage.first.cols)
        whole = QuantizedTensor.make(storage, shape, self.dtype, quantizer=quantizer)
        quantizer.update_quantized(plain.detach().reshape(shape), whole)
        torch.autograd.graph.increment_version(self)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write `value` to the part `index`, also where the part is no view of the planes."""
        if not assign_copied(self, index, value):
            super().__setitem__(index, value)

    @property
    def data(self) -> torch.Tensor:
        """The same planes without autograd history; assigning it: `docs/reference/tensors.md`."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        check_tensor(value, "data")
        made = value.detach() if is_quantized(value) else self._quantized_like_me(value)
        torch.Tensor.data.__set__(self, made)  # type: ignore[attr-defined]
        self.tensor_storage = made.tensor_storage  # type: ignore[attr-defined]
        self.quantizer, self.part = made.quantizer, made.part  # type: ignore[attr-defined]
        attach_initial(self, made.initial_value)  # type: ignore[attr-defined]
        self.__class__ = type(made)  # type: ignore[assignment]

    def _quantized_like_me(self, value: torch.Tensor) -> QuantizedTensor:
        """Return new planes of a plain `value`; the same ones if they hold these very values."""
        if value.shape != self.shape:
            raise ValueError(
                f"data: a plain tensor must have the shape {tuple(self.shape)}, got "
                f"{tuple(value.shape)}; quantize it first, by weight.quantizer.quantize(value). "
                "Before what resizes a weight by itself (resize_token_embeddings) let the module "
                "have nn.Parameter(weight.dequantize()), and quantize that afterwards"
            )
        if value.dtype not in HIGH:
            raise TypeError(
                f"data: a plain tensor must be float32, bfloat16 or float16, got {value.dtype}; a "
                "module of that dtype needs plain parameters, see dequantize"
            )
        mine: Any = self.detach()
        value = value.detach().to(self.device)
        if torch.equal(value, dequantize(mine, value.dtype)):
            return mine.to(value.dtype)  # module.half() and its like: another name for the dtype
        quantizer = self.quantizer_for_write("data")
        own = quantizer.with_usage(**self.get_usages())
        made = (own.quantize if self.tensor_storage.count is None else own.quantize_stack)(value)
        made = made.remake(made.tensor_storage, quantizer=quantizer)
        if self.initial_value is not None:
            keep_initial(made, None, self)  # module.to_empty: the next initialization is kept
        return made

    # ---- torch's protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        refusal = self.tensor_storage.check_graph()
        names = [name for name, _ in self.tensor_storage.named_buffers()]
        layout = self.tensor_storage.flatten()[1]
        # One that holds tensors of its caller cannot be in a graph: writes are refused there.
        quantizer = None if hasattr(self.quantizer, "quantizer") else self.quantizer
        return names, (layout, self.dtype, quantizer, self.width, refusal)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        layout, dtype, quantizer, width, refusal = context
        storage = assemble_planes(list(inner.values()), layout, outer_size, width)
        storage.refusal = refusal
        return QuantizedTensor.make(storage, outer_size, dtype, quantizer=quantizer)

    def _stable_hash_for_caching(self) -> str:
        """Return what torch.compile's cache must know of this tensor: everything but its values."""
        storage = self.tensor_storage
        quantizer = None if self.quantizer is None else self.quantizer.text
        facts: tuple[Any, ...] = (storage.flatten()[1], storage.check_graph(), quantizer)
        facts += (self.shape, self.dtype, self.requires_grad, self.width)
        return hashlib.sha256(repr((*facts, str(self.device))).encode()).hexdigest()

    @property
    def width(self) -> int | None:
        """Columns of the matrix where the shape does not tell: of a flat view."""
        return self.tensor_storage.first.cols if is_flat(self) else None

    __torch_function__ = no_torch_function

    @classmethod
    @leave_frame_alone
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return aten.dispatch(func, types, args, kwargs or {})

    def remake(
        self,
        storage: TensorStorage,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        quantizer: Any = None,
    ) -> QuantizedTensor:
        """Return a tensor of another storage, shape or dtype, and of this one's quantizer."""
        same = storage is self.tensor_storage
        made = QuantizedTensor.make(
            storage,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            quantizer=quantizer or (self.quantizer if same else self.own_quantizer),
        )
        if same and self.part is not None:
            made.part = self.part
        if same and self.initial_value is not None:
            attach_initial(made, self.initial_value)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffers, layout = self.tensor_storage.flatten()
        plain = tuple(plane.plain for plane in layout)
        args = (buffers, plain, tuple(self.shape), self.dtype, self.requires_grad)
        is_parameter = isinstance(self, torch.nn.Parameter)
        own = getattr(self.own_quantizer, "quantizer", self.own_quantizer)  # holds no tensors
        return _rebuild, (*args, own, self.width, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = QuantizedTensor.make(
            self.tensor_storage.map(lambda buffer: buffer.detach().clone()),
            self.shape,
            self.dtype,
            quantizer=deepcopy(self.own_quantizer, memo),
            requires_grad=self.requires_grad,
        )
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        copy_attributes(self, copy, memo)
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        lines = [f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}"]
        for direction in DIRECTIONS:
            plane = getattr(self.tensor_storage, direction)
            lines.append(f"  {direction}={plane!r}" if plane else f"  {direction}=None")
        return ",\n".join(lines) + ")"


def assemble_planes(
    buffers: Sequence[torch.Tensor],
    layout: StorageLayout,
    shape: Sequence[int],
    width: int | None = None,
) -> TensorStorage:
    """Return the storage that `flatten` took apart, of a tensor of `shape`.

    Args:
        buffers, layout: as `flatten` returns them.
        shape: of the tensor.
        width: columns of its matrix where the shape lacks them, of a flat view.
    """
    rows, cols = matrix_shape(shape) if width is None else (shape[0] // max(width, 1), width)
    return TensorStorage.unflatten(buffers, layout, rows, cols)


def _rebuild(
    buffers: list[torch.Tensor],
    layout: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    quantizer: Any,
    width: int | None = None,
    is_parameter: bool = False,
) -> torch.Tensor:
    from_layout = tuple(PlaneLayout(*plane) for plane in layout)
    storage = assemble_planes(buffers, from_layout, shape, width)
    made: Any = QuantizedTensor.make(
        storage, shape, dtype, quantizer=quantizer, requires_grad=requires_grad
    )
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made


torch.serialization.add_safe_globals([_rebuild])


for _direction in DIRECTIONS:
    for _name in BUFFER_NAMES:
        setattr(QuantizedTensor, f"_{_direction}_{_name}", buffer_property(_direction, _name))
