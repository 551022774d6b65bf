"""Every backend, every element, all inputs: `make exhaustive`, a few minutes.

The expected bits are those of helpers/oracle, in NumPy, whose casts are first held to ml_dtypes and
to torch's own float8 casts over the same inputs. What the default suite exhausts is not repeated:
this adds every format family, every CPU variant, all 256 random bytes of stochastic rounding, all
amax of every scale rule, and FP32 inputs of every exponent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import hybridq
from core_tools import using_variant
from element_cases import FP8, ML_DTYPES, midpoints
from encode_cases import options_of
from hybridq import _core, formats, reference
from hybridq.formats import PlaneSpec
from oracle import ELEMENTS, cast_nearest, cast_stochastic
from oracle import decode as oracle_decode
from oracle.bridge import (
    NAMES,
    assert_bits_equal,
    assert_planes_equal,
    decode_plane,
    encode_plane,
    expected,
    oracle_spec,
)
from oracle.planes import pack_nibbles

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

#: The reference, and the CPU core with every instruction set that this machine has.
ENGINES = ("reference", *_core.build_info()["tables"])
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FORMATS = [name for name in formats.names() if not formats.format(name).is_identity]
MX = [name for name in FORMATS if formats.format(name).scale.name == "e8m0"]
NVFP4 = [name for name in FORMATS if formats.format(name).rule == "two_level"]


@contextmanager
def using_engine(name: str) -> Iterator[None]:
    if name == "reference":
        with hybridq.backend("reference"):
            yield
    else:
        with hybridq.backend("cpu"), using_variant(name):
            yield


@pytest.fixture(params=ELEMENTS)
def element(request) -> str:
    return request.param


def cast(engine: str, element: str, values: np.ndarray, random: np.ndarray | None = None):
    """Codes of float32 `values` by the engine's own scalar cast."""
    if engine == "reference":
        drawn = None if random is None else torch.from_numpy(random)
        return reference.cast(torch.from_numpy(values), formats.element(element), drawn).numpy()
    out = np.full(values.shape, 0xEE, dtype=np.uint8)
    if random is None:
        _core.cast(element, values.ctypes.data, values.size, out.ctypes.data)
    else:
        _core.cast_stochastic(
            element, values.ctypes.data, random.ctypes.data, values.size, out.ctypes.data
        )
    return out


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit dtype, in bit order."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def fp32_inputs(element: str) -> np.ndarray:
    """Every sign, exponent and upper 12 mantissa bits, exact and one step on (a sticky bit), and
    every midpoint of neighbouring codes with the FP32 values beside it."""
    upper = np.arange(1 << 21, dtype=np.uint32) << np.uint32(11)
    dense = np.concatenate([upper, upper | np.uint32(1)]).view(np.float32)
    return np.concatenate([dense, midpoints(element)])


# --- casts ---------------------------------------------------------------------------------------


def test_casts_of_fp32(element):
    """4.2 million values; the oracle's codes are first held to ml_dtypes' and torch's own."""
    values = fp32_inputs(element)
    want = cast_nearest(values, ELEMENTS[element])
    known = ~np.isnan(values)
    inside = known & (np.abs(values) <= ELEMENTS[element].max)
    with np.errstate(all="ignore"):
        theirs = values.astype(ML_DTYPES[element]).view(np.uint8)
    trusted = inside if element in FP8 else known
    assert_bits_equal(want[trusted], theirs[trusted], "ml_dtypes")
    if element in FP8:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
        theirs = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
        trusted = known if element == "e4m3" else inside
        assert_bits_equal(want[trusted], theirs[trusted], "torch")
    for engine in ENGINES:
        with using_engine(engine):
            assert_bits_equal(cast(engine, element, values), want, engine)


@pytest.mark.parametrize("dtype", HALVES, ids=HALVES.values())
def test_stochastic_casts_of_every_half_by_every_byte(element, dtype):
    """65,536 inputs x 256 bytes, in integers: 256 gaps, the distance rounded to even, and r."""
    values = every_half(dtype).float().numpy()
    one = ELEMENTS[element]
    low = cast_stochastic(values, one, np.zeros(values.shape, dtype=np.uint8))
    grid = one.magnitudes
    with np.errstate(invalid="ignore"):
        magnitude = np.minimum(np.abs(values.astype(np.float64)), one.max)
    below = np.searchsorted(grid, magnitude, side="right").clip(1) - 1
    gap = np.append(np.diff(grid), 1.0)[below]
    with np.errstate(invalid="ignore"):
        q = np.nan_to_num(np.rint((magnitude - grid[below]) / gap * 256)).astype(np.int64)
    sign = np.signbit(values) * one.sign_code
    for byte in range(256):
        want = (below + (q + byte >= 256)) | sign
        want = np.where(np.isnan(values), one.nan_code, want).astype(np.uint8)
        if byte == 0:
            assert_bits_equal(low, want, "the oracle")
        random = np.full(values.shape, byte, dtype=np.uint8)
        for engine in ENGINES:
            with using_engine(engine):
                got = cast(engine, element, values, random)
            assert_bits_equal(got, want, f"{engine} {element}, byte {byte}")


def test_scalar_decode_of_every_byte(element):
    """Bits above an element's own are not read."""
    codes = np.arange(256, dtype=np.uint8)
    want = ELEMENTS[element].values[codes & (ELEMENTS[element].num_codes - 1)].astype(np.float32)
    got = reference.decode_codes(torch.from_numpy(codes), formats.element(element))
    assert_bits_equal(got, want, "reference")
    for variant in ENGINES[1:]:
        out = np.empty(256, dtype=np.float32)
        with using_engine(variant):
            _core.decode_codes(element, codes.ctypes.data, codes.size, out.ctypes.data)
        assert_bits_equal(out, want, variant)


# --- encode --------------------------------------------------------------------------------------


def encodes_as_the_oracle(x: torch.Tensor, spec: PlaneSpec, direction: str, **options) -> None:
    """Every engine's plane of `x` has the oracle's bytes."""
    stat = options.get("stat")
    known = options if stat is None else options | {"stat": stat.numpy()}
    want = expected(x, spec, direction, **known)
    for engine in ENGINES:
        with using_engine(engine):
            got = encode_plane(x, spec, direction, **options)
        assert_planes_equal(got, want, f"{engine} {spec} {direction} {x.dtype}")


def shuffled(values: torch.Tensor, seed: int) -> torch.Tensor:
    return values[torch.from_numpy(np.random.default_rng(seed).permutation(values.numel()))]


@pytest.mark.parametrize("dtype", HALVES, ids=HALVES.values())
@pytest.mark.parametrize("name", FORMATS)
def test_encode_of_every_half(name, dtype, seed):
    """In bit order, and the finite ones shuffled so that blocks mix magnitudes; every option."""
    every = every_half(dtype)
    finite = every[every.isfinite()]
    finite = torch.nn.functional.pad(finite, (0, -finite.numel() % 256))
    specs = options_of(name)
    if dtype == torch.float16:  # the options differ in scales and rounding, not in what they read
        specs = [specs[0], replace(specs[0], stochastic=True)]
    for number, spec in enumerate(specs):
        options = {"seed": seed} if spec.stochastic else {}
        for x in (every.view(-1, 256), shuffled(finite, seed + number).view(-1, 256)):
            for direction in ("rowwise", "columnwise"):
                encodes_as_the_oracle(x, spec, direction, **options)


def led_by(top: float, block: tuple[int, int]) -> torch.Tensor:
    """All BF16 values of magnitudes up to `top`, in blocks one below the other, each led by top."""
    values = every_half(torch.bfloat16)
    values = values[values.abs() <= top]
    size = block[0] * block[1]
    rows = torch.nn.functional.pad(values, (0, -values.numel() % (size - 1))).view(-1, size - 1)
    lead = torch.full((len(rows), 1), top, dtype=values.dtype)
    return torch.cat([lead, rows], 1).view(-1, block[1])


@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
@pytest.mark.parametrize("name", MX)
def test_mx_codes_are_the_bare_cast_at_every_scale(name, rule):
    """Blocks led by the element's largest value times 2^e have the scale 2^e: the codes of all
    BF16 values of no larger magnitude are the cast of x / 2^e, exact in float64. Rule `ceil` is
    not here, as the largest value is no power of two and the scale would be 2^(e + 1)."""
    fmt = replace(formats.format(name), rule=rule)
    element = ELEMENTS[fmt.element.name]
    exponents = [*range(-126, 128 - fmt.element.emax, 11), 127 - fmt.element.emax]
    for exponent in exponents:
        x = led_by(element.max * 2.0**exponent, fmt.block)
        codes = cast_nearest(x.double().numpy() * 2.0**-exponent, element)
        codes = pack_nibbles(codes) if fmt.element.name == "e2m1" else codes
        for engine in ENGINES:
            with using_engine(engine):
                plane = encode_plane(x, PlaneSpec(fmt))
            assert (plane["scale"] == 127 + exponent).all()
            assert_bits_equal(plane["data"], codes, f"{engine} {name} 2^{exponent}")


# --- scales --------------------------------------------------------------------------------------


def every_amax() -> torch.Tensor:
    """Non-negative FP32 [98304]: all upper halves with a lower half of 0, 1 or all ones."""
    upper = np.arange(1 << 15, dtype=np.uint32) << np.uint32(16)
    bits = upper[:, None] | np.array([0, 1, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy(bits.reshape(-1).view(np.float32))


@pytest.mark.parametrize("name", [n for n in FORMATS if not formats.format(n).is_tensor_scaled])
def test_scales_of_every_amax(name):
    """One amax in each block, by every rule of the format; NVFP4 beside four amax of the tensor.

    A column of partial blocks, one value wide; of squares every seventh amax (128x128: every
    31st), which leaves all lower halves, as 3 divides neither.
    """
    height = formats.format(name).block[0]
    amax = every_amax()[:: {1: 1, 128: 31}.get(height, 7)]
    x = torch.zeros(height * len(amax), 1)
    x[height - 1 :: height, 0] = amax
    for spec in options_of(name):
        if spec.stochastic or spec.signs is not None:
            continue
        wholes = (
            (6 * 448.0, 1.0, 1e-30, torch.finfo(torch.float32).max) if spec.needs_amax else (None,)
        )
        for whole in wholes[:1] if spec.four_over_six else wholes:
            options = {}
            if whole is not None:
                options["stat"] = torch.full(spec.stat_shape(len(x)), whole)
            encodes_as_the_oracle(x, spec, "rowwise", **options)


@pytest.mark.parametrize("name", [n for n in FORMATS if formats.format(n).is_tensor_scaled])
def test_scale_of_every_tensor_amax(name):
    for spec in options_of(name):
        if spec.stochastic or spec.signs is not None:
            continue
        for value in every_amax()[::211]:
            encodes_as_the_oracle(value.reshape(1, 1), spec, "rowwise")


# --- decode --------------------------------------------------------------------------------------


def decodes_as_the_oracle(buffers: dict, spec: PlaneSpec, rows: int, k: int) -> None:
    """Every engine decodes the planes as the oracle does, to every dtype."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(b)) for name, b in buffers.items()}
    for dtype, name in NAMES.items():
        want = oracle_decode(buffers, oracle_spec(spec), rows, k, name)
        for engine in ENGINES:
            with using_engine(engine):
                got = decode_plane(tensors, spec, rows, k, dtype)
            assert_bits_equal(got, want, f"{engine} {spec} to {name}")


def all_codes(name: str, width: int) -> np.ndarray:
    """uint8 [1, K]: every code, in whole blocks of `width`."""
    codes = np.arange(ELEMENTS[formats.format(name).element.name].num_codes, dtype=np.uint8)
    return np.resize(codes, (1, -(-codes.size // width) * width))


@pytest.mark.parametrize("name", MX)
def test_decode_of_every_code_under_every_e8m0_byte(name):
    fmt = formats.format(name)
    height, width = fmt.block
    codes = all_codes(name, width).repeat(256 * height, 0)
    scale = np.arange(256, dtype=np.uint8)[:, None].repeat(codes.shape[1] // width, 1)
    data = pack_nibbles(codes) if fmt.element.name == "e2m1" else codes
    decodes_as_the_oracle({"data": data, "scale": scale}, PlaneSpec(fmt), *codes.shape)


@pytest.mark.parametrize("name", NVFP4)
def test_decode_of_every_code_under_every_e4m3_byte(name):
    """16 codes x 256 scale bytes x an amax in every binade, beside 0 and the FP32 maximum."""
    fmt = formats.format(name)
    height, width = fmt.block
    codes = all_codes(name, width).repeat(256 * height, 0)
    scale = np.arange(256, dtype=np.uint8)[:, None]
    bits = np.arange(256, dtype=np.uint32) << np.uint32(23)
    bits |= np.random.default_rng(1).integers(0, 1 << 23, 256).astype(np.uint32)
    every = np.concatenate([bits.view(np.float32), np.float32([0.0, np.finfo(np.float32).max])])
    for bound in (448.0, 256.0):
        for amax in every[:: 1 if height == 1 else 16]:
            buffers = {"data": pack_nibbles(codes), "scale": scale, "amax": amax.reshape(1)}
            decodes_as_the_oracle(buffers, PlaneSpec(fmt, tensor_bound=bound), *codes.shape)


@pytest.mark.parametrize("name", [n for n in FORMATS if formats.format(n).scale.name == "fp32"])
def test_decode_of_every_code_under_fp32_scales(name):
    """Scales of every exponent, zero, subnormal and special ones included."""
    fmt = formats.format(name)
    bits = np.arange(256, dtype=np.uint32)[:, None] << np.uint32(23)
    drawn = np.random.default_rng(2).integers(0, 1 << 23, (256, 1)).astype(np.uint32)
    scales = np.concatenate([bits, bits | drawn], 1).reshape(-1, 1).view(np.float32)
    if fmt.is_tensor_scaled:
        codes = all_codes(name, 1)
        for scale in scales:
            decodes_as_the_oracle({"data": codes, "scale": scale}, PlaneSpec(fmt), *codes.shape)
        return
    height, width = fmt.block
    if height > 1:
        scales = scales[::16]  # 128 rows of each
    codes = all_codes(name, width).repeat(len(scales) * height, 0)
    wide = scales.repeat(codes.shape[1] // width, 1)
    decodes_as_the_oracle({"data": codes, "scale": wide}, PlaneSpec(fmt), *codes.shape)
