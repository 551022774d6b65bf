"""GEMM of planes: any format with any other, against an FP64 product of the decoded operands.

The bound is `K * 2^-24 * sum |a||b|` for FP32 accumulation, plus half a unit in the last place of
the result's dtype, plus what underflows: products below 2^-126 may be flushed by BF16 instructions.
The operands are decoded by the oracle, not by the code under test.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import hybridq
from gemm_cases import check, decoded, in_own_domain, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names
from hybridq.kernels import OpQuery, choose
from hybridq.kernels.decoded import decoded_gemm as exact
from hybridq.kernels.decoded import decoded_sides as sides
from hybridq.storage import Plane, TensorStorage
from oracle.samples import KINDS, sample

FORMATS = [name for name in names() if name != "identity"]
PAIRS = list(itertools.product(FORMATS, FORMATS))
#: Those that multiply on a CPU; tests/kernels/scaled_mm/test_scaled_mm.py is for the others.
_QUERY = OpQuery("gemm", "cpu", torch.float32, *[PlaneSpec.parse("mxfp8")] * 2)
BACKENDS = [answer.backend.name for answer in choose(_QUERY).answers if answer.reason is None]


def no_product_of_the_core(monkeypatch) -> None:
    for module in (exact, sides):
        monkeypatch.setattr(module, "product_reason", lambda: "not for this test")


@pytest.fixture(params=["tiles", "core", "torch"])
def products(request, monkeypatch) -> str:
    """With the core's BF16 products, where this CPU has them, and as on a CPU without any."""
    request.getfixturevalue("tiles" if request.param == "tiles" else "without_tiles")
    if request.param == "torch":
        no_product_of_the_core(monkeypatch)
    elif exact.product_reason() is not None:
        pytest.skip(str(exact.product_reason()))
    return request.param


@pytest.mark.thinned(2)
@pytest.mark.parametrize("a_name,b_name", PAIRS)
def test_every_pair_of_formats(a_name: str, b_name: str, products: str) -> None:
    a = make(torch.randn(19, 150, dtype=torch.bfloat16), a_name)
    b = make(torch.randn(33, 150, dtype=torch.bfloat16), b_name)
    for dtype in (torch.bfloat16, torch.float32):
        check(hybridq.gemm(a, b, out_dtype=dtype), decoded(a), decoded(b))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_are_multiplied_in_fp32_where_bf16_instructions_are_slow(
    name: str, without_tiles, monkeypatch
) -> None:
    """As on an Intel CPU without tiles, whatever this one is: few rows keep the BF16 product."""
    if exact.product_reason() is not None:
        pytest.skip(str(exact.product_reason()))
    monkeypatch.setattr(exact, "planes_reason", lambda: None)
    monkeypatch.setattr(exact, "no_planes_reason", lambda a, b, in_bf16: "AMX" if in_bf16 else None)
    b = make(torch.randn(33, 150, dtype=torch.bfloat16), name)
    products = []
    whole = exact.PlanesProduct.__call__
    monkeypatch.setattr(
        exact.PlanesProduct, "__call__", lambda *args: products.append(1) or whole(*args)
    )
    for m in (63, 64, 130):
        a = make(torch.randn(m, 150, dtype=torch.bfloat16), "mxfp8")
        for dtype in (torch.bfloat16, torch.float32):
            products.clear()
            check(hybridq.gemm(a, b, out_dtype=dtype), decoded(a), decoded(b))
            if b.spec.format.is_bf16_exact:
                assert bool(products) == (m >= 64)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cpu_without_bf16_instructions_takes_the_fp32_product(
    name: str, monkeypatch, slow_products: None, without_tiles: None
) -> None:
    no_product_of_the_core(monkeypatch)
    a = make(torch.randn(19, 150, dtype=torch.bfloat16), name)
    b = make(torch.randn(33, 150, dtype=torch.bfloat16), "mxfp8")
    check(hybridq.gemm(a, b, out_dtype=torch.bfloat16), decoded(a), decoded(b))
    assert "FP32 product" in str(hybridq.explain("gemm", a, b))


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_out_and_accumulate(backend_name: str, dtype: torch.dtype, products: str) -> None:
    a, b = make(torch.randn(9, 70), "mxfp8"), make(torch.randn(21, 70), "nvfp4")
    bias = torch.randn(21)
    out = torch.randn(9, 21).to(dtype)
    before = out.to(torch.float64).numpy()
    with hybridq.backend(backend_name):
        check(
            hybridq.gemm(a, b, bias=bias, out_dtype=dtype),
            decoded(a),
            decoded(b),
            bias.double().numpy()[None, :],
        )
        same = hybridq.gemm(a, b, out=out, accumulate=True)
        assert same is out
        check(out, decoded(a), decoded(b), before)
        hybridq.gemm(a, b, out=out)
        check(out, decoded(a), decoded(b))


def test_what_torch_may_cut_is_said() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for mode, says in (("highest", False), ("high", True)):
            torch.set_float32_matmul_precision(mode)
            told = str(hybridq.explain("gemm", "fp8_1x128", "fp32", device="sm_80"))
            assert (f"is {mode!r}: torch's FP32 products may cut" in told) == says, told
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", ["mxfp8", "fp8_1x128", "nvfp4", "fp8_e4m3"])
def test_extreme_operands(kind: str, name: str, seed: int, products: str) -> None:
    """Operands beyond BF16's normal range take the FP32 product; inf and NaN come out as such."""
    x = sample(kind, (8, 96), "float32", seed)
    a, b = make(x, name), make(torch.randn(5, 96), "mxfp8")
    left, right = decoded(a), decoded(b)
    with np.errstate(all="ignore"):
        exact = left @ right.T
    y = hybridq.gemm(a, b, out_dtype=torch.float32)
    plain = np.isfinite(exact) & (np.abs(exact) < 1e38) & np.isfinite(left).all(1, keepdims=True)
    if products == "tiles":  # sums of even and of odd k, which may pass FP32's maximum on the way
        plain &= np.abs(left) @ np.abs(right).T < 1e38
    with np.errstate(all="ignore"):
        room = 100 * 2.0**-24 * (np.abs(left) @ np.abs(right).T) + 100 * 2.0**-126
        error = np.abs(y.double().numpy() - exact)
    assert (error[plain] <= room[plain]).all()
    assert not torch.isfinite(y)[torch.from_numpy(~np.isfinite(left).all(1))].any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 4000), (3, 1, 257), (0, 4, 8), (4, 0, 8)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128", "fp8_e5m2", "bf16"])
def test_shapes(shape: tuple[int, int, int], name: str, products: str) -> None:
    m, n, k = shape
    a = make(torch.randn(m, k, dtype=torch.bfloat16), name)
    b = make(torch.randn(n, k, dtype=torch.bfloat16), "mxfp8")
    y = hybridq.gemm(a, b, out_dtype=torch.bfloat16)
    assert y.shape == (m, n)
    check(y, decoded(a), decoded(b))


def test_contraction_over_nothing_is_zero() -> None:
    a, b = make(torch.randn(3, 0), "mxfp8"), make(torch.randn(2, 0), "nvfp4")
    bias = torch.tensor([1.0, 2.0])
    y = hybridq.gemm(a, b, bias=bias, out_dtype=torch.float32)
    assert torch.equal(y, bias.expand(3, 2))


ROWS = PlaneSpec(format("nvfp4"), row_scaled=True)
OPTIONS = {
    "rows": ROWS,
    "rows 4o6": PlaneSpec(format("nvfp4"), False, None, 256.0, "mse", True),
    "4o6": PlaneSpec(format("nvfp4"), four_over_six="mae"),
    "4o6 square": PlaneSpec(format("nvfp4_16x16"), False, None, 256.0, "mae"),
    "floor": PlaneSpec(replace(format("mxfp8"), rule="floor")),
    "even": PlaneSpec(replace(format("mxfp4"), rule="even")),
}


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize(
    "a_name,b_name", list(itertools.product(OPTIONS, [*OPTIONS, "mxfp8", "bf16"]))
)
def test_options_of_formats(a_name: str, b_name: str, backend_name: str) -> None:
    """Either operand, with bias, and added to what is there; rows differ by orders of magnitude."""
    a = make(torch.randn(19, 70) * 10.0 ** torch.arange(-9, 10)[:, None], OPTIONS[a_name])
    b = make(torch.randn(33, 70, dtype=torch.bfloat16), OPTIONS.get(b_name, b_name))
    bias = torch.randn(33)
    with hybridq.backend(backend_name):
        for left, right, extra in ((a, b, bias), (b, a, None)):
            for dtype in (torch.bfloat16, torch.float32):
                y = hybridq.gemm(left, right, bias=extra, out_dtype=dtype)
                added = 0.0 if extra is None else extra.double().numpy()[None, :]
                check(y, decoded(left), decoded(right), added)
        out = torch.ones(19, 33)
        hybridq.gemm(a, b, out=out, accumulate=True)
        check(out, decoded(a), decoded(b), np.ones((19, 33)))


def test_row_factors_that_are_powers_of_two_keep_the_bf16_product() -> None:
    """Rows whose amax is bound * 6 * 2^e have the factor 2^e: a rounded product stays exact."""
    x = torch.randint(-6, 7, (12, 64)).float()
    x[:, 0] = 6.0
    x = x * 2.0 ** torch.arange(-3, 9)[:, None]
    a, b = make(x * 448.0, ROWS), make(torch.randn(7, 64), "mxfp8")
    factors = a.amax / (448 * 6)
    assert torch.equal(factors, 2.0 ** torch.arange(-3, 9))
    check(hybridq.gemm(a, b, out_dtype=torch.bfloat16), decoded(a), decoded(b))


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_factors_are_applied_one_after_the_other(backend_name: str, products: str) -> None:
    """(0 * 1e35) * 1e35 is 0, where the product of both factors is inf and 0 * inf is NaN."""
    x = torch.tensor([[0.0], [3e38], [-3e38]]).expand(3, 32)
    a, b = make(x, "nvfp4"), make(x[:2], "nvfp4")
    assert float(a.amax) / (448 * 6) > 1e35
    with hybridq.backend(backend_name):
        y = hybridq.gemm(a, b, out_dtype=torch.float32)
    inf = float("inf")
    assert y.tolist() == [[0.0, 0.0], [0.0, inf], [0.0, -inf]]


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_bias_and_accumulation_come_before_the_rounding(backend_name: str, products: str) -> None:
    """257 - 256 is 1; BF16 has no 257, and 256 - 256 would be 0. No factor asks for FP32 here.

    One row and many: few rows have a product of their own.
    """
    w = torch.full((1, 32), 8.0)
    w[0, 0] = 9.0
    for rows in (1, 16):
        a, b = make(torch.ones(rows, 32), "mxfp8"), make(w, "mxfp8")
        with hybridq.backend(backend_name):
            y = hybridq.gemm(a, b, bias=torch.tensor([-256.0]), out_dtype=torch.bfloat16)
            out = torch.full((rows, 1), -256.0, dtype=torch.bfloat16)
            hybridq.gemm(a, b, out=out, accumulate=True)
        assert (y == 1).all() and (out == 1).all()


def test_operands_below_bf16s_normal_range(products: str) -> None:
    """BF16 instructions of CPUs flush 2^-130 to zero; 32 products with 2^120 are 2^-5."""
    a = make(torch.full((16, 32), 2.0**-130), "mxfp8")
    b = make(torch.full((16, 32), 2.0**120), "mxfp8")
    for left, right in ((a, b), (b, a)):
        y = hybridq.gemm(left, right, out_dtype=torch.bfloat16)
        assert (y == 2.0**-5).all()


def test_row_scaled_operands_share_a_transform() -> None:
    transformed = replace(ROWS, signs=DEFAULT_SIGNS)
    a = make(torch.randn(17, 90) * torch.logspace(-6, 6, 17)[:, None], transformed)
    b = make(torch.randn(11, 90), transformed)
    for name in ("torch", "reference"):
        with hybridq.backend(name):
            y = hybridq.gemm(a, b, out_dtype=torch.float32)
            check(y, in_own_domain(a), in_own_domain(b))
            lone = hybridq.gemm(a, make(torch.randn(11, 90), "bf16"), out_dtype=torch.float32)
        assert torch.isfinite(lone).all()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("k", [96, 90])
def test_a_shared_transform_cancels(stochastic: bool, k: int) -> None:
    """Both operands transformed alike: the product is taken between the transformed operands."""
    transformed = PlaneSpec(format("nvfp4"), stochastic, DEFAULT_SIGNS)
    a, b = make(torch.randn(17, k), transformed), make(torch.randn(11, k), transformed)
    y = hybridq.gemm(a, b, out_dtype=torch.float32)
    check(y, in_own_domain(a), in_own_domain(b))
    if k % 16 == 0:  # and that is the product of what they decode to
        np.testing.assert_allclose(y.numpy(), decoded(a) @ decoded(b).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("other", ["plain", "other signs"])
def test_a_lone_transform_is_undone(other: str) -> None:
    transformed = PlaneSpec(format("nvfp4"), False, DEFAULT_SIGNS)
    spec = PlaneSpec(format("nvfp4"), False, None if other == "plain" else 0x1234)
    a, b = make(torch.randn(17, 90), transformed), make(torch.randn(11, 90), spec)
    # The oracle turns back in FP32 in the same order, so the decoded operands are the same.
    check(hybridq.gemm(a, b, out_dtype=torch.float32), decoded(a), decoded(b))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_columnwise_planes_are_contracted_over_rows(direction: str) -> None:
    x, w = torch.randn(48, 20), torch.randn(48, 30)
    if direction == "rowwise":
        x, w = x.t(), w.t()
    a, b = make(x, "mxfp8", direction), make(w, "nvfp4", direction)
    y = hybridq.gemm(a, b, out_dtype=torch.float32)
    assert y.shape == (20, 30)
    check(y, decoded(a), decoded(b))


@pytest.mark.usefixtures("fast_products")
def test_plain_tensors_give_torchs_own_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w, bias = torch.randn(6, 40), torch.randn(3, 40), torch.randn(3)
        x, w, bias = x.to(dtype), w.to(dtype), bias.to(dtype)
        got = hybridq.gemm(x, w, bias=bias, out_dtype=dtype)
        assert torch.equal(got, torch.nn.functional.linear(x, w, bias))
        assert torch.equal(hybridq.gemm(x, w), torch.nn.functional.linear(x, w))


def test_a_quantized_gemm_is_not_the_plain_one() -> None:
    x, w = torch.randn(16, 64), torch.randn(16, 64)
    for name in names():
        if format(name).is_identity:
            continue
        got = hybridq.gemm(hybridq.quantize(x, name), hybridq.quantize(w, name))
        assert not torch.equal(got, x @ w.t()), name


def test_gemm_gradients_of_plain_operands() -> None:
    x = torch.randn(4, 40, dtype=torch.float32, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    w = hybridq.quantize(torch.randn(6, 40), "mxfp8")
    g = torch.randn(4, 6)
    hybridq.gemm(x, w, bias=bias).backward(g)
    torch.testing.assert_close(x.grad, g @ w.dequantize())
    torch.testing.assert_close(bias.grad, g.sum(0))


def test_gemm_ignores_torch_autocast() -> None:
    a, b = make(torch.randn(8, 64), "fp8_1x128"), make(torch.randn(8, 64), "nvfp4")
    outside = hybridq.gemm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hybridq.gemm(a, b, out_dtype=torch.float32)
    assert torch.equal(outside, inside)


def test_explain_names_the_backend_and_the_reasons(products: str) -> None:
    explanation = hybridq.explain("gemm", "mxfp8", "nvfp4", dtype=torch.float32)
    assert explanation.chosen == "torch"
    text = str(explanation)
    by = {
        "tiles": "codes become BF16 as it reads them",
        "core": "the core's product of few rows",
        "torch": "FP32 product",
    }[products]
    assert "cpu        has no gemm" in text and by in text
    t = hybridq.quantize(torch.randn(4, 32), "mxfp8")
    assert hybridq.explain("gemm", t, t.columnwise).chosen == "torch"
    encode = hybridq.explain("encode", "mxfp8", "nvfp4")
    assert encode.chosen == "cpu"
    on_gpu = hybridq.explain("encode", "mxfp8", device="cuda")
    built = hybridq._core.build_info()["cuda"]
    assert on_gpu.chosen == ("cuda" if built else "reference") and "got cuda" in str(on_gpu)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda a, b: hybridq.gemm(a, b[:, :3]), "strided \\[rows, K\\]|contraction length"),
        (lambda a, b: hybridq.gemm(a, b.int()), "must be float32, bfloat16 or float16"),
        (lambda a, b: hybridq.gemm(a, "x"), "must be a tensor or a Plane, got str"),
        (lambda a, b: hybridq.gemm(a, b, bias=torch.ones(9)), "bias must be floating point"),
        (lambda a, b: hybridq.gemm(a, b, out=torch.ones(1, 1)), "out must be"),
        (lambda a, b: hybridq.gemm(a, b, accumulate=True), "accumulate needs out"),
        (lambda a, b: hybridq.gemm(a, b, out_dtype=torch.int8), "out dtype must be"),
        (lambda a, b: hybridq.gemm(a, b.to("meta")), "one device"),
        (lambda a, b: hybridq.explain("conv", a, b), "op must be"),
    ],
)
def test_bad_calls_say_why(call, message: str) -> None:
    a, b = hybridq.quantize(torch.randn(4, 32), "mxfp8"), torch.randn(5, 32)
    with pytest.raises((TypeError, ValueError), match=message):
        call(a, b)


def test_wrong_buffers_are_refused_before_a_kernel_reads_them() -> None:
    good = make(torch.randn(8, 64), "mxfp8")
    short = Plane(good.spec, "rowwise", 8, 64, {"data": good.data, "scale": good.scale[:4]})
    with pytest.raises(ValueError, match="scale of a \\[8, 64\\] plane"):
        hybridq.gemm(short, good)
    with pytest.raises(ValueError, match="data of a"):
        Plane(good.spec, "rowwise", 8, 96, good.buffers).dequantize()
    assert TensorStorage(good, None).nbytes == 8 * 64 + 8 * 2


def test_what_is_no_tensor_is_named() -> None:
    a = hybridq.quantize(torch.ones(2, 32), "mxfp8")
    for options in ({"bias": 3}, {"out": [1.0]}, {"out_dtype": "float32"}):
        with pytest.raises(TypeError, match="gemm: "):
            hybridq.gemm(a, a, **options)


def test_operands_without_a_plain_matrix_of_numbers_are_refused() -> None:
    w = hybridq.quantize(torch.randn(8, 32), "mxfp8")
    negated = torch.zeros(4, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with pytest.raises(ValueError, match="negated view, got one; give out"):
        hybridq.gemm(torch.randn(4, 32), w, out=negated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of nested tensors
        nested = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)])
    with pytest.raises(ValueError, match="got a nested tensor"):
        hybridq.gemm(nested, w)
    with pytest.raises(TypeError, match="no nested tensor, got one; use quantize_grouped"):
        hybridq.quantize(nested, "mxfp8")
