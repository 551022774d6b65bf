"""Element casts and decodes of the core against ml_dtypes, gfloat and exact arithmetic."""

from __future__ import annotations

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest

from core_tools import using_variant
from hybridq import _core

# name: (ml_dtypes type, gfloat format)
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, gf.format_info_ocp_e4m3),
    "e5m2": (ml_dtypes.float8_e5m2, gf.format_info_ocp_e5m2),
    "e2m1": (ml_dtypes.float4_e2m1fn, gf.format_info_ocp_e2m1),
    "e3m2": (ml_dtypes.float6_e3m2fn, gf.format_info_ocp_e3m2),
    "e2m3": (ml_dtypes.float6_e2m3fn, gf.format_info_ocp_e2m3),
}
VARIANTS = _core.build_info()["tables"]


@pytest.fixture(params=ELEMENTS)
def element(request) -> str:
    return request.param


@pytest.fixture(params=VARIANTS, autouse=True)
def variant(request):
    with using_variant(request.param):
        yield request.param


def cast(element: str, values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    out = np.full(values.shape, 0xEE, dtype=np.uint8)
    _core.cast(element, values.ctypes.data, values.size, out.ctypes.data)
    return out


def cast_stochastic(element: str, values: np.ndarray, random: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    random = np.ascontiguousarray(np.broadcast_to(random, values.shape), dtype=np.uint8)
    out = np.full(values.shape, 0xEE, dtype=np.uint8)
    _core.cast_stochastic(
        element, values.ctypes.data, random.ctypes.data, values.size, out.ctypes.data
    )
    return out


def decode(element: str, codes: np.ndarray) -> np.ndarray:
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    out = np.empty(codes.shape, dtype=np.float32)
    _core.decode_codes(element, codes.ctypes.data, codes.size, out.ctypes.data)
    return out


def all_bf16() -> np.ndarray:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def finite_magnitudes(element: str) -> np.ndarray:
    """Non-negative finite values of the element, ascending; the index is the code."""
    return decode(element, np.arange(_core.constants()[element]["max_code"] + 1))


def expected_codes(element: str, values: np.ndarray) -> np.ndarray:
    """ml_dtypes inside the finite range, the rules of numerics.md outside of it."""
    info = _core.constants()[element]
    clipped = np.clip(values, -info["max"], info["max"]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        codes = clipped.astype(ELEMENTS[element][0]).view(np.uint8)
    mask = (1 << info["bits"]) - 1
    return np.where(np.isnan(values), info["nan_code"], codes & mask).astype(np.uint8)


def test_casts_of_all_bf16_values(element):
    values = all_bf16()
    np.testing.assert_array_equal(cast(element, values), expected_codes(element, values))


def test_casts_at_and_around_every_tie(element):
    """Halfway points, their FP32 neighbours, and what lies beyond the largest value."""
    grid = finite_magnitudes(element).astype(np.float64)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    top = np.float32(grid[-1])
    points = np.concatenate([grid.astype(np.float32), ties, [top * 1.0625, top * 2, 3.4e38]])
    points = points.astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    )
    points = np.concatenate([points, -points, [np.inf, -np.inf, 0.0, -0.0, np.nan, -np.nan]])
    points = np.concatenate([points, np.array([1e-45, -1e-45, 1.1754942e-38])])
    values = points.astype(np.float32)
    np.testing.assert_array_equal(cast(element, values), expected_codes(element, values))


def test_casts_agree_with_gfloat(element):
    info = ELEMENTS[element][1]
    rng = np.random.default_rng(1)
    top = _core.constants()[element]["max"]
    values = (rng.standard_normal(500) * top / 3).astype(np.float32)
    want = [gfloat.encode_float(info, gfloat.round_float(info, float(v), sat=True)) for v in values]
    np.testing.assert_array_equal(cast(element, values), np.array(want, dtype=np.uint8))


def test_every_code_decodes_as_in_both_oracles(element):
    dtype, info = ELEMENTS[element]
    codes = np.arange(1 << _core.constants()[element]["bits"], dtype=np.uint8)
    got = decode(element, codes)
    np.testing.assert_array_equal(got, codes.view(dtype).astype(np.float32))
    want = np.array([gfloat.decode_float(info, int(c)).fval for c in codes], dtype=np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), codes >> (codes.size.bit_length() - 2) == 1)


def test_casting_a_decoded_code_gives_it_back(element):
    info = _core.constants()[element]
    codes = np.arange(1 << info["bits"], dtype=np.uint8)
    values = decode(element, codes)
    want = codes.copy()
    sign = codes & (1 << (info["bits"] - 1))
    want[np.isinf(values)] = (info["max_code"] | sign)[np.isinf(values)]
    want[np.isnan(values)] = info["nan_code"]
    np.testing.assert_array_equal(cast(element, values), want)


def test_stochastic_rounding_for_every_byte(element):
    """The farther neighbour if and only if RN_even(256 * frac) + byte >= 256, in float64."""
    rng = np.random.default_rng(2)
    grid = finite_magnitudes(element).astype(np.float64)
    low, high = grid[:-1], grid[1:]
    # Fractions on the 1/256 grid, on its ties (n + 1/2)/256 and off it.
    fractions = np.concatenate(
        [
            np.arange(0, 256, 37) / 256,
            (np.arange(0, 256, 41) + 0.5) / 256,
            rng.random(6),
            [255.5 / 256, 0.5 / 256],
        ]
    )
    values = (low[:, None] + fractions * (high - low)[:, None]).astype(np.float32).ravel()
    index = np.searchsorted(grid, values.astype(np.float64), side="right") - 1
    gap = np.append(high - low, 1.0)[index]
    q = np.rint(256 * (values.astype(np.float64) - grid[index]) / gap).astype(np.int64)
    sign = 1 << (_core.constants()[element]["bits"] - 1)
    for byte in (0, 1, 127, 128, 200, 254, 255):
        want = (index + (q + byte >= 256)).astype(np.uint8)
        got = cast_stochastic(element, values, np.uint8(byte))
        np.testing.assert_array_equal(got, want)
        negative = cast_stochastic(element, -values, np.uint8(byte))
        np.testing.assert_array_equal(negative, want | sign)
    # The last byte that stays and the first that moves, of every value.
    for byte in (np.clip(255 - q, 0, 255), np.clip(256 - q, 0, 255)):
        want = (index + (q + byte >= 256)).astype(np.uint8)
        got = cast_stochastic(element, values, byte.astype(np.uint8))
        np.testing.assert_array_equal(got, want)


def test_stochastic_rounding_keeps_codes_and_saturates(element):
    info = _core.constants()[element]
    codes = np.arange(info["max_code"] + 1, dtype=np.uint8)
    bytes_ = np.arange(256, dtype=np.uint8)
    values = np.repeat(decode(element, codes), 256)
    got = cast_stochastic(element, values, np.tile(bytes_, codes.size))
    np.testing.assert_array_equal(got, np.repeat(codes, 256))
    edge = np.array([np.inf, -np.inf, info["max"] * 1.01, np.nan, 0.0, -0.0], dtype=np.float32)
    sign = 1 << (info["bits"] - 1)
    top = info["max_code"]
    want = [top, top | sign, top, info["nan_code"], 0, sign]
    np.testing.assert_array_equal(cast_stochastic(element, edge, np.uint8(255)), want)


def test_philox_known_answers():
    assert _core.philox(0, 0, 0, 0) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


def test_constants_of_the_wide_types():
    known = _core.constants()
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp32", np.float32)):
        info = ml_dtypes.finfo(dtype)
        assert known[name]["max"] == float(info.max)
        assert known[name]["min_normal"] == float(info.smallest_normal)
        assert known[name]["min_subnormal"] == float(info.smallest_subnormal)
    assert known["e8m0"]["max"] == 2.0**127
