"""Elements, exhaustively: every BF16 input, every code, every scale byte.

Independent oracles are the table search of tests/helpers/oracle, ml_dtypes, gfloat and torch's own
float8 casts, each where docs/reference/numerics.md says that it can be trusted:

- ml_dtypes: E4M3 gives NaN above 464, E5M2 gives inf above 61440; FP4 and FP6 all but NaN.
- gfloat with sat=True: everything but NaN. torch: E4M3 saturates, E5M2 overflows to inf.
"""

from __future__ import annotations

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

import hybridq
from element_cases import FP8, ML_DTYPES, midpoints
from hybridq import formats, reference
from hybridq.formats import PlaneSpec
from oracle import ELEMENTS, cast_nearest, cast_stochastic, decode_codes, philox4x32_7
from oracle import random_bytes as oracle_random_bytes
from oracle.bridge import assert_bits_equal, decode_plane, encode_plane, stat_of
from oracle.planes import pack_nibbles
from oracle.scales import e8m0_value

NAMES = tuple(ELEMENTS)
GFLOAT = {name: getattr(gfloat.formats, f"format_info_ocp_{name}") for name in NAMES}


def every_bf16() -> np.ndarray:
    """float32 [65536]: the value of every BF16 bit pattern."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def inputs(name: str) -> np.ndarray:
    return np.concatenate([every_bf16(), midpoints(name)])


# --- the oracle against independent libraries -----------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_oracle_casts_like_ml_dtypes(name):
    values = inputs(name)
    trusted = ~np.isnan(values)
    if name in FP8:
        trusted &= np.abs(values) <= ELEMENTS[name].max
    with np.errstate(all="ignore"):
        theirs = values.astype(ML_DTYPES[name]).view(np.uint8)
    assert_bits_equal(cast_nearest(values, ELEMENTS[name])[trusted], theirs[trusted], name)


@pytest.mark.parametrize("name", NAMES)
def test_oracle_casts_like_gfloat(name):
    values = inputs(name)
    values = values[~np.isnan(values)]
    info = GFLOAT[name]
    rounded = gfloat.round_ndarray(
        info, values.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True
    )
    codes = gfloat.encode_ndarray(info, rounded).astype(np.uint8)
    assert_bits_equal(cast_nearest(values, ELEMENTS[name]), codes, name)


@pytest.mark.parametrize("name", FP8)
def test_oracle_casts_like_torch(name):
    values = inputs(name)
    # Beyond the maximum torch has NaN or the maximum, by version, and inf for E5M2.
    trusted = np.abs(values) <= ELEMENTS[name].max
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    theirs = torch.from_numpy(values.copy()).to(dtype).view(torch.uint8).numpy()
    assert_bits_equal(cast_nearest(values, ELEMENTS[name])[trusted], theirs[trusted], name)


@pytest.mark.parametrize("name", NAMES)
def test_oracle_decodes_like_ml_dtypes_and_gfloat(name):
    element = ELEMENTS[name]
    codes = np.arange(element.num_codes, dtype=np.uint8)
    mine = decode_codes(codes, element)
    assert_bits_equal(mine, codes.view(ML_DTYPES[name]).astype(np.float32), "ml_dtypes")
    theirs = [gfloat.decode_float(GFLOAT[name], int(code)).fval for code in codes]
    assert_bits_equal(mine, np.array(theirs, dtype=np.float32), "gfloat")


def test_oracle_e8m0_values_like_ml_dtypes_and_gfloat():
    codes = np.arange(256, dtype=np.uint8)
    mine = e8m0_value(codes)
    assert_bits_equal(mine, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    info = gfloat.formats.format_info_ocp_e8m0
    theirs = [gfloat.decode_float(info, int(code)).fval for code in codes]
    assert_bits_equal(mine, np.array(theirs, dtype=np.float32), "gfloat")


def test_oracle_philox_known_answer():
    words = philox4x32_7((0, 0, 0, 0), (0, 0))
    assert words == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


def test_oracle_random_bytes_are_the_scalar_philox(seed):
    """The array form against the scalar one, across group borders and offsets."""
    key = 0x9ABCDEF012345678
    drawn = oracle_random_bytes(key, 3, 40, row0=5, k0=13, stream=1)
    for row in range(3):
        for k in range(40):
            group, byte = divmod(13 + k, 16)
            words = philox4x32_7((group, 5 + row, 1, 0), (key & 0xFFFFFFFF, key >> 32))
            assert drawn[row, k] == words[byte // 4] >> 8 * (byte % 4) & 255


# --- hybridq's records and reference functions ---------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_element_record_has_the_bit_layouts_constants(name):
    mine, theirs = formats.element(name), ELEMENTS[name]
    assert mine.exponent_bits == theirs.exponent_bits
    assert mine.mantissa_bits == theirs.mantissa_bits
    assert mine.bias == theirs.bias
    assert mine.nan_code == theirs.nan_code
    assert mine.max == theirs.max
    assert 1 << mine.bits == theirs.num_codes


@pytest.mark.parametrize("name", NAMES)
def test_reference_casts_every_input(name):
    values = inputs(name)
    got = reference.cast(torch.from_numpy(values.copy()), formats.element(name))
    assert_bits_equal(got, cast_nearest(values, ELEMENTS[name]), name)


@pytest.mark.parametrize("name", NAMES)
def test_reference_decodes_every_code(name):
    codes = torch.arange(ELEMENTS[name].num_codes, dtype=torch.int32).to(torch.uint8)
    got = reference.decode_codes(codes, formats.element(name))
    assert_bits_equal(got, ELEMENTS[name].values.astype(np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_reference_casts_every_input_stochastically(name, seed):
    values = inputs(name)
    random = np.random.default_rng(seed).integers(0, 256, values.shape).astype(np.uint8)
    got = reference.cast(
        torch.from_numpy(values.copy()), formats.element(name), torch.from_numpy(random)
    )
    assert_bits_equal(got, cast_stochastic(values, ELEMENTS[name], random), name)


# --- the compiled core's scalar casts ------------------------------------------------------------


@pytest.fixture(scope="module")
def core():
    return pytest.importorskip("hybridq._core", reason="the compiled core is not built")


@pytest.mark.parametrize("name", NAMES)
def test_core_casts_and_decodes_everything(core, name, seed):
    """The core shares one header between CPU and CUDA; FP6 has no other way in than this."""
    values = np.ascontiguousarray(inputs(name))
    got = np.empty(values.shape, dtype=np.uint8)
    core.cast(name, values.ctypes.data, values.size, got.ctypes.data)
    assert_bits_equal(got, cast_nearest(values, ELEMENTS[name]), "nearest")

    random = np.random.default_rng(seed).integers(0, 256, values.shape).astype(np.uint8)
    core.cast_stochastic(name, values.ctypes.data, random.ctypes.data, values.size, got.ctypes.data)
    assert_bits_equal(got, cast_stochastic(values, ELEMENTS[name], random), "stochastic")

    codes = np.arange(ELEMENTS[name].num_codes, dtype=np.uint8)
    decoded = np.empty(codes.shape, dtype=np.float32)
    core.decode_codes(name, codes.ctypes.data, codes.size, decoded.ctypes.data)
    assert_bits_equal(decoded, ELEMENTS[name].values.astype(np.float32), "decode")


def test_core_philox_known_answer(core):
    assert list(core.philox(0, 0, 0, 0)) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("element_seed", [1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_core_philox_is_the_oracles(core, element_seed):
    key = (element_seed & 0xFFFFFFFF, element_seed >> 32)
    for k16, row, stream in ((0, 1, 1), (7, 2**31, 3), (12345, 678, 0)):
        assert tuple(core.philox(element_seed, k16, row, stream)) == philox4x32_7(
            (k16, row, stream, 0), key
        )


# --- every backend -------------------------------------------------------------------------------


def bf16_matrix(width: int) -> torch.Tensor:
    """Every BF16 bit pattern, [65536 / width, width]."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(-1, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FP8)
def test_backend_casts_every_bf16_to_fp8(name, dtype, backend):
    """An amax of fmax given from outside makes the multiplier 1, so encode is the bare cast."""
    spec = PlaneSpec(formats.format(f"fp8_{name}"))
    x = bf16_matrix(256).to(dtype)
    plane = encode_plane(x, spec, stat=stat_of(ELEMENTS[name].max))
    want = cast_nearest(x.float().numpy(), ELEMENTS[name])
    assert_bits_equal(plane["data"], want, name)
    columns = encode_plane(x, spec, "columnwise", stat=stat_of(ELEMENTS[name].max))
    assert_bits_equal(columns["data"], want.T, f"{name} columnwise")


@pytest.mark.parametrize("name", FP8)
def test_backend_casts_every_fp16_to_fp8(name, backend):
    spec = PlaneSpec(formats.format(f"fp8_{name}"))
    x = bf16_matrix(256).view(torch.float16)
    plane = encode_plane(x, spec, stat=stat_of(ELEMENTS[name].max))
    want = cast_nearest(x.float().numpy(), ELEMENTS[name])
    assert_bits_equal(plane["data"], want, name)


@pytest.mark.parametrize("name", FP8)
def test_backend_casts_every_midpoint_to_fp8(name, backend):
    values = midpoints(name)
    plane = encode_plane(
        torch.from_numpy(values[None].copy()),
        PlaneSpec(formats.format(f"fp8_{name}")),
        stat=stat_of(ELEMENTS[name].max),
    )
    assert_bits_equal(plane["data"][0], cast_nearest(values, ELEMENTS[name]), name)


@pytest.mark.parametrize("name", FP8)
def test_backend_casts_every_bf16_to_fp8_stochastically(name, backend, seed):
    spec = PlaneSpec(formats.format(f"fp8_{name}"), stochastic=True)
    x = bf16_matrix(256)
    plane = encode_plane(x, spec, stat=stat_of(ELEMENTS[name].max), seed=seed)
    random = oracle_random_bytes(seed, *x.shape, row0=0, k0=0, stream=0)
    want = cast_stochastic(x.float().numpy(), ELEMENTS[name], random)
    assert_bits_equal(plane["data"], want, name)


def test_backend_casts_every_bf16_within_range_to_e2m1(backend):
    """A 6 in front of each block and a tensor amax of 6 * 448 make scale and multiplier 1."""
    every = bf16_matrix(1 << 16)[0]
    inside = torch.cat([every[every.abs() <= 6], torch.zeros(14, dtype=torch.bfloat16)])
    inside = inside[: inside.numel() // 15 * 15].view(-1, 15)
    assert inside.numel() > 30_000
    x = torch.cat([torch.full((inside.shape[0], 1), 6.0, dtype=torch.bfloat16), inside], 1)
    plane = encode_plane(x, PlaneSpec(formats.format("nvfp4")), stat=stat_of(6 * 448))
    assert (plane["scale"] == 0x38).all()  # 1.0
    codes = cast_nearest(x.float().numpy(), ELEMENTS["e2m1"])
    assert_bits_equal(plane["data"], pack_nibbles(codes))


@pytest.mark.parametrize("name", FP8)
def test_backend_decodes_every_code_under_every_e8m0_byte(name, backend):
    """256 codes x 256 scale bytes: row r has scale byte r in all of its eight blocks."""
    spec = PlaneSpec(formats.format("mxfp8" if name == "e4m3" else "mxfp8_e5m2"))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    plane = {
        "data": codes.repeat(256, 1),
        "scale": codes[:, None].repeat(1, 8).contiguous(),
    }
    with np.errstate(all="ignore"):
        values = ELEMENTS[name].values.astype(np.float32)
        want = values[None, :] * e8m0_value(codes.numpy())[:, None]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = decode_plane(plane, spec, 256, 256, dtype)
        assert got.dtype == dtype
        assert_bits_equal(got, torch.from_numpy(want).to(dtype), f"{name} {dtype}")


def test_backend_decodes_every_code_under_every_e4m3_byte(backend):
    """16 codes x 256 scale bytes under three tensor amax."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    e2m1, e4m3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
    with np.errstate(all="ignore"):
        product = decode_codes(codes, e2m1) * decode_codes(scales, e4m3)
    for amax in (6 * 448.0, 1.0, 3.4028235e38):
        plane = {
            "data": torch.from_numpy(pack_nibbles(codes)),
            "scale": torch.from_numpy(scales.copy()),
            "amax": stat_of(amax),
        }
        got = decode_plane(plane, PlaneSpec(formats.format("nvfp4")), 256, 16)
        with np.errstate(all="ignore"):
            want = product * (np.float32(amax) / np.float32(6 * 448))
        assert_bits_equal(got, want, f"amax {amax}")


def test_backend_decodes_every_fp8_code_of_one_scale(backend):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)[None]
    for name in FP8:
        for scale in (1.0, 0.3, 2.0**-127, 3.4028235e38):
            plane = {"data": codes, "scale": stat_of(scale)}
            got = decode_plane(plane, PlaneSpec(formats.format(f"fp8_{name}")), 1, 256)
            with np.errstate(all="ignore"):
                want = ELEMENTS[name].values.astype(np.float32)[None] * np.float32(scale)
            assert_bits_equal(got, want, f"{name} {scale}")


def test_backend_makes_every_e4m3_scale_byte(backend):
    """All 32,768 non-negative BF16 block amax beside one tensor amax: bytes are the oracle's."""
    from oracle.scales import two_level_scale

    amax = bf16_matrix(1 << 16)[0][: 1 << 15]
    x = torch.zeros(1 << 15, 16, dtype=torch.bfloat16)
    x[:, 3] = amax
    for tensor_amax in (6 * 448.0, 1.0, 1e-30, 3.4028235e38):
        plane = encode_plane(x, PlaneSpec(formats.format("nvfp4")), stat=stat_of(tensor_amax))
        byte, _ = two_level_scale(
            amax.float().numpy(), np.float32(tensor_amax), ELEMENTS["e2m1"], 448.0
        )
        assert_bits_equal(plane["scale"][:, 0], byte, f"tensor amax {tensor_amax}")
        if tensor_amax == 6 * 448.0:
            assert len(np.unique(byte)) == 128  # every magnitude, NaN too


def test_elements_are_known_by_name():
    for name in NAMES:
        assert hybridq.formats.element(name).name == name
