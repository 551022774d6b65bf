"""A plane's buffers as Transformer Engine lays them out, and planes made of such buffers.

Source: shapes of data and padded scales: Transformer Engine's `inner_tensor_specs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..storage import Plane
from ..tensor import matrix_shape

__all__ = ["data_of", "dtype_of", "plane_of", "scale_of", "shape_of"]

#: What rows and columns of a rowwise plane's scales are padded to, by family.
_PADDED = {"mxfp8": (128, 4), "nvfp4": (128, 4), "float8_block": (1, 4)}


def _is_transposed(spec: PlaneSpec, direction: Direction) -> bool:
    """Whether scales are stored as the transpose of the plane's own."""
    if spec.format.family == "float8_block":
        return not spec.format.is_square
    return spec.format.family == "mxfp8" and direction == COLUMNWISE


def data_of(plane: Plane, shape: Sequence[int]) -> torch.Tensor:
    """Return the codes: of MXFP8's columnwise plane a copy in the tensor's own layout, else a view.

    Args:
        plane: of the tensor.
        shape: of the tensor.
    """
    data, lead = plane.data, list(shape[:-1])
    if not shape:
        return data.view(())
    if plane.direction == ROWWISE:
        return data if len(lead) == 1 else data.view(*lead, -1)  # where it fits, the very buffer
    if plane.spec.format.family == "mxfp8":
        return data.t().reshape(tuple(shape))
    if data.shape[1] != plane.rows and lead:  # packed along the last of them
        lead[-1] = -1
    return data if len(lead) == 1 else data.view(data.shape[0], *lead)


def scale_of(plane: Plane) -> torch.Tensor | None:
    """Return the scales, a copy where they are padded, spread over rows or transposed.

    Args:
        plane: of a tensor.
    """
    spec, scale = plane.spec, plane.scale
    padded = _PADDED.get(spec.format.family)
    if scale is None or padded is None:
        return scale
    if spec.format.is_square and spec.format.family != "float8_block":
        block = (spec.format.block or (1, 1))[0]
        scale = scale.repeat_interleave(block, 0)[: plane.matrix[0]]
    rows, cols = padded
    if _is_transposed(spec, plane.direction):
        scale = scale.t()
        rows, cols = (1, 4) if spec.format.family == "float8_block" else (cols, rows)
    lacking = (-scale.shape[0] % rows, -scale.shape[1] % cols)
    if not any(lacking):
        return scale.contiguous()
    return torch.nn.functional.pad(scale, (0, lacking[1], 0, lacking[0]))


def plane_of(
    spec: PlaneSpec,
    direction: Direction,
    shape: Sequence[int],
    buffers: Sequence[torch.Tensor | None],
) -> Plane:
    """Return the plane that Transformer Engine's buffers are, views of them where layouts agree.

    Args:
        spec, direction: of the plane.
        shape: of the tensor.
        buffers: its data, its scales, and of NVFP4 its amax.

    Raises:
        ValueError: one is missing, or has another size than the shape and the format say.
    """
    rows, cols = matrix_shape(shape)
    own = (rows, cols) if direction == ROWWISE else (cols, rows)
    found = {}
    for (what, given), wanted in zip(
        zip(("data", "scale", "amax"), buffers, strict=True), spec.buffers(*own), strict=False
    ):
        if given is None:
            raise ValueError(f"tensor: a {direction} plane of {spec} needs its {what}, got None")
        if what == "scale":
            given = _compact(given, spec, direction, wanted.shape)
        elif what == "data" and direction == COLUMNWISE and spec.format.family == "mxfp8":
            given = given.reshape(rows, cols).t().contiguous()
        if given.numel() != wanted.numel:
            raise ValueError(
                f"tensor: {what} of a {direction} plane of {spec} must have {wanted.numel} values "
                f"for the shape {tuple(shape)}, got {tuple(given.shape)}"
            )
        # As it is where it fits: what both planes share is one object.
        found[what] = given if given.shape == wanted.shape else given.reshape(wanted.shape)
    return Plane(spec, direction, rows, cols, found)


def _compact(
    scale: torch.Tensor, spec: PlaneSpec, direction: Direction, shape: Sequence[int]
) -> torch.Tensor:
    """Return scales without padding, by blocks, in the plane's own order."""
    if spec.format.family not in _PADDED or scale.dim() != 2:
        return scale
    if _is_transposed(spec, direction):
        scale = scale.t()
    if spec.format.is_square and spec.format.family != "float8_block":
        scale = scale[:: (spec.format.block or (1, 1))[0]]
    return scale[: shape[0], : shape[1]].contiguous()


def shape_of(name: str, given: Mapping[str, Any]) -> Sequence[int]:
    """Return the shape that the buffers of a storage say, or the tensors of a hybrid one.

    Args:
        name: of its class.
        given: the buffers, by the constructor's names.

    Raises:
        ValueError: there are none.
    """
    packed = 2 if name.startswith("NVFP4") else 1
    for key in ("data", "rowwise_data", "hp_data", "rowwise_storage", "columnwise_storage"):
        data = given.get(key)
        if data is not None:
            *lead, last = data.shape
            return (*lead, packed * last)
    for key in ("data_transpose", "columnwise_data"):
        data = given.get(key)
        if data is not None and name.startswith("MXFP8"):
            return tuple(data.shape)
        if data is not None:
            cols, *lead = data.shape
            return (*lead[:-1], packed * lead[-1], cols)
    raise ValueError(f"{name}: without data it must be given its shape, got {sorted(given)}")


def dtype_of(given: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a storage's values, FP32 where nothing given says it.

    Args:
        given: the buffers, by the constructor's names.
    """
    values = given.get("hp_data"), given.get("rowwise_storage"), given.get("columnwise_storage")
    return next((one.dtype for one in values if one is not None), torch.float32)
