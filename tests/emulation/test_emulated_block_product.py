"""The kernel of products with block scales, thread by thread, against sums in double precision.

The emulated matrix unit adds 32 products exactly, so that what is left to differ is FP32: the
sums of 128 and what is added up of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import emulated
from hybridq.formats import PlaneSpec
from hybridq.kernels import folded_backend, folded_groups
from hybridq.kernels.choice import (
    BlockSide,
    GemmArgs,
    GroupedArgs,
    GroupedOperand,
    Operand,
    OpQuery,
)
from hybridq.kernels.cuda.block_product import multiply_blocks, multiply_pair
from hybridq.kernels.decoded import decoded_grouped_gemm
from hybridq.kernels.inputs import Chip
from hybridq.kernels.ragged import capacity, group_ends, padded_offsets
from hybridq.kernels.scaled_mm import backend as scaled_backend
from hybridq.kernels.scaled_mm import core_sides, laid_down
from hybridq.reference import Folded

MODULE = emulated.load()
pytestmark = pytest.mark.skipif(MODULE is None, reason="make emulation builds the kernels")

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Tokens of each group, and how many belong to none: edges of tiles, groups without tokens.
SPLITS = [((130, 0, 1, 128), 5), ((3,), 0), ((256, 127), 0)]


@pytest.fixture(params=[0, 7])
def order(request) -> None:
    """Copies are made when they are begun, or as late as can be, and warps take turns."""
    MODULE.set_seed(request.param)
    yield
    MODULE.set_seed(0)


def _side(rows: int, k: int, seed: int, element: str = "e4m3", matrices: int = 1) -> BlockSide:
    """Random codes with scales of powers of two, NaN between the matrices' rows."""
    generator = torch.Generator().manual_seed(seed)
    pitch = -(-rows // 4) * 4
    values = torch.randn(matrices, pitch, k, generator=generator)
    codes = values.to(CODES[element]).view(torch.uint8)
    codes[:, rows:] = 0x7F
    blocks = -(-k // 128)
    scale = torch.exp2(
        torch.randint(-3, 4, (blocks, matrices * pitch), generator=generator).float()
    )
    return BlockSide(codes.flatten(0, 1), scale.contiguous(), element, rows)


def _values(side: BlockSide) -> torch.Tensor:
    """What the codes mean, in double precision: `[rows, k]`."""
    codes = side.codes.view(CODES[side.element]).double()
    if side.per == "group":
        return codes
    scale = side.scale.double()
    if side.per == "square":
        scale = scale.repeat_interleave(128, 0).t()
    return codes * scale.t().repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]


def _assert_near(got: torch.Tensor, want: torch.Tensor, sums: torch.Tensor) -> None:
    """Within the FP32 error of sums of so large values; NaN stays outside."""
    bound = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[got.dtype]
    assert torch.isfinite(got).all()
    far = (got.double() - want).abs() - bound * sums - 1e-30
    assert far.max() <= 0, f"off by {far.max()} beyond the bound"


def _args(ends: Sequence[int], tokens: int, dtype: torch.dtype, **more) -> GroupedArgs:
    offsets = torch.tensor(ends, dtype=torch.int32)
    return GroupedArgs(
        offsets=offsets,
        tokens=tokens,
        bias=more.get("bias"),
        accumulate_into=more.get("into"),
        out_dtype=dtype,
        padded=more.get("padded"),
    )


def _ends(sizes: Sequence[int]) -> list[int]:
    return torch.tensor(sizes).cumsum(0).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("rows", "k"), [(132, 400), (126, 128), (256, 16)])
def test_rows_of_tokens(order, split, rows, k, dtype) -> None:
    """By a matrix of their group; rows of none are zeros."""
    sizes, rest = split
    tokens, groups = sum(sizes) + rest, len(sizes)
    a, b = _side(tokens, k, 1), _side(rows, k, 2, "e5m2", groups)
    kernels = emulated.EmulatedKernels(MODULE)
    got = multiply_blocks(kernels, a, b, _args(_ends(sizes), tokens, dtype), True)
    left, right = _values(a), _values(b).unflatten(0, (groups, -1))[:, :rows]
    for group, (begin, end) in enumerate(pairwise([0, *_ends(sizes)])):
        want = left[begin:end] @ right[group].t()
        sums = left[begin:end].abs() @ right[group].abs().t()
        if begin < end:
            _assert_near(got[begin:end], want, sums)
    assert got.shape == (tokens, rows) and not got[tokens - rest :].any()


@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("sizes", [(130, 0, 1, 128), (300,)], ids=str)
@pytest.mark.parametrize(("m", "n"), [(130, 64), (20, 301)])
def test_over_tokens(order, sizes, m, n, elements) -> None:
    """Contracted over the tokens of each group, each padded to 128; groups of none give zeros."""
    tokens, groups = sum(sizes), len(sizes)
    ends = group_ends(torch.tensor(_ends(sizes), dtype=torch.int32), tokens)
    padded = padded_offsets(ends, tokens)
    columns = capacity(tokens, groups)
    a, b = _side(m, columns, 3, elements[0]), _side(n, columns, 4, elements[1])
    for side in (a, b):  # zeros between the groups, as encoded
        for group, begin in enumerate(padded[:-1].tolist()):
            side.codes[:, begin + sizes[group] : padded[group + 1]] = 0
    kernels = emulated.EmulatedKernels(MODULE)
    args = _args(ends.tolist(), tokens, torch.float32, padded=padded.to(torch.int32))
    got = multiply_blocks(kernels, a, b, args, False)
    left, right = _values(a)[:m], _values(b)[:n]
    assert got.shape == (groups, m, n)
    for group, size in enumerate(sizes):
        own = slice(int(padded[group]), int(padded[group]) + size)
        want = left[:, own] @ right[:, own].t()
        _assert_near(got[group], want, left[:, own].abs() @ right[:, own].abs().t())


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_squares(order, blocks) -> None:
    """One scale for 128x128 of b is that of its rows, whatever its strides."""
    sizes, k = (70, 200), 128 * blocks
    a, b = _side(270, k, 5), _side(256, k, 6, matrices=2)
    squares = torch.exp2(torch.arange(4 * blocks).reshape(4, blocks).float() % 5 - 2)
    wide = squares.repeat_interleave(128, 0).t().contiguous()
    kernels, args = emulated.EmulatedKernels(MODULE), _args(_ends(sizes), 270, torch.float32)
    want = multiply_blocks(kernels, a, b._replace(scale=wide), args, True)
    for scale in (squares, squares.t().contiguous().t()):
        got = multiply_blocks(kernels, a, b._replace(scale=scale, per="square"), args, True)
        assert torch.equal(got, want)  # powers of two: the order of factors rounds nothing


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_stack", [False, True])
def test_one_scale_for_each_group(order, count, is_stack) -> None:
    """Beside one for each group of the other side: as if all rows had it."""
    sizes, tokens, padded = (129, 0, 40), 169, torch.tensor([0, 256, 256, 384], dtype=torch.int32)
    rows, k = (tokens, 144) if is_stack else (70, 384)
    a, b = _side(rows, k, 11), _side(68, k, 12, matrices=3 if is_stack else 1)
    if not is_stack:
        for side in (a, b):
            side.codes[:, 129:256] = side.codes[:, 296:] = 0
    scales = [torch.tensor([2.0, -1.0, 0.5][:count]) * factor for factor in (1.0, 0.75)]
    kernels = emulated.EmulatedKernels(MODULE)
    args = _args(_ends(sizes), tokens, torch.float32, padded=padded)
    one = [side._replace(scale=s, per="group") for side, s in zip((a, b), scales, strict=True)]
    got = multiply_blocks(kernels, *one, args, is_stack)
    left, right = _values(one[0]), _values(one[1]).unflatten(0, (3 if is_stack else 1, -1))
    for group, (begin, end) in enumerate(pairwise([0, *_ends(sizes)])):
        x, y = left[begin:end], right[group if is_stack else 0][:68]
        if not is_stack:
            own = slice(int(padded[group]), int(padded[group]) + end - begin)
            x, y = left[:70, own], y[:, own]
        factor = scales[0][group % count] * scales[1][group % count]
        found = got[begin:end] if is_stack else got[group]
        if begin < end:
            sums = x.abs() @ y.abs().t() * abs(factor)
            _assert_near(found, x @ y.t() * factor, sums)
        else:
            assert not found.any()


@pytest.mark.parametrize("is_square", [False, True])
def test_two_matrices(order, is_square) -> None:
    """Are one group, whose ends nobody has to say."""
    a, b = _side(200, 256, 13), _side(128, 256, 14)
    if is_square:
        b = b._replace(scale=torch.tensor([[0.5, 4.0]]), per="square")
    bias, into = torch.randn(128), torch.randn(200, 128)
    kernels = emulated.EmulatedKernels(MODULE)
    made = multiply_pair(kernels, a, b, GemmArgs(bias, into, torch.float32))
    want = _values(a) @ _values(b).t() + bias + into
    _assert_near(made, want, _values(a).abs() @ _values(b).abs().t() + bias.abs() + into.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [64, 65])
def test_bias_and_what_is_added(order, dtype, bias_dtype, columns) -> None:
    """In FP32 before the one rounding; a group without tokens gets no bias."""
    sizes = (40, 0, 30)
    a, b = _side(75, 256, 7), _side(columns, 256, 8, matrices=3)
    bias = torch.randn(3, columns).to(bias_dtype)
    into = torch.randn(75, 2 * columns).to(dtype)[:, ::2]
    kernels = emulated.EmulatedKernels(MODULE)
    plain = multiply_blocks(kernels, a, b, _args(_ends(sizes), 75, torch.float32), True)
    more = {"bias": bias, "into": into}
    got = multiply_blocks(kernels, a, b, _args(_ends(sizes), 75, dtype, **more), True)
    own = torch.tensor([0] * 40 + [2] * 30)
    plain[:70] += bias[own].float()
    assert torch.equal(got, (plain + into.float()).to(dtype))


def test_wrong_group_ends_do_not_lead_out(order) -> None:
    """Ends that are negative, too large or not sorted write zeros or products, and nowhere else."""
    a, b = _side(50, 128, 9), _side(32, 128, 10, matrices=3)
    kernels = emulated.EmulatedKernels(MODULE)
    got = multiply_blocks(kernels, a, b, _args([-5, 400, 20], 50, torch.float32), True)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": 1}, "must begin at multiples of 16 bytes"),
        ({"element": "e3m4"}, "must be e4m3 or e5m2, got e3m4"),
        ({"pitch": 4}, "must be those of 40 rows, got 4"),
        ({"k": 0}, "sizes must be 1 to"),
    ],
    ids=str,
)
def test_wrong_arguments_are_errors(change, message) -> None:
    """Each names the rule and what was given."""
    side = {"codes": 0, "pitch": 40, "element": "e4m3", "k": 128, **change}
    codes, scale = torch.zeros(40 * 128 + 16, dtype=torch.uint8), torch.ones(1, 40)
    given = (codes.data_ptr() + side["codes"], 40, scale.data_ptr(), side["pitch"], side["element"])
    sizes, out = (40, 40, 40, 40, side["k"]), torch.zeros(40, 40)
    result = (out.data_ptr(), "float32", 40, 0)
    with pytest.raises(ValueError, match=message):
        MODULE.multiply_blocks(
            given, given, *[None] * 2, (0, 0, 1), sizes, *[None] * 2, result, 1, 0
        )


def _operands(is_stack: bool, b_name: str) -> tuple[GroupedOperand, GroupedOperand, GroupedArgs]:
    """FP8 tokens with a scale of each group, and experts, or tokens to contract with."""
    sizes, rest = (40, 0, 150), 6
    tokens, offsets = sum(sizes) + rest, torch.tensor(_ends(sizes), dtype=torch.int32)
    padded, made = padded_offsets(group_ends(offsets, tokens), tokens), []
    columns = capacity(tokens, 3)
    generator = torch.Generator().manual_seed(1)
    for cols in (144, 72):
        x = torch.randn(tokens, cols, generator=generator) * 3
        buffers = torch.ops.hybridq.encode_ragged(
            x, offsets, "fp8_e4m3", "fp8_e4m3", None, None, None, by_group=True
        )
        spec = PlaneSpec.parse("fp8_e4m3")
        if is_stack:
            made.append(GroupedOperand(buffers[:2], spec, tokens, cols, by_group=True))
        else:
            made.append(
                GroupedOperand(buffers[2:], spec, cols, columns, False, True, by_group=True)
            )
    args = GroupedArgs(offsets, tokens, padded, None, None, torch.float32)
    if not is_stack:
        return made[0], made[1], args
    spec = PlaneSpec.parse(b_name)
    w = [torch.randn(68, 144, generator=generator) for _ in range(3)]
    planes = [torch.ops.hybridq.encode(one, b_name, "", None, None, None) for one in w]
    stack = [torch.stack([plane[i] for plane in planes]) for i in range(len(planes[0]))]
    return made[0], GroupedOperand(stack, spec, 68, 144, True), args


@pytest.mark.parametrize("by_core", [True, False])
@pytest.mark.parametrize(
    ("is_stack", "b_name"), [(True, "fp8_e4m3"), (True, "fp8_1x128"), (False, "")]
)
def test_groups_with_a_scale_each(monkeypatch, by_core, is_stack, b_name) -> None:
    """Enter the product where the core makes it, and are those of rows or columns elsewhere."""
    kernels, seen = emulated.EmulatedKernels(MODULE), []

    def product(*call: object) -> torch.Tensor:
        seen.append(call[:2])
        return multiply_blocks(kernels, *call)

    monkeypatch.setattr(folded_groups, "_by_core", lambda chip: product if by_core else None)
    monkeypatch.setattr(folded_groups, "grouped_block_gemm", product)
    a, b, args = _operands(is_stack, b_name)
    got = folded_groups.multiply_groups(a, b, args, None)
    want = decoded_grouped_gemm.grouped_gemm(a, b, args)
    scale = float(want.abs().max())
    assert float((got - want).abs().max()) <= 2.0**-18 * scale
    has_groups = by_core and b_name != "fp8_1x128"
    assert [side.per for side in seen[0]] == (["group"] * 2 if has_groups else ["row"] * 2)


def fold(kernels: emulated.EmulatedKernels, one: Operand, height: int) -> Folded:
    """Fold a plane as a chip does: the core takes scales of a group of columns side by side."""
    with kernels.launch(torch.device("cpu")):
        made = kernels.fold(one.buffers, one.spec, one.rows, one.cols, height)
    return replace(made, codes=made.codes.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("precision", ["auto", "fast"])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_dense_products_of_folded_planes(monkeypatch, precision, is_planned, adds) -> None:
    """Below a size, and of whatever is added to: by the core, with all that follows the product."""
    kernels = emulated.EmulatedKernels(MODULE)
    hopper = Chip("cuda", (9, 0), (13, 0), (2, 11))
    monkeypatch.setattr(folded_backend, "core_product", lambda op, chip: kernels.multiply_pair)
    monkeypatch.setattr(folded_backend, "fold", lambda one, height: fold(kernels, one, height))
    monkeypatch.setattr(scaled_backend, "_scaled_mm", None)  # nothing is left to cuBLASLt
    if adds:
        monkeypatch.setattr(folded_backend, "_LARGE", 0)
    spec, (m, n, k) = PlaneSpec.parse("mxfp8"), (64, 128, 512)
    operands, values = [], []
    for rows, seed in ((m, 1), (n, 2)):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
        buffers = torch.ops.hybridq.encode(x, spec.text, "", None, None, None)
        operands.append(Operand(buffers, spec, rows, k))
        values.append(torch.ops.hybridq.decode(buffers, spec.text, rows, k, torch.float32).double())
    bias, into = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16() if adds else None
    args = GemmArgs(bias, into, torch.bfloat16, precision, hopper)
    if is_planned and not adds:
        query = OpQuery("gemm", "cuda", torch.bfloat16, spec, spec, precision, (m, n, k), hopper)
        heights = (1, 128 if precision == "fast" else 1)
        folders = [
            kernels.folder(spec, one.rows, k, height)
            for one, height in zip(operands, heights, strict=True)
        ]
        monkeypatch.setattr(folded_backend, "is_current", lambda _: True)
        monkeypatch.setattr(folded_backend, "_gemm", None)  # nothing is left to it
        with kernels.launch(torch.device("cpu")):
            got = folded_backend._Planned(query, folders)(*operands, args).double()
    else:
        got = folded_backend.FOLD.ops["gemm"](*operands, args).double()
    want = values[0] @ values[1].t() + bias + (0 if into is None else into)
    # One rounding to BF16, and what the fold rounds: 2^-17.8 of a block's amax for each code.
    sums = values[0].abs() @ values[1].abs().t()
    assert ((got - want).abs() <= 2.0**-8 * want.abs() + 2.0**-15 * sums + 2.0**-12).all()


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(
    "a_name,b_name,adds",
    [
        ("fp8_e4m3", "fp8_e5m2", False),
        ("fp8_1x128", "fp8_128x128", False),
        ("fp8_1x128_e5m2", "fp8_1x128", False),
        ("fp8_1x128", "fp8_1x128", True),
    ],
)
def test_small_products_of_fp8_planes(monkeypatch, a_name, b_name, adds, is_planned) -> None:
    """By the core, without cuBLASLt; and what rows of any size are added to."""
    kernels, calls = emulated.EmulatedKernels(MODULE), []

    def run(*given: object) -> torch.Tensor:
        calls.append(given)
        return kernels.multiply_pair(*given)

    hopper = Chip("cuda", (9, 0), (13, 0), (2, 11))
    for module in (core_sides, scaled_backend):
        monkeypatch.setattr(module, "core_product", lambda op, chip: run)
    monkeypatch.setattr(scaled_backend, "multiply", None)
    monkeypatch.setattr(scaled_backend, "_scaled_mm", None)
    if adds:
        monkeypatch.setattr(core_sides, "_SMALL", 0)
    (m, n, k), operands, values = (68, 128, 272), [], []
    for name, rows, seed in ((a_name, m, 1), (b_name, n, 2)):
        spec = laid_down(PlaneSpec.parse(name))
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
        buffers = torch.ops.hybridq.encode(x, spec.text, "", x.abs().max().view(1), None, None)
        codes, scale = buffers[:2]
        if spec.format.block == (1, 128):  # as a GPU writes them
            scale = scale.t().contiguous().t()
        operands.append(Operand([codes, scale], spec, rows, k))
        values.append(torch.ops.hybridq.decode(buffers, spec.text, rows, k, torch.float32).double())
    bias, into = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16() if adds else None
    args = GemmArgs(bias, into, torch.bfloat16, "auto", hopper)
    specs = [one.spec for one in operands]
    query = OpQuery("gemm", "cuda", torch.bfloat16, *specs, "auto", (m, n, k), hopper)
    if is_planned:
        got = scaled_backend.NATIVE.planner(query)(*operands, args)
    else:
        got = scaled_backend.NATIVE.ops["gemm"](*operands, args)
    want = values[0] @ values[1].t() + bias + (0 if into is None else into)
    sums = values[0].abs() @ values[1].abs().t()
    assert len(calls) == 1
    assert ((got - want).abs() <= 2.0**-8 * want.abs() + 2.0**-15 * sums + 2.0**-12).all()
    by = "cuBLASLt" if adds else "the core's kernel"
    assert by in scaled_backend.NATIVE.notes(query)[0]


def test_products_that_a_host_does_not_wait_for_are_cublaslts(monkeypatch) -> None:
    hopper = Chip("cuda", (9, 0), (13, 0), (2, 11))
    assert "no such product" in str(core_sides.core_reason(hopper, "tensor", (16, 256, 256)))
    monkeypatch.setattr(core_sides, "core_product", lambda op, chip: print)
    for sizes in ((16, 256, 256), (2048, 2048, 2048), (8192, 1024, 1024), (4, 2048, 2048)):
        assert core_sides.core_reason(hopper, "tensor", sizes) is None
        assert core_sides.core_reason(hopper, "block", sizes) is None
        assert core_sides.core_reason(hopper, "row", sizes) is not None
    for sizes in ((4096, 4096, 4096), (16, 4096, 4096), (0, 16, 16)):  # large, long, nothing
        assert core_sides.core_reason(hopper, "tensor", sizes) is not None
