"""What is measured: one record per case, the bytes it needs, and the goals of the project."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels import OpQuery, choose
from hybridq.storage import Plane

__all__ = [
    "SCALES_OF_CHECKPOINTS",
    "Bench",
    "Case",
    "encode_goal",
    "fresh",
    "plane_nbytes",
    "quantized",
    "takes",
]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Args:
        section: `"cast"`, `"gemm"`, `"grouped"`, `"small_m"`, `"linear"`, `"host"` or `"peer"`.
        name: unique within the section and shape.
        shape: `rows, cols` of a cast, `M, N, K` of a product, `tokens, in, out` of a Linear; of
            groups `G, tokens, C`, or `G, tokens, N, K`.
        make: `make(i)` returns the call over the i-th set of buffers.
        baseline: `"copy"` (of `nbytes` in all), or the name of another case of the same section
            and shape that runs in the same rounds; "" for none.
        nbytes: bytes that the task has to read and write at least, or 0.
        flops: floating-point operations, or 0.
        goal: least ratio to the baseline, or None where the project states none.
        dtype: of the high-precision side.
        note: what else a reader has to know.
        footprint: bytes that a call touches, if not `nbytes`: the L2 cache must not hold them.
        told: what `make` finds out, such as the backend that runs the call.
        is_headline: whether the short table shows it.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    make: Callable[[int], Callable[[], Any]]
    baseline: str = ""
    nbytes: int = 0
    flops: int = 0
    goal: float | None = None
    dtype: str = "bfloat16"
    note: str = ""
    footprint: int = 0
    told: dict[str, str] = field(default_factory=dict)
    is_headline: bool = False


@dataclass(frozen=True)
class Bench:
    """Where cases run and how large they are.

    Args:
        device: `"cuda"`, or `"cpu"` for dry runs.
        casts: (rows, cols, dtype) of casts.
        products: (name, M, N, K).
        small: M of products with few rows; the weight is `small_weight`.
        small_weight: (N, K).
        linear: (tokens, in, out).
        host: (tokens, in, out) of the layer whose host time counts.
        many: (matrices, rows, cols) that are encoded at once.
        grouped: (groups, tokens, N, K) of an expert layer.
    """

    device: str
    casts: Sequence[tuple[int, int, torch.dtype]]
    products: Sequence[tuple[str, int, int, int]]
    small: Sequence[int]
    small_weight: tuple[int, int]
    linear: tuple[int, int, int]
    host: tuple[int, int, int]
    many: tuple[int, int, int]
    grouped: tuple[int, int, int, int] = (8, 16384, 4096, 4096)
    l2_nbytes: int = 1
    _inputs: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def randn(self, rows: int, cols: int, dtype: torch.dtype, index: int) -> torch.Tensor:
        """Return the index-th random matrix of this shape; made once, until `forget`."""
        made = self._inputs.setdefault((rows, cols, dtype), [])
        while len(made) <= index:
            made.append(torch.randn(rows, cols, device=self.device, dtype=dtype))
        return made[index]

    def forget(self) -> None:
        """Free the matrices of `randn`."""
        self._inputs.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def runs(self, op: str, *specs: PlaneSpec | None) -> str:
        """Return the name of the backend that `op` of `specs` runs on here, "" if none."""
        query = OpQuery(op, self.device, torch.bfloat16, *specs)
        chosen = choose(query).chosen
        return "" if chosen is None else chosen.name


def plane_nbytes(spec: PlaneSpec, rows: int, cols: int) -> int:
    """Return the bytes of the buffers of a plane whose own matrix is `[rows, cols]`."""
    total = 0
    for buffer in spec.buffers(rows, cols):
        count = 1
        for size in buffer.shape:
            count *= size
        dtype = buffer.dtype or torch.bfloat16
        total += count * torch.empty(0, dtype=dtype).element_size()
    return total


def encode_goal(row: PlaneSpec | None, col: PlaneSpec | None) -> float | None:
    """Return the least fraction of a copy that the project set itself for an encode, on an H200.

    NVFP4: 0.70 with stochastic rounding and transform, else 0.85; eight-bit elements: 0.90 for one
    direction, 0.85 for two. None for formats and options for which no goal was stated.
    """
    specs = [spec for spec in (row, col) if spec is not None]
    if any(spec.row_scaled or spec.four_over_six for spec in specs):
        return None
    if any(spec.format.rule == "two_level" for spec in specs):
        drawn = any(spec.stochastic for spec in specs)
        return 0.70 if drawn else 0.85
    if any(spec.stochastic or spec.signs is not None for spec in specs):
        return None
    if any(spec.format.element is None or spec.format.element.bits != 8 for spec in specs):
        return None
    return 0.90 if len(specs) == 1 else 0.85


def fresh(plane: Plane) -> Plane:
    """Return a plane over the same buffers that keeps nothing of what was made of the first."""
    return Plane(plane.spec, plane.direction, plane.rows, plane.cols, dict(plane.buffers))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter `name`."""
    return name in inspect.signature(function).parameters


#: FP8 as checkpoints have it: FP32 scales that are no powers of two, of rows and of squares.
SCALES_OF_CHECKPOINTS: dict[str, PlaneSpec] = {
    "fp8 by row": PlaneSpec.parse("e4m3/1x65536/fp32/amax/float8_block"),
    "fp8 by square": PlaneSpec.parse("e4m3/128x128/fp32/amax/float8_block"),
}


def quantized(x: torch.Tensor, name: str | PlaneSpec) -> Plane:
    """Return the rowwise plane of x."""
    spec = SCALES_OF_CHECKPOINTS.get(name) if isinstance(name, str) else None
    if spec is None:
        return hybridq.quantize(x, name, False).tensor_storage.plane("rowwise")
    made = hybridq.Quantizer(rowwise=spec, columnwise=None).quantize(x)
    return made.tensor_storage.plane("rowwise")
