"""GEMMs on CUDA read nothing on the host: run on fake CUDA tensors, where any reading raises.

No GPU is needed: a FakeTensor knows shapes, dtypes and a device, and raises
`DataDependentOutputException` as soon as a value is asked for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fake_indexing import Indexing
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.kernels import described
from hybridq.kernels import folded_backend as backend_fold
from hybridq.kernels import reference_backend as backend_reference
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.choice.arguments import GemmArgs, GroupedArgs, GroupedOperand, Operand
from hybridq.kernels.choice.registry import forget_choices
from hybridq.kernels.decoded import decoded_gemm as exact
from hybridq.kernels.decoded import decoded_grouped_gemm as grouped
from hybridq.kernels.decoded import decoded_sides, factored_gemm
from hybridq.kernels.operators import encode_ragged as ops_ragged
from hybridq.kernels.ragged import padded_layout as ragged
from hybridq.kernels.scaled_mm import backend as backend_native
from hybridq.kernels.scaled_mm import grouped as native_grouped
from hybridq.kernels.scaled_mm import operand_layout as native_layout
from hybridq.kernels.scaled_mm import operand_views as native_views

HOPPER, BLACKWELL = described("sm_90"), described("sm_100")
SPECS = ["fp8_e4m3", "fp8_e5m2", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp8_32x32"]
SPECS += ["mxfp4", "mxfp6_e3m2", "nvfp4", "nvfp4_16x16", "nvfp4;rows", "bf16"]
SPECS += ["e4m3/1x96/fp32/amax/float8_block", "e4m3/1x32/fp32/amax/float8_block"]
TURNED = PlaneSpec(format("nvfp4"), False, DEFAULT_SIGNS).text


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Fake memory, torch's product as a shape, and the plain kernels in place of compiled ones."""
    monkeypatch.setattr(native_layout, "_ALIGNMENT", 1)
    monkeypatch.setattr(torch._subclasses.FakeTensor, "data_ptr", lambda self: 0, raising=False)

    def scaled_mm(a, b, *_, output_dtype, **__):
        return a.new_empty((a.shape[0], b.shape[1]), dtype=output_dtype)

    def older(a, b, *_, out_dtype, **__):
        return scaled_mm(a, b, output_dtype=out_dtype)

    monkeypatch.setattr(backend_native, "scaled_mm", scaled_mm)
    monkeypatch.setattr(backend_native, "older_scaled_mm", older)
    monkeypatch.setattr(native_views, "_wider", native_views._wider.__wrapped__)  # not for fakes
    for module in (backend_fold, native_views, decoded_sides, factored_gemm):
        monkeypatch.setattr(module, "select", lambda call: backend_reference.REFERENCE)
    monkeypatch.setattr(factored_gemm, "is_current", lambda _: True)
    forget_choices()
    with FakeTensorMode(), Indexing():
        yield
    forget_choices()  # those of kernels that stand in


def operand(rows: int, cols: int, text: str) -> Operand:
    """A plane on a GPU that does not exist."""
    spec = PlaneSpec.parse(text)
    buffers = [
        torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
        for buffer in spec.buffers(rows, cols)
    ]
    return Operand(buffers, spec, rows, cols)


def test_reading_is_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        bool(torch.ones(1, device="cuda").any())


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "a,b", [*itertools.product(SPECS, SPECS), (TURNED, TURNED), (TURNED, "mxfp8")]
)
def test_products_of_torch(a: str, b: str) -> None:
    bias = torch.empty(40, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        for args in (GemmArgs(None, None, dtype), GemmArgs(bias, None, dtype)):
            y = exact.exact_gemm(operand(24, 96, a), operand(40, 96, b), args)
            assert y.shape == (24, 40) and y.dtype == dtype and y.device.type == "cuda"


@pytest.mark.parametrize(
    "precision,dtype,text,wide",
    [
        ("auto", torch.bfloat16, "mxfp8", False),
        ("exact", torch.bfloat16, "mxfp8", True),
        ("auto", torch.bfloat16, "nvfp4", True),
        ("auto", torch.float32, "mxfp8", True),
        ("auto", torch.float16, "mxfp8", True),
    ],
)
def test_an_fp32_result_only_where_it_is_needed(precision, dtype, text, wide, monkeypatch) -> None:
    """A factor, another dtype, or `exact` where cuBLAS may add parts of the sum in BF16."""
    asked = []
    mm = torch.mm

    def spy(a, b, **options):
        asked.append(options.get("out_dtype") == torch.float32)
        return mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", spy)
    args = GemmArgs(None, None, dtype, precision)
    exact.exact_gemm(operand(24, 96, text), operand(40, 96, "mxfp8"), args)
    assert asked == [wide]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL], ids=str)
@pytest.mark.parametrize("a,b", list(itertools.product(SPECS, SPECS)))
def test_scaled_products(a: str, b: str, chip) -> None:
    left, right = operand(23, 90, a), operand(41, 90, b)
    kind, _ = backend_native.native_kind(left.spec, right.spec, chip, 90)
    into = torch.empty(23, 41, device="cuda")
    for args in (GemmArgs(None, None, torch.bfloat16), GemmArgs(None, into, torch.float32)):
        if kind is not None:
            y = backend_native.multiply(left, right, args, kind)
            assert y.shape == (23, 41) and y.dtype == args.out_dtype


@pytest.mark.parametrize(
    "a,b", [("mxfp8", "mxfp8"), ("mxfp4", "mxfp8_32x32"), ("fp8_e4m3", "mxfp8")]
)
def test_folds(a: str, b: str) -> None:
    args = GemmArgs(None, None, torch.bfloat16, "fast", HOPPER)
    y = backend_fold.FOLD.ops["gemm"](operand(23, 90, a), operand(41, 90, b), args)
    assert y.shape == (23, 41)


@pytest.mark.parametrize(
    "a,b",
    [
        *(("mxfp8", "mxfp8"), ("bf16", "mxfp4"), ("fp8_1x128", "fp8_128x128"), ("bf16", "bf16")),
        *(("nvfp4", "nvfp4"), ("bf16", "nvfp4"), ("nvfp4", "fp8_e4m3")),
    ],
)
def test_groups(a: str, b: str) -> None:
    """The grid of nothing depends on the offsets; padding does not either."""
    rows, stack, args = _grouped_rows(a, b)
    assert grouped._rows_cuda(rows, stack, args).shape == (24, 40)
    *sides, args = _grouped_tokens(a, b)
    assert grouped._tokens_cuda(*sides, args).shape == (3, 16, 40)
    rows, *sides = (_by_group(one) for one in (rows, *sides))
    bias = torch.empty(3, 40, dtype=torch.bfloat16, device="cuda")
    args = replace(args, padded=ragged.padded_offsets(args.offsets, 24), bias=bias)
    assert grouped._rows_cuda(rows, stack, args).shape == (24, 40)
    args = replace(args, bias=None)
    if any(one.is_padded for one in sides):
        assert grouped._tokens_cuda(*sides, args).shape == (3, 16, 40)


def _by_group(one: GroupedOperand) -> GroupedOperand:
    """The operand with a statistic of each of three groups, if it has one."""
    if not one.spec.needs_amax:
        return one
    buffers = [*one.buffers[:-1], torch.stack([one.buffers[-1]] * 3)]
    return replace(one, buffers=buffers, by_group=True)


def _grouped_rows(a: str, b: str) -> tuple[GroupedOperand, GroupedOperand, GroupedArgs]:
    offsets = torch.empty(3, dtype=torch.int32, device="cuda")
    args = GroupedArgs(offsets, 24, None, None, None, torch.bfloat16)
    left, one = operand(24, 96, a), operand(40, 96, b)
    stack = [torch.stack([buffer] * 3) for buffer in one.buffers]
    rows = GroupedOperand(left.buffers, left.spec, 24, 96)
    return rows, GroupedOperand(stack, one.spec, 40, 96, True), args


def _grouped_tokens(a: str, b: str) -> tuple[GroupedOperand, GroupedOperand, GroupedArgs]:
    offsets = torch.empty(3, dtype=torch.int32, device="cuda")
    size, sides = ragged.capacity(24, 3), []
    for rows, text in ((16, a), (40, b)):
        is_padded = text != "bf16"
        made = operand(rows, size if is_padded else 24, text)
        sides.append(
            GroupedOperand(made.buffers, made.spec, made.rows, made.cols, False, is_padded)
        )
    has_pad = any(side.is_padded for side in sides)
    padded = ragged.padded_offsets(offsets, 24) if has_pad else None
    return *sides, GroupedArgs(offsets, 24, padded, None, None, torch.bfloat16)


@pytest.mark.parametrize(
    "kind,a,b", [("row", *["fp8_e4m3"] * 2), ("mx", "mxfp8", "mxfp4"), ("nvfp4", *["nvfp4"] * 2)]
)
def test_scaled_groups(kind: str, a: str, b: str, monkeypatch) -> None:
    """Scales are moved to where each group's begin without asking where that is."""

    def product(left, right, *_, offs, **__):
        shape = left.shape[:1] if right.dim() == 3 else (offs.shape[0], left.shape[0])
        return left.new_empty((*shape, right.shape[-1]), dtype=torch.bfloat16)

    monkeypatch.setattr(native_grouped, "scaled_grouped_mm", product)
    y = native_grouped.multiply_groups(*_grouped_rows(a, b), kind)
    assert y.shape == (24, 40) and y.device.type == "cuda"
    y = native_grouped.multiply_groups(*_grouped_tokens(a, b), kind)
    assert y.shape == (3, 16, 40)


@pytest.mark.parametrize(
    "row,col", [("mxfp8", "nvfp4;sr;rht=d7e8"), ("fp8_e4m3", "fp8_e4m3"), ("nvfp4", "bf16")]
)
def test_ragged_tokens_are_encoded(row: str, col: str) -> None:
    """Where the groups end is never asked: not for the sizes of the planes, nor to move tokens."""
    x = torch.empty(40, 64, dtype=torch.bfloat16, device="cuda")
    offsets = torch.empty(3, dtype=torch.int32, device="cuda")
    seed = torch.empty(1, dtype=torch.int64, device="cuda")
    for source in ("original", "rowwise_dequantized"):
        request = EncodeRequest(row, col, seed=seed, col_source=source)
        made = ops_ragged._encode_ragged(x, offsets, request)
        assert all(buffer.device.type == "cuda" for buffer in made)
        first = PlaneSpec.parse(row).buffers(40, 64)
        second = PlaneSpec.parse(col).buffers(64, 40 if col == "bf16" else 384)
        assert [tuple(b.shape) for b in made] == [b.shape for b in (*first, *second)]
