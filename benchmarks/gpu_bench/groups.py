"""Tokens of experts: quantizing them, and the products of an expert layer beside torch's BF16 one.

Every expert has equally many tokens, so that the BF16 product does no more work than ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import hybridq
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec

from .case import Bench, Case, plane_nbytes

__all__ = ["group_cases"]

#: Formats of tokens and of weights.
PAIRS = (
    ("mxfp8", "mxfp8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("nvfp4", "nvfp4"),
    ("fp8_1x128", "fp8_128x128"),
    ("bf16", "mxfp8"),
)
#: What the short table shows; the rest is in the file.
_SHOWN = {"bf16 rows", "mxfp8 x mxfp8 rows", "mxfp8 wgrad"}
#: What is quantized: rows and columns.
QUANTIZED = (("mxfp8", "mxfp8"), ("mxfp8", "nvfp4"), ("fp8_1x128", "fp8_1x128"))
#: The same with an amax of each group, as `GroupedLinear` has them: activations and gradients.
_RHT = f"rht={DEFAULT_SIGNS:04x}"
BY_GROUP = (
    ("nvfp4", f"nvfp4;{_RHT}"),
    ("nvfp4;sr", f"nvfp4;sr;{_RHT}"),
    ("fp8_e4m3", "fp8_e4m3"),
)


def _offsets(bench: Bench) -> torch.Tensor:
    groups, tokens = bench.grouped[:2]
    ends = torch.arange(1, groups + 1) * (tokens // groups)
    return ends.to(torch.int32).to(bench.device)


def _quantize_cases(bench: Bench) -> Iterator[Case]:
    groups, tokens, _, k = bench.grouped
    padded = (tokens // 128 + groups) * 128
    for row, col in (*QUANTIZED, *BY_GROUP):
        by_group = (row, col) in BY_GROUP
        specs = PlaneSpec.parse(row), PlaneSpec.parse(col)
        reads = 2 + 2 * any(spec.needs_amax for spec in specs)

        def make(
            i: int, names: tuple[str, str] = (row, col), by_group: bool = by_group
        ) -> Callable[[], Any]:
            x, offsets = bench.randn(tokens, k, torch.bfloat16, i), _offsets(bench)
            seed = torch.arange(groups, device=x.device)
            given = (x, offsets, *names, None, None, seed if by_group else None)
            return lambda: torch.ops.hybridq.encode_ragged(*given, by_group=by_group)

        written = plane_nbytes(specs[0], tokens, k) + plane_nbytes(specs[1], k, padded)
        yield Case(
            "grouped",
            f"encode tokens {row} | {col}" + ", by group" * by_group,
            (groups, tokens, k),
            make,
            baseline="copy",
            nbytes=reads * tokens * k + written,
            is_headline=(row, col) == QUANTIZED[0],
            note="the columns padded group by group",
        )


def _product_cases(bench: Bench) -> Iterator[Case]:
    groups, tokens, n, k = bench.grouped
    shape = (groups, tokens, n, k)
    flops, touched = 2 * tokens * n * k, 2 * (tokens * (n + k) + groups * n * k)

    def case(name: str, make: Any, **rest: Any) -> Case:
        found = {"flops": flops, "footprint": touched, "is_headline": name in _SHOWN}
        return Case("grouped", name, shape, make, **(found | rest))

    def plain(is_wgrad: bool) -> Callable[[int], Callable[[], Any]]:
        def make(i: int) -> Callable[[], Any]:
            x, offsets = bench.randn(tokens, k, torch.bfloat16, i), _offsets(bench)
            product: Any = torch.nn.functional.grouped_mm
            if is_wgrad:
                dy = bench.randn(tokens, n, torch.bfloat16, i)
                return lambda: product(dy.t(), x, offs=offsets)
            w = bench.randn(groups * n, k, torch.bfloat16, i).view(groups, n, k)
            return lambda: product(x, w.mT, offs=offsets)

        return make

    def ours(a: str, b: str, is_wgrad: bool, told: dict[str, str]) -> Callable[..., Any]:
        def make(i: int) -> Callable[[], Any]:
            offsets = _offsets(bench)
            x = hybridq.quantize_grouped(bench.randn(tokens, k, torch.bfloat16, i), offsets, a)
            if is_wgrad:
                dy = bench.randn(tokens, n, torch.bfloat16, i)
                left: Any = hybridq.quantize_grouped(dy, offsets, a)
                right: Any = x
                specs = left.columnwise.spec, x.columnwise.spec
            else:
                w = bench.randn(groups * n, k, torch.bfloat16, i).view(groups, n, k)
                left, right = x, [hybridq.quantize(one, b) for one in w]
                specs = x.rowwise.spec, right[0].rowwise.spec
            device = torch.device(bench.device)
            found = hybridq.explain("grouped_gemm", *specs, device=device, rows=tokens // groups)
            told["backend"] = found.chosen or ""
            return lambda: hybridq.grouped_gemm(left, right, out_dtype=torch.bfloat16)

        return make

    yield case("bf16 rows", plain(False), note="torch's grouped product")
    yield case("bf16 wgrad", plain(True), note="torch's grouped product")
    for a, b in PAIRS:
        told: dict[str, str] = {}
        name = f"{a} x {b} rows"
        yield case(name, ours(a, b, False, told), baseline="bf16 rows", told=told)
        told = {}
        if a != "bf16":
            name = f"{a} wgrad"
            yield case(name, ours(a, b, True, told), baseline="bf16 wgrad", told=told)


#: Recipes of experts: of their layers.
RECIPES = ("mxfp8", "fp8_current", "fp8_block", "nvfp4", "mxfp8_fwd_nvfp4_bwd")


def _layer_cases(bench: Bench) -> Iterator[Case]:
    """Training steps of `GroupedLinear`; the first one is torch's BF16 product and its gradient."""
    groups, tokens, n, k = bench.grouped
    made: list[Any] = []

    def parts() -> Any:
        if not made:  # one set of weights for all
            options = {"device": bench.device, "dtype": torch.bfloat16}
            layer = hybridq.GroupedLinear(groups, k, n, bias=False, **options)
            x = bench.randn(tokens, k, torch.bfloat16, 0).clone().requires_grad_()
            dy = bench.randn(tokens, n, torch.bfloat16, 0)
            w = bench.randn(groups * n, k, torch.bfloat16, 0).view(groups, n, k)
            made.append((layer, x, dy, w.clone().requires_grad_()))
        return made[0]

    def plain(i: int) -> Callable[[], Any]:
        _, x, dy, w = parts()
        offsets, product = _offsets(bench), torch.nn.functional.grouped_mm

        def run() -> None:
            torch.autograd.grad(product(x, w.mT, offs=offsets), (x, w), dy)

        return run

    def ours(recipe: str) -> Callable[[int], Callable[[], Any]]:
        def make(i: int) -> Callable[[], Any]:
            layer, x, dy, _ = parts()
            splits = torch.full((groups,), tokens // groups, device=x.device)
            leaves = (x, *layer.parameters())

            def run() -> None:
                with hybridq.autocast(recipe=recipe):
                    y = layer(x, splits)
                torch.autograd.grad(y, leaves, dy)

            return run

        return make

    flops, shape = 6 * tokens * n * k, (groups, tokens, n, k)
    touched = 2 * (tokens * (n + k) + groups * n * k)  # one set of buffers is more than a cache
    told: Any = {"flops": flops, "footprint": touched, "is_headline": True}
    yield Case("grouped", "bf16 step", shape, plain, note="torch's grouped product", **told)
    for recipe in RECIPES:
        name = f"GroupedLinear {recipe}"
        yield Case("grouped", name, shape, ours(recipe), baseline="bf16 step", **told)


def group_cases(bench: Bench) -> list[list[Case]]:
    """Return the cases of quantizing tokens, those of products, and those of layers."""
    return [[*_quantize_cases(bench)], [*_product_cases(bench)], [*_layer_cases(bench)]]
