"""What holds of every quantized tensor, whatever was done to it."""

from __future__ import annotations

from typing import Any

import torch

import hybridq
from hybridq import Plane, QuantizedTensor
from hybridq.storage import TensorStorage

from .policy import Wrong

__all__ = [
    "check_accuracy",
    "check_backends",
    "check_sound",
    "check_values",
    "equal",
    "same_planes",
    "snapshot",
]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same bits, NaN (of any payload) being one value."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type == "meta" or b.device.type == "meta":
        return a.device == b.device
    if not a.is_floating_point():
        return torch.equal(a, b)
    both_nan = a.isnan() & b.isnan()
    same = (a == b) & (a.signbit() == b.signbit())
    return bool((both_nan | same).all())


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    # Cloned first: one value with another stride counts as contiguous, but has no view in bytes.
    flat = buffer.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def snapshot(tensor: QuantizedTensor) -> list[torch.Tensor]:
    """Return copies of the bytes of all buffers."""
    planes = tensor.tensor_storage.planes
    return [_bytes(buffer) for plane in planes for buffer in plane.tensors]


def same_planes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether both have the same planes: specs, directions, bits (any NaN equals any NaN)."""
    first, second = a.tensor_storage.planes, b.tensor_storage.planes
    if [(p.spec, p.direction, p.matrix) for p in first] != [
        (p.spec, p.direction, p.matrix) for p in second
    ]:
        return False
    return all(
        equal(x, y)
        for one, other in zip(first, second, strict=True)
        for x, y in zip(one.tensors, other.tensors, strict=True)
    )


def check_sound(tensor: Any, where: str) -> None:
    """Raise unless the planes fit the shape, the buffers fit the planes, and all can be read."""
    storage = tensor.tensor_storage
    rows, cols = hybridq.tensor.matrix_shape(tensor.shape)
    for plane in storage.planes:
        flat = tensor.dim() == 1 and plane.rows * plane.cols == cols
        if (plane.rows, plane.cols) != (rows, cols) and not flat:
            raise Wrong(
                f"{where}: a tensor of shape {tuple(tensor.shape)} holds a plane of "
                f"{plane.rows} x {plane.cols}"
            )
        wanted = {b.name: (b.shape, b.dtype) for b in plane.spec.buffers(*plane.matrix)}
        found = {
            name: (tuple(b.shape), None if wanted.get(name, (0, 0))[1] is None else b.dtype)
            for name, b in plane.buffers.items()
        }
        if found != wanted:
            raise Wrong(f"{where}: buffers of {plane.spec} must be {wanted}, got {found}")
    values = tensor.dequantize()
    if (
        values.shape != tensor.shape
        or values.dtype != tensor.dtype
        or type(values) is not (torch.Tensor)
    ):
        raise Wrong(f"{where}: {tensor!r} decodes to {values.dtype} {tuple(values.shape)}")
    if not repr(tensor):
        raise Wrong(f"{where}: no repr")


def _with_backend(name: str, call: Any) -> Any:
    with hybridq.backend(name):
        return call()


def check_backends(plane: Plane, where: str) -> None:
    """Raise unless the chosen backend and the reference decode a plane to the same bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = plane.dequantize(dtype)
        theirs = _with_backend("reference", lambda dtype=dtype: plane.dequantize(dtype))
        if not equal(ours, theirs):
            raise Wrong(f"{where}: {plane!r} decodes to other {dtype} than on the reference")


def check_values(got: Any, expected: torch.Tensor, where: str) -> None:
    """Raise unless `got` has, bit for bit, the values of the plain tensor `expected`."""
    plain = got.dequantize() if isinstance(got, QuantizedTensor) else got
    if not equal(plain.detach(), expected.detach()):
        raise Wrong(
            f"{where}: got {type(got).__name__} {plain.dtype} {tuple(plain.shape)}, whose values "
            f"are not those of the plain tensor {expected.dtype} {tuple(expected.shape)}\n{plain}\n"
            f"{expected}"
        )


def _unit_scales(plane: Plane) -> torch.Tensor:
    """Return what a code of 1 decodes to, by value of the plane's own matrix, in FP32."""
    element = plane.spec.format.element
    one = element.bias << element.mantissa_bits
    if element.codes_per_byte == 2:
        one |= one << 4
    buffers = dict(plane.buffers, data=torch.full_like(plane.data, one))
    made = Plane(plane.spec, plane.direction, plane.rows, plane.cols, buffers)
    own = torch.ops.hybridq.decode(made.tensors, made.spec.text, *made.matrix, torch.float32)
    return own.double()


def check_accuracy(x: torch.Tensor, storage: TensorStorage, where: str) -> None:
    """Raise if a plane is farther from `x` than its format's rounding allows.

    A value v under scale s lies within `max(|v| 2^-(m+1), s * smallest / 2)` of its code's value
    if it does not saturate, within the double of that if it is rounded stochastically; a value
    above `s * max` loses the difference. Every rule's scale takes a block's amax to within a factor
    of two of the element's maximum, except where the scale itself underflows: an E4M3 scale below
    2^-10 becomes 0, which costs at most `max * 2^-10` of the tensor's factor.

    Args:
        x: `[rows, cols]`, finite, between 1e-30 and 1e30 in magnitude, or zero.
        storage: of x; transformed and identity planes are left out.
        where: for the report.
    """
    for plane in storage.planes:
        spec, element = plane.spec, plane.spec.format.element
        if spec.signs is not None or spec.format.is_identity or element is None:
            continue
        own = (x if plane.direction == "rowwise" else x.t()).double()
        if own.numel() == 0:
            return
        got = torch.ops.hybridq.decode(
            plane.tensors, spec.text, *plane.matrix, torch.float32
        ).double()
        if element.bias << element.mantissa_bits > element.nan_code:
            continue  # the element has no code for 1
        scale = _unit_scales(plane)
        size = own.abs()
        rounding = torch.maximum(
            size * 2.0 ** -(element.mantissa_bits + 1), scale * element.min_subnormal / 2
        )
        if spec.stochastic:
            rounding = 2 * rounding
        lost = (size - scale * element.max).clamp(min=0)
        slack = torch.zeros((), dtype=torch.float64)
        if plane.amax is not None:
            slack = plane.amax.max().double() / (spec.tensor_bound * 6) * element.max * 2.0**-10
        bound = (rounding + lost) * (1 + 1e-5) + slack + 1e-37
        bad = (got - own).abs() > bound
        if bool(bad.any()) or not bool(got.isfinite().all()):
            raise Wrong(f"{where}: {plane!r} decodes {own[bad][:4]} to {got[bad][:4]}")
        if bool((lost > size / 2 + slack + 1e-37).any()):
            raise Wrong(f"{where}: the scales of {plane!r} are too small")
