"""Products of few rows that read a plane's codes: their error, their bits, and what they leave.

The bound is that of every product (`gemm_cases.check`), around an FP64 product of operands that the
oracle decodes. Two more things hold bit for bit. Where the CPU has a BF16 product, its product of
the decoded plane; and the FP32 way in its two orders (`code_sums`), under every variant of the
kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridq
from code_sums import fp32_way, operand
from core_tools import using_variant
from gemm_cases import check, decoded, in_own_domain, make
from hybridq.formats import PlaneSpec, names
from hybridq.kernels.choice import EncodeRequest, GemmArgs, Operand
from hybridq.kernels.cpu import SKINNY_ROWS, CodesProduct, codes_reason, core, product_reason
from hybridq.kernels.decoded import decode_side
from hybridq.kernels.decoded import decoded_gemm as exact
from hybridq.kernels.operators.encode_plan import encode_plan
from hybridq.kernels.operators.skinny_gemm import skinny_gemm
from hybridq.storage import Plane

pytestmark = pytest.mark.skipif(core is None, reason="the compiled core is missing")

FORMATS = [name for name in names() if name not in ("identity", "bf16", "fp16", "fp32")]
#: Options that change what a product reads: a factor per row, a transform, other scales.
OPTIONS = ("nvfp4;rows", "nvfp4;rht=d7e8", "nvfp4;4o6=mae", "mxfp6_e2m3;rht=d7e8")
#: (M, N, K): one row, tails of blocks and vectors, one column, as many rows as there may be.
SHAPES = ((1, 1, 1), (1, 37, 100), (2, 5, 257), (3, 16, 64), (8, 33, 31), (7, 130, 48), (4, 3, 600))
needs_codes = pytest.mark.skipif(codes_reason() is not None, reason=str(codes_reason()))
needs_bf16 = pytest.mark.skipif(product_reason() is not None, reason=str(product_reason()))
VARIANTS = () if core is None else tuple(core.build_info()["variants"])


def of_codes(x: torch.Tensor, w: Plane, args: GemmArgs) -> torch.Tensor | None:
    """The product by itself: x in the basis of w's codes, without a factor."""
    return CodesProduct(w.spec)(x, None, operand(w), args)


@pytest.mark.parametrize("name", [*FORMATS, *OPTIONS])
def test_every_format_and_shape(name: str) -> None:
    """Plain and quantized inputs; what follows the product too."""
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k), make(torch.randn(n, k), name)
        bias, into = torch.randn(n), torch.randn(m, n)
        rows, values = [make(x, name)], decoded
        if w.spec.signs is None:
            rows += [make(x.bfloat16(), "bf16"), make(x, "fp32"), make(x.half(), "fp16")]
        else:  # transformed rows meet it in the transform's own basis
            values = in_own_domain
        for a in rows:
            check(hybridq.gemm(a, w, out_dtype=torch.float32), values(a), values(w))
            y = hybridq.gemm(a, w, bias=bias, out_dtype=torch.bfloat16)
            check(y, values(a), values(w), bias.double().numpy()[None, :])
            out = into.clone()
            hybridq.gemm(a, w, out=out, accumulate=True)
            check(out, values(a), values(w), into.double().numpy())


@needs_bf16
@pytest.mark.parametrize("name", [*FORMATS, *OPTIONS])
def test_the_bits_of_the_decoded_planes_product(name: str, monkeypatch) -> None:
    """Where the CPU has a BF16 product: it is no matter what is decoded, and what is cached."""
    for m, n, k in SHAPES:
        w = make(torch.randn(n, k), name)
        signs = w.spec.signs
        if not w.spec.format.is_bf16_exact:
            continue
        a = make(torch.randn(m, k).bfloat16(), "bf16" if signs is None else name)
        bias = torch.randn(n)
        got = hybridq.gemm(a, w, bias=bias, out_dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(exact.CodesProduct, "__call__", lambda *_: None)
            assert torch.equal(got, hybridq.gemm(a, w, bias=bias, out_dtype=torch.float32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [*FORMATS, *OPTIONS])
def test_the_fp32_way_has_one_order(name: str, variant: str) -> None:
    """BF16 values, whose products are exact, FP32 values, whose are not, tiny and huge ones."""
    for m, n, k in SHAPES:
        w = make(torch.randn(n, k), name)
        rows = torch.randn(m, w.spec.padded(k))
        for x in (rows, rows.bfloat16().float(), rows * 2.0**-90, rows * 2.0**90):
            want = fp32_way(x, w)
            with using_variant(variant):
                got = of_codes(x, w, GemmArgs(None, None, torch.float32))
            assert got is not None
            assert np.array_equal(got.numpy(), want), (m, n, k)


def _set(plane: Plane, buffer: str, index: int, byte: int) -> None:
    plane.buffers[buffer].view(torch.uint8).flatten()[index] = byte


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2"])
def test_every_code(name: str, variant: str) -> None:
    """All 256 codes of a byte, each in a row of its own, NaN and infinity among them."""
    w = make(torch.ones(256, 40), name)
    for code in range(256):
        _set(w, "data", code * 40 + 33, code)
    x = torch.randn(2, 40)
    values = decode_side(operand(w), True, torch.float32)
    want = torch.from_numpy(fp32_way(x, w))
    rows = torch.isfinite(values.matrix).all(1)
    with using_variant(variant):
        for a in (x, x.bfloat16()):
            y = of_codes(a, w, GemmArgs(None, None, torch.float32))
            if y is None:  # an infinity: the steps decide
                assert not rows.all() and a.dtype == torch.bfloat16
                continue
            assert torch.equal(torch.isfinite(y).all(0), rows)
            if a is x:
                assert torch.equal(y[:, rows], want[:, rows])
                assert torch.equal(y.isnan(), want.isnan())
    a = make(x.bfloat16(), "bf16")
    y = hybridq.gemm(a, w, out_dtype=torch.float32)
    finite = decoded(a) @ np.where(rows[:, None].numpy(), decoded(w), 0.0).T
    assert np.allclose(y[:, rows].numpy(), finite[:, rows.numpy()], rtol=1e-4, atol=1e-3)
    assert not torch.isfinite(y[:, ~rows]).any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8_e5m2", "mxfp6_e2m3", "nvfp4"])
def test_every_scale(name: str, variant: str) -> None:
    """All 256 bytes of a scale, on blocks with values and on blocks of zeros."""
    for is_zero in (False, True):
        w = make(torch.zeros(256, 64) if is_zero else torch.randn(256, 64).sign(), name)
        each = w.scale.shape[1]
        for byte in range(256):
            _set(w, "scale", byte * each, byte)
        x = torch.randn(1, 64)
        want = torch.from_numpy(fp32_way(x, w))
        with using_variant(variant):
            got = of_codes(x, w, GemmArgs(None, None, torch.float32))
        assert got is not None and torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        a = make(x.bfloat16(), "bf16")
        y = hybridq.gemm(a, w, out_dtype=torch.float32)
        with np.errstate(all="ignore"):
            assert y[0, np.isnan(decoded(w)).any(1)].isnan().all()
            plain = np.abs(decoded(w)).max(1) < 1e36  # sums do not overflow; no NaN
        check(y[:, plain], decoded(a), decoded(w)[plain])


@needs_bf16
def test_blocks_of_zeros_with_the_smallest_scale_stay_with_their_codes() -> None:
    """What a zero block is encoded to must not make the whole plane take the steps."""
    w = torch.randn(5, 96)
    w[2, 32:64] = 0
    plane = make(w, "mxfp8")
    assert int(plane.scale[2, 1].view(torch.uint8)) < 10
    x = torch.randn(1, 96).bfloat16()
    assert of_codes(x, plane, GemmArgs(None, None, torch.bfloat16)) is not None
    _set(plane, "scale", 0, 3)  # 2^-124 times 2^-9 is below BF16's normal range
    assert of_codes(x, plane, GemmArgs(None, None, torch.bfloat16)) is None


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_threads_and_repeats_change_no_bit(name: str) -> None:
    x, w = torch.randn(3, 700), make(torch.randn(1500, 700), name)
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            made += [hybridq.gemm(one, w) for one in (x, x.bfloat16())]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, made[i % 2]) for i, one in enumerate(made))


@needs_bf16
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_rows_do_not_depend_on_the_others(name: str) -> None:
    """So that a token decoded in a batch has the bits of one decoded alone."""
    x, w = torch.randn(SKINNY_ROWS, 200).bfloat16(), make(torch.randn(40, 200), name)
    whole = hybridq.gemm(x, w)
    for row in range(SKINNY_ROWS):
        assert torch.equal(hybridq.gemm(x[row : row + 1], w), whole[row : row + 1])


@needs_codes
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_kept_of_the_weight(name: str) -> None:
    w = hybridq.quantize(torch.randn(64, 96), name)
    for rows in (1, SKINNY_ROWS):
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(3):
                hybridq.gemm(torch.randn(rows, 96, dtype=dtype), w)
    assert w.rowwise.operand_cache is None or w.rowwise.operand_cache.nbytes == 0
    for _ in range(3):
        hybridq.gemm(torch.randn(SKINNY_ROWS + 1, 96), w)
    assert w.rowwise.operand_cache.nbytes > 0


@needs_codes
def test_explain_says_so() -> None:
    line = f"up to {SKINNY_ROWS} rows of a: the codes of b are read as they lie"
    x, w = torch.randn(1, 64, dtype=torch.bfloat16), hybridq.quantize(torch.randn(8, 64), "mxfp8")
    assert line in str(hybridq.explain("gemm", x, w))
    assert line in str(hybridq.explain("gemm", "bf16", "nvfp4", device="cpu"))
    assert line not in str(hybridq.explain("gemm", w, x))  # b is plain
    assert line not in str(hybridq.explain("gemm", "bf16", "nvfp4;rht=d7e8", device="cpu"))


@needs_codes
def test_a_forced_reference_decodes() -> None:
    w = hybridq.quantize(torch.randn(8, 64), "mxfp8")
    with hybridq.backend("reference"):
        y = hybridq.gemm(torch.randn(1, 64), w, out_dtype=torch.float32)
    assert y.shape == (1, 8)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_e4m3"])
def test_slices_of_planes(name: str) -> None:
    """Rows of a view, whose buffers have gaps or begin elsewhere."""
    w = hybridq.quantize(torch.randn(64, 128), name)
    for part in (w[32:], w[:, 64:], w[:32, :64]):
        x = torch.randn(2, part.shape[1], dtype=torch.bfloat16)
        want = x.double() @ part.dequantize().double().t()
        got = hybridq.gemm(x, part, out_dtype=torch.float32)
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-3)


def test_compiled_code_has_the_eager_bits() -> None:
    w = hybridq.quantize(torch.randn(48, 96), "nvfp4")
    x = torch.randn(1, 96, dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        return hybridq.gemm(x, w)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), run(x))


@needs_codes
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("activations", ["quantized", "high_precision"])
def test_a_served_layer(recipe: str, activations: str, monkeypatch) -> None:
    """Eager and general path have one result, keep nothing, and read no decoded weight."""
    layer = torch.nn.Sequential(torch.nn.Linear(96, 64, dtype=torch.bfloat16))
    model = hybridq.quantize_model(layer, recipe, activations=activations)
    x = torch.randn(2, 1, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        y = [model(x) for _ in range(3)]
        from hybridq.nn.modules import linear

        with monkeypatch.context() as patch:
            patch.setattr(linear, "eager_forward", lambda *_: None)
            y.append(model(x))
    assert all(torch.equal(one, y[0]) for one in y)
    cache = model[0].weight.rowwise.operand_cache
    assert cache is None or cache.nbytes == 0


def test_wrong_arguments_are_refused() -> None:
    w = make(torch.randn(4, 32), "mxfp8")
    run = CodesProduct(w.spec)
    args = GemmArgs(None, None, torch.float32)
    with pytest.raises(ValueError, match="one K, got 31 and 32"):
        run(torch.randn(1, 31), None, operand(w), args)
    with pytest.raises(ValueError, match=r"at most 8 rows, at least 32 elements .* got 9 and 32"):
        run(torch.randn(9, 32), None, operand(w), args)
    with pytest.raises(ValueError, match="a must be bfloat16 or float32, got float16"):
        run(torch.randn(1, 32).half(), None, operand(w), args)
    short = Operand([w.data[:2], w.scale], w.spec, 4, 32)
    with pytest.raises(ValueError, match="product: data must be 128 contiguous"):
        run(torch.randn(1, 32), None, short, args)


@needs_codes
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "names_", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_16x16"), ("fp8_e4m3",) * 2]
)
def test_one_call_with_a_plane_is_its_steps(names_: tuple[str, str], static: bool) -> None:
    """On every CPU that reads codes: encode, decode, multiply; with a given amax too."""
    row, weight = (PlaneSpec.parse(name) for name in names_)
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k).bfloat16(), make(torch.randn(n, k), names_[1])
        bias = torch.randn(n).bfloat16()
        amax = torch.tensor([1.75]) if static and row.needs_amax else None
        request = EncodeRequest(row_stat=amax)
        run = skinny_gemm(row.text, "", weight.text, x.dtype, True, "auto")
        made, _ = run(x, operand(w), bias, None, 1, amax)
        plane = Operand(encode_plan(row.text, "", x.dtype, "cpu")(x, request), row, m, k)
        args = GemmArgs(bias, None, x.dtype)
        expected = exact.exact_gemm(plane, operand(w), args)
        assert torch.equal(made, expected), (m, n, k)


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize(
    "names_", [("nvfp4", "nvfp4"), ("nvfp4", "mxfp4"), ("mxfp4", "nvfp4_16x16"), ("mxfp4",) * 2]
)
def test_rows_that_meet_codes_as_integers(names_: tuple[str, str], variant: str) -> None:
    """Rows that the call encodes have the bits of the same rows given as BF16 numbers."""
    row, weight = (PlaneSpec.parse(name) for name in names_)
    args = GemmArgs(None, None, torch.bfloat16)
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k).bfloat16(), operand(make(torch.randn(n, k), names_[1]))
        codes = encode_plan(row.text, "", x.dtype, "cpu")(x, EncodeRequest())
        side = decode_side(Operand(codes, row, m, k), True, torch.bfloat16)
        run = skinny_gemm(row.text, "", weight.text, x.dtype, False, "auto")
        with using_variant(variant):
            made, _ = run(x, w, None, None, 1)
            want = CodesProduct(weight)(side.matrix, side.factor, w, args)
        assert torch.equal(made, want), (m, n, k)
