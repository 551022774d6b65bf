"""Torch's scaled grouped products on a CPU: choice by described chips, every argument's layout.

`scaled_grouped_oracle` stands in for torch's product. It computes in FP64 and rounds once, so what
is left is half a unit of the BF16 result, and FP32's rounding of a scale.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import hybridq
import scaled_grouped_oracle as oracle
from gemm_cases import decoded, in_own_domain, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names
from hybridq.formats.base import Format
from hybridq.formats.elements import E4M3, FP32
from hybridq.kernels import Chip, OpQuery, described
from hybridq.kernels.choice.arguments import GroupedArgs, GroupedOperand
from hybridq.kernels.decoded import decoded_grouped_gemm as grouped
from hybridq.kernels.ragged.padded_layout import padded_offsets
from hybridq.kernels.scaled_mm import backend as backend_native
from hybridq.kernels.scaled_mm import chip_gates as native_gates
from hybridq.kernels.scaled_mm import grouped as native_grouped
from ragged_cases import SIZES, bounds, ends, padded, places

HOPPER, BLACKWELL = described("sm_90"), described("sm_100")
ROW = PlaneSpec(Format(E4M3, (1, 4096), FP32, "amax", "float8"))
TURNED = {name: PlaneSpec(format(name), False, DEFAULT_SIGNS) for name in ("mxfp8", "nvfp4")}
KINDS = {
    "row": ["fp8_e4m3", ROW],
    "mx": ["mxfp8", "mxfp8_32x32", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "fp8_1x128", "fp8_128x128"],
    "nvfp4": ["nvfp4", "nvfp4_16x16", "nvfp4;bound=256;4o6=mae"],
}
PAIRS = [(kind, a, b) for kind, specs in KINDS.items() for a, b in itertools.product(specs, specs)]
#: Fewer tokens than groups, an empty group first and last, more than a tile of rows.
SPLITS = [*SIZES[:3], ((0, 1, 0, 0, 0), 1), ((40, 300, 0), 2)]


@pytest.fixture(autouse=True)
def _oracle(monkeypatch) -> None:
    monkeypatch.setattr(native_grouped, "scaled_grouped_mm", oracle.scaled_grouped_mm)


def spec_of(which: str | PlaneSpec) -> PlaneSpec:
    return PlaneSpec.parse(which) if isinstance(which, str) else which


def values_of(plane) -> torch.Tensor:
    own = decoded(plane) if plane.spec.signs is None else in_own_domain(plane)
    return torch.from_numpy(own)


def hold(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Half a unit of BF16; a code times an FP32 scale, as decoded, is itself rounded to FP32."""
    assert y.dtype == torch.bfloat16 and y.is_contiguous() and y.isfinite().all()
    want, sums = a @ b.t(), a.abs() @ b.abs().t()
    room = 2.0**-8 * want.abs() + 6 * 2.0**-24 * (want.abs() + sums) + 2.0**-126
    assert ((y.double() - want).abs() <= room).all()


@pytest.mark.parametrize("kind,a,b", PAIRS, ids=str)
def test_rows_of_tokens(kind: str, a, b) -> None:
    k, n = 72, 37
    for sizes, rest in SPLITS:
        tokens, groups = sum(sizes) + rest, len(sizes)
        x = make(torch.randn(tokens, k) * torch.logspace(-3, 3, tokens)[:, None], spec_of(a))
        weights = [make(torch.randn(n, k) * 3.0**g, spec_of(b)) for g in range(groups)]
        stack = [torch.stack([w.buffers[name] for w in weights]) for name in weights[0].buffers]
        left = GroupedOperand(x.tensors, x.spec, tokens, k)
        right = GroupedOperand(stack, weights[0].spec, n, k, is_stack=True)
        args = GroupedArgs(ends(sizes), tokens, None, None, None, torch.bfloat16)
        y = native_grouped.multiply_groups(left, right, args, kind)
        assert y.shape == (tokens, n) and not y[tokens - rest :].any()
        for g, (begin, end) in enumerate(bounds(sizes)):
            hold(y[begin:end], values_of(x)[begin:end], values_of(weights[g]))


@pytest.mark.parametrize("kind,a,b", PAIRS, ids=str)
def test_contraction_over_tokens(kind: str, a, b) -> None:
    m, n = 21, 37
    for sizes, rest in SPLITS:
        tokens = sum(sizes) + rest
        sources = torch.randn(tokens, m), torch.randn(tokens, n)
        planes = [
            make(padded(x, sizes), spec_of(one), "columnwise")
            for x, one in zip(sources, (a, b), strict=True)
        ]
        sides = [GroupedOperand(p.tensors, p.spec, *p.matrix, is_padded=True) for p in planes]
        begins = padded_offsets(ends(sizes), tokens)
        args = GroupedArgs(ends(sizes), tokens, begins, None, None, torch.bfloat16)
        y = native_grouped.multiply_groups(*sides, args, kind)
        assert y.shape == (len(sizes), m, n)
        first, second = (values_of(p) for p in planes)
        for g, (size, at) in enumerate(zip(sizes, places(sizes), strict=True)):
            hold(y[g], first[:, at : at + size], second[:, at : at + size])


def test_many_rows_of_tiles() -> None:
    """More than one tile of scales in every direction, M and N beyond 128."""
    sizes, rest = (130, 0, 300), 3
    tokens = sum(sizes) + rest
    for kind, name in (("mx", "mxfp8"), ("nvfp4", "nvfp4")):
        planes = [
            make(padded(torch.randn(tokens, rows), sizes), name, "columnwise")
            for rows in (150, 270)
        ]
        sides = [GroupedOperand(p.tensors, p.spec, *p.matrix, is_padded=True) for p in planes]
        begins = padded_offsets(ends(sizes), tokens)
        args = GroupedArgs(ends(sizes), tokens, begins, None, None, torch.bfloat16)
        y = native_grouped.multiply_groups(*sides, args, kind)
        first, second = (values_of(p) for p in planes)
        for g, at in enumerate(places(sizes)):
            cut = slice(at, at + sizes[g])
            hold(y[g], first[:, cut], second[:, cut])
        x = make(torch.randn(tokens, 300), name)
        weights = [make(torch.randn(270, 300), name) for _ in sizes]
        stack = [torch.stack([w.buffers[key] for w in weights]) for key in weights[0].buffers]
        args = GroupedArgs(ends(sizes), tokens, None, None, None, torch.bfloat16)
        y = native_grouped.multiply_groups(
            GroupedOperand(x.tensors, x.spec, tokens, 300),
            GroupedOperand(stack, x.spec, 270, 300, is_stack=True),
            args,
            kind,
        )
        for g, (begin, end) in enumerate(bounds(sizes)):
            hold(y[begin:end], values_of(x)[begin:end], values_of(weights[g]))


@pytest.mark.parametrize("name", TURNED)
def test_operands_that_are_transformed_alike_stay_so(name: str) -> None:
    """Each group's last 16 tokens are filled with zeros before they are transformed."""
    sizes, kind = (5, 0, 40), "mx" if name == "mxfp8" else name
    planes = [
        make(padded(torch.randn(45, rows), sizes), TURNED[name], "columnwise") for rows in (9, 12)
    ]
    sides = [GroupedOperand(p.tensors, p.spec, *p.matrix, is_padded=True) for p in planes]
    args = GroupedArgs(ends(sizes), 45, padded_offsets(ends(sizes), 45), None, None, torch.bfloat16)
    y = native_grouped.multiply_groups(*sides, args, kind)
    first, second = (values_of(p) for p in planes)
    for g, at in enumerate(places(sizes)):
        cut = slice(at, at + -(-sizes[g] // 16) * 16)
        hold(y[g], first[:, cut], second[:, cut])


def test_wrong_offsets_reach_torch_as_right_ones() -> None:
    x = make(torch.randn(20, 64), "mxfp8")
    weights = [make(torch.randn(16, 64), "mxfp8") for _ in range(3)]
    stack = [torch.stack([w.buffers[key] for w in weights]) for key in weights[0].buffers]
    found = []
    for offsets in ([-3, 12, 99], [0, 12, 20], [12, 4, 20], [12, 12, 20]):
        given = torch.tensor(offsets, dtype=torch.int32)
        args = GroupedArgs(given, 20, None, None, None, torch.bfloat16)
        left = GroupedOperand(x.tensors, x.spec, 20, 64)
        right = GroupedOperand(stack, x.spec, 16, 64, is_stack=True)
        found.append(native_grouped.multiply_groups(left, right, args, "mx"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8, 32), (5, 0, 32), (5, 8, 0)])
def test_empty_operands(kind: str, shape: tuple[int, int, int]) -> None:
    tokens, n, k = shape
    x, w = make(torch.randn(tokens, k), spec_of(KINDS[kind][0])), torch.randn(n, k)
    w = make(w, spec_of(KINDS[kind][0]))
    args = GroupedArgs(ends((0, tokens)), tokens, None, None, None, torch.bfloat16)
    y = native_grouped.multiply_groups(
        GroupedOperand(x.tensors, x.spec, tokens, k),
        GroupedOperand([torch.stack([b, b]) for b in w.tensors], w.spec, n, k, is_stack=True),
        args,
        kind,
    )
    assert y.shape == (tokens, n) and not y.any()
    none = GroupedOperand(x.tensors, x.spec, tokens, k)
    stack = GroupedOperand([b.new_empty((0, *b.shape)) for b in w.tensors], w.spec, n, k, True)
    args = GroupedArgs(ends(()), tokens, None, None, None, torch.bfloat16)
    assert not native_grouped.multiply_groups(none, stack, args, kind).any()


def test_the_backend_finds_the_kind_itself(monkeypatch) -> None:
    a, b = (make(torch.randn(6, 32), name) for name in ("fp8_e4m3", "mxfp8"))
    args = GroupedArgs(ends((6,)), 6, None, None, None, torch.bfloat16)
    run = backend_native.NATIVE.ops["grouped_gemm"]
    for chip, plane, other in ((HOPPER, a, b), (BLACKWELL, b, a)):
        monkeypatch.setattr(native_grouped, "chip_of", lambda device, chip=chip: chip)
        left = GroupedOperand(plane.tensors, plane.spec, 6, 32)
        stack = [buffer[None] for buffer in plane.tensors]
        right = GroupedOperand(stack, plane.spec, 6, 32, is_stack=True)
        hold(run(left, right, args), values_of(plane), values_of(plane))
        wrong = GroupedOperand(other.tensors, other.spec, 6, 32)
        with pytest.raises(hybridq.BackendError, match="was chosen but cannot: "):
            run(wrong, right, args)


# ---- choice


def reason(chip, a, b, **options) -> str | None:
    found = hybridq.explain("grouped_gemm", spec_of(a), spec_of(b), device=chip, **options)
    return dict(found.reasons)["native"]


@pytest.mark.parametrize("kind,a,b", PAIRS, ids=str)
def test_the_chip_that_has_a_kind_takes_it(kind: str, a, b) -> None:
    chip, other = (HOPPER, BLACKWELL) if kind == "row" else (BLACKWELL, HOPPER)
    for precision in ("auto", "fast"):
        found = hybridq.explain(
            "grouped_gemm", spec_of(a), spec_of(b), device=chip, precision=precision
        )
        assert found.chosen == "native", str(found)
        assert "scaled grouped product" in str(found) and "1.3e-04" in str(found)
    exact = reason(chip, a, b, precision="exact")
    assert "asks for sums in FP32" in exact
    assert "groups on sm_" in reason(other, a, b) or "has not one scale" in reason(other, a, b)


@pytest.mark.parametrize(
    "chip,a,b,options,text",
    [
        (HOPPER, "fp8_e4m3", "fp8_e4m3", {"dtype": torch.float32}, "rounds to BF16"),
        (HOPPER, "fp8_e4m3", "fp8_e5m2", {}, "takes E4M3, got operand b"),
        (HOPPER, "fp8_e5m2", "fp8_e5m2", {}, "no two E5M2 matrices"),
        (HOPPER, "fp8_e4m3", "bf16", {}, "operand b is not quantized"),
        (HOPPER, "fp8_1x128", "fp8_128x128", {}, "groups on sm_100 only, got cuda sm_90"),
        (BLACKWELL, "mxfp8_e5m2", "mxfp8", {}, "takes E4M3, got operand a"),
        (BLACKWELL, "nvfp4;rows", "nvfp4", {}, "a factor per row that follows"),
        (BLACKWELL, "mxfp8", "nvfp4", {}, "operand"),
        (BLACKWELL, TURNED["mxfp8"], "mxfp8", {}, "one operand is transformed"),
        ("sm_103", "mxfp8", "mxfp8", {}, "groups on sm_100 only, got cuda sm_103"),
        ("sm_89", "fp8_e4m3", "fp8_e4m3", {}, "groups on sm_90 only, got cuda sm_89"),
        ("sm_120", "nvfp4", "nvfp4", {}, "groups on sm_100 only, got cuda sm_120"),
        ("cpu", "mxfp8", "mxfp8", {}, "runs on NVIDIA GPUs, got cpu"),
        (Chip("cuda", (9, 4), (6, 4), (2, 13), True), "fp8_e4m3", "fp8_e4m3", {}, "got ROCm"),
        (Chip("cuda", (10, 0), (12, 6), (2, 13)), "mxfp8", "mxfp8", {}, "needs CUDA 12.8"),
    ],
    ids=str,
)
def test_reasons(chip, a, b, options, text: str) -> None:
    assert text in str(reason(chip, a, b, **options))


def test_a_torch_without_the_kernels_says_so(monkeypatch, chooses_anew) -> None:
    monkeypatch.setattr(native_gates, "_has_library", lambda: False)
    assert "was built without MSLK" in reason(BLACKWELL, "mxfp8", "mxfp8")
    assert reason(HOPPER, "fp8_e4m3", "fp8_e4m3") is None
    monkeypatch.setattr(native_grouped, "scaled_grouped_mm", None)
    chooses_anew()
    assert "no torch.nn.functional.scaled_grouped_mm" in reason(HOPPER, "fp8_e4m3", "fp8_e4m3")


@pytest.mark.parametrize(
    "settings,cuda,has",
    [
        ("-DUSE_FBGEMM -DUSE_MSLK -DUSE_KINETO", "13.0", True),
        ("-DUSE_FBGEMM_GENAI", "12.8", True),
        ("-DUSE_FBGEMM, USE_MSLK=OFF", "13.0", False),
        ("-DUSE_FBGEMM", "13.0", False),
        ("-DUSE_FBGEMM", None, True),  # only asked about
    ],
)
def test_how_torch_was_built(settings: str, cuda, has: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.__config__, "show", lambda: settings)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    native_gates._has_library.cache_clear()
    try:
        assert native_gates._has_library() is has
    finally:
        native_gates._has_library.cache_clear()


def test_only_so_many_groups() -> None:
    spec = PlaneSpec.parse("fp8_e4m3")
    for groups, fits in ((1023, True), (1024, False), (None, True)):
        query = OpQuery(
            "grouped_gemm", "cuda", torch.bfloat16, spec, spec, chip=HOPPER, groups=groups
        )
        assert (native_grouped.grouped_kind(query)[0] == "row") is fits


def test_every_pair_of_formats_has_a_way_on_every_chip() -> None:
    for chip in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        for a, b in itertools.product(names(), names()):
            row, col = (PlaneSpec.parse(name).resolve(torch.bfloat16) for name in (a, b))
            for precision in ("auto", "exact"):
                found = hybridq.explain("grouped_gemm", row, col, device=chip, precision=precision)
                assert found.chosen is not None
                assert found.chosen != "native" or precision == "auto"


# ---- torch's BF16 product, held to what a GPU demands of it


@pytest.mark.parametrize("a_name", ["mxfp8", "bf16"])
@pytest.mark.parametrize("b_name", ["mxfp4", "bf16"])
@pytest.mark.parametrize("sizes,rest", SPLITS, ids=str)
def test_torchs_bf16_product(a_name: str, b_name: str, sizes, rest: int, monkeypatch) -> None:
    """Groups anywhere, none of them empty where torch does not take it; nothing is left NaN."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", oracle.grouped_mm)
    tokens, groups, k, n = sum(sizes) + rest, len(sizes), 70, 11
    x = make(torch.randn(tokens, k).bfloat16(), a_name)
    weights = [make(torch.randn(n, k).bfloat16(), b_name) for _ in range(groups)]
    stack = [torch.stack([w.buffers[key] for w in weights]) for key in weights[0].buffers]
    args = GroupedArgs(ends(sizes), tokens, None, None, None, torch.bfloat16)
    y = grouped._rows_cuda(
        GroupedOperand(x.tensors, x.spec, tokens, k),
        GroupedOperand(stack, weights[0].spec, n, k, True),
        args,
    )
    assert not y[tokens - rest :].any()
    for g, (begin, end) in enumerate(bounds(sizes)):
        hold(y[begin:end], values_of(x)[begin:end], values_of(weights[g]))

    sides, values, starts = [], [], []
    for name, rows in ((a_name, 9), (b_name, n)):
        source, is_plain = torch.randn(tokens, rows).bfloat16(), name == "bf16"
        plane = make(source if is_plain else padded(source, sizes), name, "columnwise")
        sides.append(GroupedOperand(plane.tensors, plane.spec, *plane.matrix, False, not is_plain))
        values.append(values_of(plane))
        starts.append([begin for begin, _ in bounds(sizes)] if is_plain else places(sizes))
    has_pad = any(side.is_padded for side in sides)
    begins = padded_offsets(ends(sizes), tokens) if has_pad else None
    args = GroupedArgs(ends(sizes), tokens, begins, None, None, torch.bfloat16)
    y = grouped._tokens_cuda(*sides, args)
    for g, size in enumerate(sizes):
        first, second = (
            v[:, start[g] : start[g] + size] for v, start in zip(values, starts, strict=True)
        )
        hold(y[g], first, second)
