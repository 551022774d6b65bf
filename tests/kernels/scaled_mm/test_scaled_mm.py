"""The native and the folding GEMM on a CPU: choice by described chips, and every argument's layout.

`scaled_mm_oracle` stands in for torch's product. It computes in FP64, so what is left is the
rounding of the result: half a unit in its last place (plus FP32's where the result is finished
after the product).
"""

from __future__ import annotations

import itertools

import pytest
import torch

import hybridq
from gemm_cases import ULP, decoded, in_own_domain, make
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format, names
from hybridq.formats.base import Format
from hybridq.formats.elements import E4M3, E5M2, E8M0, FP32
from hybridq.kernels import Chip, OpQuery, described
from hybridq.kernels import folded_backend as backend_fold
from hybridq.kernels.choice.arguments import GemmArgs, Operand
from hybridq.kernels.scaled_mm import backend as backend_native
from hybridq.kernels.scaled_mm import cublas_probe as native_probe
from hybridq.kernels.scaled_mm.operand_layout import swizzle
from scaled_mm_oracle import older_scaled_mm, scaled_mm

HOPPER, BLACKWELL, ADA, AMPERE = (described(name) for name in ("sm_90", "sm_100", "sm_89", "sm_80"))
ROW = Format(E4M3, (1, 4096), FP32, "amax", "float8")
ROW_E5M2 = Format(E5M2, (1, 4096), FP32, "amax", "float8")
FLOAT_SCALES = Format(E4M3, (1, 128), FP32, "amax", "float8_block")
FLOAT_SQUARES = Format(E4M3, (128, 128), FP32, "amax", "float8_block")
WIDE = Format(E4M3, (1, 64), E8M0, "rceil", "mxfp8")


@pytest.fixture(autouse=True)
def _oracle(monkeypatch) -> None:
    monkeypatch.setattr(backend_native, "scaled_mm", scaled_mm)
    monkeypatch.setattr(backend_native, "older_scaled_mm", older_scaled_mm)


def spec_of(text: str | Format | PlaneSpec) -> PlaneSpec:
    """A PlaneSpec of a name or a Format."""
    if isinstance(text, PlaneSpec):
        return text
    return PlaneSpec(text) if isinstance(text, Format) else PlaneSpec.parse(text)


def operand(x: torch.Tensor, spec) -> tuple[Operand, torch.Tensor]:
    """A plane as a kernel takes it, and its FP64 values."""
    plane = make(x, spec_of(spec))
    known = Operand(plane.tensors, plane.spec, *plane.matrix)
    values = decoded(plane) if plane.spec.signs is None else in_own_domain(plane)
    return known, torch.from_numpy(values)


def hold(y: torch.Tensor, want: torch.Tensor, sums: torch.Tensor, is_rounded: bool) -> None:
    """Half a unit of the result's dtype; FP32's beside it where something followed the product, or
    where a code times its scale, as decoded, is itself rounded to FP32."""
    room = ULP[y.dtype] * want.abs() + 2.0**-126
    if is_rounded:
        room = room + 6 * 2.0**-24 * (want.abs() + sums)
    assert y.is_contiguous()
    assert ((y.double() - want).abs() <= room).all()


KINDS = {
    "tensor": ["fp8_e4m3", "fp8_e5m2"],
    "row": [ROW, "fp8_e4m3", ROW_E5M2],
    "block": [
        "fp8_1x128",
        "fp8_128x128",
        "fp8_1x128_e5m2",
        FLOAT_SCALES,
        FLOAT_SQUARES,
        "fp8_e4m3",
    ],
    "mx": [
        "mxfp8",
        "mxfp8_32x32",
        "mxfp8_e5m2",
        "mxfp4",
        "mxfp6_e3m2",
        "mxfp6_e2m3",
        WIDE,
        "fp8_1x128",
        "fp8_128x128",
    ],
    "nvfp4": ["nvfp4", "nvfp4_16x16", "nvfp4;rows", "nvfp4;bound=256;4o6=mae"],
}
PAIRS = [
    (kind, a, b)
    for kind, formats in KINDS.items()
    for a, b in itertools.product(formats, formats)
    if not (spec_of(a).format.element == spec_of(b).format.element == E5M2)
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind,a,b", PAIRS, ids=lambda one: str(one))
def test_every_kind_is_laid_out_as_torch_wants(kind: str, a, b) -> None:
    for shape in ((7, 20, 72), (130, 150, 300)):
        m, n, k = shape
        left, first = operand(torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None], a)
        right, second = operand(torch.randn(n, k), b)
        want, sums = first @ second.t(), first.abs() @ second.abs().t()
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            if dtype == torch.float16:
                left, first = operand(torch.randn(m, k), a)
                want, sums = first @ second.t(), first.abs() @ second.abs().t()
            y = backend_native.multiply(left, right, GemmArgs(None, None, dtype), kind)
            assert y.dtype == dtype and tuple(y.shape) == (m, n)
            is_exact = all(one.spec.format.has_power_of_two_scales for one in (left, right))
            hold(y, want, sums, is_rounded=not is_exact)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_and_accumulation_come_before_the_one_rounding(kind: str, dtype) -> None:
    spec = KINDS[kind][0]
    left, first = operand(torch.randn(9, 72), spec)
    right, second = operand(torch.randn(21, 72), spec)
    into = torch.randn(9, 21).to(dtype)
    for bias in (torch.randn(21), torch.randn(21).to(dtype)):
        want = first @ second.t() + bias.double()
        sums = first.abs() @ second.abs().t() + bias.double().abs()
        y = backend_native.multiply(left, right, GemmArgs(bias, None, dtype), kind)
        hold(y, want, sums, is_rounded=True)
        y = backend_native.multiply(left, right, GemmArgs(bias, into, dtype), kind)
        hold(y, want + into.double(), sums + into.double().abs(), is_rounded=True)


def _refuses(*args, bias=None, **rest):
    if bias is not None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    return scaled_mm(*args, bias=bias, **rest)


def _forgets(*args, bias=None, **rest):
    return scaled_mm(*args, **rest)


@pytest.mark.parametrize("library", [scaled_mm, _refuses, _forgets], ids=lambda f: f.__name__)
@pytest.mark.parametrize("weight", ["fp8_1x128", "fp8_128x128"])
def test_a_bias_goes_with_block_scales_where_a_probe_says_so(monkeypatch, library, weight) -> None:
    """Whatever the library does with a bias, the result has it; one product adds it if it can."""
    monkeypatch.setattr(native_probe, "_known", {})
    biases = []

    def spied(*args, bias=None, **rest):
        biases.append(bias is not None)
        return library(*args, bias=bias, **rest)

    monkeypatch.setattr(backend_native, "scaled_mm", spied)
    left, first = operand(torch.randn(9, 200), "fp8_1x128")
    right, second = operand(torch.randn(21, 200), weight)
    bias = torch.randn(21).bfloat16()
    want = first @ second.t() + bias.double()
    for _ in range(2):
        y = backend_native.multiply(left, right, GemmArgs(bias, None, torch.bfloat16), "block")
        hold(y, want, first.abs() @ second.abs().t(), is_rounded=True)
    # The first is the question, asked once.
    assert biases == [True, *([library is scaled_mm] * 2)]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (3, 5, 0), (1, 1, 1), (1, 17, 129)])
def test_small_and_empty_shapes(kind: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    spec = KINDS[kind][0]
    left, first = operand(torch.randn(m, k), spec)
    right, second = operand(torch.randn(n, k), spec)
    bias = torch.randn(n)
    y = backend_native.multiply(left, right, GemmArgs(bias, None, torch.float32), kind)
    sums = first.abs() @ second.abs().t() + bias.abs().double()
    hold(y, first @ second.t() + bias.double(), sums, True)


def test_parts_of_planes_are_laid_out_anew() -> None:
    """Rows and columns of a plane: addresses and strides that a kernel must not be given."""
    plane = make(torch.randn(40, 512), "fp8_1x128")
    part = plane.part(1, 128, 384).part(0, 3, 20)
    left = Operand(part.tensors, part.spec, *part.matrix)
    right, second = operand(torch.randn(16, 256), "fp8_128x128")
    y = backend_native.multiply(left, right, GemmArgs(None, None, torch.float32), "block")
    first = torch.from_numpy(decoded(plane))[3:20, 128:384]
    hold(y, first @ second.t(), torch.zeros(17, 16), False)


def test_transformed_operands_multiply_as_they_are() -> None:
    spec = PlaneSpec(format("nvfp4"), False, DEFAULT_SIGNS)
    left, first = operand(torch.randn(7, 90), spec)
    right, second = operand(torch.randn(11, 90), spec)
    assert backend_native.native_kind(spec, spec, BLACKWELL, 90)[0] == "nvfp4"
    y = backend_native.multiply(left, right, GemmArgs(None, None, torch.float32), "nvfp4")
    hold(y, first @ second.t(), first.abs() @ second.abs().t(), True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e-39])
@pytest.mark.parametrize("kind", ["tensor", "block", "mx", "nvfp4"])
def test_odd_values_keep_their_place(kind: str, value: float) -> None:
    """NaN stays NaN in its rows; E8M0's ends (bytes 0, 254 and 255) survive the layouts."""
    x = torch.randn(8, 96)
    x[3, 5] = value
    if value == 3e-39:
        x[3] = value
    left, first = operand(x, KINDS[kind][0])
    right, second = operand(torch.randn(16, 96), KINDS[kind][0])
    y = backend_native.multiply(left, right, GemmArgs(None, None, torch.float32), kind)
    want = first @ second.t()
    assert torch.equal(y.isnan(), want.float().isnan())
    seen = want.abs() < 1e38
    room = 2.0**-22 * (first.abs() @ second.abs().t()) + 1e-44
    assert ((y.double() - want).abs() <= room)[seen].all()


# ---- fold


FOLDABLE = ["mxfp8", "mxfp8_32x32", "mxfp8_e5m2", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", WIDE]
OTHERS = ["fp8_1x128", "fp8_128x128", "fp8_e4m3", FLOAT_SCALES]


@pytest.mark.parametrize(
    "a,b",
    [
        (a, b)
        for a, b in (
            *itertools.product(FOLDABLE, FOLDABLE + OTHERS),
            *itertools.product(OTHERS, FOLDABLE),
        )
        if not (a == b == "mxfp8_e5m2")
    ],
    ids=lambda one: str(one),
)
@pytest.mark.parametrize("precision", ["auto", "fast"])
def test_folded_pairs(a, b, precision) -> None:
    """Beside the result's rounding there is the fold's own error, bounded as `fold_plane` says.

    With "fast" the amax is that of all rows of b: they are in one square.
    """
    m, n, k = 21, 37, 300
    left, first = operand(torch.randn(m, k), a)
    right, second = operand(torch.randn(n, k), b)
    bias = torch.randn(n)
    y = backend_fold.FOLD.ops["gemm"](left, right, GemmArgs(bias, None, torch.float32, precision))
    want = first @ second.t() + bias.double()
    groups = [(first[:, c : c + 128], second[:, c : c + 128]) for c in range(0, k, 128)]
    top = [(x.abs().amax(1, keepdim=True), w.abs().amax(1, keepdim=True)) for x, w in groups]
    if precision == "fast":
        top = [(big_x, big_w.amax().expand_as(big_w)) for big_x, big_w in top]
    limit = 2.0**-9 / 448
    room = sum(
        limit * (big_x * w.abs().sum(1) + x.abs().sum(1, keepdim=True) * big_w.t())
        + limit**2 * 128 * big_x * big_w.t()
        for (x, w), (big_x, big_w) in zip(groups, top, strict=True)
    )
    room = room + 2.0**-22 * (first.abs() @ second.abs().t() + want.abs())
    assert ((y.double() - want).abs() <= room).all()


def test_fold_keeps_what_it_made() -> None:
    plane = make(torch.randn(32, 256), "mxfp8")
    left, _ = operand(torch.randn(8, 256), "mxfp8")
    right = Operand(plane.tensors, plane.spec, *plane.matrix, plane.ready)
    args = GemmArgs(None, None, torch.bfloat16)
    first = backend_fold.FOLD.ops["gemm"](left, right, args)
    assert plane.ready.nbytes == 0
    assert torch.equal(first, backend_fold.FOLD.ops["gemm"](left, right, args))
    assert plane.ready.nbytes >= plane.data.nbytes
    plane.data[0].zero_()
    after = backend_fold.FOLD.ops["gemm"](left, right, args)
    assert not after[:, 0].any() and torch.equal(after[:, 1:], first[:, 1:])


# ---- choice


def chosen(chip: Chip, a, b, **options) -> str | None:
    """The backend that a chip multiplies two formats with."""
    return hybridq.explain("gemm", spec_of(a), spec_of(b), device=chip, **options).chosen


@pytest.mark.parametrize(
    "chip,a,b,backend",
    [
        (HOPPER, "fp8_e4m3", "fp8_e5m2", "native"),
        (HOPPER, "fp8_1x128", "fp8_128x128", "native"),
        (HOPPER, "fp8_1x128", "fp8_1x128_e5m2", "native"),
        (HOPPER, "fp8_e4m3", "fp8_128x128", "native"),
        (HOPPER, FLOAT_SCALES, FLOAT_SQUARES, "native"),
        (HOPPER, "mxfp8", "mxfp8", "fold"),
        (HOPPER, "mxfp8", "mxfp8_e5m2", "fold"),
        (HOPPER, "mxfp4", "mxfp8", "fold"),
        (HOPPER, "mxfp8", "fp8_128x128", "fold"),
        (HOPPER, "fp8_e5m2", "fp8_e5m2", "torch"),
        (HOPPER, "mxfp8_e5m2", "mxfp8_e5m2", "torch"),
        (HOPPER, "nvfp4", "nvfp4", "torch"),
        (HOPPER, "mxfp8", "nvfp4", "torch"),
        (HOPPER, "mxfp8", "bf16", "torch"),
        (BLACKWELL, "mxfp8", "mxfp8", "native"),
        (BLACKWELL, "mxfp8", "mxfp4", "native"),
        (BLACKWELL, "nvfp4", "nvfp4_16x16", "native"),
        (BLACKWELL, "fp8_1x128", "fp8_128x128", "native"),
        (BLACKWELL, "fp8_1x128", "mxfp8", "native"),
        (BLACKWELL, FLOAT_SCALES, FLOAT_SQUARES, "fold"),
        (HOPPER, "fp8_e5m2", "fp8_1x128_e5m2", "torch"),
        (BLACKWELL, "mxfp8", "nvfp4", "torch"),
        (ADA, "fp8_e4m3", "fp8_e4m3", "native"),
        (AMPERE, "fp8_e4m3", "fp8_e4m3", "torch"),
        (Chip.of("cuda"), "fp8_e4m3", "fp8_e4m3", "torch"),
        (Chip("cuda", (9, 4), (6, 4), (2, 13), True), "fp8_e4m3", "fp8_e4m3", "torch"),
    ],
    ids=str,
)
def test_choice(chip: Chip, a, b, backend: str) -> None:
    assert chosen(chip, a, b) == backend
    assert chosen(chip, a, b, precision="fast") == backend
    assert chosen(chip, a, b, precision="exact") == "torch"


def test_squares_are_folded_only_if_asked_for() -> None:
    """Their fold is bounded by the square's amax, so that a small row may lose more."""
    assert chosen(HOPPER, "mxfp8", "mxfp8_32x32") == "torch"
    assert chosen(HOPPER, "mxfp8", "mxfp8_32x32", precision="fast") == "fold"
    assert "a square's amax" in str(hybridq.explain("gemm", "mxfp8_32x32", "mxfp8", device="sm_90"))


OLD_HOPPER = Chip("cuda", (9, 0), (12, 8), (2, 11))


@pytest.mark.parametrize("chip", [ADA, OLD_HOPPER], ids=["sm_89", "CUDA 12.8"])
@pytest.mark.parametrize("a,b", [("mxfp8", "mxfp8"), ("fp8_1x128", "fp8_128x128")])
def test_tritons_fp8_product_has_to_be_asked_for(chip: Chip, a: str, b: str) -> None:
    """Nobody has measured it yet: `auto` takes the product that is known."""
    pytest.importorskip("triton")
    assert chosen(chip, a, b) == "torch"
    assert chosen(chip, a, b, precision="fast") == "fold"
    assert "until it was measured" in str(hybridq.explain("gemm", a, b, device=chip))
    assert "Triton" in str(hybridq.explain("gemm", a, b, device=chip, precision="fast"))


@pytest.mark.parametrize("a", ["mxfp8", "fp8_1x128", "fp8_e4m3", "mxfp4"])
@pytest.mark.parametrize("b", ["mxfp8", "fp8_128x128", FLOAT_SQUARES, "mxfp8_e5m2"], ids=str)
def test_tritons_fp8_product_gets_plain_layouts(a: str, b, monkeypatch) -> None:
    def block_gemm(a_data, a_scale, b_data, b_scale, elements, *, b_is_square, args):
        sides = []
        for data, scale, name, square in (
            (a_data, a_scale, elements[0], False),
            (b_data, b_scale, elements[1], b_is_square),
        ):
            assert data.dtype == torch.uint8 and data.stride(1) == 1
            rows, k = data.shape
            dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
            down = -(-rows // 128) if square else rows
            assert tuple(scale.shape) == (down, -(-k // 128))
            wide = scale.double().repeat_interleave(128 if square else 1, 0)[:rows]
            values = data.view(dtype).double()
            sides.append(values * wide.repeat_interleave(128, 1)[:, :k])
        return (sides[0] @ sides[1].t()).to(args.out_dtype)

    monkeypatch.setattr(backend_fold, "block_gemm", block_gemm)
    left, first = operand(torch.randn(9, 300), a)
    right, second = operand(torch.randn(140, 300), b)
    args = GemmArgs(None, None, torch.float32, "fast", OLD_HOPPER)
    y = backend_fold.FOLD.ops["gemm"](left, right, args)
    sums = first.abs() @ second.abs().t()
    # What folding adds: 2^-17.8 of a group's amax, which is far below its sum here.
    assert ((y.double() - first @ second.t()).abs() <= 2.0**-16 * sums + 1e-30).all()


@pytest.mark.parametrize(
    "chip,a,b,text",
    [
        (HOPPER, "nvfp4", "nvfp4", "NVFP4: sm_100 and newer, got cuda sm_90"),
        (BLACKWELL, FLOAT_SCALES, FLOAT_SQUARES, "sm_90 only, got cuda sm_100"),
        (BLACKWELL, FLOAT_SCALES, FLOAT_SQUARES, "by Triton"),
        (HOPPER, "fp8_e5m2", "fp8_e5m2", "torch multiplies no two E5M2 matrices"),
        (HOPPER, "fp8_e4m3", "bf16", "operand b is not quantized"),
        (Chip("cuda", (9, 0), (12, 8), (2, 11)), "fp8_1x128", "fp8_1x128", "needs CUDA 12.9"),
        (Chip("cuda", (9, 4), (6, 4), (2, 13), True), "mxfp8", "mxfp8", "got ROCm"),
        (Chip.of("cuda"), "mxfp8", "mxfp8", "compute capability is not known"),
        (Chip.of("cpu"), "mxfp8", "mxfp8", "runs on NVIDIA GPUs, got cpu"),
    ],
    ids=str,
)
def test_reasons(chip: Chip, a: str, b: str, text: str) -> None:
    assert text in str(hybridq.explain("gemm", spec_of(a), spec_of(b), device=chip))


def test_explain_states_the_added_error() -> None:
    fold = str(hybridq.explain("gemm", "mxfp8", "mxfp8", device="sm_90"))
    assert "operand a and b folded" in fold and "1.3e-04" in fold and "1.7e-03" in fold
    native = str(hybridq.explain("gemm", "mxfp8", "mxfp8", device="sm_100"))
    assert "MXFP8, by cuBLASLt" in native and "1.3e-04" in native
    assert "Hopper's model, assumed here" in native and "assumed" not in fold
    exact = str(hybridq.explain("gemm", "mxfp8", "mxfp8", device="sm_90", precision="exact"))
    assert "added error" not in exact and "asks for sums in FP32" in exact


def test_one_scale_per_row_needs_to_know_the_columns() -> None:
    query = OpQuery("gemm", "cuda", torch.bfloat16, *[spec_of(ROW)] * 2, chip=ADA)
    assert "sm_90 only, got cuda sm_89" in backend_native.NATIVE.answer(query).reason
    assert backend_native.native_kind(query.row, query.col, ADA, 4096) == ("row", "")
    assert backend_native.native_kind(query.row, query.col, ADA, 4097)[0] is None


def test_every_pair_of_formats_has_a_way_on_every_chip() -> None:
    for chip in (HOPPER, BLACKWELL, ADA, AMPERE):
        for a, b in itertools.product(names(), names()):
            row, col = (PlaneSpec.parse(name).resolve(torch.bfloat16) for name in (a, b))
            for precision in ("auto", "exact", "fast"):
                found = hybridq.explain("gemm", row, col, device=chip, precision=precision)
                assert found.chosen in ("native", "fold", "triton", "torch"), str(found)


def test_swizzled_tiles_are_the_documented_formula() -> None:
    rows, blocks = 300, 10
    scale = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    flat = swizzle(scale)
    assert flat.shape == (384 * 12,)
    seen = torch.zeros_like(flat, dtype=torch.bool)
    for r, c in itertools.product(range(rows), range(blocks)):
        at = ((r // 128) * 3 + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert flat[at] == scale[r, c]
        seen[at] = True
    assert not flat[~seen].any()


def test_described_chips() -> None:
    assert described("sm_90a") == described("sm_90") == Chip.of("cuda", (9, 0))
    assert described("sm_120").capability == (12, 0)
    assert described("cpu") == described(torch.device("cpu"))
    assert str(described("sm_103")) == "cuda sm_103"
    with pytest.raises(ValueError, match="architecture as sm_90"):
        described("hopper")
