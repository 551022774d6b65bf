"""What torch's operators do with a QuantizedTensor: one table, generic over formats.

An operator that is not in the table dequantizes its quantized arguments and runs on plain
tensors; one that writes into a quantized argument requantizes it through its quantizer. What is a
view in torch and would be a plain tensor is a DecodedPart, which refuses to be written.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._torch_private import neg_view, tree_flatten, tree_unflatten
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import PlaneError
from ..gemm import gemm_planes
from ..storage import Plane, overwrite
from . import factories
from . import rows as _rows  # noqa: F401  (its handlers)
from .decoded_part import DecodedPart, as_parts, as_plain, check_writes, ordinary
from .initial import carry_initial, keep_attributes
from .lost_updates import watch_update
from .replaced import is_replaced_by_module, replaced_parameter
from .table import HIGH, TABLE, dequantize, handles, is_flat, is_quantized, matrix_shape
from .written import check_collective, is_collective, written

__all__ = ["dispatch"]

_aten = torch.ops.aten


def dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, an ATen operator with at least one quantized argument.

    Args:
        func, types, args, kwargs: as `__torch_dispatch__` takes them.

    Raises:
        RuntimeError: it would give a quantized tensor another shape, or write to a decoded part.
    """
    if DecodedPart in types:
        check_writes(func, args, kwargs)
        args, kwargs = as_plain(args), as_plain(kwargs)
    args, kwargs = _materialized(func, args, kwargs)
    if func.is_view and is_quantized(args[0]):
        with ordinary(args[0]):
            return as_parts(_run(func, args, kwargs))
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = TABLE.get(func)
    if handler is not None:
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _fallback(func, args, kwargs)


def _is_negated(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_neg()


def _materialized(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without lazily negated tensors, such as `z.conj().imag`.

    torch materializes those before its kernels run, but not for what an operator of a subclass
    calls: there the bit would be lost. One that is written into is left as it is.
    """
    negated = [
        arg for arg in args if _is_negated(arg)
    ]  # no any(): dynamo of torch 2.10 stops there
    if not negated:
        return args, kwargs
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    resolved = tuple(
        arg.resolve_neg() if _is_negated(arg) and not is_written else arg
        for arg, is_written in zip(args, written, strict=False)
    )
    return resolved, kwargs


# ---- the same planes


@handles(_aten.detach.default, _aten.alias.default)
def _same(func: Any, tensor: Any) -> Any:
    made = tensor.remake(tensor.tensor_storage)
    replaced = replaced_parameter()
    if replaced is not None and is_quantized(replaced):
        keep_attributes(replaced, made)
    return made


@handles(_aten.clone.default)
def _clone(func: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    return tensor.remake(tensor.tensor_storage.map(torch.clone))


@handles(_aten._to_copy.default)
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
    """Move the planes; a dtype changes what the tensor appears as, not its codes."""
    if dtype is not None and dtype not in HIGH:
        if is_replaced_by_module():
            raise TypeError(
                f"to: a quantized parameter may be float32, bfloat16 or float16, got {dtype}; a "
                "module of that dtype needs plain parameters, see dequantize"
            )
        return NotImplemented
    storage = tensor.tensor_storage.map(
        lambda buffer: buffer.to(
            device=device or buffer.device, non_blocking=non_blocking, copy=True
        )
    )
    return carry_initial(tensor, tensor.remake(storage, dtype=dtype))


@handles(_aten.view.default, _aten._unsafe_view.default)
def _view(func: Any, tensor: Any, shape: list[int]) -> Any:
    """Reshape the leading dimensions, or all into one; another last dimension cuts blocks."""
    shape = list(shape)
    if shape.count(-1) == 1:
        known = 1
        for size in shape:
            known *= size if size != -1 else 1
        if known == 0 or tensor.numel() % known:
            return NotImplemented
        shape[shape.index(-1)] = tensor.numel() // known
    if not shape or min(shape) < 0 or math.prod(shape) != tensor.numel() or tensor.dim() == 0:
        return NotImplemented
    first = tensor.tensor_storage.first
    # With no columns any number of rows has as many values, but a plane has rows of its own.
    same_matrix = matrix_shape(shape) == (first.rows, first.cols)
    if first.count is not None and len(shape) == 2:
        return NotImplemented  # several matrices are no matrix
    if not same_matrix and not (len(shape) == 1 and first.cols):
        return NotImplemented
    return tensor.remake(tensor.tensor_storage, shape=shape)


def _is_dim(tensor: Any, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


@handles(_aten.unsqueeze.default)
def _unsqueeze(func: Any, tensor: Any, dim: int) -> Any:
    if not -tensor.dim() - 1 <= dim <= tensor.dim():
        return NotImplemented  # torch's own error, here and below
    dim = dim % (tensor.dim() + 1)
    return _view(func, tensor, [*tensor.shape[:dim], 1, *tensor.shape[dim:]])


@handles(_aten.squeeze.dim)
def _squeeze(func: Any, tensor: Any, dim: int) -> Any:
    if tensor.dim() < 2 or not _is_dim(tensor, dim) or tensor.shape[dim] != 1:
        return NotImplemented
    dim = dim % tensor.dim()
    return _view(func, tensor, [*tensor.shape[:dim], *tensor.shape[dim + 1 :]])


@handles(_aten.as_strided.default)
def _as_strided(
    func: Any, tensor: Any, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Any:
    same = tuple(size) == tuple(tensor.shape) and tuple(stride) == tuple(tensor.stride())
    if not same or storage_offset:
        raise RuntimeError(
            "as_strided: a quantized tensor has no memory that strides count in; its own geometry "
            f"is {list(tensor.shape)} with strides {list(tensor.stride())}, got {list(size)} with "
            f"strides {list(stride)} from {storage_offset or 0}; use .dequantize().as_strided(...)"
        )
    return _same(func, tensor)


@handles(_aten._pin_memory.default)
def _pin_memory(func: Any, tensor: Any, device: Any = None) -> Any:
    return tensor.remake(tensor.tensor_storage.map(lambda buffer: buffer.pin_memory(device)))


@handles(_aten.is_pinned.default)
def _is_pinned(func: Any, tensor: Any, device: Any = None) -> bool:
    return all(buffer.is_pinned(device) for buffer in tensor.tensor_storage.flatten()[0])


# ---- the planes swapped


def _is_stack(tensor: Any) -> bool:
    """Return whether a tensor is `[G, rows, cols]` of G matrices with planes of their own."""
    count = tensor.tensor_storage.count
    return count is not None and tensor.dim() == 3 and tensor.shape[0] == count


def _mirrored(tensor: Any) -> Any:
    quantizer = tensor.quantizer
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    mirrored = tensor.remake(tensor.tensor_storage.mirrored(), shape=shape)
    mirrored.quantizer = None if quantizer is None else quantizer.mirrored()
    return mirrored


@handles(_aten.t.default)
def _t(func: Any, tensor: Any) -> Any:
    return _mirrored(tensor) if tensor.dim() == 2 else NotImplemented


@handles(_aten.transpose.int)
def _transpose(func: Any, tensor: Any, dim0: int, dim1: int) -> Any:
    if not (_is_dim(tensor, dim0) and _is_dim(tensor, dim1)):
        return NotImplemented
    if _is_stack(tensor) and {dim0 % 3, dim1 % 3} == {1, 2}:
        return _mirrored(tensor)
    if tensor.dim() != 2:
        return NotImplemented
    return _mirrored(tensor) if dim0 % 2 != dim1 % 2 else _same(func, tensor)


@handles(_aten.permute.default)
def _permute(func: Any, tensor: Any, dims: list[int]) -> Any:
    if _is_stack(tensor) and [dim % 3 for dim in dims] == [0, 2, 1]:
        return _mirrored(tensor)
    if tensor.dim() != 2 or not all(_is_dim(tensor, dim) for dim in dims):
        return NotImplemented
    if sorted(dim % 2 for dim in dims) != [0, 1]:
        return NotImplemented
    return _mirrored(tensor) if dims[0] % 2 == 1 else _same(func, tensor)


# ---- products


def _operand(matrix: Any, is_right: bool) -> Plane | None:
    """Return the plane with the contraction axis last: of a, or of b in `a @ b`."""
    direction: Direction = COLUMNWISE if is_right else ROWWISE
    if not is_quantized(matrix):
        return Plane.of(matrix, direction)
    matrix.tensor_storage.first.check_memory("matmul")
    try:
        return matrix.tensor_storage.plane(direction)
    except PlaneError:
        return None


@handles(_aten.mm.default)
def _mm(func: Any, a: Any, b: Any) -> Any:
    return _addmm(func, None, a, b)


@handles(_aten.addmm.default)
def _addmm(func: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Multiply planes; where the plane that is contracted is missing, dequantize."""
    for one in (a, b):
        if is_quantized(one):
            one.tensor_storage.check_values()
    if beta != 1 or alpha != 1 or is_quantized(bias) or (bias is not None and bias.dim() != 1):
        return NotImplemented
    if a.dim() != 2 or b.dim() != 2 or a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        return NotImplemented  # torch's own error
    if not a.layout == b.layout == torch.strided:
        return NotImplemented  # a sparse matrix is no plane
    left, right = _operand(a, False), _operand(b, True)
    if left is None or right is None:
        return NotImplemented
    with torch.no_grad():  # autograd has been here already, above the dispatcher
        return gemm_planes(left, right, bias=bias, out_dtype=a.dtype)


# ---- writes


@handles(_aten.copy_.default)
def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not is_quantized(target):
        values = dequantize(source, source.dtype)
        if target.is_neg():
            neg_view(target).copy_(values.neg(), non_blocking)
            return target
        return target.copy_(values, non_blocking)
    if is_quantized(source) and _copy_bytes(target, source, non_blocking):
        return target
    if not isinstance(source, torch.Tensor):  # torch takes a number too
        source = torch.as_tensor(source, dtype=target.dtype, device=target.device)
    if source.layout != torch.strided:
        raise TypeError(f"copy_: source must be strided, got {source.layout}")
    plain = dequantize(source, target.dtype) if is_quantized(source) else source
    values = plain.detach().to(_writable(plain.dtype, target))  # autograd has been here already
    target.write(values.expand(target.shape), "copy_")
    return target


def _writable(dtype: torch.dtype, target: Any) -> torch.dtype:
    """Return the dtype in which values of `dtype` are quantized into `target`."""
    return dtype if dtype in HIGH else target.dtype


def _copy_bytes(target: Any, source: Any, non_blocking: bool) -> bool:
    """Copy buffer by buffer if both tensors are laid out alike; return whether they are."""
    if target.part is not None:
        return False  # some of its buffers are the whole tensor's
    theirs, layout = source.tensor_storage.flatten()
    ours, own_layout = target.tensor_storage.flatten()
    if layout != own_layout or target.shape != source.shape or is_flat(target) != is_flat(source):
        return False
    target.tensor_storage.check_write("copy_")
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        overwrite(ours_one, theirs_one, non_blocking)
    return True


# ---- everything else

#: What to call instead of an operator that changes a tensor's shape or memory.
_OUT_OF_PLACE = {
    "set_": "copy_",
    "resize_": "reshape, or quantize a tensor of the new shape,",
    "resize_as_": "reshape, or quantize a tensor of the new shape,",
}


def _fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dequantize, run, and requantize what the operator wrote."""
    found = {id(one): one for one in written(func, args, kwargs) if is_quantized(one)}
    targets = list(found.values())
    if is_collective(func):
        check_collective(func, targets)
        check_writes(func, args, kwargs)  # types do not tell what is in lists of lists
    leaves, tree = tree_flatten((args, kwargs))
    plain_of: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if is_quantized(leaf) and id(leaf) not in plain_of:
            if func in factories.SHAPE_ONLY:
                plain = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            else:
                plain = dequantize(leaf, leaf.dtype)
            plain_of[id(leaf)] = plain
    plain_args, plain_kwargs = tree_unflatten(
        [plain_of.get(id(leaf), leaf) if is_quantized(leaf) else leaf for leaf in leaves], tree
    )
    if targets and torch.Tag.inplace_view in func.tags:
        name = func.overloadpacket.__name__
        raise RuntimeError(
            f"{name}: a quantized tensor keeps its shape and its memory, got "
            f"{tuple(targets[0].shape)}; use {_OUT_OF_PLACE.get(name, name.rstrip('_'))} and take "
            "what it returns"
        )
    for tensor in targets:
        tensor.quantizer_for_write(str(func))  # raises before anything is computed
    watched = watch_update(func, targets, plain_of)
    result = func(*plain_args, **plain_kwargs)
    back = {}
    for tensor in targets:
        plain = plain_of[id(tensor)]
        tensor.write(plain, str(func))
        back[id(plain)] = tensor
    if watched is not None:
        watched.end(dequantize(targets[0], targets[0].dtype))
    if not back:
        return result
    results, result_tree = tree_flatten(result)
    return tree_unflatten([back.get(id(one), one) for one in results], result_tree)
