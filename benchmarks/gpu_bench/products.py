"""GEMMs of planes beside cuBLAS on BF16: large ones, with and without a cached weight, and small M.

The operands of the BF16 baseline are normally distributed: on zeros, or on few mantissa bits, a
chip that is limited by power runs faster than it does in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import hybridq
from hybridq.kernels.choice import GemmArgs, Operand
from hybridq.kernels.folded_backend import block_side
from hybridq.kernels.inputs import chip_of
from hybridq.kernels.scaled_mm import core_product
from hybridq.storage import Plane

from .case import Bench, Case, fresh, quantized, takes

__all__ = ["PAIRS", "product_cases", "product_goal", "small_cases"]

#: (operand a, operand b): activation and weight.
PAIRS = (
    ("mxfp8", "mxfp8"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("nvfp4", "nvfp4"),
    ("mxfp8", "nvfp4"),
    ("nvfp4", "mxfp8"),
    ("mxfp4", "mxfp4"),
    ("bf16", "mxfp8"),
    ("bf16", "nvfp4"),
    ("bf16", "fp8 by row"),
    ("bf16", "fp8 by square"),
    ("fp8 by row", "fp8 by row"),
)

#: Those that are measured with a bias too.
BIASED = (("mxfp8", "mxfp8"), ("fp8_1x128", "fp8_128x128"), ("nvfp4", "nvfp4"))

#: What the short table shows of each section; the rest is in the file.
_SHOWN = {
    "gemm": {
        *("bf16 randn", "bf16 of mxfp8", "bf16 of nvfp4"),
        *("mxfp8 x mxfp8, auto", "mxfp8 x mxfp8, exact, weight kept"),
        *("fp8_1x128 x fp8_128x128, auto", "fp8_e4m3 x fp8_e4m3, auto"),
        *("nvfp4 x nvfp4, exact, weight kept", "mxfp8 x nvfp4, exact, weight kept"),
        *("mxfp8 x mxfp8, auto, bias", "fp8_1x128 x fp8_128x128, auto, bias"),
        *("mxfp8 x mxfp8", "nvfp4 x nvfp4", "mxfp8 x nvfp4"),  # without a choice of precision
    },
    "small_m": {
        *("bf16 randn", "bf16 x nvfp4", "mxfp8 x mxfp8", "nvfp4 x nvfp4"),
        *("bf16 x nvfp4, auto", "mxfp8 x mxfp8, auto", "nvfp4 x nvfp4, auto"),
    },
}


def precisions() -> tuple[str, ...]:
    """Return the values of gemm's `precision` to measure, or one empty text if it has none."""
    return ("exact", "auto") if takes(hybridq.gemm, "precision") else ("",)


def product_goal(a: str, b: str, precision: str, is_kept: bool, m: int) -> float | None:
    """Return the least ratio to BF16 cuBLAS that the project set itself on an H200, or None."""
    is_large = m > 4096
    if precision == "auto" and (a, b) == ("fp8_1x128", "fp8_128x128"):
        return 1.5
    if precision == "auto" and (a, b) == ("mxfp8", "mxfp8"):
        return 1.3 if is_large else 1.15
    if is_kept and precision in ("exact", ""):
        return 0.97 if is_large else 0.92
    return None


def _gemm(
    a: Plane, b: Plane, precision: str, bias: torch.Tensor | None
) -> Callable[[bool], torch.Tensor]:
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "bias": bias}
    if precision:
        options["precision"] = precision

    def run(keeps_b: bool) -> torch.Tensor:
        # The activation is new in every step, and so nothing is kept of it.
        return hybridq.gemm(fresh(a), b if keeps_b else fresh(b), **options)

    return run


def _backend(a: Plane, b: Plane, precision: str) -> str:
    explain: Any = hybridq.explain
    options = {"precision": precision} if precision and takes(explain, "precision") else {}
    return explain("gemm", a, b, **options).chosen or ""


def _operands(bench: Bench, m: int, n: int, k: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (2 * i, 2 * i + 1) if m == n else (i, i)
    return bench.randn(m, k, torch.bfloat16, first), bench.randn(n, k, torch.bfloat16, second)


def _case(section: str, name: str, shape: tuple[int, int, int], make: Any, **rest: Any) -> Case:
    m, n, k = shape
    touched = 2 * (m * k + n * k + m * n)
    shown = name in _SHOWN[section] and (section == "gemm" or m == 1)
    return Case(
        section,
        name,
        shape,
        make,
        flops=2 * m * n * k,
        footprint=touched,
        is_headline=shown,
        **rest,
    )


def _plain_cases(bench: Bench, section: str, m: int, n: int, k: int) -> Iterator[Case]:
    shape = (m, n, k)

    def random(i: int) -> Callable[[], Any]:
        a, b = _operands(bench, m, n, k, i)
        return lambda: torch.mm(a, b.t())

    yield _case(section, "bf16 randn", shape, random)
    if section != "gemm":
        return
    for name in ("mxfp8", "nvfp4"):

        def decoded(i: int, name: str = name) -> Callable[[], Any]:
            made = [hybridq.quantize(x, name, False) for x in _operands(bench, m, n, k, i)]
            a, b = (one.dequantize().to(torch.bfloat16) for one in made)
            return lambda: torch.mm(a, b.t())

        note = "torch.mm of decoded values: fewer mantissa bits, less power"
        yield _case(section, f"bf16 of {name}", shape, decoded, baseline="bf16 randn", note=note)
    if bench.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):

        def direct(i: int) -> Callable[[], Any]:
            made = [x.to(torch.float8_e4m3fn) for x in _operands(bench, m, n, k, i)]
            one = torch.ones((), device=bench.device)
            a, b = made
            return lambda: torch._scaled_mm(
                a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False
            )

        note = "torch._scaled_mm itself"
        yield _case(section, "fp8 cuBLASLt", shape, direct, baseline="bf16 randn", note=note)


def _pair_case(
    bench: Bench,
    section: str,
    names: tuple[str, str],
    precision: str,
    is_kept: bool,
    shape: tuple[int, int, int],
    has_bias: bool = False,
) -> Case:
    m, n, k = shape
    told: dict[str, str] = {}

    def make(i: int) -> Callable[[], Any]:
        x, w = _operands(bench, m, n, k, i)
        a, b = (
            Plane.of(t) if name == "bf16" else quantized(t, name)
            for t, name in zip((x, w), names, strict=True)
        )
        told["backend"] = _backend(a, b, precision)
        bias = torch.randn(n, device=bench.device).bfloat16() if has_bias else None
        run = _gemm(a, b, precision, bias)
        return lambda: run(is_kept)

    words = [" x ".join(names), precision, *["weight kept"] * is_kept, *["bias"] * has_bias]
    return _case(
        section,
        ", ".join(word for word in words if word),
        shape,
        make,
        baseline="bf16 randn",
        goal=product_goal(*names, precision, is_kept, m) if section == "gemm" else None,
        note="the baseline has no bias" if has_bias else "",
        told=told,
    )


def _core_cases(bench: Bench, shape: tuple[int, int, int]) -> Iterator[Case]:
    """Yield products with block scales by the core's own kernel, where the chip has it."""
    run = core_product("multiply_pair", chip_of(torch.device(bench.device)))
    if run is None:
        return
    for names in (("fp8_1x128", "fp8_1x128"), ("fp8_1x128", "fp8_128x128")):

        def make(i: int, names: tuple[str, str] = names) -> Callable[[], Any]:
            sides = []
            for x, name in zip(_operands(bench, *shape, i), names, strict=True):
                plane = quantized(x, name)
                codes, scale = plane.buffers.values()
                laid = scale.t().contiguous().t() if name == "fp8_1x128" else scale
                sides.append(block_side(Operand([codes, laid], plane.spec, *plane.matrix)))
            return lambda: run(*sides, GemmArgs(None, None, torch.bfloat16))

        note = "the kernel alone, of operands that lie as it reads them"
        name = " x ".join(names) + ", by the core"
        yield _case("gemm", name, shape, make, baseline="bf16 randn", note=note)


def _pair_cases(
    bench: Bench, section: str, pairs: tuple[tuple[str, str], ...], shape: tuple[int, int, int]
) -> Iterator[Case]:
    keeps = (False, True) if hasattr(hybridq, "gemm_cache") else (False,)
    for names in pairs:
        for precision in precisions():
            for is_kept in keeps:
                yield _pair_case(bench, section, names, precision, is_kept, shape)


def product_cases(bench: Bench) -> Iterator[list[Case]]:
    """Yield the cases of each large product; the first is the baseline."""
    for _, m, n, k in bench.products:
        yield [
            *_plain_cases(bench, "gemm", m, n, k),
            *_pair_cases(bench, "gemm", PAIRS, (m, n, k)),
            *(
                _pair_case(bench, "gemm", names, precisions()[-1], False, (m, n, k), has_bias=True)
                for names in BIASED
            ),
            *_core_cases(bench, (m, n, k)),
        ]


def small_cases(bench: Bench) -> Iterator[list[Case]]:
    """Yield the cases of few rows by a packed weight, where the weight's bytes count."""
    n, k = bench.small_weight
    for m in bench.small:
        found = [*_plain_cases(bench, "small_m", m, n, k)]
        pairs = (("bf16", "mxfp8"), ("bf16", "nvfp4"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"))
        found += _pair_cases(bench, "small_m", pairs, (m, n, k))
        yield found
