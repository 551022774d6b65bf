"""Few rows in one step of the core: the bits of encode, decode and product one after the other."""

from __future__ import annotations

import itertools

import pytest
import torch

import hybridq
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import EncodeRequest, GemmArgs, Operand
from hybridq.kernels.cpu import SKINNY_ROWS
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.kernels.cpu import bf16_gemm as product
from hybridq.kernels.cpu.bf16_gemm import multiply
from hybridq.kernels.decoded.decoded_sides import decode_side
from hybridq.kernels.operators.encode_plan import encode_plan
from hybridq.kernels.operators.skinny_gemm import skinny_gemm

pytestmark = pytest.mark.skipif(
    product.product_reason() is not None, reason=str(product.product_reason())
)

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
#: Texts of operands with one transform or none, and of columnwise planes.
PAIRS = (
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8_32x32"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_16x16"),
    ("nvfp4;rht=d7e8", "nvfp4;rht=d7e8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", "mxfp6_e3m2"),
    ("mxfp4", "nvfp4;4o6=mae"),
    ("fp8_1x128", "fp8_128x128"),
)
SHAPES = ((1, 64, 64), (1, 1, 1), (3, 37, 100), (8, 130, 257), (5, 1500, 133))


def text(name: str) -> str:
    """Return the canonical string of the plane that a short one names."""
    return PlaneSpec.parse(name).text


def steps(x, w, bias, row: str, weight: str):
    """Encode, decode, multiply, each a call with an oracle of its own; and the weight's plane."""
    sides, operand = [], None
    for matrix, name in ((x, row), (w, weight)):
        buffers = encode_plan(name, "", matrix.dtype, "cpu")(matrix, EncodeRequest())
        operand = Operand(buffers, PlaneSpec.parse(name), *matrix.shape)
        sides.append(decode_side(operand, True, torch.bfloat16))
    assert all(side.is_bf16 for side in sides)
    factors = (side.factor for side in sides)
    args = GemmArgs(bias, None, x.dtype)
    return multiply(sides[0].matrix, sides[1].matrix, *factors, args), operand


@pytest.mark.thinned(1, few=9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_one_call_is_its_steps(pair: tuple[str, str], dtype: torch.dtype) -> None:
    """Any size, strides and number of threads, the weight quantized on the way or before."""
    row, weight = (text(name) for name in pair)
    for (m, n, k), has_bias, transposed in itertools.product(SHAPES, (True, False), (True, False)):
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        if transposed:
            x, w = x.t().contiguous().t(), w.t().contiguous().t()
        bias = torch.randn(n).to(dtype) if has_bias else None
        run = skinny_gemm(row, "", weight, dtype, has_bias, "auto")
        expected, plane = steps(x, w, bias, row, weight)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for right in (w, plane):
                made, column = run(x, right, bias, None, 1)
                assert column == [] and made.dtype == dtype
                assert torch.equal(made, expected), (m, n, k, has_bias, transposed, threads)
    torch.set_num_threads(1)


@pytest.mark.parametrize("col", ["mxfp8", "nvfp4;rht=d7e8", "nvfp4;sr", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("row", ["mxfp8", "nvfp4", "fp8_e4m3"])
def test_the_columnwise_plane_is_written_too(row: str, col: str) -> None:
    seed = torch.tensor([1234567])
    stochastic, name = col.endswith(";sr"), text(col)
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        run = skinny_gemm(text(row), name, text(row), x.dtype, False, "auto")
        _, column = run(x, w, None, seed, 3)
        plan = encode_plan("", name, x.dtype, "cpu")
        expected = plan(
            x, EncodeRequest(seed=seed if stochastic else None, row_stream=2, col_stream=3)
        )
        assert len(column) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(column, expected, strict=True))


def test_values_that_bf16_does_not_hold_are_not_done() -> None:
    """The FP32 product of the steps takes them: subnormal values, and E5M2's infinity."""
    name = text("mxfp8")
    run = skinny_gemm(name, "", name, torch.float32, False, "auto")
    x, w = torch.randn(2, 64), torch.randn(64, 64)
    for tensor in (x, w):
        kept = tensor.clone()
        tensor[1, 0:32] = 1e-38
        assert run(x, w, None, None, 1) is None
        tensor.copy_(kept)
    assert run(x, w, None, None, 1) is not None


def test_nan_and_zeros() -> None:
    name = text("nvfp4")
    run = skinny_gemm(name, "", name, torch.float32, True, "auto")
    x, w, bias = torch.zeros(2, 32), torch.randn(5, 32), torch.randn(5)
    assert torch.equal(run(x, w, bias, None, 1)[0], bias.expand(2, 5))
    x[1, 3] = torch.nan
    expected, _ = steps(x, w, bias, name, name)
    assert torch.equal(run(x, w, bias, None, 1)[0].isnan(), expected.isnan())
    assert run(x, w, bias, None, 1)[0][1].isnan().all()


def test_what_takes_several_steps_has_no_product() -> None:
    """Another backend, an identity, FP32 scales, one transform only, rows with their own amax."""
    fine = text("nvfp4")
    ask = skinny_gemm
    assert ask(fine, "", fine, torch.bfloat16, True, "auto") is not None
    with hybridq.backend("reference"):
        assert ask(fine, "", fine, torch.bfloat16, True, "auto") is None
    others = [text(name) for name in ("bf16", "nvfp4;rht=d7e8", "nvfp4;rows", "nvfp4;sr")]
    others.append(text("e4m3/1x128/fp32/amax/float8_block"))
    for other in others:
        assert ask(other, "", fine, torch.bfloat16, True, "auto") is None, other
        assert ask(fine, "", other, torch.bfloat16, True, "auto") is None, other
    assert ask(fine, "", fine, torch.float64, True, "auto") is None


def test_a_variant_without_a_product_takes_the_steps() -> None:
    core = backend_cpu.core
    name = text("mxfp8")
    run = skinny_gemm(name, "", name, torch.bfloat16, False, "auto")
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    before = core.variant()
    try:
        core.set_variant("baseline")
        assert run(x, torch.randn(64, 64, dtype=torch.bfloat16), None, None, 1) is None
    finally:
        core.set_variant(before)


def test_the_core_refuses_wrong_arguments() -> None:
    core = backend_cpu.core
    spec, transformed = (
        backend_cpu.core_spec(PlaneSpec.parse(text(name)))[0]
        for name in ("nvfp4", "nvfp4;rht=d7e8")
    )
    with pytest.raises(ValueError, match="one transform, got two"):
        core.FewRows(spec, transformed, "bfloat16")
    run = core.FewRows(spec, spec, "float32")
    x, w, out = torch.randn(9, 32), torch.randn(4, 32), torch.empty(9, 4)
    good = {"a": x.data_ptr(), "m": 1, "k": 32, "b": w.data_ptr(), "n": 4, "codes": 0}
    good |= {"scales": 0, "to": out.data_ptr()}

    def call(**wrong: int) -> bool:
        one = good | wrong
        left = (one["a"], 32, 1, one["m"], one["k"], None, False)
        right = (one["b"], 32, 1, one["n"], one["codes"], one["scales"], 0)
        return run(*left, *right, 0, one["to"], 1)

    assert call()
    for wrong, rule in (
        ({"m": SKINNY_ROWS + 1}, r"m must be in \[1, 8\].* got 9, 4 and 32"),
        ({"m": 0}, "got 0, 4 and 32"),
        ({"n": 0}, "got 1, 0 and 32"),
        ({"k": -1}, "must be >= 0"),
        ({"a": 0}, "a must not be null"),
        ({"to": 0}, "out must not be null"),
        ({"b": 0}, "got both or none"),
        ({"codes": w.data_ptr()}, "got both or none"),
        ({"b": 0, "codes": w.data_ptr()}, "scales must not be null"),
        ({"b": 0, "codes": w.data_ptr(), "scales": w.data_ptr()}, "amax must not be null"),
    ):
        with pytest.raises(ValueError, match=rule):
            call(**wrong)
