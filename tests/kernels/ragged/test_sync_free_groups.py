"""What a device does with groups, without reading where they end, held to the loop of a CPU.

The functions are made of operations of any device, so their values are checked on a CPU; that they
read nothing is checked on fake CUDA tensors, where reading raises.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_cases
import ragged_cases as cases
from fake_indexing import Indexing
from hybridq import BackendError
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.kernels.choice import Backend, EncodeRequest
from hybridq.kernels.choice.arguments import GemmArgs, GroupedArgs, GroupedOperand, Operand
from hybridq.kernels.decoded import decoded_gemm as exact
from hybridq.kernels.decoded import decoded_grouped_gemm as grouped
from hybridq.kernels.operators import encode_ragged
from hybridq.kernels.ragged import group_loop as group_loop
from hybridq.kernels.ragged import sync_free_groups as group_device
from hybridq.kernels.ragged import sync_free_products as group_product
from hybridq.kernels.ragged.group_loop import pads_rows
from hybridq.kernels.ragged.padded_layout import capacity, pad_tokens, padded_offsets

TURNED = PlaneSpec(format("nvfp4"), False, DEFAULT_SIGNS).text
FP8_TURNED = PlaneSpec(format("fp8_e4m3"), False, DEFAULT_SIGNS).text
#: Every way in which a plane may depend on its group.
SPECS = [
    "fp8_e4m3",
    "fp8_e5m2",
    FP8_TURNED,
    "nvfp4",
    TURNED,
    "nvfp4;rows",
    "nvfp4;4o6=mse",
    "mxfp8",
    "mxfp8_32x32",
    "fp8_128x128",
    "bf16",
]
SIZES = [((0, 37, 0, 130, 16, 0), 5), ((5,), 0), ((128, 256), 0), ((0, 0), 3), ((1,) * 7, 2)]
COLS = 40


def tokens_of(sizes: tuple[int, ...], extra: int, dtype=torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    parts = [torch.randn(n, COLS) * 3.0 ** (g % 5 - 2) for g, n in enumerate(sizes)]
    return torch.cat([*parts, torch.randn(extra, COLS) * 1e4]).to(dtype)


def parts_of(buffers, row, col, x, sizes):
    return (part.buffer for part in cases.parts_of(buffers, row, col, COLS, sizes))


def both(x, sizes, row, col, **options):
    texts = ("" if spec is None else spec.resolve(x.dtype).text for spec in (row, col))
    request, offsets = EncodeRequest(*texts, **options), cases.ends(sizes)
    return [
        run(x, offsets, row, col, request)
        for run in (group_device.encode_by_group, group_loop.encode_loop)
    ]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("sizes,extra", SIZES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_planes_have_the_loops_bits(name: str, sizes, extra: int) -> None:
    spec = PlaneSpec.parse(name)
    for dtype in (torch.bfloat16, torch.float32):
        x = tokens_of(sizes, extra, dtype)
        made, want = both(x, sizes, spec, spec)
        assert [b.shape for b in made] == [b.shape for b in want]
        assert [b.dtype for b in made] == [b.dtype for b in want]
        pairs = zip(
            parts_of(made, spec, spec, x, sizes), parts_of(want, spec, spec, x, sizes), strict=True
        )
        for one, two in pairs:
            assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("row,col", list(itertools.product(SPECS, ["fp8_e5m2", TURNED, "bf16"])))
def test_columns_of_decoded_rows(row: str, col: str) -> None:
    sizes, first, second = (0, 37, 130, 16), PlaneSpec.parse(row), PlaneSpec.parse(col)
    for dtype, keep in ((torch.bfloat16, True), (torch.float32, False)):
        x = tokens_of(sizes, 5, dtype)
        made, want = both(x, sizes, first, second, col_source="rowwise_dequantized", keep_row=keep)
        kept = first if keep else None
        pairs = zip(
            parts_of(made, kept, second, x, sizes),
            parts_of(want, kept, second, x, sizes),
            strict=True,
        )
        for one, two in pairs:
            assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", TURNED, FP8_TURNED])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), 0.0])
def test_nan_and_inf_stay_in_their_group(name: str, value: float) -> None:
    # Even sizes: with a NaN amax the code beside the last one, which is padding, is NaN too.
    sizes, spec = (4, 0, 6, 2), PlaneSpec.parse(name)
    x = tokens_of(sizes, 1)
    x[5, 7] = value
    x[10:12] = value if value == 0.0 else 1.0
    made, want = both(x, sizes, spec, spec)
    for one, two in zip(
        parts_of(made, spec, spec, x, sizes), parts_of(want, spec, spec, x, sizes), strict=True
    ):
        if one.is_floating_point():
            kernel_cases.same_values(one, two, name)
        else:
            assert torch.equal(one, two)
    stat = group_device.amax_by_group(x, cases.ends(sizes), spec, "columnwise")
    assert stat.isnan().flatten().tolist() == [False, False, value != value, False]


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", TURNED, FP8_TURNED, "nvfp4;rows"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("sizes,extra", SIZES, ids=str)
def test_amaxes_are_those_of_each_group(name: str, direction: str, sizes, extra: int) -> None:
    spec = PlaneSpec.parse(name)
    if spec.row_scaled and direction == "rowwise":
        return
    x, offsets = tokens_of(sizes, extra), cases.ends(sizes)
    got = group_device.amax_by_group(x, offsets, spec, direction)
    assert torch.equal(got, torch.ops.hybridq.amax_ragged(x, offsets, name, direction))
    for g, (begin, end) in enumerate(cases.bounds(sizes)):
        own = torch.ops.hybridq.amax(x[begin:end], name, direction)
        assert torch.equal(got[g], own)


def test_a_nan_of_any_sign_is_the_maximum() -> None:
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    values = torch.tensor([[1.0], [0.0], [3.0], [2.0], [5.0]])
    values[[1, 3], 0] = nan
    got = group_device._maximum(values, torch.tensor([0, 0, 1, 2, 3]), 3)
    assert got.isnan().flatten().tolist() == [True, False, True] and got[1] == 3.0


def test_square_blocks_that_need_their_groups_amax_are_refused() -> None:
    spec = PlaneSpec.parse("nvfp4_16x16")
    with pytest.raises(BackendError, match="square block that needs the amax of its group"):
        both(tokens_of((4,), 0), (4,), spec, None)


@pytest.mark.parametrize("sizes,extra", SIZES, ids=str)
def test_sums(sizes, extra: int) -> None:
    """Whole numbers, whose sum is exact in any order."""
    dy = torch.randint(-8, 9, (sum(sizes) + extra, COLS)).to(torch.bfloat16)
    got = group_device.sum_by_group(dy, cases.ends(sizes))
    assert torch.equal(got, group_loop.sum_loop(dy, cases.ends(sizes)))


def backend_of(product):
    return Backend("grouped", lambda _: None, {"grouped_gemm": product})


def choose(asked):
    def chosen(dtype, is_alone):
        asked.append((dtype, is_alone))
        return backend_of(plain_product)

    return chosen


def plain_product(a, b, args):
    """What a backend is asked for: nothing by group, no list, no padded rows."""
    assert not (a.by_group or b.by_group or b.is_list or (b.is_stack and a.is_padded))
    return grouped.grouped_gemm(a, b, args)


def operands(a: str, b: str):
    """Tokens under `a` by group, and weights and gradients under `b`: rows, a contraction."""
    sizes, n = (0, 37, 130, 1), 24
    left, right = PlaneSpec.parse(a), PlaneSpec.parse(b)
    x = tokens_of(sizes, 5)
    y = torch.randn(x.shape[0], n).to(torch.bfloat16)
    offsets, tokens = cases.ends(sizes), x.shape[0]
    rows = group_loop.encode_loop(x, offsets, left, None, EncodeRequest(left.text))
    weights = [torch.randn(n, COLS).bfloat16() for _ in sizes]
    planes = [torch.ops.hybridq.encode(w, b, "") for w in weights]
    count = capacity(tokens, len(sizes)) if pads_rows(left) else tokens
    one = GroupedOperand(
        rows, left, count, COLS, is_padded=pads_rows(left), by_group=rows[-1].shape == (4, 1)
    )
    two = GroupedOperand([p for own in planes for p in own], right, n, COLS, True, False, True)
    sides = []
    for source, spec in ((x, left), (y, right)):
        size = tokens if spec.format.is_identity else capacity(tokens, len(sizes))
        sides.append(
            GroupedOperand(
                group_loop.encode_loop(source, offsets, None, spec, EncodeRequest("", spec.text)),
                spec,
                source.shape[1],
                size,
                is_padded=not spec.format.is_identity,
                by_group=spec.needs_amax,
            )
        )
    args = GroupedArgs(offsets, tokens, padded_offsets(offsets, tokens), None, None, torch.float32)
    return (one, two), tuple(sides), args


@pytest.mark.parametrize("a", SPECS)
@pytest.mark.parametrize("b", ["mxfp8", "fp8_e4m3", "nvfp4", "nvfp4;rows", TURNED, "bf16"])
def test_products(a: str, b: str) -> None:
    """Against the loop, in FP32: nothing but the order of FP32 sums may differ."""
    rows, sides, args = operands(a, b)
    bias, into = torch.randn(4, 24), torch.randn(args.tokens, 24)
    for extra in ((None, None), (bias, None), (bias, into)):
        own = replace(args, bias=extra[0], accumulate_into=extra[1])
        got = group_product.product_by_group(choose([]), *rows, own)
        want = grouped.grouped_gemm(*rows, own)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-4)
    got = group_product.product_by_group(choose([]), *sides, args)
    torch.testing.assert_close(got, grouped.grouped_gemm(*sides, args), rtol=1e-6, atol=1e-4)


#: RMS of rounding to BF16, relative to the RMS of what is rounded.
BF16_RMS = 1.7e-3
WITH_FACTORS = ["fp8_e4m3", "nvfp4", "nvfp4_16x16", "mxfp8", "bf16"]


@pytest.mark.parametrize("a", WITH_FACTORS)
@pytest.mark.parametrize("b", WITH_FACTORS)
def test_products_whose_factors_go_into_the_tokens(a: str, b: str) -> None:
    """The way of CUDA, on a CPU: against the loop, at most one operand's rounding more."""
    shapes = []

    def product(one, two, given):
        assert not two.is_list and not (two.is_stack and one.is_padded)
        assert given.out_dtype == torch.bfloat16 or not one.by_group
        shapes.append((one.by_group, two.by_group))
        run = grouped._rows_cuda if two.is_stack else grouped._tokens_cuda
        return run(one, two, given)

    taking = replace(backend_of(product), takes_group_factors=True)
    rows, sides, args = operands(a, b)
    kept = [buffer.clone() for one in (*rows, *sides) for buffer in one.buffers]
    bias = (torch.randn(4, 24) * 30).bfloat16()
    for pair, more in ((rows, None), (rows, bias), (sides, None)):
        given = replace(args, bias=more)
        wanted = grouped.grouped_gemm(*pair, given).double()
        own = replace(given, out_dtype=torch.bfloat16)
        if pair is sides and a == b == "bf16":
            own = replace(own, padded=None)
        got = group_product.product_by_group(lambda *_: taking, *pair, own)
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        ends = [0, *args.offsets.tolist()]
        spans = list(itertools.pairwise(ends))
        cut = [slice(*span) for span in spans] if pair is rows else list(range(4))
        errors = []
        for part in cut:  # groups differ by 3^4 in size
            want, made = wanted[part], got[part].double()
            if not want.any():
                assert not made.any()
                continue
            errors.append(float((made - want).square().mean() / want.square().mean()))
        # One factor rounds all codes of a group alike: its error lies around the mean of many.
        assert max(errors) <= 2 * (2 * BF16_RMS) ** 2
        assert sum(errors) / len(errors) <= 2 * (1.3 * BF16_RMS) ** 2
        if pair is rows:
            assert not got[ends[-1] :].any()
    now = [buffer for one in (*rows, *sides) for buffer in one.buffers]
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(kept, now, strict=True))
    by_group = rows[0].by_group, False
    assert shapes == [by_group, by_group, (sides[0].by_group, sides[1].by_group)]


def test_the_factor_of_a_group_follows_an_fp32_product() -> None:
    """Rounded once, after it; and an ordinary operand is multiplied as ever."""
    x, sizes = tokens_of((4, 3), 0), (4, 3)
    spec = PlaneSpec.parse("fp8_e4m3")
    (made, _) = both(x, sizes, spec, None)
    w = torch.randn(2, 8, COLS).bfloat16()
    a = GroupedOperand(made, spec, 7, COLS, by_group=True)
    b = GroupedOperand([w], PlaneSpec.parse("bf16"), 8, COLS, True)
    args = GroupedArgs(cases.ends(sizes), 7, None, None, None, torch.bfloat16)
    asked: list = []
    got = group_product.product_by_group(choose(asked), a, b, args)
    # Whether the result's own product takes factors, and then the one that is taken.
    assert asked == [(torch.bfloat16, True), (torch.float32, True)]
    for g, (begin, end) in enumerate(cases.bounds(sizes)):
        own = Operand([made[0][begin:end], made[1][g]], spec, end - begin, COLS)
        want = exact.exact_gemm(
            own,
            Operand([w[g]], PlaneSpec.parse("bf16"), 8, COLS),
            GemmArgs(None, None, torch.bfloat16),
        )
        assert torch.equal(got[begin:end], want)
    mx = PlaneSpec.parse("mxfp8")
    rows = torch.ops.hybridq.encode(x, "mxfp8", "")
    asked.clear()
    listed = GroupedOperand([w[0], w[1]], PlaneSpec.parse("bf16"), 8, COLS, True, is_list=True)
    group_product.product_by_group(choose(asked), GroupedOperand(rows, mx, 7, COLS), listed, args)
    assert asked == [(torch.bfloat16, True)]


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_read_on_the_host(name: str) -> None:
    """On CUDA tensors that have no values, under every spec and source."""
    spec = PlaneSpec.parse(name)
    with FakeTensorMode(), Indexing():
        x = torch.empty(300, COLS, dtype=torch.bfloat16, device="cuda")
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        for source in ("original", "rowwise_dequantized"):
            made = group_device.encode_by_group(
                x, offsets, spec, spec, EncodeRequest(name, name, col_source=source)
            )
            wanted = [
                shape
                for is_col in (False, True)
                for shape, _ in group_loop.ragged_shapes(spec, 300, COLS, 3, is_col, True)
            ]
            assert [tuple(one.shape) for one in made] == wanted
            assert all(one.device.type == "cuda" for one in made)
        assert group_device.sum_by_group(x, offsets).shape == (3, COLS)
        split = len(spec.buffers(1, 1))
        padded = torch.empty(4, dtype=torch.int32, device="cuda")
        rows = capacity(300, 3) if pads_rows(spec) else 300
        a = GroupedOperand(
            made[:split], spec, rows, COLS, is_padded=pads_rows(spec),
            by_group=group_loop.is_by_group(spec, False),
        )  # fmt: skip
        weights = [torch.empty(24, COLS, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        b = GroupedOperand(weights, PlaneSpec.parse("bf16"), 24, COLS, True, is_list=True)
        bias = torch.empty(3, 24, device="cuda")
        args = GroupedArgs(offsets, 300, padded, bias, None, torch.bfloat16)

        def choose(dtype, is_alone):
            def product(a, b, args):
                return b.buffers[0].new_empty((args.tokens, b.rows), dtype=dtype)

            return backend_of(product)

        y = group_product.product_by_group(choose, a, b, args)
        assert y.shape == (300, 24) and y.dtype == torch.bfloat16 and y.device.type == "cuda"


def test_blocks_that_do_not_divide_128() -> None:
    """A shared plane is decoded before it is cut; by group there is an error."""
    spec = PlaneSpec.parse("e4m3/1x48/fp32/amax/float8")
    x, y = tokens_of((50, 90), 3), torch.randn(143, 9).bfloat16()
    offsets = cases.ends((50, 90))
    planes = [torch.ops.hybridq.encode(pad_tokens(one, offsets), "", spec.text) for one in (x, y)]
    size = capacity(143, 2)
    got = torch.ops.hybridq.grouped_gemm(
        planes[0], spec.text, [COLS, size], planes[1], spec.text, [9, size], offsets, 143,
        is_stack=False, a_padded=True, b_padded=True, out_dtype=torch.float32,
    )  # fmt: skip
    first, second = (
        torch.ops.hybridq.decode(own, spec.text, rows, size, torch.float32).double()
        for own, rows in zip(planes, (COLS, 9), strict=True)
    )
    for g, (begin, end) in enumerate([(0, 50), (128, 218)]):
        want = first[:, begin:end] @ second[:, begin:end].t()
        torch.testing.assert_close(got[g].double(), want, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="must divide the 128 tokens"):
        torch.ops.hybridq.encode_ragged(x, offsets, "", spec.text, by_group=True)


def test_the_largest_of_a_group_is_not_that_of_those_before_it() -> None:
    x = torch.arange(6.0, 0.0, -1.0).view(6, 1).expand(6, 4).contiguous()
    offsets = torch.tensor([2, 3, 6], dtype=torch.int32)
    for largest in (group_device.largest_by_group, group_loop.largest_loop):
        assert largest(x, offsets).flatten().tolist() == [6.0, 4.0, 3.0]


@pytest.mark.parametrize("row", ["nvfp4;sr", "fp8_e4m3", "nvfp4;rows;sr", "mxfp8;sr", TURNED])
@pytest.mark.parametrize("col", ["nvfp4", "mxfp8", FP8_TURNED])
@pytest.mark.parametrize("sizes", [(), (3, 0, 130)], ids=str)
def test_a_device_takes_a_seed_for_each_group(monkeypatch, row, col, sizes) -> None:
    """Whether or not a plane depends on its group, and where there are no groups."""
    x, offsets = tokens_of(sizes, 4), torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
    call = (x, offsets, row, col, None, None, torch.arange(len(sizes)))
    want = torch.ops.hybridq.encode_ragged(*call, by_group=True)
    monkeypatch.setattr(encode_ragged, "is_host", lambda kind: False)
    got = torch.ops.hybridq.encode_ragged(*call, by_group=True)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    if not sizes or ";sr" not in row:
        for mine, theirs in zip(got[2:], want[2:], strict=True):
            kernel_cases.same_values(mine, theirs, f"{row}, {col}")
