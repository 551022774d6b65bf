"""`quantize_grouped` and the three products of experts.

Products are compared with the FP64 product, group by group, of what the oracle decodes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import hybridq
from gemm_cases import check, decoded, make
from hybridq import reference
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from hybridq.quantizers import Quantizer
from ragged_cases import (
    PAIRS,
    PLAIN,
    SIZES,
    SPECS,
    bounds,
    buffers,
    ends,
    expected,
    padded,
    places,
    planes_of,
    same,
)

X, ENDS = torch.randn(6, 64), ends((2, 3))


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 | nvfp4 rht", "nvfp4 sr | nvfp4 rht sr", "bf16"])
def test_quantize_grouped(name: str, source: str) -> None:
    row, col = PAIRS[name]
    sizes, rest = SIZES[0]
    seed = torch.tensor([4])
    x = torch.randn(sum(sizes) + rest, 40, dtype=torch.bfloat16)
    made = hybridq.quantize_grouped(x, ends(sizes), Quantizer(row, col, source), seed=seed)
    first = expected(x, row, 0, seed, False)
    seen = x if source == "original" else reference.decode_plane(first, row, *x.shape, x.dtype)
    same(buffers(made), [*first, *planes_of(seen, sizes, None, col, seed)], name)
    assert made.rowwise.spec == row and made.columnwise.spec == col
    assert (made.tokens, made.groups, made.cols, made.dtype) == (len(x), 5, 40, x.dtype)
    assert made.rowwise.matrix == x.shape and made.columnwise.matrix[0] == 40
    by_name = hybridq.quantize_grouped(
        x, ends(sizes), row, col, columnwise_source=source, seed=seed
    )
    same(buffers(by_name), buffers(made), name)


def test_usages_and_options() -> None:
    x = torch.randn(7, 64)
    q = hybridq.MXFP8Quantizer()
    rows = hybridq.quantize_grouped(x, ENDS, q.with_usage(columnwise=False))
    assert rows.columnwise is None
    same(buffers(rows), hybridq.quantize(x, "mxfp8", False).rowwise.tensors, "rows")
    hidden = hybridq.HybridQuantizer(
        rowwise_quantizer=q,
        columnwise_quantizer=hybridq.NVFP4Quantizer(),
        columnwise_source="rowwise_dequantized",
    ).with_usage(rowwise=False)
    made = hybridq.quantize_grouped(x, ENDS, hidden)
    assert made.rowwise is None
    seen = hybridq.quantize(x, "mxfp8", False).dequantize()
    same(
        buffers(made),
        planes_of(seen, (2, 3), None, SPECS["nvfp4"], torch.tensor([0])),
        "columns of rows that are not kept",
    )
    options = {"hadamard": True, "row_scaled": True}
    named = hybridq.quantize_grouped(x, ENDS, "nvfp4", **options)
    made = hybridq.quantize_grouped(x, ENDS, hybridq.quantizer("nvfp4", **options))
    assert named.columnwise.spec.row_scaled and named.columnwise.spec.signs == DEFAULT_SIGNS
    same(buffers(named), buffers(made), "options")
    again = hybridq.quantize_grouped(hybridq.quantize(x, "mxfp8"), ENDS, "mxfp8")
    same(buffers(again), buffers(hybridq.quantize_grouped(seen, ENDS, "mxfp8")), "quantized before")


def test_a_seed_is_drawn_from_torchs_generator() -> None:
    x = torch.randn(7, 64)
    torch.manual_seed(3)
    first = hybridq.quantize_grouped(x, ENDS, "nvfp4", stochastic=True)
    second = hybridq.quantize_grouped(x, ENDS, "nvfp4", stochastic=True)
    torch.manual_seed(3)
    again = hybridq.quantize_grouped(x, ENDS, "nvfp4", stochastic=True)
    same(buffers(again), buffers(first), "the same seed")
    assert not torch.equal(first.rowwise.data, second.rowwise.data)


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_group_of_ranks_shares_the_amax(source: str, transformed: bool, monkeypatch) -> None:
    """Of the rows that of all tokens, of the columns that of the tokens of a group."""
    asked = []

    def larger(amax: torch.Tensor, name: str) -> torch.Tensor:
        asked.append(name)
        return amax * 2

    monkeypatch.setattr(sys.modules["hybridq.quantizers.statistics"], "group_amax", larger)
    row = PlaneSpec.parse("nvfp4")
    col = replace(row, signs=DEFAULT_SIGNS) if transformed else row
    x = torch.randn(7, 64)
    x[6] *= 100  # belongs to no group
    made = hybridq.quantize_grouped(x, ENDS, Quantizer(row, col, source, amax_group="ranks"))
    stat = 2 * reference.tensor_amax(x, row)
    first = reference.encode_plane(x, row, stat=stat)
    seen = x if source == "original" else reference.decode_plane(first, row, *x.shape, x.dtype)
    columns = padded(seen, (2, 3)).t()
    second = reference.encode_plane(
        columns, col, stat=2 * reference.tensor_amax(columns, col), is_columnwise=True
    )
    same(buffers(made), [*first, *second], "planes")
    assert asked == ["ranks"] * 2
    assert made.columnwise.amax < made.rowwise.amax / 10 or source != "original"
    plain = hybridq.quantize_grouped(
        x, ENDS, Quantizer(PlaneSpec.parse("mxfp8"), None, amax_group="ranks")
    )
    assert len(asked) == 2 and plain.columnwise is None


def test_the_result_owns_its_memory_and_holds_the_offsets() -> None:
    x, offsets = torch.randn(6, 64), ENDS.clone()
    for names_ in (("identity", "identity"), ("fp32", "bf16"), ("mxfp8", "identity")):
        made = hybridq.quantize_grouped(x, offsets, *names_)
        before = [buffer.clone() for buffer in buffers(made)]
        kept = x.clone()
        x.zero_()
        same(buffers(made), before, str(names_))
        x.copy_(kept)
        assert made.offsets is offsets and made.device == x.device
    plain = hybridq.quantize_grouped(x, offsets, "identity")
    assert plain.nbytes == x.nbytes  # one memory for both
    moved = plain.map(torch.clone)
    assert moved.nbytes == x.nbytes and moved.rowwise.data is not plain.rowwise.data
    quantized = hybridq.quantize_grouped(x, offsets, "mxfp8", "nvfp4")
    moved = quantized.map(torch.clone)
    same(buffers(moved), buffers(quantized), "map")
    assert moved.offsets is not offsets and torch.equal(moved.offsets, offsets)
    assert quantized.nbytes == sum(buffer.nbytes for buffer in buffers(quantized))
    assert "6 tokens in 2 groups" in repr(quantized)


def grouped(*args, **options):
    return lambda: hybridq.quantize_grouped(*args, **options)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (grouped(X[None], ENDS, "mxfp8"), ValueError, "x must be \\[T, C\\], got shape"),
        (grouped(X.long(), ENDS, "mxfp8"), TypeError, "quantize_grouped: dtype must be"),
        (grouped([1.0], ENDS, "mxfp8"), TypeError, "quantize_grouped: input must be a torch"),
        (grouped(X, [2, 5], "mxfp8"), TypeError, "offsets must be a tensor, got list"),
        (grouped(X, ENDS.long(), "mxfp8"), ValueError, "offsets must be int32 \\[G\\]"),
        (grouped(X, ENDS, "mxfp9"), hybridq.SpecError, "format: must be one of"),
        (grouped(X, ENDS, hybridq.MXFP8Quantizer(), "nvfp4"), hybridq.SpecError, "left out"),
        (grouped(X, ENDS, hybridq.MXFP8Quantizer(), eps=0.0), hybridq.SpecError, "left out"),
        (
            grouped(X, ENDS, hybridq.MXFP8Quantizer().with_usage(False, False)),
            hybridq.PlaneError,
            "quantize_grouped: both usages are off",
        ),
        (
            grouped(X.clone().requires_grad_(), ENDS, "mxfp8"),
            RuntimeError,
            "x requires grad, which planes do not pass on",
        ),
    ],
)
def test_bad_calls_say_why(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    with torch.no_grad():
        hybridq.quantize_grouped(X.clone().requires_grad_(), ENDS, "mxfp8")


def test_planes_that_are_not_of_the_tokens_are_refused() -> None:
    made = hybridq.quantize_grouped(X, ENDS, "mxfp8")
    with pytest.raises(hybridq.PlaneError, match="needs at least one plane"):
        hybridq.RaggedTensor(None, None, ENDS, 6, torch.float32)
    with pytest.raises(hybridq.PlaneError, match="must have 5 rows of X"):
        hybridq.RaggedTensor(made.rowwise, None, ENDS, 5, torch.float32)
    with pytest.raises(hybridq.PlaneError, match="must have 384 rows of X"):
        hybridq.RaggedTensor(None, made.columnwise, ends((1, 1, 1)), 6, torch.float32)


# ---- the three products of an expert layer

PRODUCTS = ["mxfp8", "nvfp4", "fp8_e4m3", "fp8_1x128", "mxfp4", "nvfp4 rows", "bf16", "fp32"]


@pytest.mark.parametrize("row,col", list(itertools.product(PRODUCTS, PRODUCTS[:4])))
def test_three_products(row: str, col: str) -> None:
    """Forward, input gradient, weight gradient; the planes decoded by the oracle."""
    every = {**SPECS, **PLAIN}
    n, k = 24, 40
    for sizes, rest in SIZES[:2]:
        tokens, groups = sum(sizes) + rest, len(sizes)
        x, dy = torch.randn(tokens, k), torch.randn(tokens, n)
        w = torch.randn(groups, n, k)
        seed = torch.tensor([1])
        xr = hybridq.quantize_grouped(x, ends(sizes), every[row], every[col], seed=seed)
        dyr = hybridq.quantize_grouped(dy, xr.offsets, every[col], every[row], seed=seed)
        experts = [hybridq.quantize(one, every[col], seed=seed) for one in w]
        y = hybridq.grouped_gemm(xr, experts)
        dx = hybridq.grouped_gemm(dyr, [one.mT for one in experts])
        dw = hybridq.grouped_gemm(dyr, xr)
        assert y.dtype == dx.dtype == dw.dtype == torch.float32  # that of x
        assert y.shape == (tokens, n) and dx.shape == x.shape and dw.shape == w.shape
        assert not y[tokens - rest :].any() and not dx[tokens - rest :].any()
        rows = [decoded(one.rowwise) for one in (xr, dyr)]
        columns = [decoded(one.columnwise) for one in (xr, dyr)]
        for g, ((begin, end), place) in enumerate(zip(bounds(sizes), places(sizes), strict=True)):
            check(y[begin:end], rows[0][begin:end], decoded(experts[g].rowwise))
            check(dx[begin:end], rows[1][begin:end], decoded(experts[g].columnwise))
            cut = [
                values[:, begin:end]
                if one.columnwise.spec.format.is_identity
                else values[:, place : place + end - begin]
                for one, values in zip((xr, dyr), columns, strict=True)
            ]
            check(dw[g], cut[1], cut[0])
            assert begin < end or not dw[g].any()


def test_accumulation_bias_and_dtypes() -> None:
    sizes, rest = SIZES[0]
    tokens = sum(sizes) + rest
    xr = hybridq.quantize_grouped(torch.randn(tokens, 32).half(), ends(sizes), "mxfp8")
    w, bias = torch.randn(5, 8, 32), torch.randn(5, 8)
    y = hybridq.grouped_gemm(xr, w, bias=bias, out_dtype=torch.float32)
    assert hybridq.grouped_gemm(xr, w).dtype == torch.float16
    for g, (begin, end) in enumerate(bounds(sizes)):
        check(
            y[begin:end],
            decoded(xr.rowwise)[begin:end],
            w[g].double().numpy(),
            bias[g].double().numpy()[None],
        )
    out = torch.randn(5, 32, 32)
    before = out.clone()
    assert hybridq.grouped_gemm(xr, xr, out=out, accumulate=True) is out
    assert torch.equal(out[1], before[1])
    first = decoded(xr.columnwise)[:, :3]
    check(out[0], first, first, before[0].double().numpy())


def test_a_ragged_tensor_beside_planes_and_plain_tensors() -> None:
    """Whatever lies over the same tokens; a plain one is not padded."""
    sizes = (2, 0, 3)
    xr = hybridq.quantize_grouped(X, ends(sizes), "mxfp8")
    other = torch.randn(6, 8)
    plane = make(padded(other, sizes), "nvfp4", "columnwise")
    for one in (other.t(), plane):
        left, right = hybridq.grouped_gemm(xr, one), hybridq.grouped_gemm(one, xr)
        given = hybridq.grouped_gemm(
            xr.columnwise, one, ends(sizes), tokens=6, out_dtype=torch.float32
        )
        assert torch.equal(left, given) and left.shape == (3, 64, 8)
        right = hybridq.grouped_gemm(one, xr, out_dtype=torch.float32)
        assert right.shape == (3, 8, 64) and torch.allclose(right, left.mT, atol=1e-4)


def test_no_groups_at_all() -> None:
    none = ends(())
    xr = hybridq.quantize_grouped(X, none, "mxfp8")
    assert xr.columnwise.matrix == (64, 0)
    y = hybridq.grouped_gemm(xr, torch.randn(0, 8, 64))
    assert y.shape == (6, 8) and not y.any()
    assert hybridq.grouped_gemm(xr, xr).shape == (0, 64, 64)
    with pytest.raises(ValueError, match="without groups, b must be a plain \\[0, N, K\\]"):
        hybridq.grouped_gemm(xr, [])


def product(*args, **options):
    return lambda: hybridq.grouped_gemm(*args, **options)


XR = hybridq.quantize_grouped(X, ENDS, "mxfp8")
ROWS = hybridq.quantize_grouped(X, ENDS, "mxfp8", None)
COLUMNS = hybridq.quantize_grouped(X, ENDS, None, "mxfp8")


@pytest.mark.parametrize(
    "call,error,message",
    [
        (product(X, torch.randn(2, 8, 64)), TypeError, "offsets must be given, unless an operand"),
        (product(XR, torch.randn(2, 8, 64), ENDS), ValueError, "brings its own offsets"),
        (product(XR, XR, tokens=6), ValueError, "leave both out, got tokens=6"),
        (product(XR, torch.randn(3, 8, 64)), ValueError, "one b for each of the 2 groups"),
        (product(XR, torch.randn(2, 8, 32)), ValueError, "contraction length, got 64 and 32"),
        (product(COLUMNS, torch.randn(2, 8, 64)), hybridq.PlaneError, "there is no rowwise plane"),
        (product(XR, ROWS), hybridq.PlaneError, "there is no columnwise plane"),
        (
            product(XR, hybridq.quantize_grouped(X, ends((3, 2)), "mxfp8")),
            ValueError,
            "6 tokens in 2 groups and 6 in 2 with other ends",
        ),
        (
            product(XR, hybridq.quantize_grouped(X[:5], ENDS, "mxfp8")),
            ValueError,
            "same groups of tokens, got 6 tokens in 2 groups and 5 in 2",
        ),
        (product(XR, [1, 2]), TypeError, "b must be a tensor or a Plane, got int"),
    ],
)
def test_bad_products_say_why(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_equal_ends_in_another_tensor_are_the_same_groups() -> None:
    other = hybridq.quantize_grouped(X, ENDS.clone(), "mxfp8")
    assert torch.equal(hybridq.grouped_gemm(XR, other), hybridq.grouped_gemm(XR, XR))


# ---- torch.compile


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
def test_a_compiled_expert_layer_has_eager_bits() -> None:
    """Forward and both gradients in one graph, for any number of tokens."""
    q = hybridq.quantizer("mxfp8", "nvfp4", hadamard=True, stochastic=True)
    experts = [hybridq.quantize(torch.randn(8, 64), "mxfp8") for _ in range(3)]
    plain = torch.randn(3, 8, 64)

    def step(x, dy, offsets, seed, *w):
        xr = hybridq.quantize_grouped(x, offsets, q, seed=seed)
        dyr = hybridq.quantize_grouped(dy, offsets, "mxfp8", "nvfp4", hadamard=True)
        y = hybridq.grouped_gemm(xr, list(w)) + hybridq.grouped_gemm(xr, plain)
        return y, hybridq.grouped_gemm(dyr, plain.mT), hybridq.grouped_gemm(dyr, xr)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 200, 77):
        args = (torch.randn(tokens, 64), torch.randn(tokens, 8), ends((2, 0, 5)))
        seed = torch.tensor([tokens])
        with torch.no_grad():
            pairs = zip(compiled(*args, seed, *experts), step(*args, seed, *experts), strict=True)
        for got, want in pairs:
            assert torch.equal(got, want)


@pytest.mark.usefixtures("_fresh")
def test_ragged_tensors_enter_and_leave_compiled_code() -> None:
    def make_ragged(x, offsets):
        return hybridq.quantize_grouped(x, offsets, "mxfp8", "nvfp4")

    def use(ragged, w):
        return hybridq.grouped_gemm(ragged, w), hybridq.grouped_gemm(ragged, ragged)

    w = torch.randn(2, 8, 64)
    made = torch.compile(make_ragged, fullgraph=True, backend="aot_eager")(X, ENDS)
    want = make_ragged(X, ENDS)
    assert isinstance(made, hybridq.RaggedTensor)
    assert (made.tokens, made.dtype) == (want.tokens, want.dtype)
    same(buffers(made), buffers(want), "made")
    got = torch.compile(use, fullgraph=True, backend="aot_eager")(made, w)
    for first, second in zip(got, use(want, w), strict=True):
        assert torch.equal(first, second)
