"""Activations, and activation + encode as one operation: the oracle's bits, and encode's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import kernel_cases as cases
from hybridq import reference
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.operators.norm_activation_encode import activation_encode
from oracle import prologue
from oracle.bridge import assert_bits_equal, assert_planes_equal, expected
from prologue_cases import PAIRS, SHAPES, WAYS, oracle_y, same, text, turn, using

ops = torch.ops.hybridq
SEED = torch.tensor([0x1234_5678_9ABC])
KINDS = tuple(reference.ACTIVATIONS)
GATED = tuple(kind for kind in KINDS if reference.ACTIVATIONS[kind].is_gated)


def width(kind: str, cols: int) -> int:
    return 2 * cols if kind in GATED else cols


def every_bf16() -> torch.Tensor:
    """All 65536 BF16 values."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def exact(kind: str, x: torch.Tensor) -> torch.Tensor:
    """torch's own function in FP64; of GELU in the form that does not cancel in its tail."""
    wide = x.double()
    inner = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    tail = (wide * torch.sigmoid(inner), functional.gelu(wide, approximate="tanh"))
    assert torch.allclose(*tail, rtol=1e-13, atol=1e-14, equal_nan=True)
    return {
        "relu": functional.relu,
        "srelu": lambda v: functional.relu(v) ** 2,
        "gelu": lambda v: tail[0],
        "silu": functional.silu,
        "qgelu": lambda v: v * torch.sigmoid(1.702 * v),
    }[kind](wide)


# ---- the functions


def test_the_oracle_has_every_activation() -> None:
    assert KINDS == prologue.ACTIVATIONS
    assert GATED == ("reglu", "sreglu", "geglu", "swiglu", "qgeglu")


def test_exp_is_within_one_ulp() -> None:
    """Every BF16 value, and a million FP32 ones where results are finite and not zero."""
    many = torch.linspace(-104.0, 88.8, 1_000_003)
    for v in (every_bf16().float(), many):
        with np.errstate(over="ignore"):
            got, want = reference.exp(v).numpy(), np.exp(v.double().numpy())
        assert_bits_equal(got, prologue.exp(v.numpy()), "exp")
        ordinary = want <= np.finfo(np.float32).max  # not NaN
        ulp = np.spacing(want[ordinary].astype(np.float32)).astype(np.float64)
        assert np.abs(got[ordinary].astype(np.float64) - want[ordinary]).max() > 0
        assert (np.abs(got[ordinary].astype(np.float64) - want[ordinary]) / ulp).max() < 1.0
        assert np.isinf(got[want > np.finfo(np.float32).max]).all()
    edges = [float("-inf"), -105.0, -103.0, 0.0, 89.0, float("inf"), float("nan")]
    assert_bits_equal(
        reference.exp(torch.tensor(edges)),
        np.array([0.0, 0.0, 2.0**-149, 1.0, np.inf, np.inf, np.nan], dtype=np.float32),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_of_every_half_is_the_oracles(kind: str, way: str) -> None:
    x = every_bf16().reshape(-1, 512)
    for dtype in cases.DTYPES:
        own = x.to(dtype) if dtype != torch.float16 else x.view(torch.float16)
        with using(way):
            got = ops.activation(own, kind)
        (want,) = oracle_y(own, kind)
        assert got.dtype == dtype
        assert_bits_equal(got, want, f"{kind} {dtype}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GATED])
def test_activation_of_every_bf16_is_within_one_ulp_of_torchs(kind: str) -> None:
    """Of its FP64 result rounded to BF16; the same where that is NaN or infinite."""
    x = every_bf16()
    got, want = ops.activation(x[None], kind)[0], exact(kind, x)
    rounded = want.to(torch.bfloat16)
    assert torch.equal(got.isnan(), rounded.isnan())
    assert torch.equal(got.isinf(), rounded.isinf())
    some = ~got.isnan() & ~got.isinf()
    neighbours = [
        torch.nextafter(rounded, torch.full_like(rounded, edge)) for edge in (-torch.inf, torch.inf)
    ]
    within = (got >= neighbours[0]) & (got <= neighbours[1])
    assert bool(within[some].all())
    # Almost always the nearest one.
    assert int((got != rounded)[some].sum()) < 200
    # As FP32 the function itself: relative to what a BF16 step is, far below one.
    wide = ops.activation(x.float()[None], kind)[0].double()
    finite = want.isfinite() & (want.abs() < torch.finfo(torch.float32).max)
    error = (wide - want).abs()[finite] / want.abs()[finite].clamp(min=2.0**-100)
    assert float(error.max()) < 2.0**-15


@pytest.mark.parametrize("kind", GATED)
def test_a_gate_multiplies_the_function_of_the_first_half(kind: str) -> None:
    """Before it is rounded: FP32 of the function times FP32 of the gate."""
    x = torch.randn(9, 34).bfloat16()
    first, second = x.float().chunk(2, dim=1)
    plain = reference.ACTIVATIONS[kind].core
    want = (ops.activation(first.contiguous(), plain) * second).bfloat16()
    same([ops.activation(x, kind)], [want], kind)
    twice = ops.activation(x[:, :17].contiguous(), plain) * x[:, 17:]
    assert plain == "relu" or not torch.equal(want, twice)


# ---- activation + encode


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_one_operation_has_the_bits_of_two(name: str, way: str) -> None:
    row, col = PAIRS[name]
    with using(way):
        for i, shape in enumerate(SHAPES):
            dtype, special = turn(i + len(name))
            kind = KINDS[(3 * i + len(name)) % len(KINDS)]
            x = cases.matrix(shape[0], width(kind, shape[1]), dtype, i, special)
            want = ops.encode(ops.activation(x, kind), text(row), text(col), seed=SEED)
            got = ops.activation_encode(x, kind, text(row), text(col), None, None, SEED)
            same(got, want, f"{name}: {kind} of {shape} {dtype} {special}")


@pytest.mark.more
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_matrix_that_is_too_large_to_be_kept_is_made_twice(way: str) -> None:
    """Above 16 MiB: once for its maximum, once for its codes."""
    x = cases.matrix(2100, 2 * 4100, torch.bfloat16, 3, "normal")
    with using(way):
        y = ops.activation(x, "swiglu")
        for planes in (("fp8_e4m3", "fp8_e4m3"), ("mxfp8", "nvfp4;rht=d7e8"), ("nvfp4", "")):
            same(ops.activation_encode(x, "swiglu", *planes), ops.encode(y, *planes), f"{planes}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_in_every_dtype(kind: str) -> None:
    for i, dtype in enumerate(cases.DTYPES):
        x = cases.matrix(140, width(kind, 90), dtype, i, "normal")
        for planes in (("mxfp8", "nvfp4;rht=d7e8"), ("fp8_e4m3", "nvfp4;rows"), ("nvfp4", "")):
            want = ops.encode(ops.activation(x, kind), *planes)
            same(ops.activation_encode(x, kind, *planes), want, f"{kind} {dtype} {planes}")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 | nvfp4 rht", "nvfp4 rows", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_planes_are_the_oracles(kind: str, name: str) -> None:
    row, col = PAIRS[name]
    x = cases.matrix(40, width(kind, 72), torch.bfloat16, 1, "normal")
    y = torch.from_numpy(oracle_y(x, kind)[0]).bfloat16()
    buffers = activation_encode(x, kind, EncodeRequest(text(row), text(col)))
    for spec, direction in ((row, "rowwise"), (col, "columnwise")):
        names = [buffer.name for buffer in spec.format.buffers(1, 1)]
        got = {buffer: buffers.pop(0) for buffer in names}
        assert_planes_equal(got, expected(y, spec, direction), f"{name} {direction}")


def test_given_amaxes_streams_and_sources() -> None:
    x = cases.matrix(70, 192, torch.bfloat16, 7, "normal")
    y = ops.activation(x, "swiglu")
    one, rows = torch.tensor([9.0]), torch.rand(96) * 4
    for planes, options in (
        (("fp8_e4m3", "nvfp4;sr", one, one * 2, SEED), {"row_stream": 5, "col_stream": 9}),
        (("nvfp4;rows", "nvfp4;rows", rows[:70], rows, None), {}),
        (("mxfp8", "nvfp4;sr", None, None, SEED), {"col_source": "rowwise_dequantized"}),
        (
            ("bf16", "mxfp8", None, None, None),
            {"col_source": "rowwise_dequantized", "keep_row": False},
        ),
        (("mxfp8", "nvfp4", None, None, None), {"keep_row": False}),
    ):
        want = ops.encode(y, *planes, **options)
        got = ops.activation_encode(x, "swiglu", *planes, **options)
        same(got, want, f"{planes[:2]} {options}")
        request = EncodeRequest(*planes, **options)
        same(activation_encode(x, "swiglu", request), want, "the door")


def test_views_and_threads_change_no_bit() -> None:
    planes = ("nvfp4", "mxfp8", None, None, None)
    for name, x in cases.views(torch.bfloat16).items():
        same(
            activation_encode(x, "swiglu", EncodeRequest(*planes)),
            activation_encode(x.clone().contiguous(), "swiglu", EncodeRequest(*planes)),
            name,
        )
    x, before, found = cases.matrix(700, 2200, torch.bfloat16, 2, "normal"), [], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(
                [*activation_encode(x, "geglu", EncodeRequest(*planes)), ops.activation(x, "geglu")]
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        same(other, found[0], "threads")


# ---- operators


@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("bf16", "mxfp8"), ("", "fp8_e4m3")])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_opcheck(kind: str, pair: tuple[str, str]) -> None:
    x = torch.randn(6, 40)
    torch.library.opcheck(ops.activation.default, (x, kind))
    torch.library.opcheck(ops.activation_encode.default, (x, kind, *pair, None, None, SEED))


def test_it_compiles_without_a_break() -> None:
    def call(x, seed):
        return activation_encode(x, "swiglu", EncodeRequest("mxfp8", "nvfp4;sr", seed=seed))

    x = torch.randn(40, 128).bfloat16()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same(compiled(x, SEED), call(x, SEED), "compiled")


def test_it_has_no_derivative_and_says_so() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="hybridq::activation: has no derivative"):
        ops.activation(x, "silu").sum().backward()
    (y,) = activation_encode(x, "silu", EncodeRequest("bf16"))
    with pytest.raises(RuntimeError, match="activation_encode: has no derivative"):
        y.sum().backward()


X = torch.randn(6, 63)


@pytest.mark.parametrize(
    "args,error,message",
    [
        ((X, "swish"), ValueError, "kind must be one of relu, .*, qgeglu, got 'swish'"),
        ((X, "swiglu"), ValueError, "swiglu takes an even number of columns, got 63"),
        ((X[0], "relu"), ValueError, r"x must be \[rows, cols\], got"),
        ((X.double(), "relu"), TypeError, "dtype must be float32"),
    ],
)
def test_wrong_arguments_are_named(args, error, message: str) -> None:
    with pytest.raises(error, match=f"^activation: {message}"):
        ops.activation(*args)
    with pytest.raises(error, match=f"^activation_encode: {message}"):
        ops.activation_encode(*args, "mxfp8", "")
