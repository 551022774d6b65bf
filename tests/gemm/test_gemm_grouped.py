"""Grouped GEMM: every group against the FP64 product of what the oracle decodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import hybridq
from gemm_cases import check, decoded, in_own_domain, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.kernels import OpQuery, choose, described
from hybridq.kernels.choice.arguments import GroupedArgs, GroupedOperand
from hybridq.kernels.decoded import decoded_grouped_gemm as grouped
from hybridq.kernels.ragged.padded_layout import capacity, pad_tokens, padded_offsets

FORMATS = ["mxfp8", "nvfp4", "nvfp4_16x16", "nvfp4;rows", "fp8_e4m3", "fp8_1x128", "mxfp4", "bf16"]
TURNED = PlaneSpec(format("nvfp4"), False, DEFAULT_SIGNS)
_QUERY = OpQuery("grouped_gemm", "cpu", torch.float32, *[PlaneSpec.parse("mxfp8")] * 2)
BACKENDS = [answer.backend.name for answer in choose(_QUERY).answers if answer.reason is None]
#: Ends of groups, tokens: an empty group first, in the middle and last, tokens of no group.
RAGGED = [([0, 5, 5, 19, 19], 23), ([7], 7), ([0, 0], 4), ([130, 131, 300], 300)]


def ends(values: list[int]) -> torch.Tensor:
    """Offsets as the operator takes them."""
    return torch.tensor(values, dtype=torch.int32)


def bounds(values: list[int]) -> list[tuple[int, int]]:
    """Begin and end of every group."""
    return list(zip([0, *values[:-1]], values, strict=True))


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("a_name,b_name", list(itertools.product(FORMATS, FORMATS)))
def test_rows_of_tokens(a_name: str, b_name: str, backend_name: str) -> None:
    k, n = 70, 11
    for offsets, tokens in RAGGED[:3]:
        a = make(torch.randn(tokens, k, dtype=torch.bfloat16), a_name)
        b = [
            make(torch.randn(n, k, dtype=torch.bfloat16) * 3**g, b_name)
            for g in range(len(offsets))
        ]
        bias = torch.randn(len(offsets), n)
        left = decoded(a)
        with hybridq.backend(backend_name):
            for dtype, extra in (
                (torch.bfloat16, None),
                (torch.float32, bias),
                (torch.float16, bias),
            ):
                y = hybridq.grouped_gemm(a, b, ends(offsets), bias=extra, out_dtype=dtype)
                assert y.shape == (tokens, n) and y.dtype == dtype
                assert not y[offsets[-1] :].any()
                for g, (begin, end) in enumerate(bounds(offsets)):
                    more = 0.0 if extra is None else extra[g].double().numpy()[None, :]
                    check(y[begin:end], left[begin:end], decoded(b[g]), more)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("a_name,b_name", list(itertools.product(FORMATS, FORMATS)))
def test_contraction_over_tokens(a_name: str, b_name: str, backend_name: str) -> None:
    m, n = 9, 12
    for offsets, tokens in RAGGED:
        x, w = torch.randn(tokens, m, dtype=torch.bfloat16), torch.randn(tokens, n).bfloat16()
        planes, values = [], []
        for source, name in ((x, a_name), (w, b_name)):
            is_plain = name == "bf16"
            ragged = source if is_plain else pad_tokens(source, ends(offsets))
            plane = make(ragged, name, "columnwise")
            begins = [b for b, _ in bounds(offsets)]
            if not is_plain:
                begins = padded_offsets(ends(offsets), tokens).tolist()
            planes.append(plane)
            own = decoded(plane)
            values.append(
                [own[:, b : b + e - s] for b, (s, e) in zip(begins, bounds(offsets), strict=False)]
            )
        with hybridq.backend(backend_name):
            for dtype in (torch.bfloat16, torch.float32):
                y = hybridq.grouped_gemm(*planes, ends(offsets), tokens=tokens, out_dtype=dtype)
                assert y.shape == (len(offsets), m, n)
                for g, (first, second) in enumerate(zip(*values, strict=True)):
                    check(y[g], first, second)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulation(backend_name: str, dtype: torch.dtype) -> None:
    offsets, tokens = [3, 3, 9], 12
    a = make(torch.randn(tokens, 64), "mxfp8")
    b = [make(torch.randn(10, 64), "nvfp4") for _ in offsets]
    out = torch.randn(tokens, 10).to(dtype)
    before = out.clone()
    with hybridq.backend(backend_name):
        assert hybridq.grouped_gemm(a, b, ends(offsets), out=out, accumulate=True) is out
    assert torch.equal(out[9:], before[9:])  # tokens of no group: nothing is added
    for g, (begin, end) in enumerate(bounds(offsets)):
        old = before[begin:end].double().numpy()
        check(out[begin:end], decoded(a)[begin:end], decoded(b[g]), old)
    x, w = torch.randn(tokens, 5), torch.randn(tokens, 7)
    total = torch.randn(3, 5, 7).to(dtype)
    old = total.clone()
    with hybridq.backend(backend_name):
        hybridq.grouped_gemm(x.t(), w.t(), ends(offsets), out=total, accumulate=True)
    assert torch.equal(total[1], old[1])  # an empty group
    for g, (begin, end) in enumerate(bounds(offsets)):
        first, second = (one[begin:end].t().double().numpy() for one in (x, w))
        check(total[g], first, second, old[g].double().numpy())


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_shared_transform_stays_in_the_groups(backend_name: str) -> None:
    """Padded groups are transformed 16 tokens at a time, the last with zeros filled in."""
    offsets, tokens = [5, 45, 45], 50
    x, w = torch.randn(tokens, 9), torch.randn(tokens, 12)
    a, b = (make(pad_tokens(one, ends(offsets)), TURNED, "columnwise") for one in (x, w))
    begins = padded_offsets(ends(offsets), tokens).tolist()
    with hybridq.backend(backend_name):
        y = hybridq.grouped_gemm(a, b, ends(offsets), tokens=tokens, out_dtype=torch.float32)
        same = hybridq.grouped_gemm(a, b, ends(offsets), out_dtype=torch.float32)
    assert torch.equal(y, same)  # as many tokens as surely fit
    for g, (begin, end) in enumerate(bounds(offsets)):
        width = -(-(end - begin) // 16) * 16
        cut = slice(begins[g], begins[g] + width)
        check(y[g], in_own_domain(a)[:, cut], in_own_domain(b)[:, cut])


@pytest.mark.parametrize("is_plain", [False, True])
def test_one_transformed_operand_is_transformed_back(is_plain: bool) -> None:
    offsets, tokens = [5, 45], 45
    x, w = torch.randn(tokens, 9), torch.randn(tokens, 12)
    a = make(pad_tokens(x, ends(offsets)), TURNED, "columnwise")
    b = make(
        w if is_plain else pad_tokens(w, ends(offsets)),
        "fp32" if is_plain else "mxfp8",
        "columnwise",
    )
    begins = padded_offsets(ends(offsets), tokens).tolist()
    y = hybridq.grouped_gemm(a, b, ends(offsets), tokens=tokens, out_dtype=torch.float32)
    for g, (begin, end) in enumerate(bounds(offsets)):
        size, own = end - begin, begin if is_plain else begins[g]
        first = decoded(a)[:, begins[g] : begins[g] + size]
        check(y[g], first, decoded(b)[:, own : own + size])


# ---- the way of CUDA, whose product torch also has on a CPU


@pytest.mark.parametrize("a_name", ["mxfp8", "fp8_1x128", "mxfp4", "bf16"])
@pytest.mark.parametrize("b_name", ["mxfp8", "fp8_128x128", "mxfp6_e3m2", "bf16"])
@pytest.mark.parametrize("offsets,tokens", RAGGED)
def test_torchs_grouped_product(a_name: str, b_name: str, offsets: list[int], tokens: int) -> None:
    k, n = 70, 11
    a = make(torch.randn(tokens, k, dtype=torch.bfloat16), a_name)
    b = [make(torch.randn(n, k, dtype=torch.bfloat16), b_name) for _ in offsets]
    stack = [torch.stack([plane.buffers[name] for plane in b]) for name in b[0].buffers]
    args = GroupedArgs(ends(offsets), tokens, None, None, None, torch.bfloat16)
    left = GroupedOperand(a.tensors, a.spec, tokens, k)
    y = grouped._rows_cuda(left, GroupedOperand(stack, b[0].spec, n, k, True), args)
    assert y.shape == (tokens, n) and not y[offsets[-1] :].any()
    for g, (begin, end) in enumerate(bounds(offsets)):
        check(y[begin:end], decoded(a)[begin:end], decoded(b[g]))

    x, w = torch.randn(tokens, 9, dtype=torch.bfloat16), torch.randn(tokens, n).bfloat16()
    sides, values = [], []
    for source, name in ((x, a_name), (w, b_name)):
        is_plain = name == "bf16"
        plane = make(source if is_plain else pad_tokens(source, ends(offsets)), name, "columnwise")
        sides.append(GroupedOperand(plane.tensors, plane.spec, *plane.matrix, False, not is_plain))
        begins = [begin for begin, _ in bounds(offsets)]
        if not is_plain:
            begins = padded_offsets(ends(offsets), tokens).tolist()
        own = decoded(plane)
        values.append(
            [own[:, b : b + e - s] for b, (s, e) in zip(begins, bounds(offsets), strict=False)]
        )
    has_pad = any(side.is_padded for side in sides)
    padded = padded_offsets(ends(offsets), tokens) if has_pad else None
    args = GroupedArgs(ends(offsets), tokens, padded, None, None, torch.bfloat16)
    y = grouped._tokens_cuda(*sides, args)
    for g, (first, second) in enumerate(zip(*values, strict=True)):
        check(y[g], first, second)


@pytest.mark.parametrize(
    "chip,a,b,dtype,backend",
    [
        ("sm_90", "mxfp8", "mxfp8", torch.bfloat16, None),
        ("sm_90", "mxfp8", "nvfp4", torch.bfloat16, None),
        ("sm_90", "mxfp8", "nvfp4;rows", torch.bfloat16, "operand b has a factor"),
        ("sm_90", "mxfp8", "mxfp8", torch.float32, "rounds to BF16"),
        ("sm_89", "mxfp8", "mxfp8", torch.bfloat16, "reads the offsets on the host"),
        ("cuda", "mxfp8", "mxfp8", torch.bfloat16, "capability is not known"),
    ],
)
def test_where_torchs_grouped_product_runs(chip, a, b, dtype, backend) -> None:
    found = hybridq.explain("grouped_gemm", a, b, device=chip, dtype=dtype)
    reason = dict(found.reasons)["torch"]
    assert reason is None if backend is None else backend in reason
    if reason is None:
        with hybridq.backend("torch"):
            found = hybridq.explain("grouped_gemm", a, b, device=chip, dtype=dtype)
        has_factor = any("the tokens take the factors" in note for note in found.notes)
        assert has_factor == (b == "nvfp4")


@pytest.mark.parametrize(
    "a,b,precision,tokens,backend",
    [
        ("nvfp4", "nvfp4", "auto", 255, "triton"),
        ("nvfp4", "nvfp4", "auto", 256, "torch"),
        ("nvfp4", "nvfp4", "exact", 256, "triton"),  # factors follow an FP32 product
        ("nvfp4;rows", "nvfp4", "auto", 256, "triton"),
        ("fp8_e4m3", "nvfp4", "auto", 256, "torch"),
        ("bf16", "mxfp8", "auto", 256, "torch"),
        ("mxfp8", "mxfp8", "exact", 256, "torch"),  # nothing follows, and BF16 holds both
        ("mxfp8", "mxfp8", "auto", 256, "fold"),
    ],
)
@pytest.mark.parametrize("is_rows", [True, False])
def test_many_tokens_are_decoded_before_the_product(
    a: str, b: str, precision: str, tokens: int, backend: str, is_rows: bool
) -> None:
    """On sm_90, where both ways were measured."""
    specs = [PlaneSpec.parse(name).resolve(torch.bfloat16) for name in (a, b)]

    def chosen(chip: str, groups: int = 8, **options) -> str | None:
        query = OpQuery(
            "grouped_gemm",
            "cuda",
            torch.bfloat16,
            *specs,
            precision,
            (groups * tokens, 512, 512) if is_rows else (512, 512, groups * tokens),
            described(chip),
            groups=groups,
            tokens_per_group=tokens if is_rows else None,
            **options,
        )
        found = choose(query).chosen
        return None if found is None else found.name

    assert chosen("sm_90") == backend
    assert chosen("sm_89") not in ("torch", "fold")
    if backend == "torch":
        assert chosen("sm_90", is_alone=False) == "triton"
        assert chosen("sm_90", is_alone=False, is_biased=True) == "torch"
        # Torch's kernels have one thread of a block for each group.
        assert chosen("sm_90", 1023) == "torch" and chosen("sm_90", 1024) == "triton"


def test_explain_asks_how_many_tokens_a_group_has() -> None:
    """Many, where nothing is said, as rows of a GEMM are."""

    def chosen(rows: int | None) -> str | None:
        return hybridq.explain("grouped_gemm", "nvfp4", "nvfp4", device="sm_90", rows=rows).chosen

    assert (chosen(None), chosen(256), chosen(255)) == ("torch", "torch", "triton")
    found = hybridq.explain("grouped_gemm", "nvfp4", "nvfp4", device="sm_90")
    assert "256 tokens per group" in str(dict(found.reasons)["triton"])


# ---- offsets, arguments, operators


def test_offsets_out_of_range_touch_no_other_memory() -> None:
    """They count as the nearest sensible ones: a kernel cannot raise."""
    a = make(torch.randn(10, 64), "mxfp8")
    b = [make(torch.randn(4, 64), "mxfp8") for _ in range(3)]
    y = hybridq.grouped_gemm(a, b, ends([-3, 6, 99]))
    want = hybridq.grouped_gemm(a, b, ends([0, 6, 10]))
    assert torch.equal(y, want)
    assert torch.equal(
        hybridq.grouped_gemm(a, b, ends([6, 2, 10])), hybridq.grouped_gemm(a, b, ends([6, 6, 10]))
    )


def test_a_stack_that_lies_in_one_piece_is_not_copied() -> None:
    from hybridq.gemm.grouped import stacked

    whole = torch.randn(4, 3, 5)
    assert stacked([whole[g] for g in range(4)]).data_ptr() == whole.data_ptr()
    assert torch.equal(stacked([whole[g] for g in range(1, 4)]), whole[1:])
    mixed = stacked([whole[1], whole[0]])
    assert mixed.data_ptr() != whole.data_ptr() and torch.equal(mixed, whole[[1, 0]])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "bf16"])
def test_opcheck(name: str) -> None:
    op, into = torch.ops.hybridq.grouped_gemm.default, torch.ops.hybridq.grouped_gemm_.default
    a = make(torch.randn(6, 40), name)
    b = [make(torch.randn(5, 40), "mxfp8") for _ in range(2)]
    stack = [torch.stack([plane.buffers[key] for plane in b]) for key in b[0].buffers]
    operands = (a.tensors, a.spec.text, [6, 40], stack, "mxfp8", [5, 40], ends([2, 5]), 6)
    options = {"is_stack": True, "out_dtype": torch.float32}
    torch.library.opcheck(op, (*operands, torch.randn(2, 5)), options)
    torch.library.opcheck(
        into, (torch.zeros(6, 5), *operands, None), {"is_stack": True, "accumulate": True}
    )
    x = make(pad_tokens(torch.randn(6, 3), ends([2, 5])), "mxfp8", "columnwise")
    w = make(torch.randn(6, 4), "fp32", "columnwise")
    size = capacity(6, 2)
    operands = (x.tensors, "mxfp8", [3, size], [w.data], "fp32", [4, 6], ends([2, 5]), 6)
    options = {"is_stack": False, "a_padded": True, "out_dtype": torch.float32}
    torch.library.opcheck(op, operands, options)


def test_compiled_and_eager_give_the_same_bits() -> None:
    def run(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = torch.ops.hybridq.encode(x, "mxfp8", "")
        return torch.ops.hybridq.grouped_gemm(
            rows,
            "mxfp8",
            x.shape,
            [w],
            "fp32",
            w.shape[1:],
            offsets,
            x.shape[0],
            is_stack=True,
            out_dtype=torch.float32,
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 17):
        args = (torch.randn(tokens, 64), torch.randn(3, 5, 64), ends([2, 2, 8]))
        assert torch.equal(compiled(*args), run(*args))


def test_it_has_no_derivative_and_says_so() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    y = hybridq.grouped_gemm(x, torch.randn(2, 3, 32), ends([1, 4]))
    with pytest.raises(RuntimeError, match="grouped_gemm: has no derivative"):
        y.sum().backward()


def bad(a, b, offsets, **options):
    """A call that must fail."""
    return lambda: hybridq.grouped_gemm(a, b, offsets, **options)


X, W = torch.randn(4, 32), torch.randn(2, 3, 32)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (bad(X, W, torch.tensor([1, 4])), ValueError, "offsets must be int32 \\[G\\]"),
        (bad(X, W, ends([1, 2, 4])), ValueError, "one b for each of the 3 groups"),
        (bad(X[:, :16], W, ends([1, 4])), ValueError, "contraction length, got 16 and 32"),
        (bad(X, W, ends([1, 4]), bias=torch.ones(3)), ValueError, "a bias goes with rows"),
        (bad(X, W, ends([1, 4]), out=torch.ones(2, 2)), ValueError, "out must be"),
        (bad(X, W, ends([1, 4]), accumulate=True), ValueError, "accumulate needs out"),
        (bad(X, W, ends([1, 4]), precision="no"), ValueError, "grouped_gemm: precision"),
        (bad(X, W, ends([1, 4]), out_dtype=torch.int8), TypeError, "out dtype must be"),
        (
            bad(X, [hybridq.quantize(W[0], "mxfp8"), W[1]], ends([1, 4])),
            hybridq.SpecError,
            "one spec and one shape",
        ),
        (
            bad(hybridq.quantize(X, "mxfp8"), X, ends([1, 32]), tokens=32),
            ValueError,
            "must have 256 columns for 32 tokens",
        ),
        (bad(X, X[:, :8], ends([1, 4])), ValueError, "b must have 32 columns"),
    ],
)
def test_bad_calls_say_why(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_an_unpadded_quantized_plane_is_refused() -> None:
    plane = make(torch.randn(6, 3), "mxfp8", "columnwise")
    with pytest.raises(ValueError, match="must be padded \\(pad_tokens\\)"):
        torch.ops.hybridq.grouped_gemm(
            plane.tensors,
            "mxfp8",
            [3, 6],
            plane.tensors,
            "mxfp8",
            [3, 6],
            ends([6]),
            6,
            is_stack=False,
            out_dtype=torch.float32,
        )
    assert np.isfinite(decoded(plane)).all()
