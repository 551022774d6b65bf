"""Encode and decode of one plane [rows, K]; a columnwise plane is the plane of the transpose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import four_over_six
from .elements import ELEMENTS, cast_nearest, cast_stochastic, decode_codes
from .hadamard import forward_hadamard, inverse_hadamard
from .philox import random_bytes
from .rounding import MAX, round_to
from .scales import (
    F32,
    amax_scale,
    e8m0_value,
    exponent_scale,
    finite_or_nan,
    rceil_scale,
    two_level_factor,
    two_level_scale,
)


@dataclass(frozen=True)
class OracleSpec:
    """All that decides the bytes of a plane. `element` is bf16, fp16 or fp32 for rule identity.

    `block` is None for the whole tensor; `signs` is None without the Hadamard transform.
    """

    element: str
    block: tuple[int, int] | None
    rule: str
    power_of_two: bool = False
    eps: float = 0.0
    stochastic: bool = False
    signs: int | None = None
    tensor_bound: float = 448.0
    four_over_six: str | None = None
    row_scaled: bool = False

    @property
    def needs_stat(self) -> bool:
        return self.rule == "two_level" or (self.rule == "amax" and self.block is None)


_IDENTITY = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def tensor_amax(x: np.ndarray, spec: OracleSpec) -> np.ndarray:
    """float32 [1]: max |x| after the transform; NaN kept, inf stored as the FP32 maximum.

    Row-scaled: float32 [rows], of each row.
    """
    if spec.signs is not None:
        x = forward_hadamard(x, spec.signs)
    if spec.row_scaled:
        return finite_or_nan(np.array([np.abs(row).max(initial=0) for row in x], dtype=F32))
    return finite_or_nan(np.array([np.abs(x).max() if x.size else 0], dtype=F32))


def _block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 [ceil(rows / br), ceil(K / bc)]; blocks at the edges see only what exists."""
    rows, k = x.shape
    br, bc = block
    nr, nc = -(-rows // br), -(-k // bc)
    padded = np.zeros((nr * br, nc * bc), dtype=F32)
    padded[:rows, :k] = np.abs(x)
    return padded.reshape(nr, br, nc, bc).max(axis=(1, 3))


def _spread(per_block: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Each block's value at each of its elements."""
    wide = np.repeat(np.repeat(per_block, block[0], axis=0), block[1], axis=1)
    return wide[: shape[0], : shape[1]]


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [rows, ceil(K / 2)], the lower index in the low nibble, the last high nibble 0."""
    rows, k = codes.shape
    even = np.zeros((rows, k + k % 2), dtype=np.uint8)
    even[:, :k] = codes
    return even[:, 0::2] | even[:, 1::2] << 4


def unpack_nibbles(data: np.ndarray, k: int) -> np.ndarray:
    """uint8 [rows, k] codes."""
    pairs = np.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(data.shape[0], 2 * data.shape[1])[:, :k]


def encode(
    x: np.ndarray,
    spec: OracleSpec,
    *,
    dtype: str = "float32",
    stat: float | np.ndarray | None = None,
    seed: int = 0,
    row0: int = 0,
    k0: int = 0,
    stream: int = 0,
    is_columnwise: bool = False,
) -> dict[str, np.ndarray]:
    """Buffers of the plane of float32 values `x` [rows, K], which came from type `dtype`.

    `stat` replaces the tensor's own amax (each row's, if row-scaled). `row0`, `k0` place this
    matrix in a whole plane. `is_columnwise`: x is a transpose, whose square four-over-six blocks
    decide as those of the untransposed matrix.
    """
    x = np.asarray(x, dtype=F32)
    if spec.rule == "identity":
        return {"data": round_to(x, _IDENTITY[spec.element])}
    amax = tensor_amax(x, spec)
    if stat is not None:
        amax = finite_or_nan(np.broadcast_to(np.asarray(stat, dtype=F32), amax.shape))
    if spec.signs is not None:
        x, dtype = forward_hadamard(x, spec.signs), "bfloat16"
    element = ELEMENTS[spec.element]
    buffers: dict[str, np.ndarray] = {}
    if spec.block is None:
        scale, multiplier = amax_scale(
            amax, element, spec.power_of_two, spec.eps, overflow=MAX["float32"]
        )
        spread = np.broadcast_to(multiplier[0], x.shape)
    else:
        per_block = _block_amax(x, spec.block)
        if spec.rule == "amax":
            scale, multiplier = amax_scale(
                per_block, element, spec.power_of_two, spec.eps, overflow=MAX[dtype]
            )
        elif spec.rule == "rceil":
            scale, multiplier = rceil_scale(per_block, element)
        elif spec.rule in ("floor", "ceil", "even"):
            scale, multiplier = exponent_scale(per_block, element, spec.rule)
        else:
            scale, multiplier = _two_level(x, per_block, amax, spec, is_columnwise)
            buffers["amax"] = amax
        spread = _spread(multiplier, spec.block, x.shape)
    with np.errstate(all="ignore"):
        scaled = x * spread
    if spec.rule == "two_level":
        scaled = np.clip(scaled, F32(-element.max), F32(element.max))
    if spec.stochastic:
        random = random_bytes(seed, *x.shape, row0, k0, stream)
        codes = cast_stochastic(scaled, element, random)
    else:
        codes = cast_nearest(scaled, element)
    # A block whose scale is NaN decodes to NaN as a whole: 0 * NaN and inf * NaN are NaN as well.
    codes = np.where(np.isnan(spread), np.uint8(element.nan_code), codes)
    data = pack_nibbles(codes) if spec.element == "e2m1" else codes
    return {"data": data, "scale": scale} | buffers


def _two_level(
    x: np.ndarray, per_block: np.ndarray, amax: np.ndarray, spec: OracleSpec, is_columnwise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(scale bytes, multipliers) of NVFP4's blocks, by any of its options."""
    element, bound = ELEMENTS[spec.element], spec.tensor_bound
    if spec.four_over_six is not None:
        error = spec.four_over_six
        if is_columnwise and spec.block[0] > 1:
            both = four_over_six.choose(x.T, spec.block, amax, bound, error)
            return both[0].T, both[1].T
        return four_over_six.choose(x, spec.block, amax, bound, error)
    if not spec.row_scaled:
        return two_level_scale(per_block, amax[0], element, bound)
    scale = np.zeros(per_block.shape, dtype=np.uint8)
    multiplier = np.zeros(per_block.shape, dtype=F32)
    for row, own in enumerate(amax):
        scale[row], multiplier[row] = two_level_scale(per_block[row], own, element, bound)
    return scale, multiplier


def _factor(amax: np.ndarray, spec: OracleSpec) -> np.ndarray | np.float32:
    """FP32 decode factor: one, or [rows, 1] if row-scaled."""
    element = ELEMENTS[spec.element]
    factors = [two_level_factor(own, element, spec.tensor_bound) for own in amax]
    return np.array(factors, dtype=F32).reshape(-1, 1) if spec.row_scaled else factors[0]


def _scaled_codes(
    buffers: dict[str, np.ndarray], spec: OracleSpec, rows: int, width: int, with_scale: bool
) -> np.ndarray:
    element = ELEMENTS[spec.element]
    data = unpack_nibbles(buffers["data"], width) if spec.element == "e2m1" else buffers["data"]
    values = decode_codes(data, element)
    scale = buffers["scale"]
    if spec.rule in ("rceil", "floor", "ceil", "even"):
        scale = e8m0_value(scale)
    elif spec.rule == "two_level":
        scale = decode_codes(scale, ELEMENTS["e4m3"])
    if spec.block is None:
        spread = np.broadcast_to(scale[0] if with_scale else F32(1), values.shape)
    else:
        spread = _spread(scale, spec.block, (rows, width))
    with np.errstate(all="ignore"):
        return (values * spread).astype(F32)


def _width(spec: OracleSpec, k: int) -> int:
    return k if spec.signs is None else -(-k // 16) * 16


def decode(
    buffers: dict[str, np.ndarray], spec: OracleSpec, rows: int, k: int, dtype: str = "float32"
) -> np.ndarray:
    """float32 [rows, k]: (code * scale) * factor, transform undone, one rounding to `dtype`."""
    if spec.rule == "identity":
        return round_to(buffers["data"], dtype)
    values = _scaled_codes(buffers, spec, rows, _width(spec, k), with_scale=True)
    if spec.rule == "two_level":
        with np.errstate(all="ignore"):
            values = values * _factor(buffers["amax"], spec)
    if spec.signs is not None:
        values = inverse_hadamard(values, spec.signs, k)
    return round_to(values, dtype)


def operand(
    buffers: dict[str, np.ndarray], spec: OracleSpec, rows: int, k: int
) -> tuple[np.ndarray, np.float32 | np.ndarray]:
    """(float32 [rows, Kp] GEMM operand before its rounding to BF16, FP32 factor of the tensor).

    Per-tensor FP8: codes and the scale as factor; NVFP4: code * scale and amax / (bound * fmax),
    [rows, 1] if row-scaled. The transform is not undone.
    """
    if spec.rule == "identity":
        return buffers["data"], F32(1)
    values = _scaled_codes(buffers, spec, rows, _width(spec, k), with_scale=False)
    if spec.rule == "two_level":
        return values, _factor(buffers["amax"], spec)
    return values, F32(buffers["scale"][0]) if spec.block is None else F32(1)
