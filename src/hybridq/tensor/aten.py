"""What torch's operators do with a QuantizedTensor: one table, generic over formats.

An operator that is not in the table dequantizes its quantized arguments and runs on plain
tensors; one that writes into a quantized argument requantizes it through its quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import PlaneError
from ..gemm import gemm_planes
from ..storage import Plane

__all__ = ["dequantize", "dispatch", "is_quantized"]

_aten = torch.ops.aten
_TABLE: dict[Any, Callable[..., Any]] = {}


def is_quantized(value: Any) -> bool:
    """Return whether `value` is a QuantizedTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "tensor_storage")


def dequantize(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a QuantizedTensor as a plain tensor, outside autograd."""
    plane = tensor.tensor_storage.first
    return plane.dequantize(dtype).contiguous().reshape(tensor.shape)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, an ATen operator with at least one quantized argument."""
    handler = _TABLE.get(func)
    if handler is not None:
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _fallback(func, args, kwargs)


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _TABLE[function] = handler
        return handler

    return register


# ---- the same planes


@_handles(_aten.detach.default, _aten.alias.default)
def _same(func: Any, tensor: Any) -> Any:
    return tensor.remake(tensor.tensor_storage)


@_handles(_aten.clone.default)
def _clone(func: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    return tensor.remake(tensor.tensor_storage.map(torch.clone))


@_handles(_aten._to_copy.default)
def _to_copy(
    func: Any,
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    """Move the planes; a floating dtype changes what the tensor appears as, not its codes."""
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    storage = tensor.tensor_storage.map(
        lambda buffer: buffer.to(
            device=device or buffer.device, non_blocking=non_blocking, copy=True
        )
    )
    return tensor.remake(storage, dtype=dtype)


@_handles(_aten.view.default, _aten._unsafe_view.default)
def _view(func: Any, tensor: Any, shape: list[int]) -> Any:
    """Reshape the leading dimensions; another last dimension cuts through blocks."""
    shape = list(shape)
    if shape.count(-1) == 1:
        known = 1
        for size in shape:
            known *= size if size != -1 else 1
        if known == 0 or tensor.numel() % known:
            return NotImplemented
        shape[shape.index(-1)] = tensor.numel() // known
    count = 1
    for size in shape:
        count *= size
    if not shape or count != tensor.numel() or tensor.dim() == 0:
        return NotImplemented
    if shape[-1] != tensor.shape[-1]:
        return NotImplemented
    return tensor.remake(tensor.tensor_storage, shape=shape)


# ---- the planes swapped


def _mirrored(tensor: Any) -> Any:
    quantizer = tensor.quantizer
    shape = (tensor.shape[1], tensor.shape[0])
    mirrored = tensor.remake(tensor.tensor_storage.mirrored(), shape=shape)
    mirrored.quantizer = None if quantizer is None else quantizer.mirrored()
    return mirrored


@_handles(_aten.t.default)
def _t(func: Any, tensor: Any) -> Any:
    return _mirrored(tensor) if tensor.dim() == 2 else NotImplemented


@_handles(_aten.transpose.int)
def _transpose(func: Any, tensor: Any, dim0: int, dim1: int) -> Any:
    if tensor.dim() != 2:
        return NotImplemented
    return _mirrored(tensor) if dim0 % 2 != dim1 % 2 else _same(func, tensor)


@_handles(_aten.permute.default)
def _permute(func: Any, tensor: Any, dims: list[int]) -> Any:
    if tensor.dim() != 2:
        return NotImplemented
    return _mirrored(tensor) if dims[0] % 2 == 1 else _same(func, tensor)


# ---- products


def _operand(matrix: Any, is_right: bool) -> Plane | None:
    """Return the plane with the contraction axis last: of a, or of b in `a @ b`."""
    direction: Direction = COLUMNWISE if is_right else ROWWISE
    if not is_quantized(matrix):
        return Plane.of(matrix, direction)
    try:
        return matrix.tensor_storage.plane(direction)
    except PlaneError:
        return None


@_handles(_aten.mm.default)
def _mm(func: Any, a: Any, b: Any) -> Any:
    return _addmm(func, None, a, b)


@_handles(_aten.addmm.default)
def _addmm(func: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Multiply planes; where the plane that is contracted is missing, dequantize."""
    if beta != 1 or alpha != 1 or is_quantized(bias) or (bias is not None and bias.dim() != 1):
        return NotImplemented
    if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        return NotImplemented  # torch's own error
    left, right = _operand(a, False), _operand(b, True)
    if left is None or right is None:
        return NotImplemented
    return gemm_planes(left, right, bias=bias, out_dtype=a.dtype)


# ---- writes


@_handles(_aten.copy_.default)
def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not is_quantized(target):
        return target.copy_(dequantize(source, source.dtype), non_blocking)
    if is_quantized(source) and _copy_bytes(target, source, non_blocking):
        return target
    plain = dequantize(source, target.dtype) if is_quantized(source) else source
    target.quantizer_for_write("copy_").update_quantized(plain.expand(target.shape), target)
    return target


def _copy_bytes(target: Any, source: Any, non_blocking: bool) -> bool:
    """Copy buffer by buffer if both tensors are laid out alike; return whether they are."""
    theirs, layout = source.tensor_storage.flatten()
    ours, own_layout = target.tensor_storage.flatten()
    if layout != own_layout or target.shape != source.shape:
        return False
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        ours_one.copy_(theirs_one, non_blocking)
    return True


# ---- operators that only look at shape, dtype and device

_SHAPE_ONLY = {
    getattr(_aten, name).default
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    )
}


def _fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dequantize, run, and requantize what the operator wrote."""
    leaves, tree = tree_flatten((args, kwargs))
    plain_of: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if is_quantized(leaf) and id(leaf) not in plain_of:
            if func in _SHAPE_ONLY:
                plain = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            else:
                plain = dequantize(leaf, leaf.dtype)
            plain_of[id(leaf)] = plain
    plain_args, plain_kwargs = tree_unflatten(
        [plain_of.get(id(leaf), leaf) if is_quantized(leaf) else leaf for leaf in leaves], tree
    )
    written = _written(func, args, kwargs)
    for tensor in written:
        tensor.quantizer_for_write(str(func))  # before anything is computed
    result = func(*plain_args, **plain_kwargs)
    back = {}
    for tensor in written:
        plain = plain_of[id(tensor)]
        tensor.quantizer_for_write(str(func)).update_quantized(plain, tensor)
        back[id(plain)] = tensor
    if not back:
        return result
    results, result_tree = tree_flatten(result)
    return tree_unflatten([back.get(id(one), one) for one in results], result_tree)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the quantized tensors that `func` writes into, by its schema."""
    written: dict[int, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in tree_flatten(value)[0]:
            if is_quantized(leaf):
                written[id(leaf)] = leaf
    return list(written.values())
