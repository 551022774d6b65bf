"""The core's product of tiles (AMX): what becomes BF16 on its way is what `decode` gives.

Its sums are held to exact values (products of small integers, whose sums FP32 holds in any order)
and, of any values, to the bound of docs/reference/numerics.md against FP64.
"""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

import hybridq
from gemm_cases import check, decoded, integers, make, operand
from hybridq.kernels.choice.arguments import GemmArgs, Operand
from hybridq.kernels.cpu import planes_gemm as product
from hybridq.kernels.scaled_mm.epilogue import finish

pytestmark = pytest.mark.usefixtures("tiles")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Every element and scale that BF16 holds, factors of a tensor and of rows, a transform.
SPECS = [
    "mxfp8",
    "mxfp8_e5m2_32x32",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_1x128",
    "fp8_128x128",
    "nvfp4",
    "nvfp4_16x16",
    "nvfp4;rows",
    "nvfp4;rht=3039",
]
BF16 = hybridq.PlaneSpec.parse("bf16")
ALONE = GemmArgs(None, None, torch.float32)


def of_matrices(a: torch.Tensor, b: torch.Tensor, args: GemmArgs) -> torch.Tensor:
    sides = (Operand([x], BF16, *x.shape) for x in (a, b))
    made = product.PlanesProduct(BF16, BF16, in_bf16=True)(*sides, args)
    assert made is not None
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "m,n,k", [(1, 1, 1), (16, 16, 32), (33, 31, 65), (300, 290, 300), (9, 7, 1024), (7, 9, 2048)]
)
def test_what_follows_is_torchs_own_fp32_arithmetic(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """Bias and accumulation in their order, then one rounding: no bit differs."""
    a, b = integers(m, k, 1), integers(n, k, 2)
    sums = a.float() @ b.float().t()
    bias, into = torch.randn(n).to(dtype), torch.randn(m, 2 * n).to(dtype)[:, ::2]
    for args in (
        GemmArgs(None, None, dtype),
        GemmArgs(bias, None, dtype),
        GemmArgs(bias, into, dtype),
        GemmArgs(None, into.double(), dtype),
    ):
        got = of_matrices(a, b, args)
        assert got.dtype == dtype
        assert torch.equal(got, finish(sums, None, None, args))


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 5, 0), (40, 40, 0)])
def test_empty_sides_give_zeros_or_nothing(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16()
    got = of_matrices(a, b, GemmArgs(torch.ones(n), None, torch.float32))
    assert torch.equal(got, torch.ones(m, n))
    if k == 0:
        left, right = make(torch.ones(m, 0), "mxfp8"), make(torch.ones(n, 0), "nvfp4")
        assert not hybridq.gemm(left, right).any()


def test_blocks_of_every_side_and_threads_change_no_bit(monkeypatch) -> None:
    """More than one block of rows, columns (2048) and k (1024), none of them whole."""
    m, n, k = 2081, 2065, 1091
    left, _ = operand(torch.randn(m, k), "mxfp8")
    right, _ = operand(torch.randn(n, k), "nvfp4")
    run = product.PlanesProduct(left.spec, right.spec, in_bf16=True)
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(product, "_threads", lambda count=threads: count)
        results.append(run(left, right, ALONE))
    assert torch.equal(*results)
    few = Operand([buffer[2060:] for buffer in left.buffers], left.spec, 21, k)
    assert torch.equal(run(few, right, ALONE), results[0][2060:])  # the sums of a row are its own


def test_bits_are_those_of_decoded_operands() -> None:
    """Which the product of BF16 matrices multiplies in tiles, too."""
    (left, a), (right, b) = (
        operand(torch.randn(70, 333), "mxfp8"),
        operand(torch.randn(50, 333), "mxfp4"),
    )
    run = product.PlanesProduct(left.spec, right.spec, in_bf16=True)
    assert torch.equal(run(left, right, ALONE), of_matrices(a.bfloat16(), b.bfloat16(), ALONE))


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("m,n,k", [(9, 31, 37), (40, 70, 544), (300, 20, 1100)])
def test_codes_become_bf16_as_they_are_read(m: int, n: int, k: int, text: str) -> None:
    """Against the decoded planes in FP64; a wrong scale or code is far outside of the bound."""
    torch.manual_seed(m)
    if "rht" in text:  # a product keeps what the last group's padding holds, and a decode does not
        k = k // 16 * 16
    left, a = operand(torch.randn(m, k).bfloat16(), text)
    right, b = operand((torch.randn(n, k) * 3).bfloat16(), text)
    got = product.PlanesProduct(left.spec, right.spec, in_bf16=True)(left, right, ALONE)
    assert got is not None
    error = (k + 8) * 2.0**-24 * (a.abs() @ b.abs().t())
    if left.spec.signs is not None:  # what it is compared with was transformed back, in FP32
        error = error + 2.0**-18 * k * a.abs().max() * b.abs().max()
    assert bool(((got.double() - a @ b.t()).abs() <= error).all())


def test_a_plane_meets_a_matrix_of_any_strides() -> None:
    left, a = operand(integers(20, 64, 3), "mxfp8")  # small integers are codes
    run = product.PlanesProduct(left.spec, BF16, in_bf16=True)
    for matrix in (integers(9, 64, 4), integers(9, 130, 4)[:, ::2][:, :64], integers(64, 9, 4).t()):
        got = run(left, Operand([matrix], BF16, *matrix.shape), ALONE)
        assert torch.equal(got.double(), a @ matrix.double().t())


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "fp8_1x128", "mxfp4", "fp8_e4m3"])
def test_nan_stays_in_its_row(text: str) -> None:
    x = torch.randn(40, 1200)
    x[7, 1100] = float("nan")
    a, b = make(x, text), make(torch.randn(33, 1200), "mxfp8")
    got = hybridq.gemm(a, b)
    wrong = got.isnan().all(1)
    if text in ("nvfp4", "fp8_e4m3"):  # whose amax is the tensor's
        assert bool(wrong.all()) or wrong.nonzero().flatten().tolist() == [7]
    else:
        assert wrong.nonzero().flatten().tolist() == [7]
        assert not got[~wrong].isnan().any()
    assert torch.equal(got.isnan(), (a.dequantize() @ b.dequantize().t()).isnan())


def test_infinity_and_values_outside_of_bf16s_normal_range_take_another_product() -> None:
    """Of which tiles would make zeros; the FP32 product has them."""
    tiny = torch.full((33, 64), 2.0**-132)
    endless, _ = operand(torch.randn(20, 64), "mxfp8_e5m2")
    endless.buffers[0][3, 5] = 0x7C  # E5M2 has a code for it
    other, _ = operand(torch.randn(33, 64), "mxfp8")
    small, _ = operand(tiny, "mxfp8")
    for left, right in ((endless, other), (other, small)):
        assert (
            product.PlanesProduct(left.spec, right.spec, in_bf16=True)(left, right, ALONE) is None
        )
    a, b = make(torch.full((20, 64), 2.0**120), "mxfp8"), make(tiny, "mxfp8")
    check(hybridq.gemm(a, b), decoded(a), decoded(b))
    assert torch.equal(hybridq.gemm(a, b), torch.full((20, 33), 2.0**-6))


def test_fp32_matrices_are_not_taken() -> None:
    spec = hybridq.PlaneSpec.parse("fp32")
    assert "BF16 does not hold" in str(product.tiles_reason(spec))
    x = torch.randn(20, 64)
    planes = product.PlanesProduct(spec, BF16, in_bf16=True)
    assert planes(Operand([x], spec, 20, 64), Operand([x.bfloat16()], BF16, 20, 64), ALONE) is None


def test_torchs_own_products_of_tiles_go_on_between_ours() -> None:
    """Both set the form of tiles for the thread that they run on."""
    a, b = integers(64, 96, 1), integers(48, 96, 2)
    wanted = a.float() @ b.float().t()
    for _ in range(3):
        assert torch.equal(a @ b.t(), wanted.bfloat16())
        assert torch.equal(of_matrices(a, b, ALONE), wanted)
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(of_matrices(a, b, ALONE))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(one, wanted) for one in results)


def _in_a_child(queue) -> None:
    a, b = integers(40, 96, 1), integers(48, 96, 2)
    queue.put(torch.equal(of_matrices(a, b, ALONE), a.float() @ b.float().t()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_tiles() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get()
