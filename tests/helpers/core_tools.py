"""The compiled core with tensors instead of pointers, for tests/csrc/test_core_*.py.

Nothing of hybridq but `_core` is used: these tests hold the core to the rules by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from hybridq import _core

__all__ = [
    "DTYPES",
    "SPECS",
    "CoreSpec",
    "as_float",
    "decode",
    "encode",
    "encode_pair",
    "hadamard",
    "nibbles",
    "pack",
    "plane_shape",
    "same_bytes",
    "sample",
    "tensor_amax",
    "transposed",
    "using_variant",
]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SCALE_DTYPE = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}
_POINTS = 16


@dataclass(frozen=True)
class CoreSpec:
    """The arguments of `_core.Spec`, and the sizes of a plane's buffers."""

    element: str
    block: tuple[int, int] = (0, 0)
    scale: str = "fp32"
    rule: str = "amax"
    power_of_two: bool = False
    eps: float = 0.0
    stochastic: bool = False
    signs: int = -1
    tensor_bound: float = 448.0
    four_over_six: str = ""
    row_scaled: bool = False

    @property
    def native(self):
        return _core.Spec(
            self.element,
            *self.block,
            self.scale,
            self.rule,
            self.power_of_two,
            self.eps,
            self.stochastic,
            self.signs,
            self.tensor_bound,
            self.four_over_six,
            self.row_scaled,
        )

    @property
    def needs_amax(self) -> bool:
        return self.block == (0, 0) or self.rule == "two_level"

    @property
    def decides_by_rows(self) -> bool:
        """Whether the columnwise plane is not the rowwise plane of the transpose.

        Square four-over-six blocks add errors in the order of the given matrix for both planes,
        so that the columnwise plane is the rowwise one transposed.
        """
        return self.four_over_six != "" and self.block[0] > 1

    def stored_k(self, k: int) -> int:
        return k if self.signs < 0 else -(-k // _POINTS) * _POINTS

    def data_shape(self, rows: int, k: int) -> tuple[int, int]:
        k = self.stored_k(k)
        return rows, -(-k // 2) if self.element == "e2m1" else k

    def scale_shape(self, rows: int, k: int) -> tuple[int, ...]:
        if self.block == (0, 0):
            return (1,)
        return -(-rows // self.block[0]), -(-self.stored_k(k) // self.block[1])


def _specs() -> dict[str, CoreSpec]:
    mx = {"scale": "e8m0", "rule": "rceil"}
    nv = {"scale": "e4m3", "rule": "two_level"}
    specs = {
        "fp8_e4m3": CoreSpec("e4m3"),
        "fp8_e5m2_pow2": CoreSpec("e5m2", power_of_two=True, eps=1e-3),
        "fp8_1x128": CoreSpec("e4m3", (1, 128), power_of_two=True),
        "fp8_128x128": CoreSpec("e5m2", (128, 128)),
        "fp8_1x64": CoreSpec("e4m3", (1, 64)),
        "mxfp8": CoreSpec("e4m3", (1, 32), **mx),
        "mxfp8_e5m2": CoreSpec("e5m2", (1, 32), **mx),
        "mxfp8_32x32": CoreSpec("e4m3", (32, 32), **mx),
        "mxfp4": CoreSpec("e2m1", (1, 32), **mx),
        "mxfp6_e3m2": CoreSpec("e3m2", (1, 32), **mx),
        "mxfp6_e2m3": CoreSpec("e2m3", (1, 32), **mx),
        "nvfp4": CoreSpec("e2m1", (1, 16), **nv),
        "nvfp4_16x16": CoreSpec("e2m1", (16, 16), **nv),
        "nvfp4_256": CoreSpec("e2m1", (1, 16), tensor_bound=256.0, **nv),
    }
    for name in ("fp8_e4m3", "fp8_1x128", "mxfp8", "nvfp4", "mxfp6_e3m2"):
        specs[name + "_sr"] = replace(specs[name], stochastic=True)
    for name in ("fp8_e4m3", "mxfp8", "nvfp4"):
        specs[name + "_rht"] = replace(specs[name], signs=0xD7E8)
    for name, rule in (
        *(("mxfp8", "floor"), ("mxfp8", "even"), ("mxfp8_e5m2", "ceil"), ("mxfp8_32x32", "floor")),
        *(("mxfp4", "floor"), ("mxfp4", "ceil"), ("mxfp4", "even")),
        *(("mxfp6_e3m2", "even"), ("mxfp6_e2m3", "ceil")),
    ):
        specs[f"{name}_{rule}"] = replace(specs[name], rule=rule)
    specs["mxfp4_sr"] = replace(specs["mxfp4"], stochastic=True)
    specs["mxfp6_e2m3_rht"] = replace(specs["mxfp6_e2m3"], signs=0xD7E8)
    for error, bound in (("mae", 256.0), ("mse", 448.0)):
        over = {"four_over_six": error, "tensor_bound": bound}
        specs[f"nvfp4_4o6_{error}"] = replace(specs["nvfp4"], **over)
        specs[f"nvfp4_16x16_4o6_{error}"] = replace(specs["nvfp4_16x16"], **over)
        specs[f"nvfp4_rows_4o6_{error}"] = replace(specs["nvfp4"], row_scaled=True, **over)
    specs["nvfp4_64x64_4o6"] = replace(specs["nvfp4_4o6_mae"], block=(64, 64))
    specs["nvfp4_1x128_4o6"] = replace(specs["nvfp4_4o6_mse"], block=(1, 128))
    specs["nvfp4_rows"] = replace(specs["nvfp4"], row_scaled=True)
    specs["nvfp4_rows_rht"] = replace(specs["nvfp4_rows"], signs=0xD7E8)
    specs["nvfp4_rows_sr"] = replace(specs["nvfp4_rows"], stochastic=True)
    specs["nvfp4_rht_sr"] = replace(specs["nvfp4"], signs=0x1234, stochastic=True)
    specs["nvfp4_16x16_sr"] = replace(specs["nvfp4_16x16"], stochastic=True)
    return specs


#: One spec of every kind that the kernels tell apart.
SPECS = _specs()


def plane_shape(x: torch.Tensor, columnwise: bool) -> tuple[int, int]:
    rows, cols = x.shape
    return (cols, rows) if columnwise else (rows, cols)


def tensor_amax(
    x: torch.Tensor,
    columnwise: bool = False,
    signs: int = -1,
    per_row: bool = False,
    threads: int = 1,
) -> torch.Tensor:
    """Return the statistic of a plane of x: one value, or one per plane row."""
    view = x.T if columnwise else x
    out = torch.full((view.shape[0] if per_row else 1,), -1.0)
    _core.amax(
        view.data_ptr(),
        DTYPES[x.dtype],
        *view.shape,
        *view.stride(),
        signs,
        out.data_ptr(),
        threads,
        per_row,
    )
    return out


def encode_pair(
    x: torch.Tensor,
    row: CoreSpec | None,
    col: CoreSpec | None,
    *,
    threads: int = 1,
    seed: int = 0x0123456789ABCDEF,
    row0: int = 0,
    col0: int = 0,
    stats: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    streams: tuple[int, int] = (0, 0),
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Return (data, scale) of both planes from one call. Bytes past the buffers are watched."""
    outs, planes, guarded = [], [], []
    for spec, columnwise, stat, stream in zip(
        (row, col), (False, True), stats, streams, strict=True
    ):
        if spec is None:
            outs.append(None)
            planes.append(None)
            continue
        shape = plane_shape(x, columnwise)
        if stat is None and spec.needs_amax:
            stat = tensor_amax(x, columnwise, spec.signs, spec.row_scaled)
        data, data_guard = _guarded(spec.data_shape(*shape), torch.uint8)
        scale, scale_guard = _guarded(spec.scale_shape(*shape), _SCALE_DTYPE[spec.scale])
        guarded += [data_guard, scale_guard]
        outs.append(
            _core.PlaneOut(
                spec.native,
                data.data_ptr(),
                scale.data_ptr(),
                0 if stat is None else stat.data_ptr(),
                seed,
                row0,
                col0,
                stream,
            )
        )
        planes.append((data, scale, stat))
    _core.encode(x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride(), outs[0], outs[1], threads)
    for whole in guarded:
        margins = torch.cat([whole[:_MARGIN], whole[-_MARGIN:]])
        assert bool((margins == _POISON).all()), "a kernel wrote outside of its buffer"
    return [None if p is None else p[:2] for p in planes]


_MARGIN, _POISON = 64, 0xA5


def _guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a poisoned buffer, and the memory that holds it between two poisoned margins."""
    nbytes = prod(shape) * dtype.itemsize
    whole = torch.full((nbytes + 2 * _MARGIN,), _POISON, dtype=torch.uint8)
    return whole[_MARGIN : _MARGIN + nbytes].view(dtype).reshape(shape), whole


def encode(x: torch.Tensor, spec: CoreSpec, columnwise: bool = False, **options):
    """Return (data, scale) of one plane; `stat` and `stream` by keyword."""
    stat, stream = options.pop("stat", None), options.pop("stream", 0)
    pair = (None, spec) if columnwise else (spec, None)
    options |= {"stats": (stat, stat), "streams": (stream, stream)}
    return encode_pair(x, *pair, **options)[int(columnwise)]


def decode(
    planes,
    spec: CoreSpec,
    rows: int,
    k: int,
    dtype=torch.float32,
    amax=None,
    operand: bool = False,
    threads: int = 1,
):
    """Return the decoded matrix and whether a value left BF16's range."""
    data, scale = planes
    out = torch.empty(rows, spec.stored_k(k) if operand else k, dtype=dtype)
    flag = _core.decode(
        spec.native,
        data.data_ptr(),
        scale.data_ptr(),
        0 if amax is None else amax.data_ptr(),
        rows,
        k,
        out.data_ptr(),
        DTYPES[dtype],
        operand,
        threads,
    )
    return out, flag


def hadamard(x: torch.Tensor, signs: int, threads: int = 1) -> torch.Tensor:
    rows, cols = x.shape
    out = torch.empty(rows, -(-cols // _POINTS) * _POINTS, dtype=torch.bfloat16)
    _core.hadamard(
        x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), signs, out.data_ptr(), threads
    )
    return out


def nibbles(data: np.ndarray, k: int) -> np.ndarray:
    """Return the codes `[rows, k]` of packed data."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)[:, :k]


def pack(codes: np.ndarray) -> np.ndarray:
    """Return two codes per byte, the lower index in the low nibble."""
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def transposed(plane, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a packed plane `[rows, k]` of square blocks, transposed."""
    data, scale = plane
    return torch.from_numpy(pack(nibbles(data.numpy(), k).T)), scale.T.contiguous()


def same_bytes(a, b) -> bool:
    """Whether two planes hold the same bytes (NaN scales included)."""
    return all(
        p.shape == q.shape
        and torch.equal(p.contiguous().view(torch.uint8), q.contiguous().view(torch.uint8))
        for p, q in zip(a, b, strict=True)
    )


def sample(rows: int, cols: int, dtype=torch.float32, seed: int = 0, special: bool = True):
    """Values over many binades with zeros, subnormals, ties, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=generator).float())
    x[torch.rand(rows, cols, generator=generator) < 0.05] = 0.0
    x[torch.rand(rows, cols, generator=generator) < 0.05] *= -0.0
    if special and x.numel() > 40:
        flat = x.view(-1)
        flat[7] = 1e-42
        flat[-3] = float("inf")
        flat[x.numel() // 2] = 5.0
    return x.to(dtype)


def as_float(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).numpy()


@contextmanager
def using_variant(name: str) -> Iterator[None]:
    before = _core.variant()
    _core.set_variant(name)
    try:
        yield
    finally:
        _core.set_variant(before)
