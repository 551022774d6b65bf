"""Encode of the core against a slow model, one block at a time, and against the reference.

The model below is written from docs/reference/numerics.md with NumPy scalars and ml_dtypes casts;
it shares nothing with the kernels.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from core_tools import (
    DTYPES,
    SPECS,
    CoreSpec,
    as_float,
    encode,
    hadamard,
    pack,
    same_bytes,
    sample,
    tensor_amax,
)
from hybridq import _core

F = np.float32
FMAX = np.finfo(F).max
MODELLED = sorted({*SPECS} - {"fp8_1x64", "fp8_e4m3_rht"})
DTYPE_OF = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def model_cast(element: str, values: np.ndarray) -> np.ndarray:
    info = _core.constants()[element]
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -info["max"], info["max"]).astype(F).astype(DTYPE_OF[element])
    return np.where(np.isnan(values), info["nan_code"], codes.view(np.uint8)).astype(np.uint8)


def model_scale(amax: np.float32, spec: CoreSpec, stat: np.float32, limit: float):
    """(stored scale, multiplier) of one block."""
    fmax = F(_core.constants()[spec.element]["max"])
    with np.errstate(all="ignore"):
        if spec.rule == "amax":
            amax = np.maximum(np.minimum(amax, FMAX), F(spec.eps))
            enc = F(1) if amax == 0 else fmax / amax
            enc = F(limit) if np.isinf(enc) else enc
            if spec.power_of_two and not np.isnan(enc):
                enc = F(2.0 ** (np.frexp(enc)[1] - 1))
            return F(1) / enc, enc
        if spec.rule == "rceil":
            ratio = amax * (F(1) / fmax)
            if np.isnan(ratio):
                return np.uint8(255), F(np.nan)
            if np.isinf(ratio):
                byte = 254
            elif ratio <= 2.0**-127:
                byte = 0
            else:
                mantissa, exponent = np.frexp(np.float64(ratio))
                byte = exponent - (mantissa == 0.5) + 127
            return np.uint8(byte), F(2.0 ** (127 - int(byte)))
        if spec.rule != "two_level":
            byte = model_exponent_byte(amax, spec)
            return np.uint8(byte), F(np.nan if byte == 255 else 2.0 ** (127 - byte))
        enc = model_global(spec, stat)
        return model_candidate(amax * (enc * (F(1) / fmax)), FMAX, enc)


def model_exponent_byte(amax: np.float32, spec: CoreSpec) -> int:
    """The byte of rules floor, ceil and even, in float64."""
    info = _core.constants()[spec.element]
    if not np.isfinite(amax):
        return 255 if np.isnan(amax) else 254
    if amax == 0:
        return 0
    value = np.float64(amax)
    if spec.rule == "even":
        # In units of the element's last place at amax's binade; rint rounds ties to even.
        unit = 2.0 ** (np.frexp(value)[1] - 1 - info["mantissa_bits"])
        value = np.rint(value / unit) * unit
    mantissa, exponent = np.frexp(value)
    power = exponent - 1 + (spec.rule == "ceil" and mantissa != 0.5)
    return int(np.clip(power - int(np.floor(np.log2(info["max"]))) + 127, 0, 254))


def model_global(spec: CoreSpec, stat: np.float32) -> np.float32:
    enc = np.minimum(F(spec.tensor_bound * 6) / stat, FMAX)
    return F(1) if stat == 0 or enc == 0 else enc


def model_candidate(wanted: np.float32, limit: float, enc: np.float32):
    code = model_cast("e4m3", np.array(np.minimum(wanted, F(limit))))
    value = code.view(ml_dtypes.float8_e4m3fn).astype(F)
    return code.item(), np.minimum(F(1) / (value * (F(1) / enc)), FMAX)


def model_four_over_six(block: np.ndarray, spec: CoreSpec, stat: np.float32):
    """(scale byte, multiplier) of one block, its rows those of the rowwise matrix."""
    enc, best = model_global(spec, stat), None
    with np.errstate(all="ignore"):
        base = np.abs(block).max() / F(6) * enc
        for wanted in (base, base * F(1.5)):
            code, multiplier = model_candidate(wanted, 448.0, enc)
            value = np.uint8(code).view(ml_dtypes.float8_e4m3fn).astype(F)
            q = model_cast("e2m1", block * multiplier).view(DTYPE_OF["e2m1"]).astype(F)
            error = np.abs(q * value * stat / F(6 * spec.tensor_bound) - block)
            error = error * error if spec.four_over_six == "mse" else error
            lines = np.zeros(spec.block[0], F)
            for line, row in enumerate(error):
                for e in row:
                    lines[line] += e
            while lines.size > 1:
                lines = lines[: lines.size // 2] + lines[lines.size // 2 :]
            if best is None or lines[0] < best[0]:
                best = lines[0], code, multiplier
    return best[1:]


def model_stochastic(element: str, value: np.float32, byte: int) -> int:
    info = _core.constants()[element]
    if np.isnan(value):
        return info["nan_code"]
    codes = np.arange(info["max_code"] + 1, dtype=np.uint8)
    grid = codes.view(DTYPE_OF[element]).astype(np.float64)
    a = min(abs(float(value)), grid[-1])
    i = int(np.searchsorted(grid, a, side="right")) - 1
    up = 0
    if i + 1 < grid.size:
        up = int(round(256 * (a - grid[i]) / (grid[i + 1] - grid[i])) + byte >= 256)
    return i + up | (1 << (info["bits"] - 1) if np.signbit(value) else 0)


def model_encode(x: np.ndarray, spec: CoreSpec, stat: np.ndarray, limit: float, seed: int):
    rows, k = x.shape
    height, width = spec.block if spec.block != (0, 0) else (max(rows, 1), max(k, 1))
    codes = np.zeros((rows, k), np.uint8)
    scales = np.zeros((-(-rows // height), -(-k // width)), F if spec.rule == "amax" else np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            amax = stat[0] if spec.block == (0, 0) else np.abs(x[at]).max()
            whole = stat[i] if spec.row_scaled else stat[0]
            if spec.four_over_six:
                scales[i, j], multiplier = model_four_over_six(x[at], spec, whole)
            else:
                scales[i, j], multiplier = model_scale(amax, spec, whole, limit)
            with np.errstate(all="ignore"):
                scaled = x[at] * multiplier
            if not spec.stochastic:
                codes[at] = model_cast(spec.element, scaled)
                continue
            for r, c in np.ndindex(scaled.shape):
                row, col = i * height + r, j * width + c
                words = _core.philox(seed, col // 16, row, 0)
                byte = words[col % 16 // 4] >> (8 * (col % 4)) & 255
                codes[row, col] = model_stochastic(spec.element, scaled[r, c], byte)
    if spec.element == "e2m1":
        codes = pack(codes)
    return codes, scales


def model_hadamard(x: np.ndarray, signs: int) -> np.ndarray:
    """Butterflies in FP32, in the order of the strides; BF16 at the end."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    factor = np.array([-0.25 if signs >> i & 1 else 0.25 for i in range(16)], F)
    v = x.reshape(x.shape[0], -1, 16) * factor
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:2], 16 // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(invalid="ignore"):
            v = np.stack([low + high, low - high], axis=-2).reshape(v.shape)
    return v.reshape(x.shape).astype(ml_dtypes.bfloat16).astype(F)


def with_one_nan(values: np.ndarray) -> np.ndarray:
    """FP32 values with the one NaN of docs/reference/numerics.md; bytes as they are."""
    if values.dtype == np.float32:
        values = np.where(np.isnan(values), np.uint32(0x7FC00000).view(F), values)
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("name", MODELLED)
def test_encode_equals_the_model(name, dtype):
    spec = SPECS[name]
    for shape, special in (((5, 33), True), ((34, 49), False), ((2, 130), True)):
        x = sample(*shape, dtype, special=special)
        if shape[0] == 2:
            x[1, 3] = float("nan")
            x[0, 64:] = 0
        values = as_float(x)
        limit = torch.finfo(dtype if spec.signs < 0 else torch.bfloat16).max
        if spec.signs >= 0:
            values = model_hadamard(values, spec.signs)
            got = as_float(hadamard(x, spec.signs))
            np.testing.assert_array_equal(got, values)
        with np.errstate(invalid="ignore"):
            stat = np.abs(values).max(axis=1) if spec.row_scaled else np.abs(values).max()
            stat = np.minimum(stat, FMAX).reshape(-1)
        got = tensor_amax(x, signs=spec.signs, per_row=spec.row_scaled).numpy()
        assert got.tobytes() == with_one_nan(stat).tobytes()
        codes, scales = model_encode(values, spec, stat, limit, seed=0x0123456789ABCDEF)
        data, scale = encode(x, spec)
        assert scale.numpy().tobytes() == with_one_nan(scales).tobytes()
        np.testing.assert_array_equal(data.numpy(), codes)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", sorted({*SPECS} - {"fp8_1x64"}))
def test_encode_equals_the_reference_backend(name, columnwise):
    reference = pytest.importorskip("hybridq.reference")
    formats = pytest.importorskip("hybridq.formats")
    spec = SPECS[name]
    block = None if spec.block == (0, 0) else spec.block
    scale = {"amax": "fp32", "two_level": "e4m3"}.get(spec.rule, "e8m0")
    elements = (formats.element(spec.element), formats.element(scale))
    found = formats.Format(
        elements[0], block, elements[1], spec.rule, "test", spec.power_of_two, spec.eps
    )
    plane = formats.PlaneSpec(
        found,
        stochastic=spec.stochastic,
        signs=None if spec.signs < 0 else spec.signs,
        tensor_bound=spec.tensor_bound,
        four_over_six=spec.four_over_six or None,
        row_scaled=spec.row_scaled,
    )
    seed = torch.tensor([0x0123456789ABCDEF])
    for shape in ((33, 65), (150, 70)):
        x = sample(*shape, torch.bfloat16)
        want = reference.encode_plane(
            x.T if columnwise else x, plane, seed=seed, is_columnwise=columnwise
        )
        got = encode(x, spec, columnwise)
        assert same_bytes(got, [b.reshape(a.shape) for a, b in zip(got, want, strict=False)])


@pytest.mark.thinned(1, few=60)
@pytest.mark.parametrize("exponent", range(-149, 128))
def test_e8m0_scale_at_every_power_of_two(exponent):
    """Just below, at and just above fmax * 2^e, the byte is ceil(log2(amax * fp32(1/fmax)))."""
    at = F(min(448 * 2.0**exponent, float(FMAX)))
    points = np.array([np.nextafter(at, F(0)), at, np.nextafter(at, FMAX)], F)
    x = torch.from_numpy(np.repeat(points[:, None], 32, axis=1).copy())
    got = encode(x, SPECS["mxfp8"])[1].numpy()[:, 0]
    want = [model_scale(p, SPECS["mxfp8"], F(0), 0.0)[0] for p in points]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("element", DTYPE_OF)
def test_exponent_rules_at_every_power_of_two(element, rule):
    """At each binade: its ends, its middle, and where the mantissa rounds up to the next one."""
    spec = CoreSpec(element, (1, 32), "e8m0", rule)
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    last = 2.0 - 2.0 ** -(_core.constants()[element]["mantissa_bits"] + 1)
    points = np.concatenate([powers, 1.5 * powers, last * powers]).astype(F)
    points = np.concatenate([points, np.nextafter(points, F(0)), np.nextafter(points, FMAX)])
    points = np.concatenate([points, np.array([0, FMAX, np.inf, np.nan], F)])
    x = torch.from_numpy(np.repeat(points[:, None], 32, axis=1).copy())
    data, scale = encode(x, spec)
    want = [model_exponent_byte(p, spec) for p in points]
    np.testing.assert_array_equal(scale.numpy()[:, 0], want)
    nan_code = _core.constants()[element]["nan_code"]
    assert (data[-1] == (nan_code | nan_code << 4 if element == "e2m1" else nan_code)).all()


def test_an_overflowing_quotient_takes_the_input_types_maximum():
    spec = SPECS["fp8_128x128"]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((1, 4), 1e-38).to(dtype)
        limit = torch.finfo(dtype).max
        assert encode(x, spec)[1].item() == F(1) / F(limit)
    per_tensor = encode(torch.full((1, 4), 1e-38).bfloat16(), SPECS["fp8_e4m3"])
    assert per_tensor[1].item() == F(1) / FMAX
