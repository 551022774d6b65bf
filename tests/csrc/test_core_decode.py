"""Decode, amax, transform and transposition of the core, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_tools import (
    DTYPES,
    SPECS,
    as_float,
    decode,
    encode,
    hadamard,
    nibbles,
    sample,
    tensor_amax,
    using_variant,
)
from hybridq import _core

F = np.float32
VARIANTS = _core.build_info()["tables"]


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(params=VARIANTS)
def variant(request):
    with using_variant(request.param):
        yield request.param


def codes_of(data: torch.Tensor, element: str, k: int) -> np.ndarray:
    codes = data.numpy()
    if element == "e2m1":
        codes = nibbles(codes, k)
    return np.ascontiguousarray(codes)


def model_decode(data, scale, spec, rows, k, amax, operand):
    """(code * scale) * factor, then the inverse transform; NumPy, FP32."""
    kp = spec.stored_k(k)
    codes = codes_of(data, spec.element, kp)
    values = np.empty(codes.shape, F)
    _core.decode_codes(spec.element, codes.ctypes.data, codes.size, values.ctypes.data)
    scales = scale.numpy()
    if spec.scale == "e8m0":
        exact = np.exp2(scales.astype(np.float64) - 127)
        scales = np.where(scales == 255, np.nan, exact).astype(F)
    elif spec.scale == "e4m3":
        scales = scale.view(torch.float8_e4m3fn).float().numpy()
    with np.errstate(all="ignore"):
        if spec.block != (0, 0):
            wide = np.repeat(np.repeat(scales, spec.block[0], 0), spec.block[1], 1)
            values = values * wide[:rows, :kp]
        elif not operand:
            values = values * scales[0]
        if operand:
            return values
        if spec.rule == "two_level":
            values = values * (amax.numpy()[:, None] / F(spec.tensor_bound * 6))
        if spec.signs >= 0:
            v = values.reshape(rows, -1, 16)
            for stride in (1, 2, 4, 8):
                pairs = v.reshape(*v.shape[:2], 16 // (2 * stride), 2, stride)
                low, high = pairs[..., 0, :], pairs[..., 1, :]
                v = np.stack([low + high, low - high], axis=-2).reshape(v.shape)
            sign = np.array([-0.25 if spec.signs >> i & 1 else 0.25 for i in range(16)], F)
            values = (v * sign).reshape(rows, kp)
    return values[:, :k]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("operand", [False, True], ids=["dequantize", "operand"])
def test_decode_equals_the_formula(spec, operand, variant):
    for shape in ((33, 65), (3, 2081), (130, 17)):
        x = sample(*shape)
        amax = tensor_amax(x, signs=spec.signs, per_row=spec.row_scaled)
        plane = encode(x, spec)
        want = model_decode(*plane, spec, *shape, amax, operand)
        for threads in (1, 3):
            got, flag = decode(plane, spec, *shape, amax=amax, operand=operand, threads=threads)
            np.testing.assert_array_equal(got.numpy(), want)
            np.testing.assert_array_equal(np.signbit(got.numpy()), np.signbit(want))
            a = np.abs(want)
            outside = (a > 0) & (a < 2.0**-126) | (a > torch.finfo(torch.bfloat16).max)
            assert flag == (operand and bool(outside.any()))
        for dtype in (torch.bfloat16, torch.float16):
            got = decode(plane, spec, *shape, dtype=dtype, amax=amax, operand=operand)[0]
            torch.testing.assert_close(
                got, torch.from_numpy(want).to(dtype), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_the_output_at_ties(dtype):
    """Products land on ties of the output type and around its overflow and subnormals."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    for scale in (1 + 2**-10, 1 + 2**-7, 2**-24 * 1.5, 146.25, 2.0**-133 * 1.5, 7e35):
        plane = codes, torch.tensor([scale])
        wide = decode(plane, SPECS["fp8_e4m3"], 1, 256)[0]
        got = decode(plane, SPECS["fp8_e4m3"], 1, 256, dtype=dtype)[0]
        torch.testing.assert_close(got, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_every_e8m0_byte_decodes():
    codes = torch.full((256, 32), 0x38, dtype=torch.uint8)  # E4M3 1.0
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    got = decode((codes, scale), SPECS["mxfp8"], 256, 32)[0][:, 0].numpy()
    want = np.exp2(np.arange(256) - 127.0)
    want[255] = np.nan
    np.testing.assert_array_equal(got, want.astype(F))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_amax(dtype, variant):
    for shape in ((1, 1), (3, 5), (5, 3), (1, 20001), (130, 257), (0, 5), (5, 0)):
        x = sample(*shape, dtype, special=False)
        want = float(as_float(x.abs()).max()) if x.numel() else 0.0
        for view in (x, x.T, x[:, ::2], x[::2]):
            expected = as_float(view.abs()).max() if view.numel() else 0.0
            assert tensor_amax(view).item() == expected
        if x.numel() == 0:
            continue
        for at in (0, x.numel() - 1, x.numel() // 2):
            y = x.clone()
            y.view(-1)[at] = -2 * want - 1
            assert tensor_amax(y).item() == as_float(y.abs()).max()
            y.view(-1)[at] = -float("inf")
            assert tensor_amax(y).item() == torch.finfo(torch.float32).max
            y.view(-1)[at] = float("nan")
            assert np.isnan(tensor_amax(y).item())


@pytest.mark.parametrize("signs", [-1, 0xD7E8], ids=["plain", "transformed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_amax_per_row(dtype, signs, variant):
    for shape in ((1, 1), (3, 5), (70, 3), (1, 20001), (130, 257), (0, 5), (5, 0)):
        x = sample(*shape, dtype)
        if x.numel() > 100:
            x[-1, 0] = float("nan")
        for view in (x, x.T, x[:, ::2], x[::2]):
            values = as_float(view if signs < 0 else hadamard(view, signs))
            want = np.abs(values).max(axis=1, initial=0.0)
            want = np.minimum(want, np.finfo(F).max)
            for threads in (1, 3):
                got = tensor_amax(view, signs=signs, per_row=True, threads=threads)
                np.testing.assert_array_equal(got.numpy(), want)


def test_amax_of_fp16_subnormals():
    x = torch.tensor([[6e-8, -1.2e-7, 0.0]], dtype=torch.float16)
    assert tensor_amax(x).item() == float(x.abs().max())


def test_transform_is_orthogonal_and_spreads_infinity():
    x = sample(33, 70, special=False).bfloat16()
    y = hadamard(x, 0xD7E8).float()
    assert y.shape == (33, 80)
    matrix = hadamard(torch.eye(16).bfloat16(), 0xD7E8).double()
    assert torch.equal(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    signs = [-1.0 if 0xD7E8 >> i & 1 else 1.0 for i in range(16)]
    assert (matrix[:, 0] * 4).tolist() == signs  # Sylvester: the first column is all ones
    x[0, 17] = float("inf")
    assert not hadamard(x, 0xD7E8)[0, 16:32].float().isfinite().any()
    assert hadamard(x, 0xD7E8)[0, :16].float().isfinite().all()


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_transpose(bits, variant):
    rng = np.random.default_rng(bits)
    dtype = {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    small = ((1, 1), (1, 7), (7, 1), (3, 5), (16, 16), (33, 50), (129, 257), (0, 3))
    # Tiles of whole lines, beside and below others, and 4 MiB, which is stored past the caches.
    for rows, cols in (*small, (128, 128), (192, 144), (300, 272), (4224, 1040)):
        x = rng.integers(0, 1 << bits, (rows, cols), dtype=np.uint64).astype(dtype)
        want = x.T
        source = x
        if bits == 4:
            source, want = (
                np.ascontiguousarray(np.pad(a, ((0, 0), (0, a.shape[1] % 2))))
                for a in (source, want)
            )
            source, want = (a[:, ::2] | a[:, 1::2] << 4 for a in (source, want))
        source = np.ascontiguousarray(source)
        for threads in (1, 2):
            out = np.full(want.shape, 0xEE, dtype)
            _core.transpose(source.ctypes.data, rows, cols, bits, out.ctypes.data, threads)
            np.testing.assert_array_equal(out, want)


BAD_SPECS = [
    (("e9m9", 0, 0, "fp32", "amax"), "element must be one of"),
    (("e4m3", 0, 0, "e3m0", "amax"), "scale must be one of"),
    (("e4m3", 0, 0, "fp32", "max"), "rule must be one of"),
    (("e4m3", 0, 128, "fp32", "amax"), "block must be"),
    (("e4m3", -1, -1, "fp32", "amax"), "block must be"),
    (("e2m1", 1, 16, "e4m3", "two_level", "max"), "four_over_six must be one of"),
]


@pytest.mark.parametrize("arguments, text", BAD_SPECS)
def test_bad_specs_are_refused(arguments, text):
    with pytest.raises(ValueError, match=f"Spec: {text}.*, got"):
        _core.Spec(*arguments[:5], False, 0.0, False, -1, 448.0, *arguments[5:])


UNSUPPORTED = [
    ("e4m3", 1, 32, "fp32", "rceil", "scale 'e8m0'"),
    ("e4m3", 0, 0, "e8m0", "rceil", "needs blocks"),
    ("e4m3", 1, 16, "e4m3", "two_level", "element 'e2m1'"),
    ("e4m3", 1, 48, "e8m0", "rceil", "blocks must be"),
    ("e4m3", 2, 32, "e8m0", "rceil", "blocks must be"),
    ("bf16", 0, 0, "none", "identity", "nothing to encode"),
    ("e4m3", 0, 0, "e8m0", "floor", "rule 'floor' needs blocks"),
    ("e4m3", 1, 32, "fp32", "even", "rule 'even' needs scale 'e8m0'"),
]
NVFP4 = ("e2m1", 1, 16, "e4m3", "two_level")
# arguments of a Spec by name, the reason
EXCLUDED = [
    (NVFP4, {"four_over_six": "mae", "stochastic": True}, "stochastic rounding"),
    (NVFP4, {"four_over_six": "mse", "signs": 1}, "a transform"),
    (("e4m3", 1, 32, "e8m0", "ceil"), {"four_over_six": "mae"}, "needs rule 'two_level'"),
    (("e4m3", 1, 128, "fp32", "amax"), {"row_scaled": True}, "row_scaled needs"),
    (("e2m1", 16, 16, "e4m3", "two_level"), {"row_scaled": True}, "blocks of 1 x B"),
]


@pytest.mark.parametrize("arguments", UNSUPPORTED, ids=str)
def test_unsupported_specs_have_a_reason(arguments):
    spec = _core.Spec(*arguments[:5])
    assert arguments[5] in _core.supports(spec)
    out = _core.PlaneOut(spec, 1, 1)
    with pytest.raises(ValueError, match="encode: spec must be supported"):
        _core.encode(1, "float32", 1, 1, 1, 1, out, None, 1)


@pytest.mark.parametrize("arguments, options, text", EXCLUDED)
def test_options_that_exclude_each_other_have_a_reason(arguments, options, text):
    assert text in _core.supports(_core.Spec(*arguments, **options))


def test_every_tested_spec_is_supported(spec):
    assert _core.supports(spec.native) is None


def test_bad_arguments_are_refused():
    spec = SPECS["mxfp8"].native
    out = _core.PlaneOut(spec, 1, 1)
    cases = [
        (lambda: _core.encode(1, "int8", 1, 1, 1, 1, out, None, 1), "encode: dtype"),
        (lambda: _core.encode(1, "float32", -1, 1, 1, 1, out, None, 1), "encode: rows and cols"),
        (lambda: _core.encode(1, "float32", 1 << 40, 1 << 40, 1, 1, out, None, 1), "below 2"),
        (lambda: _core.encode(0, "float32", 1, 1, 1, 1, out, None, 1), "x must not be null"),
        (lambda: _core.encode(1, "float32", 1, 1, 1, 1, None, None, 1), "row or col"),
        (lambda: _core.encode(1, "float32", 1, 1, 1, 1, out, None, 0), "threads"),
        (
            lambda: _core.encode(
                1, "float32", 1, 1, 1, 1, _core.PlaneOut(SPECS["nvfp4"].native, 1, 1), None, 1
            ),
            "stat must not be null",
        ),
        (lambda: _core.transpose(1, 1, 1, 12, 1, 1), "transpose: bits"),
        (lambda: _core.hadamard(1, "float32", 1, 1, 1, 1, -1, 1, 1), "hadamard: signs"),
        (lambda: _core.round_stochastic(1, 1, 1, 1, 1, "float32", 0, 0, 0, 0, 1), "dtype must be"),
        (lambda: _core.round_stochastic(1, 1, 1, 1, 1, "float16", 0, -1, 0, 0, 1), "row0 and col0"),
        (lambda: _core.round_stochastic(1, 1, 1, 1, 1, "float16", 0, 0, 0, 0, 0), "out must not"),
        (lambda: _core.cast("bf16", 1, 1, 1), "cast: element must be a small float"),
        (lambda: _core.set_variant("sse1"), "set_variant"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
