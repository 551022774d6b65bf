"""The operators as torch sees them: schemas, fakes, derivatives, and their own refusals."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format

ops = torch.ops.hybridq
SPECS = {
    "fp8_e4m3": "fp8_e4m3",
    "fp8_128x128": "fp8_128x128",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "nvfp4 gradient": PlaneSpec(format("nvfp4"), True, DEFAULT_SIGNS).text,
    "nvfp4 rows": "nvfp4;rows",
    "nvfp4 four over six": "nvfp4_16x16;bound=256;4o6=mae",
    "mxfp4": "mxfp4",
    "mxfp6 floor": "e3m2/1x32/e8m0/floor/mxfp6",
    "bf16": "bf16",
}


def planes(x: torch.Tensor, spec: str) -> list[torch.Tensor]:
    """Buffers of the rowwise plane of x."""
    return list(ops.encode(x, spec, "", seed=torch.tensor([3])))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_encode_and_decode(name: str, requires_grad: bool) -> None:
    spec, seed = SPECS[name], torch.tensor([3])
    x = torch.randn(6, 40, requires_grad=requires_grad)
    # AOT dispatch differentiates outputs, and encode's derivative is an error by design.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    if not requires_grad:
        tests = (*tests, "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.encode.default, (x, spec, spec, None, None, seed), test_utils=tests)
    buffers = planes(x.detach(), spec)
    torch.library.opcheck(ops.decode.default, (buffers, spec, 6, 40, torch.bfloat16))
    torch.library.opcheck(ops.amax.default, (x.detach(), spec, "columnwise"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opcheck_round_stochastic(dtype: torch.dtype) -> None:
    args = (torch.randn(6, 9), torch.tensor([3]), dtype, 2, 5, 7)
    torch.library.opcheck(ops.round_stochastic.default, args)


@pytest.mark.parametrize("a_name", ["mxfp8", "nvfp4", "nvfp4;rows", "bf16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck_gemm(a_name: str, with_bias: bool) -> None:
    a, b = planes(torch.randn(6, 40), a_name), planes(torch.randn(5, 40), "mxfp8")
    bias = torch.randn(5, requires_grad=True) if with_bias else None
    if a_name == "bf16":
        a[0].requires_grad_()
    args = (a, a_name, 6, b, "mxfp8", 5, 40, bias)
    torch.library.opcheck(ops.gemm.default, args, {"out_dtype": torch.float32})
    out = torch.zeros(6, 5)
    args = ([one.detach() for one in a], a_name, 6, b, "mxfp8", 5, 40, None)
    torch.library.opcheck(ops.gemm_.default, (out, *args), {"accumulate": True})


def test_opcheck_transpose() -> None:
    data = torch.randint(0, 255, (6, 9), dtype=torch.uint8)
    torch.library.opcheck(ops.transpose.default, (data, 6, 9, 8))
    data[:, -1] &= 15
    torch.library.opcheck(ops.transpose.default, (data, 6, 17, 4))


def test_encoding_is_no_silent_constant_for_autograd() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    scale = ops.encode(x, "fp8_e4m3", "")[1]
    with pytest.raises(RuntimeError, match="has no derivative"):
        scale.sum().backward()


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x: ops.encode(x[0], "mxfp8", ""), ValueError, "x must be \\[rows, cols\\]"),
        (lambda x: ops.encode(x.int(), "mxfp8", ""), TypeError, "dtype must be"),
        (lambda x: ops.encode(x, "mxfp9", ""), hybridq.SpecError, "must be one of"),
        (lambda x: ops.encode(x, "mxfp8;what", ""), hybridq.SpecError, "unknown option 'what'"),
        (lambda x: ops.encode(x, "mxfp8;sr", ""), ValueError, "needs a seed"),
        (
            lambda x: ops.encode(x, "mxfp8;sr", "", seed=torch.tensor([1.0])),
            ValueError,
            "seed must be int64",
        ),
        (lambda x: ops.encode(x, "mxfp8", "", col_source="x"), ValueError, "col_source must be"),
        (
            lambda x: ops.encode(x, "", "mxfp8", col_source="rowwise_dequantized"),
            hybridq.SpecError,
            "needs a row spec",
        ),
        (
            lambda x: ops.encode(x, "nvfp4", "", row_stat=torch.ones(2)),
            ValueError,
            "float32 with one value",
        ),
        (
            lambda x: ops.encode(x, "nvfp4;rows", "", row_stat=torch.ones(1)),
            ValueError,
            "one value for each of 4 rows",
        ),
        (
            lambda x: ops.encode(x, "", "nvfp4;rows", col_stat=torch.ones(4)),
            ValueError,
            "one value for each of 32 rows",
        ),
        (
            lambda x: ops.round_stochastic(x.half(), torch.tensor([1]), torch.bfloat16),
            TypeError,
            "x must be float32",
        ),
        (
            lambda x: ops.round_stochastic(x, torch.tensor([1]), torch.float32),
            TypeError,
            "dtype must be bfloat16 or float16",
        ),
        (
            lambda x: ops.round_stochastic(x, torch.tensor([1, 2]), torch.float16),
            ValueError,
            "seed must be int64 with one value",
        ),
        (
            lambda x: ops.encode(x, "mxfp8;sr", "", seed=torch.tensor([1], device="meta")),
            ValueError,
            "x and seed must be on one device, got cpu and meta",
        ),
        (
            lambda x: ops.encode(x, "nvfp4", "", row_stat=torch.ones(1, device="meta")),
            ValueError,
            "x and its statistics must be on one device, got cpu and meta",
        ),
        (lambda x: ops.amax(x, "nvfp4", "sideways"), ValueError, "direction must be"),
        (lambda x: ops.decode([x], "mxfp8", 4, 32, torch.float32), ValueError, "has 2 buffers"),
        (
            lambda x: ops.decode(list(ops.encode(x, "mxfp8", "")), "mxfp8", 5, 32, torch.float32),
            ValueError,
            "data of a \\[5, 32\\] plane",
        ),
        (
            lambda x: ops.decode(list(ops.encode(x, "mxfp8", "")), "mxfp8", 4, 32, torch.int8),
            TypeError,
            "dtype must be",
        ),
    ],
)
def test_operators_refuse_what_they_cannot_take(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(4, 32))


def test_compiled_and_eager_operators_give_the_same_bits() -> None:
    spec = PlaneSpec(format("nvfp4"), True, DEFAULT_SIGNS).text

    def run(x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        return ops.encode(x, "mxfp8", spec, seed=seed)

    def run_rows(x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        stat = ops.amax(x, "nvfp4;rows", "columnwise")
        return [*ops.encode(x, "nvfp4;rows", "nvfp4;rows", None, stat), stat]

    rows_compiled = torch.compile(run_rows, fullgraph=True, backend="aot_eager", dynamic=True)
    x, seed = torch.randn(17, 40), torch.tensor([11])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (17, 33):
        x = torch.randn(rows, 40)
        for got, want in zip(compiled(x, seed), run(x, seed), strict=True):
            assert torch.equal(got, want)
        for got, want in zip(rows_compiled(x, seed), run_rows(x, seed), strict=True):
            assert torch.equal(got, want)


def test_python_and_core_agree_on_every_constant() -> None:
    known = hybridq.kernels.cpu.backend.core.constants()
    assert set(known) >= {"e4m3", "e5m2", "e2m1", "e3m2", "e2m3"}
    for name, constants in known.items():
        element = hybridq.formats.element(name)
        if element.bits > 8:
            continue  # no codes: values of identity planes
        for key, value in constants.items():
            if hasattr(element, key):
                assert getattr(element, key) == value, (name, key)


@pytest.mark.parametrize(
    "data,rows,cols,bits",
    [
        (torch.zeros(2, 32, dtype=torch.uint8), 64, 64, 8),
        (torch.zeros(2, 32, dtype=torch.uint8), 2, 32, 4),
        (torch.zeros(2, 32, dtype=torch.uint8), -2, -32, 8),
        (torch.zeros(2, 16, dtype=torch.int8), 2, 32, 4),
        (torch.zeros(2, 32, dtype=torch.uint8), 2, 32, 32),
        (torch.zeros(2, 32), 2, 32, 8),
        (torch.zeros(2, 32, dtype=torch.uint8), 2, 32, 5),
        (torch.zeros(64, dtype=torch.uint8), 2, 32, 8),
    ],
)
def test_transpose_reads_no_further_than_its_data(backend, data, rows, cols, bits) -> None:
    with pytest.raises(ValueError, match="transpose: "):
        torch.ops.hybridq.transpose(data, rows, cols, bits)


def test_operators_refuse_what_is_no_strided_tensor(backend) -> None:
    ops, x = torch.ops.hybridq, torch.ones(2, 32)
    sparse = torch.zeros(2, 32, dtype=torch.uint8).to_sparse()
    scale = torch.zeros(2, 1, dtype=torch.uint8)
    for call in (
        lambda: ops.encode(None, "mxfp8", ""),
        lambda: ops.amax(None, "mxfp8", "rowwise"),
        lambda: ops.transpose(None, 2, 32, 8),
        lambda: ops.transpose(sparse, 2, 32, 8),
        lambda: ops.decode([sparse, scale], "mxfp8", 2, 32, torch.float32),
        lambda: ops.bias_grad(None),
        lambda: ops.round_stochastic(x, None, torch.bfloat16),
    ):
        with pytest.raises(TypeError, match=r"^\w+: (takes a tensor|layout must be strided)"):
            call()


def test_places_and_streams_are_numbers_that_can_be_counted(backend) -> None:
    x, seed = torch.ones(2, 32), torch.tensor([1])
    for wrong in ({"row0": -1}, {"col0": 2**56}, {"row_stream": -1}, {"col_stream": 2**32}):
        with pytest.raises(ValueError, match=r"encode: .* must be in"):
            torch.ops.hybridq.encode(x, "mxfp8;sr", "mxfp8;sr", None, None, seed, **wrong)
    with pytest.raises(ValueError, match="round_stochastic: a stream"):
        torch.ops.hybridq.round_stochastic(x, seed, torch.bfloat16, 2**32)


def test_a_product_into_a_tensor_adds_only_where_it_is_told() -> None:
    a = torch.ops.hybridq.encode(torch.randn(3, 32), "mxfp8", "")
    b = torch.ops.hybridq.encode(torch.randn(5, 32), "mxfp8", "")
    operands = (a, "mxfp8", 3, b, "mxfp8", 5, 32)
    want = torch.ops.hybridq.gemm(*operands, out_dtype=torch.float32)
    for accumulate in (False, True):
        out = torch.full((3, 5), 1000.0)
        torch.ops.hybridq.gemm_(out, *operands, accumulate=accumulate)
        assert (out - want).abs().max() < 1e-3 if not accumulate else (out - want).min() > 999.0
