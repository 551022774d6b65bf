"""Planes for products, their values by the oracle, and the bound that every product is held to."""

from __future__ import annotations

import numpy as np
import torch

import hybridq
from hybridq import Quantizer
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import Operand
from hybridq.storage import Plane, build_storage
from oracle import bridge, planes

#: Half a unit in the last place, relative, and the smallest step.
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def make(x: torch.Tensor, spec: PlaneSpec | str, direction: str = "rowwise") -> Plane:
    """The plane of x under `spec`."""
    spec = PlaneSpec.parse(spec) if isinstance(spec, str) else spec
    row, col = (spec, None) if direction == "rowwise" else (None, spec)
    seed = torch.tensor([7])
    return getattr(build_storage(x, row, col, seed=seed), direction)


def decoded(plane: Plane) -> np.ndarray:
    """FP64 values of the plane's own matrix, by the oracle."""
    rows, k = plane.matrix
    if plane.spec.format.is_identity:
        return plane.data.to(torch.float64).numpy()
    buffers = {name: buffer.numpy() for name, buffer in plane.buffers.items()}
    spec = bridge.oracle_spec(plane.spec)
    return np.asarray(planes.decode(buffers, spec, rows, k, "float32"), dtype=np.float64)


def check(y: torch.Tensor, a: np.ndarray, b: np.ndarray, extra: np.ndarray | float = 0.0) -> None:
    """Hold `y` to the bound around `a @ b.T + extra`."""
    exact = a @ b.T + extra
    k = a.shape[1]
    room = (k + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b).T + np.abs(extra))
    room = room + (k + 2) * 2.0**-126 + ULP[y.dtype] * np.abs(exact) + TINY[y.dtype]
    error = np.abs(y.to(torch.float64).numpy() - exact)
    worst = float((error / room).max()) if error.size else 0.0
    assert worst <= 1.0, f"error is {worst} of the bound"


def check_all_ways(a: Plane, b: Plane) -> None:
    """Hold `a @ b.T` to its bound: alone in two dtypes, with a bias, and added to what is there."""
    rows, cols = a.matrix[0], b.matrix[0]
    bias, into = torch.randn(cols), torch.randn(rows, cols)
    for dtype in (torch.float32, torch.bfloat16):
        check(hybridq.gemm(a, b, out_dtype=dtype), decoded(a), decoded(b))
    y = hybridq.gemm(a, b, bias=bias, out_dtype=torch.bfloat16)
    check(y, decoded(a), decoded(b), bias.double().numpy()[None, :])
    out = into.clone()
    hybridq.gemm(a, b, out=out, accumulate=True)
    check(out, decoded(a), decoded(b), into.double().numpy())


def in_own_domain(plane: Plane) -> np.ndarray:
    """FP64 values of the plane before its transform is transformed back, tails included."""
    buffers = {name: buffer.numpy() for name, buffer in plane.buffers.items()}
    values, factor = planes.operand(buffers, bridge.oracle_spec(plane.spec), *plane.matrix)
    return values.astype(np.float64) * np.float64(factor)


def integers(rows: int, k: int, seed: int) -> torch.Tensor:
    """BF16 from -7 to 7: sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, (rows, k), generator=generator).to(torch.bfloat16)


def operand(x: torch.Tensor, text: str) -> tuple[Operand, torch.Tensor]:
    """Return x as an operand of a spec, and its values in FP64."""
    spec = PlaneSpec.parse(text)
    plane = Quantizer(rowwise=spec, columnwise=None).quantize(x).rowwise
    values = plane.dequantize(torch.float32).double()
    return Operand(plane.tensors, spec, *plane.matrix), values
