"""Norms, and norm + encode as one operation: bit for bit the oracle's and encode's of the norm."""

from __future__ import annotations

import pytest
import torch

import kernel_cases as cases
from hybridq import _core
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.cpu import backend as backend_cpu
from hybridq.kernels.operators.norm_activation_encode import norm_encode
from oracle.bridge import assert_bits_equal, assert_planes_equal, expected
from prologue_cases import PAIRS, SHAPES, WAYS, is_fused, oracle_y, same, text, turn, using, weights

ops = torch.ops.hybridq
SEED = torch.tensor([0x1234_5678_9ABC])
#: kind, with beta, zero-centered.
FORMS = (
    ("LayerNorm", True, False),
    ("LayerNorm", False, True),
    ("RMSNorm", False, False),
    ("RMSNorm", False, True),
)


def arguments(form, cols: int, dtype: torch.dtype, seed: int, eps: float = 1e-5):
    """What the operators take after x."""
    kind, has_beta, zero_centered = form
    gamma, beta = weights(cols, dtype, seed)
    return gamma, beta if has_beta else None, eps, kind, zero_centered


# ---- the norm


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norm_is_the_oracles(form, way: str) -> None:
    shapes = ((33, 77), (1, 1), (4, 256), (3, 257), (7, 1030), (2, 4100), (0, 5), (5, 0))
    for i, shape in enumerate(shapes):
        dtype, special = turn(i)
        x = cases.matrix(*shape, dtype, i, special)
        args = arguments(form, shape[1], cases.DTYPES[(i + 1) % 3], i, 10.0 ** -(i + 3))
        with using(way):
            got = ops.norm(x, *args)
        gamma, beta, eps, kind, zero_centered = args
        want = oracle_y(x, kind, gamma, beta, eps, zero_centered)
        what = f"{form} of {shape} {dtype} {special}"
        assert got[0].dtype == dtype and got[0].shape == shape
        for name, one, other in zip(("y", "mean", "rstd"), got, want, strict=True):
            assert_bits_equal(one, other, f"{what}: {name}")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_is_close_to_the_exact_one(kind: str) -> None:
    """Within the accumulation bound: cols * 2^-24 of the largest intermediate, relative to y."""
    x = torch.randn(64, 3000) * 3 + 1
    gamma, beta = weights(3000, torch.float32, 1)
    beta = beta if kind == "LayerNorm" else None
    y, mean, rstd = ops.norm(x, gamma, beta, 1e-5, kind)
    wide = x.double()
    center = wide.mean(1, keepdim=True) if kind == "LayerNorm" else torch.zeros(64, 1).double()
    d = wide - center
    scale = 1 / (d.square().mean(1, keepdim=True) + 1e-5).sqrt()
    exact = d * scale * gamma.double() + (0 if beta is None else beta.double())
    # 256 partial sums of 12 elements, 8 levels: 20 roundings of sums; 6 more of everything else.
    bound = 26 * 2.0**-24 * (1 + exact.abs() + (wide.abs() * scale).mean())
    assert bool(((y - exact).abs() <= bound).all())
    assert torch.allclose(rstd.double(), scale[:, 0], rtol=26 * 2.0**-24)
    if kind == "LayerNorm":
        assert torch.allclose(mean.double(), center[:, 0], atol=26 * 2.0**-24 * 4, rtol=0)
    else:
        assert mean.shape == (0,)


@pytest.mark.parametrize("way", WAYS)
def test_a_huge_row_and_a_huge_number_of_rows(way: str) -> None:
    x = cases.matrix(2, 70_001, torch.bfloat16, 3, "normal")
    args = arguments(FORMS[0], 70_001, torch.float32, 3)
    want = oracle_y(x, "LayerNorm", args[0], args[1], args[2], False)
    tall = cases.matrix(40_000, 3, torch.float16, 4, "zeros")
    tall_args = arguments(FORMS[2], 3, torch.float32, 3)
    tall_want = oracle_y(tall[-5:], "RMSNorm", *tall_args[:3], False)
    with using(way):
        for one, other in zip(ops.norm(x, *args), want, strict=True):
            assert_bits_equal(one, other)
        assert_bits_equal(ops.norm(tall, *tall_args)[0][-5:], tall_want[0])


def test_any_view_of_x_gives_the_same_bits() -> None:
    for dtype in cases.DTYPES:
        for name, x in cases.views(dtype).items():
            args = arguments(FORMS[0], x.shape[1], dtype, 5)
            planes = ("mxfp8", "nvfp4", None, None)
            same(ops.norm(x, *args), ops.norm(x.clone().contiguous(), *args), name)
            got = ops.norm_encode(x, *args, *planes)
            same(got, ops.norm_encode(x.clone().contiguous(), *args, *planes), name)


# ---- norm + encode


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_one_operation_has_the_bits_of_two(name: str, way: str) -> None:
    row, col = PAIRS[name]
    with using(way):
        for i, shape in enumerate(SHAPES):
            dtype, special = turn(i + len(name))
            x = cases.matrix(*shape, dtype, i, special)
            args = arguments(FORMS[(i + len(name)) % 4], shape[1], torch.float32, i)
            what = f"{name}: {args[3]} of {shape} {dtype} {special}"
            y, *stats = ops.norm(x, *args)
            want = ops.encode(y, text(row), text(col), seed=SEED)
            got = ops.norm_encode(x, *args, text(row), text(col), None, None, SEED)
            same(got, [*want, *stats], what)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 | nvfp4 rht", "nvfp4 rows", "fp8_e4m3"])
def test_planes_are_the_oracles(name: str) -> None:
    row, col = PAIRS[name]
    x = cases.matrix(40, 72, torch.bfloat16, 1, "normal")
    gamma, beta = weights(72, torch.bfloat16, 2)
    y = torch.from_numpy(oracle_y(x, "LayerNorm", gamma, beta, 1e-6, False)[0]).bfloat16()
    args = (x, gamma, beta, 1e-6, "LayerNorm", False, EncodeRequest(text(row), text(col)))
    buffers, _, _ = norm_encode(*args)
    for spec, direction in ((row, "rowwise"), (col, "columnwise")):
        names = [buffer.name for buffer in spec.format.buffers(1, 1)]
        got = {buffer: buffers.pop(0) for buffer in names}
        assert_planes_equal(got, expected(y, spec, direction), f"{name} {direction}")


class NeverStores:
    """The core, without the function that writes what a norm or an activation makes."""

    def __getattr__(self, name: str):
        if name == "map_store":
            raise AssertionError("the matrix between was written")
        return getattr(_core, name)


@pytest.mark.parametrize("name", PAIRS)
def test_quantized_planes_need_no_matrix_between(name: str, monkeypatch) -> None:
    """Only a plane of plain values does, which is that matrix."""
    row, col = PAIRS[name]
    is_plain = any(spec is not None and spec.format.is_identity for spec in (row, col))
    x = cases.matrix(33, 64, torch.bfloat16, 1, "normal")
    args = arguments(FORMS[0], 64, torch.float32, 1)
    planes = (text(row), text(col), None, None, SEED)
    with using(WAYS[-1]):
        assert is_fused(row, col, torch.bfloat16) == (not is_plain)
        monkeypatch.setattr(backend_cpu, "core", NeverStores())
        if is_plain:
            with pytest.raises(AssertionError, match="was written"):
                ops.norm_encode(x, *args, *planes)
        else:
            ops.norm_encode(x, *args, *planes)
            ops.activation_encode(x, "swiglu", *planes)


def test_given_amaxes_streams_and_sources() -> None:
    x = cases.matrix(70, 96, torch.bfloat16, 7, "normal")
    args = arguments(FORMS[0], 96, torch.float32, 7)
    y, *stats = ops.norm(x, *args)
    one, rows = torch.tensor([9.0]), torch.rand(96) * 4
    nvfp4, transformed, rowwise = "nvfp4;sr", "nvfp4;sr;rht=d7e8", "nvfp4;rows"
    for planes, options in (
        (("fp8_e4m3", nvfp4, one, one * 2, SEED), {"row_stream": 5, "col_stream": 9}),
        ((nvfp4, rowwise, None, rows, SEED), {"row_stream": 3}),
        ((rowwise, transformed, rows[:70], None, SEED), {}),
        (("mxfp8", transformed, None, None, SEED), {"col_source": "rowwise_dequantized"}),
        (
            (nvfp4, "mxfp8", None, None, SEED),
            {"col_source": "rowwise_dequantized", "keep_row": False},
        ),
        (("bf16", "mxfp8", None, None, None), {"col_source": "rowwise_dequantized"}),
        (("mxfp8", "nvfp4", None, None, None), {"keep_row": False}),
        (("mxfp8", "", None, None, None), {"keep_row": False}),
        (("", "", None, None, None), {}),
    ):
        row, col, row_stat, col_stat, seed = planes
        want = ops.encode(y, row, col, row_stat, col_stat, seed, **options)
        got = ops.norm_encode(x, *args, *planes, **options)
        same(got, [*want, *stats], f"{planes[:2]} {options}")
        door = norm_encode(x, *args, EncodeRequest(*planes, **options))
        same([*door[0], *door[1:]], got, "the door")


def test_the_number_of_threads_changes_no_bit() -> None:
    x = cases.matrix(700, 1100, torch.bfloat16, 2, "normal")
    args = arguments(FORMS[0], 1100, torch.float32, 7)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            planes = ("nvfp4;rows", "nvfp4;rht=d7e8", None, None)
            found.append([*ops.norm_encode(x, *args, *planes), *ops.norm(x, *args)])
            found[-1] += ops.norm_encode(x, *args, "fp8_e4m3", "nvfp4", None, None)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        same(other, found[0], "threads")


# ---- operators


@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("bf16", "mxfp8"), ("", "fp8_e4m3")])
def test_opcheck(pair: tuple[str, str]) -> None:
    x, gamma, beta = torch.randn(6, 40), torch.randn(40), torch.randn(40)
    norm = (x, gamma, beta, 1e-5, "LayerNorm", False)
    torch.library.opcheck(ops.norm.default, norm)
    torch.library.opcheck(ops.norm_encode.default, (*norm, *pair, None, None, SEED))
    rms = (x.bfloat16(), gamma.bfloat16(), None, 1e-5, "RMSNorm", True)
    options = {"col_source": "rowwise_dequantized", "keep_row": False} if pair[0] else {}
    torch.library.opcheck(ops.norm_encode.default, (*rms, *pair), options)


def test_it_compiles_without_a_break() -> None:
    def call(x, gamma, seed):
        request = EncodeRequest("mxfp8", "nvfp4;sr", seed=seed)
        buffers, mean, rstd = norm_encode(x, gamma, None, 1e-5, "LayerNorm", True, request)
        return [*buffers, mean, rstd]

    x, gamma = torch.randn(40, 64).bfloat16(), torch.randn(64)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same(compiled(x, gamma, SEED), call(x, gamma, SEED), "compiled")


def test_it_has_no_derivative_and_says_so() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    y, _, _ = ops.norm(x, torch.ones(32), None, 1e-5, "RMSNorm")
    with pytest.raises(RuntimeError, match="hybridq::norm: has no derivative"):
        y.sum().backward()
    norm = (torch.ones(32), None, 1e-5, "RMSNorm", False)
    buffers, _, _ = norm_encode(x, *norm, EncodeRequest("bf16"))
    with pytest.raises(RuntimeError, match="norm_encode: has no derivative"):
        buffers[0].sum().backward()


X, G = torch.randn(6, 64), torch.ones(64)


@pytest.mark.parametrize(
    "args,error,message",
    [
        ((X, G, None, 1e-5, "layernorm"), ValueError, "kind must be LayerNorm or RMSNorm, got 'l"),
        ((X, G, G, 1e-5, "RMSNorm"), ValueError, "RMSNorm takes no beta, got"),
        ((X, G[1:], None, 1e-5, "RMSNorm"), ValueError, r"gamma must be .* \[64\], got .* \(63,\)"),
        ((X, G, G[None], 1e-5, "LayerNorm"), ValueError, r"beta must be .* \[64\], got .* \(1, 64"),
        (
            (X, G.double(), None, 1e-5, "LayerNorm"),
            ValueError,
            "gamma must be .*, got torch.float64",
        ),
        ((X, G, None, -1.0, "LayerNorm"), ValueError, "eps must be finite and at least 0, got -1"),
        ((X, G, None, float("nan"), "LayerNorm"), ValueError, "eps must be finite"),
        ((X[0], G, None, 1e-5, "LayerNorm"), ValueError, r"x must be \[rows, cols\], got"),
        ((X.double(), G, None, 1e-5, "LayerNorm"), TypeError, "dtype must be float32"),
        ((X, G.to("meta"), None, 1e-5, "LayerNorm"), ValueError, "x and gamma must be on one"),
    ],
)
def test_wrong_arguments_are_named(args, error, message: str) -> None:
    with pytest.raises(error, match=f"^norm: {message}"):
        ops.norm(*args)
    with pytest.raises(error, match=f"^norm_encode: {message}"):
        ops.norm_encode(*args, False, "mxfp8", "")


def test_wrong_planes_are_named() -> None:
    norm = (X, G, None, 1e-5, "LayerNorm", False)
    for planes, options, message in (
        (("mxfp8;sr", ""), {}, "stochastic rounding needs a seed"),
        (("", "mxfp8"), {"col_source": "rowwise_dequantized"}, "needs a row spec"),
        (("mxfp8", ""), {"col_source": "x"}, "col_source must be"),
        (("fp8_e4m3", "", torch.zeros(2)), {}, "a statistic of .* must be float32 with one value"),
        (("mxfp8", ""), {"row_stream": -1}, "a stream must be in"),
    ):
        with pytest.raises(ValueError, match=f"^norm_encode: .*{message}"):
            ops.norm_encode(*norm, *planes, **options)
