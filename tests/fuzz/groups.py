"""Rules of tokens sorted by group: quantize_grouped and grouped_gemm, with ends right and wrong."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st

import hybridq
from hybridq.kernels.ragged.padded_layout import group_ends, padded_offsets

from .gemms import check_product
from .invariants import check_backends, equal
from .policy import Wrong, attempt
from .pool import Pool, fuzz
from .quantizers import sound_makers
from .values import HIGH, JUNK, LAYOUTS, Values, junk

__all__ = ["GroupRules"]


def _rows(plane: Any) -> torch.Tensor:
    """FP64 values of the plane's own matrix."""
    own = plane.dequantize(torch.float32).double()
    return own if plane.direction == "rowwise" else own.t()


def _same(a: Any, b: Any) -> bool:
    return all(
        (one is None) == (other is None)
        and (one is None or all(map(equal, one.tensors, other.tensors)))
        for one, other in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise))
    )


class GroupRules(Pool):
    """hybridq.quantize_grouped, hybridq.grouped_gemm."""

    @fuzz(
        made=st.tuples(sound_makers(), sound_makers()),
        sizes=st.lists(st.sampled_from((0, 0, 1, 5, 33, 128, 140)), max_size=4),
        rest=st.sampled_from((0, 0, 1, 9)),
        wrong=st.lists(st.integers(-3, 300), max_size=4),
        widths=st.tuples(*(st.sampled_from((0, 1, 8, 17, 40)) for _ in range(2))),
        dtype=st.sampled_from(HIGH),
        layout=st.sampled_from(LAYOUTS),
        is_wrong=st.booleans(),
    )
    def groups(
        self,
        made: Any,
        sizes: list[int],
        rest: int,
        wrong: list[int],
        widths: tuple[int, int],
        dtype: torch.dtype,
        layout: str,
        is_wrong: bool,
    ) -> None:
        """Planes are the reference's; products those of the groups, whatever the ends are."""
        ends = wrong if is_wrong else list(itertools.accumulate(sizes))
        offsets, tokens = torch.tensor(ends, dtype=torch.int32), sum(sizes) + rest
        found = []
        for one, width, seed in zip(made, widths, (1, 2), strict=True):
            x = Values((tokens, width), dtype, "normal", layout, seed).build()
            quantizer, error = attempt(one.build, "quantizer")
            if error is not None:
                return
            drawn = torch.tensor([seed]) if quantizer.is_stochastic else None

            def quantize(x: Any = x, quantizer: Any = quantizer, drawn: Any = drawn) -> Any:
                return hybridq.quantize_grouped(x, offsets, quantizer, seed=drawn)

            ragged, error = attempt(quantize, "quantize_grouped")
            if error is not None:
                if quantizer.makes_rowwise or quantizer.makes_columnwise:
                    raise Wrong(f"quantize_grouped: refused {x.shape}, {ends}: {error!r}")
                return
            with hybridq.backend("reference"):
                other = quantize()
            if not _same(ragged, other) or not repr(ragged):
                raise Wrong(f"quantize_grouped: {ragged!r} of {ends} is not the reference's")
            for plane in ragged.planes:
                check_backends(plane, "quantize_grouped")
            found.append(ragged)
        self._products(*found, group_ends(offsets, tokens).tolist(), widths)

    def _products(self, x: Any, dy: Any, ends: list[int], widths: tuple[int, int]) -> None:
        none = torch.zeros((), dtype=torch.float64)
        w = torch.randn(x.groups, widths[1], widths[0])
        y, error = attempt(lambda: hybridq.grouped_gemm(x, w, out_dtype=torch.float32), "grouped")
        if (error is None) != (x.rowwise is not None):
            raise Wrong(f"grouped_gemm: {x!r} gave {error!r}")
        begins = [0, *ends[:-1]] if ends else []
        if error is None:
            if bool(y[ends[-1] if ends else 0 :].any()):
                raise Wrong("grouped_gemm: rows of no group are not zero")
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                rows = _rows(x.rowwise)[begin:end]
                check_product(y[begin:end], rows, w[g].double(), none, "grouped_gemm")
        dw, error = attempt(
            lambda: hybridq.grouped_gemm(dy, x, out_dtype=torch.float32), "grouped over tokens"
        )
        if (error is None) != (x.columnwise is not None and dy.columnwise is not None):
            raise Wrong(f"grouped_gemm: {dy!r} by {x!r} gave {error!r}")
        if error is not None:
            return
        places = padded_offsets(dy.offsets, dy.tokens).tolist()
        for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            cut = []
            for one in (dy, x):
                plane = one.columnwise
                at = begin if plane.spec.format.is_identity else places[g]
                cut.append(_rows(plane)[:, at : at + end - begin])
            transformed = {one.columnwise.spec.signs for one in (dy, x)} != {None}
            if not transformed:  # a group's tail is transformed with the zeros behind it
                check_product(dw[g], *cut, none, "grouped_gemm")
            if begin == end and bool(dw[g].any()):
                raise Wrong("grouped_gemm: a group without tokens is not zero")

    @fuzz(name=junk(), place=st.integers(0, 8))
    def groups_junk(self, name: str, place: int) -> None:
        """What is none of the arguments is refused in words."""
        wrong, x = JUNK[name](), torch.ones(6, 32)
        offsets = torch.tensor([2, 6], dtype=torch.int32)
        ragged, w = hybridq.quantize_grouped(x, offsets, "mxfp8"), torch.ones(2, 3, 32)
        calls: dict[int, Any] = {
            0: lambda: hybridq.quantize_grouped(wrong, offsets, "mxfp8"),
            1: lambda: hybridq.quantize_grouped(x, wrong, "mxfp8"),
            2: lambda: hybridq.quantize_grouped(x, offsets, wrong),
            3: lambda: hybridq.grouped_gemm(wrong, w, offsets),
            4: lambda: hybridq.grouped_gemm(ragged, wrong),
            5: lambda: hybridq.grouped_gemm(x, w, wrong),
            6: lambda: hybridq.grouped_gemm(ragged, w, bias=wrong),
            7: lambda: hybridq.grouped_gemm(ragged, w, out=wrong),
            8: lambda: hybridq.grouped_gemm(ragged, w, out_dtype=wrong),
        }
        attempt(calls[place], f"groups_junk {name} {place}")
