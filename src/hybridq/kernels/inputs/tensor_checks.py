"""What operators refuse: kernels read tensors by pointer, so that nothing wrong may reach one."""

from __future__ import annotations

import torch

from ...errors import SpecError
from ...formats import PlaneSpec

__all__ = [
    "HIGH_PRECISION",
    "check_encode",
    "check_index",
    "check_matrix",
    "check_place",
    "check_seed",
    "check_tensor",
    "spec_of",
]

#: dtypes that can be encoded and decoded to.
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def spec_of(text: str, dtype: torch.dtype) -> PlaneSpec | None:
    """Return the spec of a plane of `dtype` that `text` names; None if it is empty: no plane."""
    return PlaneSpec.parse(text).resolve(dtype) if text else None


def check_tensor(tensor: object, where: str, name: str = "") -> None:
    """Raise unless `tensor` is one in ordinary memory, in one block; torch passes None for any.

    Args:
        tensor: what a user passed.
        where: the function that takes it, for the error.
        name: what it is there, where that takes more than one.

    Raises:
        TypeError: it is no tensor, or is nested, sparse or a DTensor.
    """
    if not isinstance(tensor, torch.Tensor):
        what = f"{name} must be" if name else "takes"
        raise TypeError(f"{where}: {what} a tensor, got {type(tensor).__name__}")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{where}: {name or 'input'} must be a plain tensor, got a DTensor; give this rank's "
            "part, .to_local(), or the whole, .full_tensor()"
        )
    if tensor.is_nested:
        raise TypeError(f"{where}: {name or 'input'} must be no nested tensor, got one")
    if tensor.layout != torch.strided:
        what = f"layout of {name}" if name else "layout"
        raise TypeError(f"{where}: {what} must be strided, got {tensor.layout}; use .to_dense()")


def check_matrix(x: torch.Tensor, where: str) -> None:
    """Raise unless x is a matrix `[rows, cols]` that can be encoded.

    Args:
        x: what a user passed.
        where: the function that takes it, for the error.

    Raises:
        TypeError: of another dtype or layout.
        ValueError: of another rank.
    """
    check_tensor(x, where)
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"{where}: dtype must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{where}: x must be [rows, cols], got shape {tuple(x.shape)}")


def check_index(x: torch.Tensor, index: torch.Tensor | None, where: str) -> None:
    """Raise unless `index` can say which rows of x are meant.

    Args:
        x: a matrix.
        index: what a user passed; None: all rows, in their order.
        where: the function that takes it, for the error.

    Raises:
        ValueError: it is not int64 of one dimension on x's device.
    """
    if index is None:
        return
    if index.dtype != torch.int64 or index.dim() != 1 or index.device != x.device:
        raise ValueError(
            f"{where}: row_index must be int64 [rows] on {x.device}, got {index.dtype} "
            f"{tuple(index.shape)} on {index.device}"
        )


def check_encode(
    x: torch.Tensor,
    specs: tuple[PlaneSpec | None, PlaneSpec | None],
    stats: tuple[torch.Tensor | None, torch.Tensor | None],
    seed: torch.Tensor | None,
    col_source: str,
    where: str = "encode",
) -> None:
    """Raise unless the arguments of an operator that encodes x go together.

    Args:
        x: the matrix.
        specs: of the rowwise and the columnwise plane, or None.
        stats: an amax given for each plane, or None.
        seed: of random numbers, or None.
        col_source: what the columnwise plane is made of.
        where: the operator, for the error.

    Raises:
        SpecError: the columnwise plane is to be made of a plane that is not there.
        ValueError: an option has no meaning, a seed is missing or wrong, or tensors are on several
            devices.
    """
    row, col = specs
    if col_source not in ("original", "rowwise_dequantized"):
        raise ValueError(
            f"{where}: col_source must be 'original' or 'rowwise_dequantized', got {col_source!r}"
        )
    if col_source == "rowwise_dequantized" and row is None and col is not None:
        raise SpecError(f"{where}: col_source 'rowwise_dequantized' needs a row spec, got none")
    if seed is None and any(spec is not None and spec.stochastic for spec in specs):
        raise ValueError(f"{where}: stochastic rounding needs a seed, got None")
    if seed is not None:
        check_seed(seed, x, where)
    for stat in stats:
        if stat is not None and stat.device != x.device:
            raise ValueError(
                f"{where}: x and its statistics must be on one device, got {x.device} and "
                f"{stat.device}"
            )


def check_seed(seed: object, x: torch.Tensor, where: str) -> None:
    """Raise unless `seed` is an int64 tensor with one value, where x is.

    Args:
        seed: of random numbers.
        x: what is rounded with them.
        where: the function that takes it, for the error.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is another one.
    """
    if not isinstance(seed, torch.Tensor):
        hint = f"; torch.tensor([{seed}]) is one" if type(seed) is int else ""
        raise TypeError(
            f"{where}: seed must be an int64 tensor with one value, got {type(seed).__name__}{hint}"
        )
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(
            f"{where}: seed must be int64 with one value, got {seed.dtype} {tuple(seed.shape)}"
        )
    if seed.device != x.device:
        raise ValueError(
            f"{where}: x and seed must be on one device, got {x.device} and {seed.device}"
        )


def check_place(where: str, row0: int, col0: int, *streams: int) -> None:
    """Raise unless a place in the whole tensor and random streams are ones that can be counted."""
    if not (0 <= row0 < 1 << 56 and 0 <= col0 < 1 << 56):
        raise ValueError(f"{where}: row0 and col0 must be in [0, 2^56), got {row0} and {col0}")
    for stream in streams:
        if not 0 <= stream < 1 << 32:
            raise ValueError(f"{where}: a stream must be in [0, 2^32), got {stream}")
