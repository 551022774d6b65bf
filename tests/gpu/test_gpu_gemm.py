"""GEMM of every pair of formats on a GPU, against an FP64 product of the CPU's decoded planes.

Exact products: `K * 2^-24 * sum |a||b|` for FP32 accumulation plus one rounding of the result
(docs/reference/numerics.md, "Operands of a GEMM"). Products on FP8 tensor cores: their added error
stays below the rounding of a BF16 result, in the root mean square.
"""

from __future__ import annotations

import pytest
import torch

import hybridq
import kernel_cases as cases
from gpu_tools import exact_gemm, no_waiting, takes, to_cpu
from hybridq.storage import Plane, build_storage

SPECS = {**cases.plain_specs(), **cases.option_specs()}
PLAIN = tuple(cases.plain_specs())
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
#: RMS of rounding to BF16, relative to what is rounded.
BF16_RMS = 1.7e-3


def plane(name: str, rows: int, k: int, seed: int) -> Plane:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator).to(torch.bfloat16).cuda()
    if name == "bf16":
        return Plane.of(x)
    return build_storage(x, SPECS[name], None, seed=torch.tensor([7], device="cuda")).rowwise


def values(p: Plane) -> torch.Tensor:
    """FP64 values of the plane, on the GPU; the codes were decoded on the CPU."""
    return to_cpu(p).dequantize(torch.float32).double().cuda()


def check(y: torch.Tensor, a: Plane, b: Plane, extra: torch.Tensor | None = None) -> None:
    left, right = values(a), values(b)
    added = torch.zeros((), dtype=torch.float64, device="cuda") if extra is None else extra.double()
    exact = left @ right.t() + added
    room = (left.shape[1] + 5) * 2.0**-24 * (left.abs() @ right.abs().t() + added.abs())
    room = room + ROUNDING[y.dtype] * (exact.abs() + room) + 2.0**-24 * (y.dtype == torch.float16)
    worst = float(((y.double() - exact).abs() / (room + 1e-30)).max())
    assert worst <= 1.0, f"{a.spec} x {b.spec} to {y.dtype}: {worst} of the bound"


@pytest.mark.parametrize("name", [*PLAIN, "bf16"])
def test_every_pair_of_formats(name) -> None:
    a = plane(name, 300, 416, 1)
    for other in (*PLAIN, "bf16"):
        b = plane(other, 264, 416, 2)
        for dtype in (torch.bfloat16, torch.float32):
            check(hybridq.gemm(a, b, out_dtype=dtype, **exact_gemm()), a, b)


@pytest.mark.parametrize("pair", [("mxfp8", "mxfp8"), ("bf16", "nvfp4"), ("nvfp4", "mxfp8")])
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 128])
def test_few_rows(pair, rows) -> None:
    a, b = plane(pair[0], rows, 1024, 1), plane(pair[1], 512, 1024, 2)
    for dtype in (torch.bfloat16, torch.float32):
        check(hybridq.gemm(a, b, out_dtype=dtype, **exact_gemm()), a, b)


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 70), (130, 65, 16), (5, 1, 257)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_1x128", "nvfp4 rows"])
def test_odd_shapes(name, shape) -> None:
    m, n, k = shape
    a, b = plane(name, m, k, 1), plane(name, n, k, 2)
    check(hybridq.gemm(a, b, out_dtype=torch.bfloat16, **exact_gemm()), a, b)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3", "nvfp4 rows"])
def test_bias_out_and_accumulation(name) -> None:
    a, b = plane(name, 96, 256, 1), plane("mxfp8", 72, 256, 2)
    bias = torch.randn(72, device="cuda")
    out = torch.randn(96, 72, device="cuda")
    before = out.clone()
    made = hybridq.gemm(a, b, bias=bias, out_dtype=torch.float32, **exact_gemm())
    check(made, a, b, bias[None, :])
    hybridq.gemm(a, b, out=out, accumulate=True, **exact_gemm())
    check(out, a, b, before)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_bias_and_accumulation_of_fast_products(name) -> None:
    """By the core's kernel on Hopper: in FP32 before one rounding, of any rows."""
    for m, n in ((96, 72), (260, 384)):
        a, b = plane(name, m, 1024, 1), plane("mxfp8", n, 1024, 2)
        bias, out = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
        exact = values(a) @ values(b).t()
        made = hybridq.gemm(a, b, bias=bias, out_dtype=torch.float32).double() - bias
        before = out.double()
        hybridq.gemm(a, b, out=out, accumulate=True)
        for got in (made, out.double() - before):
            rms = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert float(rms) <= BF16_RMS


def test_transformed_tensors() -> None:
    a, b = plane("nvfp4 rht", 96, 256, 1), plane("nvfp4", 72, 256, 2)
    check(hybridq.gemm(a, b, out_dtype=torch.float32, **exact_gemm()), a, b)


@pytest.mark.parametrize(
    "pair",
    [
        *(("mxfp8", "mxfp8"), ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")),
        *(("fp8_e4m3", "fp8_e4m3"), ("mxfp8_e5m2", "mxfp8"), ("mxfp4", "mxfp8")),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["auto", "fast"])
def test_the_fast_paths_add_less_than_the_rounding_of_the_result(pair, precision) -> None:
    if not takes(hybridq.gemm, "precision"):
        pytest.skip("hybridq.gemm has no precision")
    a, b = plane(pair[0], 512, 4096, 1), plane(pair[1], 640, 4096, 2)
    exact = values(a) @ values(b).t()
    y = hybridq.gemm(a, b, out_dtype=torch.bfloat16, precision=precision).double()
    rms = float((y - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    # Two errors that know nothing of each other, each at most the rounding's; 10% for the sample.
    assert rms <= 1.1 * 2**0.5 * BF16_RMS


@pytest.mark.parametrize("name", [*PLAIN, "nvfp4 rows", "nvfp4 rht"])
def test_products_never_wait_for_the_gpu(name) -> None:
    a, b = plane(name, 256, 512, 1), plane(name, 256, 512, 2)
    options = {"out_dtype": torch.bfloat16}
    for _ in range(3):  # compiles, and keeps what it keeps
        hybridq.gemm(a, b, **options)
    with no_waiting():
        hybridq.gemm(a, b, **options)
        hybridq.gemm(plane_like(a), b, **options)


def plane_like(p: Plane) -> Plane:
    """The same plane, of which nothing is kept."""
    return Plane(p.spec, p.direction, p.rows, p.cols, dict(p.buffers))
