"""Addresses of tensors: the one door between tensors and functions that take pointers.

A compiled function knows no tensors. It reads and writes what its specs and sizes say, at the
addresses that it is given; a tensor of another dtype, on another device or with fewer elements is
memory of someone else. So every address is taken here, and of every tensor that the caller has not
made itself these three are compared first, in every build (ADR 0051).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

from ...formats import PlaneSpec

__all__ = [
    "DTYPES",
    "Description",
    "begins_at",
    "codes",
    "described_plane",
    "given",
    "given_or_none",
    "is_aligned",
    "made",
    "matrix",
    "plane",
    "plane_description",
    "values",
]

#: dtypes of matrices, as the core names them.
DTYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_CPU: Final = torch.device("cpu")


def _without_memory(what: str) -> RuntimeError:
    """Return the error of a tensor that has none, as torch says of one whose `.data` is quantized.

    Args:
        what: of which function it is what.
    """
    return RuntimeError(
        f"{what} must have memory, got a tensor without any: its .data was set to a quantized "
        "tensor, or a graph is traced; give a module the quantized tensor itself, "
        "module.weight = torch.nn.Parameter(t, requires_grad=False)"
    )


def given(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, count: int, device: torch.device = _CPU
) -> int:
    """Return the address of `count` values side by side, which a compiled function reads or raises.

    Args:
        what: of which function it is what, for the error.
        tensor: from outside.
        dtype, count, device: what it must have.

    Raises:
        ValueError: it has another dtype, another number of elements, gaps, or is elsewhere.
        RuntimeError: it has no memory.
    """
    if (
        tensor.dtype is dtype
        and (tensor.is_cpu if device is _CPU else tensor.device == device)
        and tensor.numel() == count
        and (count == 1 or tensor.is_contiguous())
    ):
        try:
            return tensor.data_ptr()
        except RuntimeError as error:
            raise _without_memory(what) from error
    gaps = "" if tensor.is_contiguous() else " with gaps"
    raise ValueError(
        f"{what} must be {count} contiguous values of {dtype} on {device}, got {tensor.dtype} "
        f"{tuple(tensor.shape)}{gaps} on {tensor.device}"
    )


def given_or_none(
    what: str,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    count: int,
    device: torch.device = _CPU,
) -> int:
    """Return `given`, or 0 for None.

    Args:
        what, tensor, dtype, count, device: as `given` takes them.
    """
    return 0 if tensor is None else given(what, tensor, dtype, count, device)


def matrix(
    what: str, x: torch.Tensor, device: torch.device = _CPU, *, only: str | None = None
) -> tuple[int, str]:
    """Return the address and the dtype's name of a matrix, whose two sizes and strides go along.

    Args:
        what: of which function it is what, for the error.
        x: from outside; of any strides.
        device: where it must be.
        only: the name of its dtype; None: any of `DTYPES`.

    Raises:
        ValueError: it is elsewhere, or has another dtype.
        RuntimeError: it has no memory.
    """
    name = DTYPES.get(x.dtype)
    if (
        name is not None
        and (only is None or only == name)
        and (x.is_cpu if device is _CPU else x.device == device)
    ):
        try:
            return x.data_ptr(), name
        except RuntimeError as error:
            raise _without_memory(what) from error
    raise ValueError(
        f"{what} must be a matrix of {only or 'float32, bfloat16 or float16'} on {device}, got "
        f"{x.dtype} {tuple(x.shape)} on {x.device}"
    )


def values(what: str, x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address of a matrix of one dtype on a CPU, whose sizes and strides go along.

    Args:
        what: of which function it is what, for the error.
        x: from outside; of any strides.
        dtype: what it must have.

    Raises:
        ValueError: it is elsewhere, or has another dtype.
        RuntimeError: it has no memory.
    """
    if x.dtype is dtype and x.is_cpu:
        try:
            return x.data_ptr()
        except RuntimeError as error:
            raise _without_memory(what) from error
    raise ValueError(f"{what} must be {dtype} on cpu, got {x.dtype} on {x.device}")


def codes(
    what: str,
    data: torch.Tensor,
    rows: int,
    cols: int,
    bits: int,
    device: torch.device = _CPU,
) -> int:
    """Return the address of `rows x cols` values of so many bits, rows one behind the other.

    Args:
        what: of which function it is what, for the error.
        data: from outside; of 4 bits, two to a byte.
        rows, cols: how many values.
        bits: of each: 4, 8, 16 or 32.
        device: where they must be.

    Raises:
        ValueError: they are elsewhere, or there are not as many.
    """
    count = rows * (-(-cols // 2) if bits == 4 else cols)
    if data.element_size() * 8 != max(bits, 8):
        raise ValueError(f"{what} must have values of {bits} bits, got {data.dtype}")
    return given(what, data, data.dtype, count, device)


def plane(
    what: str,
    buffers: Sequence[torch.Tensor],
    spec: PlaneSpec,
    rows: int,
    cols: int,
    device: torch.device = _CPU,
) -> tuple[int, int, int]:
    """Return the addresses of a plane's data, scales and amax, 0 where it keeps no amax.

    Args:
        what: of which function they are what, for the error.
        buffers: from outside.
        spec: of the plane.
        rows, cols: of its matrix.
        device: where they must be.

    Raises:
        ValueError: they are not those of such a plane.
    """
    return described_plane(what, buffers, plane_description(spec, rows, cols), device)


#: Name, dtype (None: any) and number of values of each buffer of a plane.
Description = tuple[tuple[str, torch.dtype | None, int], ...]


@lru_cache(maxsize=4096)
def plane_description(spec: PlaneSpec, rows: int, cols: int) -> Description:
    """Return what `described_plane` holds a plane's buffers to.

    Args:
        spec: of the plane.
        rows, cols: of its matrix.
    """
    return tuple((b.name, b.dtype, b.numel) for b in spec.buffers(rows, cols))


def described_plane(
    what: str,
    buffers: Sequence[torch.Tensor],
    description: Description,
    device: torch.device = _CPU,
) -> tuple[int, int, int]:
    """Return what `plane` does, for callers that know what the buffers of such planes are.

    Args:
        what, buffers, device: as `plane` takes them.
        description: of the plane.

    Raises:
        ValueError: the buffers are not those of such a plane.
    """
    if len(buffers) != len(description):
        raise ValueError(
            f"{what} must be the {len(description)} buffers of such a plane, got {len(buffers)} "
            "tensors"
        )
    found = [0, 0, 0]
    for index, (name, dtype, count) in enumerate(description):
        buffer = buffers[index]
        if (
            (buffer.dtype is dtype or dtype is None)
            and (buffer.is_cpu if device is _CPU else buffer.device == device)
            and buffer.numel() == count
            and buffer.is_contiguous()
        ):
            found[index] = buffer.data_ptr()
        else:  # of one value, strides do not count; else an error
            found[index] = given(f"{what}: {name}", buffer, dtype or buffer.dtype, count, device)
    return found[0], found[1], found[2]


#: `made(tensor)`: the address of memory that the caller has just made, as large as it is needed.
made: Final = torch.Tensor.data_ptr


def is_aligned(data: torch.Tensor, nbytes: int) -> bool:
    """Return whether bytes can be viewed as values of `nbytes`: in memory, and by torch's rule.

    Args:
        data: uint8.
        nbytes: of a value.
    """
    return data.storage_offset() % nbytes == data.data_ptr() % nbytes == 0


def begins_at(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """Return where memory begins, as a number that is compared and never followed.

    Args:
        memory: of a tensor, or all that it is a part of.
    """
    return memory.data_ptr()
