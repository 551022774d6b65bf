"""From parts of a matrix to bytes, and back.

The bytes of a part are the buffers of its rowwise plane, one behind the other: what the public
quantizer makes of that part alone. Where a boundary between parts cuts no block, and nothing
belongs to a part as a whole, all parts are encoded, or decoded, by one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...errors import PlaneError
from ...formats import PlaneSpec
from ...kernels.choice import EncodeRequest
from ...kernels.operators import encode
from ...quantizers import Quantizer
from ...quantizers import quantizer as named_quantizer
from ...tensor.in_graph import runs_at_once

__all__ = [
    "PlaneLayout",
    "WireFacts",
    "decode_parts",
    "encode_parts",
    "facts_of",
    "joined_parts",
    "layout_of",
]


class WireFacts(NamedTuple):
    """What a spec means for messages.

    Attributes:
        dtype: of a plane that is not quantized, or None.
        is_stochastic: whether it is rounded with random bits.
        needs_amax: whether encoding needs the amax of the whole tensor.
        units: rows and columns that share a block, a byte or a transform.
        grows: by axis, of each buffer whether it grows with it.
    """

    dtype: torch.dtype | None
    is_stochastic: bool
    needs_amax: bool
    units: tuple[int, int]
    grows: tuple[tuple[bool, ...], tuple[bool, ...]]

    def all_grow(self, axis: int) -> bool:
        """Return whether no buffer belongs to a part as a whole.

        Args:
            axis: along which there are parts.
        """
        return all(self.grows[axis])


class PlaneLayout(NamedTuple):
    """Where the buffers of a part's plane lie in its bytes.

    Attributes:
        shapes, dtypes, offsets: of each buffer.
        nbytes: of all.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int


def wire_quantizer(where: str, quantizer: Any) -> Quantizer:
    """Return the quantizer of messages; None: not quantized.

    Args:
        where: the function, for errors.
        quantizer: a Quantizer, the name of a format, a Format, a PlaneSpec, or None.

    Raises:
        SpecError: an unknown name.
        TypeError: something else.
    """
    if isinstance(quantizer, Quantizer):
        return quantizer
    if quantizer is None:
        return named_quantizer("identity", False)
    if isinstance(quantizer, (bool, int, float, list, tuple, dict)):
        raise TypeError(
            f"{where}: quantizer must be a Quantizer, a format or its name, or None, got "
            f"{type(quantizer).__name__}"
        )
    return named_quantizer(quantizer, False)


@runs_at_once
def wire_text(where: str, text: str, dtype: torch.dtype) -> str:
    """Return the spec string of the plane that travels.

    Args:
        where: the function, for errors.
        text: of the quantizer.
        dtype: of the tensor.

    Raises:
        TypeError: the dtype cannot be encoded.
        PlaneError: the quantizer makes no rowwise plane, is a codec's, follows a history, or
            reduces amaxes.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{where}: dtype must be float32, bfloat16 or float16, got {dtype}")
    quantizer = Quantizer.parse(text)
    quantizer.specs_to_encode(where)
    if not quantizer.makes_rowwise or quantizer.rowwise is None:
        raise PlaneError(
            f"{where}: rowwise planes travel, and so the quantizer must make one, got {quantizer}; "
            "see with_usage"
        )
    if quantizer.rowwise.format.is_python:
        raise PlaneError(
            f"{where}: a message is a part of a tensor, and a codec is given whole matrices, got "
            f"{quantizer.rowwise}; take another format, or None"
        )
    if quantizer.amax_group is not None:
        raise PlaneError(
            f"{where}: a message has an amax of its own or of its group, so amax_group must be "
            f"None, got {quantizer.amax_group!r}"
        )
    return quantizer.rowwise.resolve(dtype).text


@runs_at_once
def resolved_text(where: str, spec: str, dtype: torch.dtype) -> str:
    """Return the spec string of the plane that travels, of a tensor's dtype.

    Args:
        where: the function, for errors.
        spec: of a plane; empty: values as they are.
        dtype: of the tensor.

    Raises:
        TypeError: the dtype cannot be encoded.
    """
    return wire_text(where, Quantizer(PlaneSpec.parse(spec or "identity"), None).text, dtype)


@runs_at_once
def facts_of(text: str) -> WireFacts:
    """Return what a spec string means for messages.

    Args:
        text: with its dtype fixed if it is an identity.
    """
    return _facts_of(text)


@lru_cache(maxsize=1024)
def _facts_of(text: str) -> WireFacts:
    spec = PlaneSpec.parse(text)
    units = spec.unit(0), spec.unit(1)
    plain = spec.format.element.torch_dtype if spec.format.is_identity else None  # type: ignore[union-attr]
    one = [buffer.numel for buffer in spec.buffers(*units)]
    grows = []
    for rows, cols in ((2 * units[0], units[1]), (units[0], 2 * units[1])):
        two = [buffer.numel for buffer in spec.buffers(rows, cols)]
        grows.append(tuple(a != b for a, b in zip(one, two, strict=True)))
    needs = spec.needs_tensor_amax
    return WireFacts(plain, spec.stochastic, needs, units, (grows[0], grows[1]))


def layout_of(text: str, rows: int, cols: int) -> PlaneLayout:
    """Return where the buffers of a plane lie in its bytes; an empty matrix has none.

    Args:
        text: the spec string.
        rows, cols: of the part.
    """
    if torch.compiler.is_dynamo_compiling():  # sizes may be symbolic, which it does not tell
        return _layout(getattr(_specs, _spec_name(text)), rows, cols)
    return _cached_layout(text, rows, cols)


@lru_cache(maxsize=4096)
def _cached_layout(text: str, rows: int, cols: int) -> PlaneLayout:
    return _layout(PlaneSpec.parse(text), rows, cols)


def _layout(spec: PlaneSpec, rows: int, cols: int) -> PlaneLayout:
    shapes, dtypes, offsets, nbytes = [], [], [], 0
    for buffer in spec.buffers(rows, cols):
        dtype = buffer.dtype or torch.uint8
        size = dtype.itemsize if rows * cols else 0
        for one in buffer.shape:
            size = size * one
        shapes.append(tuple(buffer.shape))
        dtypes.append(dtype)
        offsets.append(nbytes)
        nbytes = nbytes + size
    return PlaneLayout(tuple(shapes), tuple(dtypes), tuple(offsets), nbytes)


#: Specs by a name, for code that is compiled: dynamo can read one, but not make one.
_specs = SimpleNamespace()


@runs_at_once
def _spec_name(text: str) -> str:
    name = "s" + text.encode().hex()
    if not hasattr(_specs, name):
        setattr(_specs, name, PlaneSpec.parse(text))
    return name


def part_shapes(rows: int, cols: int, axis: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and columns of each part of a matrix that is cut along an axis.

    Args:
        rows, cols: of the matrix; the one that is cut does not count.
        axis: 0 rows, 1 columns.
        sizes: of the parts, along it.
    """
    return [(size, cols) if axis == 0 else (rows, size) for size in sizes]


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _is_aligned(sizes: Sequence[int], unit: int) -> bool:
    """Return whether no boundary between parts cuts a block."""
    last = 0
    for i, size in enumerate(sizes):  # dynamo knows no `max` of a generator
        if size:
            last = i
    return all(size % unit == 0 for size in sizes[:last])


def encode_parts(
    x: torch.Tensor,
    text: str,
    axis: int,
    sizes: Sequence[int],
    seed: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the bytes of all parts, one behind the other.

    Args:
        x: matrix `[rows, cols]`.
        text: the spec string.
        axis: along which it is cut: 0 rows, 1 columns.
        sizes: of the parts.
        seed: int64 `[1]` of the first part, one more for each further part; or None.
        amax: FP32 `[1]` that all parts are scaled by, or None: each by its own.

    Returns:
        uint8 `[n]`.
    """
    facts = facts_of(text)
    shapes = part_shapes(x.shape[0], x.shape[1], axis, sizes)
    if not any(rows * cols for rows, cols in shapes):
        return x.new_empty(0, dtype=torch.uint8)
    if facts.dtype is not None:
        own = x.to(facts.dtype)
        if axis == 0 or x.shape[0] == 1:
            return _bytes(own)
        return torch.cat([_bytes(part) for part in own.split(list(sizes), axis)])
    if not facts.is_stochastic and len(sizes) == 1:
        return torch.cat([_bytes(b) for b in encode(x, EncodeRequest(text, row_stat=amax))])
    joined = facts.all_grow(axis) and _is_aligned(sizes, facts.units[axis])
    if joined and not facts.is_stochastic:
        return _cut(encode(x, EncodeRequest(text)), text, axis, shapes)
    pieces: list[torch.Tensor] = []
    for number, part in enumerate(x.split(list(sizes), axis)):
        if part.numel():
            own_seed = None if seed is None else seed + number
            request = EncodeRequest(text, row_stat=amax, seed=own_seed)
            pieces += [_bytes(buffer) for buffer in encode(part, request)]
    return torch.cat(pieces)


def _cut(
    buffers: Sequence[torch.Tensor], text: str, axis: int, shapes: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return the bytes of parts of a matrix whose plane as a whole is there."""
    starts = [0] * len(buffers)
    pieces = []
    for rows, cols in shapes:
        if not rows * cols:
            continue
        for i, (buffer, shape) in enumerate(
            zip(buffers, layout_of(text, rows, cols).shapes, strict=True)
        ):
            dim = min(axis, len(shape) - 1)
            pieces.append(_bytes(buffer.narrow(dim, starts[i], shape[dim])))
            starts[i] += shape[dim]
    return torch.cat(pieces)


def decode_parts(
    payload: torch.Tensor,
    text: str,
    shapes: Sequence[tuple[int, int]],
    axis: int,
    dtype: torch.dtype,
    shares_amax: bool = False,
) -> torch.Tensor:
    """Return the values of parts, put together along an axis.

    Args:
        payload: uint8 `[n]`: their bytes, one behind the other.
        text: the spec string.
        shapes: rows and columns of each part.
        axis: along which they stand: 0 rows, 1 columns.
        dtype: of the values: FP32 arithmetic, one rounding.
        shares_amax: all parts were scaled by the same amax.
    """
    facts = facts_of(text)
    full = [shape for shape in shapes if shape[0] * shape[1]]
    rows = sum(s[0] for s in shapes) if axis == 0 else shapes[0][0]
    cols = sum(s[1] for s in shapes) if axis == 1 else shapes[0][1]
    if not full:
        return payload.new_empty((rows, cols), dtype=dtype)
    is_joined = facts.all_grow(axis) or (shares_amax and facts.needs_amax)
    if is_joined and _is_aligned([shape[axis] for shape in full], facts.units[axis]):
        buffers = joined_parts(payload, text, full, axis)
        return _decoded(buffers, text, rows, cols, dtype, facts)
    parts, start = [], 0
    for own in full:
        layout = layout_of(text, *own)
        piece = payload.narrow(0, start, layout.nbytes)
        parts.append(_decoded(joined_parts(piece, text, [own], axis), text, *own, dtype, facts))
        start += layout.nbytes
    return torch.cat(parts, axis)


def _decoded(
    buffers: list[torch.Tensor], text: str, rows: int, cols: int, dtype: Any, facts: WireFacts
) -> torch.Tensor:
    if facts.dtype is not None:
        return buffers[0].to(dtype)
    return torch.ops.hybridq.decode(buffers, text, rows, cols, dtype)


def joined_parts(
    payload: torch.Tensor, text: str, shapes: Sequence[tuple[int, int]], axis: int
) -> list[torch.Tensor]:
    """Return the buffers of one plane of several parts; what does not grow is the first part's."""
    grows = facts_of(text).grows[axis]
    layouts = [layout_of(text, *shape) for shape in shapes]
    if all(shape == shapes[0] for shape in shapes):
        return _equal_parts(payload.view(len(shapes), layouts[0].nbytes), layouts[0], axis, grows)
    starts = [sum(layout.nbytes for layout in layouts[:i]) for i in range(len(layouts))]
    made = []
    for i, dtype in enumerate(layouts[0].dtypes):
        every = [
            _viewed(payload, start + layout.offsets[i], layout.shapes[i], dtype)
            for start, layout in zip(starts, layouts, strict=True)
        ]
        made.append(torch.cat(every, min(axis, every[0].dim() - 1)) if grows[i] else every[0])
    return made


def _equal_parts(
    payload: torch.Tensor, layout: PlaneLayout, axis: int, grows: tuple[bool, ...]
) -> list[torch.Tensor]:
    """Return the same of parts of one shape, whose bytes are the rows of `payload`."""
    made = []
    for i, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
        own = payload.narrow(1, layout.offsets[i], math.prod(shape) * dtype.itemsize)
        every = own.contiguous().view(-1)
        if dtype.itemsize > 1:
            # Bytes of values alone begin at multiples of their size; others may begin anywhere.
            every = (every if len(layout.shapes) == 1 else every.clone()).view(dtype)
        every = every.view(payload.shape[0], *shape)
        if not grows[i]:
            made.append(every[0])
        elif axis == 0 or len(shape) == 1:
            made.append(every.flatten(0, 1))
        else:
            made.append(every.transpose(0, 1).flatten(1, 2))
    return made


def _viewed(
    payload: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    own = payload.narrow(0, start, math.prod(shape) * dtype.itemsize)
    return (own if dtype.itemsize == 1 else own.clone()).view(dtype).view(list(shape))
