"""QuantizedWeight: a parameter in low precision that FSDP2 shards by rows, or by matrices.

What each rank holds are its rows' bytes of the planes of the whole parameter: the amax of a tensor
or of a block on two ranks is that of the whole. So they travel as they are, and every write is one
max-reduction with the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch

from ... import settings
from ..._torch_private import has_kernel, no_torch_function, tree_flatten, tree_map
from ...formats import PlaneSpec
from ...storage import TensorStorage
from ...tensor import as_parts, check_no_grad
from ..encoding import ShardWork, encode_shards
from ..parameters import QuantizedRows
from .gather_hooks import GatherHooks
from .memory_reads import Reads

__all__ = ["QuantizedWeight"]

_aten = torch.ops.aten
_HIGH: Final = (torch.float32, torch.bfloat16, torch.float16)
_TABLE: Final[dict[Any, Callable[..., Any]]] = {}
_SHAPE_ONLY: Final = {
    getattr(_aten, name).default
    for name in (
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    )
}


class QuantizedWeight(Reads, GatherHooks, torch.Tensor):
    """A parameter in low precision, or this rank's rows of it, whose all-gather brings planes.

    Made by `prepare_fsdp2` of a parameter that is a QuantizedTensor. Operators that read it see its
    decoded values; what writes to it quantizes them, on all ranks together. Copies are plain
    tensors, but for those by which FSDP2 or a module moves it.

    Args:
        held: the planes of its rows; shared by its views.
        about: shared by all tensors of the parameter.
        shape: of the rows, or of a flat view of them.
        dtype: that it appears as.
        device: of the planes.
    """

    held: QuantizedRows
    _about: Any  # QuantizedShard, or QuantizedStackShard

    @staticmethod
    def __new__(
        cls,
        held: QuantizedRows,
        about: Any,
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> QuantizedWeight:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device
        )
        made.held, made._about = held, about
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def remake(self, held: QuantizedRows | None = None, shape: Any = None, **options: Any) -> Any:
        """Return another tensor of the parameter.

        Args:
            held: its rows; None: these.
            shape: of it; None: this one's.
            options: another dtype or device.
        """
        dtype, device = options.get("dtype") or self.dtype, options.get("device") or self.device
        shape = self.shape if shape is None else shape
        held = self.held if held is None else held
        # A view of an ordinary tensor is one in inference mode too: torch shares its version.
        with nullcontext() if self.is_inference() else torch.inference_mode(False):
            return QuantizedWeight(held, self._about, shape, dtype, device)

    @property
    def specs(self) -> tuple[PlaneSpec | None, PlaneSpec | None]:
        """Of the planes that are held, rowwise and columnwise."""
        found: tuple[PlaneSpec | None, PlaneSpec | None] = self._about.shown_specs
        return found

    def gathered_planes(self) -> TensorStorage:
        """Return the planes of the whole parameter; every rank that shares it must call it."""
        found: TensorStorage = self._about.gathered_planes(self)
        return found

    # ---- what optimizers call, as of a QuantizedTensor

    @property
    def initial_value(self) -> QuantizedWeight | None:
        """Itself, if what the rows were quantized from was kept."""
        return None if self.held.initial is None else self

    def get(self) -> torch.Tensor | None:
        """Return what the rows were quantized from, on the CPU, or None."""
        return self.held.initial

    def clear(self) -> None:
        """Free it."""
        self.held.initial = None

    def quantizer_for_write(self, where: str) -> None:
        """Accept: there always is one."""

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of this shape.

        Args:
            dtype: of the result; None: the tensor's own.
        """
        dtype = dtype or self.dtype
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        made = self.held.dequantize(dtype)
        if made is None:
            return torch.zeros(self.shape, dtype=dtype, device=self.device)
        return made.reshape(self.shape)

    def quantize_(self, source: torch.Tensor) -> QuantizedWeight:
        """Quantize this rank's rows into this tensor; every rank must call it. Return self.

        Args:
            source: of this tensor's shape.

        Raises:
            RuntimeError: `source` requires grad, outside `torch.no_grad()`.
            ValueError: the shapes differ.
        """
        self.quantize_together([(self, source)])
        return self

    @staticmethod
    def quantize_together(pairs: Sequence[tuple[QuantizedWeight, torch.Tensor]]) -> None:
        """Do `weight.quantize_(source)` for many, with one reduction per step of encoding.

        Args:
            pairs: weights and sources; the same weights in the same order on every rank.

        Raises:
            RuntimeError: a weight holds no values of its own (what `new_zeros` made), or a source
                requires grad, outside `torch.no_grad()`.
            ValueError: shapes differ.
        """
        by_group: dict[int, tuple[Any, list[tuple[QuantizedWeight, ShardWork]]]] = {}
        own: list[tuple[QuantizedWeight, torch.Tensor]] = []
        for weight, source in pairs:
            if weight.held.is_padding and weight.numel():
                raise RuntimeError(
                    f"fsdp2: what new_zeros made of {weight._about.name} holds no values of its "
                    "own, and cannot be written; make a plain tensor by torch.zeros"
                )
            check_no_grad(source, "quantize_")
            if tuple(source.shape) != tuple(weight.shape):
                raise ValueError(
                    f"quantize_: source must have the shape {tuple(weight.shape)}, got "
                    f"{tuple(source.shape)}"
                )
            about = weight._about
            values = source.detach().to(weight.device)
            if values.dtype not in _HIGH:
                values = values.to(weight.dtype)
            if about.is_own:
                own.append((weight, values))
                continue
            work = about.work_of(values.reshape(-1, about.cols))
            group = about.group()
            by_group.setdefault(id(group), (group, []))[1].append((weight, work))
        for group, works in by_group.values():
            with torch.no_grad():
                encode_shards([work for _, work in works], group)
            for weight, work in works:
                weight._about.took(weight.held, work)
                torch.autograd.graph.increment_version(weight)
        for weight, values in own:
            weight._about.write(weight.held, values)
            torch.autograd.graph.increment_version(weight)

    def _memory(self) -> torch.Tensor | None:
        return self.held.planes[0].data if self.held.planes else None

    def _values(self) -> torch.Tensor:
        return self.dequantize()

    # ---- torch's protocols

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _TABLE.get(func)
        if handler is not None:
            result = handler(func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if has_kernel(func.name(), "CompositeImplicitAutograd"):
            # In inference mode operators come here whole that are made of others, such as narrow.
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _fallback(func, args, kwargs or {})

    def __tensor_flatten__(self) -> Any:
        raise RuntimeError(
            "torch.compile: a quantized weight that prepare_fsdp2 prepared cannot be an input of a "
            "compiled graph; step its optimizer without torch.compile"
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        raise RuntimeError("torch.compile: a quantized weight of FSDP2 is in no graph")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight(shape={tuple(self.shape)}, planes={self.held.planes})"

    def __deepcopy__(self, memo: Any) -> Any:
        return self._about.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)  # a plain tensor in every file


def _is_ours(value: Any) -> bool:
    return isinstance(value, QuantizedWeight)


def _fallback(func: Any, args: Any, kwargs: Any) -> Any:
    """Decode, run, and quantize what the operator wrote."""
    plain_of: dict[int, torch.Tensor] = {}
    ours: dict[int, QuantizedWeight] = {}

    def plain(value: Any) -> Any:
        if not _is_ours(value):
            return value
        if id(value) not in plain_of:
            is_shape = func in _SHAPE_ONLY
            empty = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            plain_of[id(value)] = empty if is_shape else value.dequantize()
            ours[id(value)] = value
        return plain_of[id(value)]

    plain_args, plain_kwargs = tree_map(plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    back: dict[int, QuantizedWeight] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in tree_flatten(value)[0]:
            if _is_ours(leaf) and id(plain_of[id(leaf)]) not in back:
                values = plain_of[id(leaf)]
                leaf.quantize_(values)
                back[id(values)] = leaf
    if not back:
        return as_parts(result) if func.is_view else result  # a write to a copy would be lost
    return tree_map(lambda one: back.get(id(one), one), result)


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _TABLE[function] = handler
        return handler

    return register


@_handles(_aten.detach.default, _aten.alias.default)
def _same(func: Any, tensor: QuantizedWeight) -> Any:
    return tensor.remake()


@_handles(_aten.clone.default)
def _clone(func: Any, tensor: QuantizedWeight, **_: Any) -> Any:
    if settings.current().moves_parameters:
        return tensor.remake(tensor.held.map(torch.clone))
    return tensor.dequantize().clone()


@_handles(_aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedWeight, **options: Any) -> Any:
    if options.get("dtype") not in (None, *_HIGH):
        return NotImplemented
    dtype = options.get("dtype") or tensor.dtype
    if dtype != tensor.dtype and not settings.current().moves_parameters:
        return NotImplemented
    device, waits = options.get("device"), not options.get("non_blocking", False)
    held = tensor.held.map(
        lambda b: b.to(device=device or b.device, non_blocking=not waits, copy=True)
    )
    return tensor.remake(held, dtype=options.get("dtype"), device=device)


@_handles(_aten._pin_memory.default)
def _pin_memory(func: Any, tensor: QuantizedWeight, device: Any = None) -> Any:
    return tensor.remake(tensor.held.map(lambda buffer: buffer.pin_memory(device)))


@_handles(_aten.is_pinned.default)
def _is_pinned(func: Any, tensor: QuantizedWeight, device: Any = None) -> bool:
    return all(b.is_pinned(device) for plane in tensor.held.planes for b in plane.tensors)


@_handles(_aten.view.default, _aten.as_strided.default)
def _view(func: Any, tensor: QuantizedWeight, shape: Any, *strides: Any) -> Any:
    """Return the same rows, in their shape or flat."""
    shape = tuple(shape)
    tail = tensor._about.tail
    if shape in ((-1,), (tensor.numel(),)):
        return tensor.remake(shape=(tensor.numel(),))
    matrix = (tensor.numel() // max(math.prod(tail), 1), *tail)
    return tensor.remake(shape=matrix) if shape == matrix else NotImplemented


@_handles(_aten.split.Tensor)
def _split(func: Any, tensor: QuantizedWeight, split_size: int, dim: int = 0) -> Any:
    """Return chunks that are copied when a shard takes them."""
    if dim != 0 or not _has_rows(tensor):
        return NotImplemented
    tensor._about.check(split_size)
    rows = tensor.shape[0]
    return [
        tensor.remake(_Chunk(tensor.held, first, min(split_size, rows - first)), shape)
        for first in range(0, rows, max(split_size, 1))
        for shape in [(min(split_size, rows - first), *tensor.shape[1:])]
    ]


def _has_rows(tensor: QuantizedWeight) -> bool:
    """Return whether a tensor has the parameter's own shape, and is no flat view."""
    return tuple(tensor.shape[1:]) == tuple(tensor._about.tail)


class _Chunk(QuantizedRows):
    """Some of another one's rows, not cut out yet."""

    __slots__ = ("_of",)

    def __init__(self, of: QuantizedRows, start: int, rows: int) -> None:
        super().__init__((), of.first + start, rows)
        self._of = of

    def copied(self, total: int) -> QuantizedRows:
        """Return them, cut out."""
        return self._of.cut(self.first, self.rows, total)


@_handles(_aten.new_zeros.default)
def _padded(func: Any, tensor: QuantizedWeight, size: Any, **options: Any) -> Any:
    """Return rows that are not there yet, for FSDP2 to copy a shard into."""
    is_own = tuple(size[1:]) == tuple(tensor._about.tail)
    if not is_own or options.get("dtype") not in (None, tensor.dtype):
        return NotImplemented
    rows = tensor._about.none()
    rows.is_padding = True
    return tensor.remake(rows, size, device=options.get("device"))


@_handles(_aten.empty_like.default)
def _emptied(func: Any, tensor: QuantizedWeight, **options: Any) -> Any:
    """Return rows that are not there yet, where a module moves its parameters."""
    if not settings.current().moves_parameters:
        return NotImplemented
    options = {key: options.get(key) for key in ("dtype", "device")}
    return tensor.remake(tensor._about.none(), **options)


@_handles(_aten.slice.Tensor)
def _slice(
    func: Any,
    tensor: QuantizedWeight,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Return the rows that there are of a padded shard, or NotImplemented."""
    if dim != 0 or step != 1 or not _has_rows(tensor):
        return NotImplemented
    first, last, _ = slice(start, end).indices(tensor.shape[0])
    known = tensor.held.rows if tensor.held.planes else last
    if first or last != known:
        return NotImplemented
    return tensor.remake(shape=(last, *tensor.shape[1:]))


@_handles(_aten.copy_.default)
def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is_ours(target):
        return target.copy_(source.dequantize(), non_blocking)
    if _is_ours(source) and source._about is target._about and source.shape == target.shape:
        held = source.held
        if isinstance(held, _Chunk):
            held = held.copied(target._about.rows)
        target.held.take(held)
        torch.autograd.graph.increment_version(target)
        return target
    values = source.dequantize() if _is_ours(source) else source
    return target.quantize_(values.detach().expand(target.shape))
