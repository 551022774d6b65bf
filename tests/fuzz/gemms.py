"""Rules of products: any plane with any other, with bias, into memory, fitting or not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import hybridq
from hybridq import Plane, QuantizedTensor

from .invariants import equal
from .policy import Wrong, attempt
from .pool import Pool, fuzz, indices
from .quantizers import sound_makers
from .values import HIGH, JUNK, SIZES, Values, junk, plain

__all__ = ["GemmRules", "check_product"]


def check_product(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor, where: str
) -> None:
    """Raise if `y` is farther from `a @ b.T + added` than FP32 sums and one rounding allow.

    A sum of K products in FP32, in any order, is off by at most K 2^-24 of the sum of magnitudes;
    that sum is at most |a| |b| (Cauchy and Schwarz; also of transformed rows: their norms are
    kept). Twice that, since a product of transformed operands is not the one that is compared with.

    Args:
        y: `[M, N]`.
        a: `[M, K]`, what is multiplied, in FP64.
        b: `[N, K]`, the same.
        added: `[N]` or `[M, N]`, in FP64.
        where: for the report.
    """
    expected = a @ b.t() + added
    size = a.norm(dim=1)[:, None] * b.norm(dim=1)[None, :] + added.abs()
    if not bool(size.isfinite().all()) or bool((size > 1e4).any()) or bool((size < 1e-4).any()):
        return  # FP16 and BF16 have ends of range, which the suite's own tests hold
    bits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[y.dtype]
    bound = (a.shape[1] + 4) * 2.0**-23 * size + expected.abs() * 2.0**-bits + 2.0**-24
    if bool(((y.double() - expected).abs() > bound).any()):
        raise Wrong(f"{where}: off by {(y.double() - expected).abs().max()}, bound {bound.min()}")


def _matrix(operand: Any) -> torch.Tensor | None:
    """Return what `gemm` multiplies, in FP64, or None where it has no such plane."""
    if isinstance(operand, Plane):
        own = operand.dequantize(torch.float32).double()
        return own if operand.direction == "rowwise" else own.t()
    if isinstance(operand, QuantizedTensor):
        return operand.tensor_storage.plane("rowwise").dequantize(torch.float32).double()
    return operand.double()


class GemmRules(Pool):
    """hybridq.gemm, matmul, linear, explain."""

    def _operand(self, t: Any, how: int) -> Any:
        if how == 0:
            return t.dequantize()
        if how in (1, 2) and len(t.tensor_storage.planes) >= how:
            return t.tensor_storage.planes[how - 1]
        return t

    @fuzz(
        made=st.tuples(sound_makers(), sound_makers()),
        sizes=st.tuples(*(st.sampled_from((0, *SIZES[:14])) for _ in range(3))),
        kind=st.sampled_from(("normal", "outlier", "zeros", "wide", "specials")),
        dtypes=st.tuples(*(st.sampled_from(HIGH) for _ in range(3))),
        bias=st.booleans(),
        into=st.integers(0, 3),
    )
    def gemm(self, made: Any, sizes: Any, kind: str, dtypes: Any, bias: bool, into: int) -> None:
        """A product of two tensors made for it."""
        (m, n, k), x = sizes, []
        for one, rows, dtype, seed in zip(made, (m, n), dtypes, (1, 2), strict=False):
            quantizer, error = attempt(one.build, "quantizer")
            values = Values((rows, k), dtype, kind, "dense", seed).build()
            if error is not None or not (quantizer.makes_rowwise or quantizer.makes_columnwise):
                x.append(values)
                continue
            x.append(quantizer.quantize(values))
            self.keep(x[-1], "gemm")
        added = torch.randn(n, generator=torch.Generator().manual_seed(3))
        out = torch.ones(m, n, dtype=dtypes[2]) if into else None
        if into == 2:
            out = torch.ones(n, m, dtype=dtypes[2]).t()
        options = {"bias": added if bias else None, "out": out, "accumulate": into == 3}
        y, error = attempt(lambda: hybridq.gemm(*x, **options), "gemm")
        if error is not None:
            if not isinstance(error, hybridq.PlaneError):
                raise Wrong(f"gemm: refused {x}: {error!r}") from error
            return
        if tuple(y.shape) != (m, n) or (out is not None and y is not out):
            raise Wrong(f"gemm: {tuple(y.shape)} of {m} x {n} x {k}")
        total = added.double() if bias else torch.zeros((), dtype=torch.float64)
        total = total + (1.0 if into == 3 else 0.0)
        if kind in ("normal", "zeros"):
            check_product(y, _matrix(x[0]), _matrix(x[1]), total, "gemm")
        for one in x:
            text = str(hybridq.explain("gemm", one, x[1]))
            if not text:
                raise Wrong("explain: no text")

    @fuzz(
        first=indices(),
        second=indices(),
        how=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        values=plain(),
        into=st.integers(0, 5),
        accumulate=st.booleans(),
        out_dtype=st.sampled_from((None, None, *HIGH, torch.int8)),
    )
    def gemm_any(
        self,
        first: int,
        second: int,
        how: Any,
        values: Values,
        into: int,
        accumulate: bool,
        out_dtype: Any,
    ) -> None:
        """A product of what there is, fitting or not; a refusal leaves `out` as it was."""
        a, b = self.take(first), self.take(second)
        if a is None:
            return
        left, right, other = self._operand(a, how[0]), self._operand(b, how[1]), values.build()
        out = other if into == 1 else None
        if into >= 2 and left is not None and hasattr(left, "shape") and left.dim() == 2:
            rows = right.matrix[0] if isinstance(right, Plane) else (*right.shape, 0)[0]
            out = torch.full((left.shape[0], rows), 3.0)
        before = None if out is None else out.clone()
        bias = other if into in (4, 5) else None
        options = {"bias": bias, "out": out, "accumulate": accumulate, "out_dtype": out_dtype}
        y, error = attempt(lambda: hybridq.gemm(left, right, **options), "gemm")
        if error is not None and out is not None and not equal(out, before):
            raise Wrong("gemm: failed, but has written to out")
        if error is None and y.dim() != 2:
            raise Wrong(f"gemm: {tuple(y.shape)}")

    @fuzz(index=indices(), name=junk(), place=st.integers(0, 5))
    def gemm_junk(self, index: int, name: str, place: int) -> None:
        """What is no operand is refused in words."""
        t = self.take(index)
        if t is None:
            return
        wrong = JUNK[name]()
        arguments: dict[int, Any] = {
            0: lambda: hybridq.gemm(wrong, t),
            1: lambda: hybridq.gemm(t, wrong),
            2: lambda: hybridq.gemm(t, t, bias=wrong),
            3: lambda: hybridq.gemm(t, t, out=wrong),
            4: lambda: hybridq.gemm(t, t, out_dtype=wrong),
            5: lambda: hybridq.explain("gemm", t, wrong),
        }
        attempt(arguments[place], f"gemm_junk {name} {place}")

    @fuzz(index=indices(), values=plain(), how=st.integers(0, 6), fits=st.booleans())
    def product(self, index: int, values: Values, how: int, fits: bool) -> None:
        """torch's own products: those of the plain values, as far as shapes and errors go."""
        t = self.take(index)
        if t is None:
            return
        if fits and t.dim() > 0:
            shape = (5, t.shape[-1]) if how in (0, 1, 2) else (t.shape[-1], 5)
            values = Values(shape, t.dtype, "normal", values.layout, values.seed)
        x = values.build()
        calls: dict[int, Any] = {
            0: lambda w: torch.nn.functional.linear(x, w),
            1: lambda w: x @ w.mT,
            2: lambda w: x @ w,
            3: lambda w: w @ x,
            4: lambda w: torch.addmm(x[0], w, x),
            5: lambda w: torch.addmm(x, w, x, beta=0.5),
            6: lambda w: w.mT @ w,
        }
        plain_y, refusal = None, None
        try:
            plain_y = calls[how](t.dequantize())
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            refusal = error
        also = () if refusal is None else (type(refusal),)
        y, error = attempt(lambda: calls[how](t), f"product {how}", also)
        if (error is None) != (refusal is None):
            raise Wrong(f"product {how}: plain {refusal!r}, quantized {error!r}, {t!r} {values}")
        if error is None and (y.shape != plain_y.shape or y.dtype != plain_y.dtype):
            raise Wrong(f"product {how}: {y.dtype} {tuple(y.shape)}, plain {plain_y.dtype}")
