"""encode: every backend equals the oracle bit for bit, and the backends each other.

Formats, directions, input types, rounding, transform, shard offsets, odd shapes, and data that
hurts. The decided corner cases of docs/reference/numerics.md are spelled out at the end.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridq
from encode_cases import SHAPES, options_of
from hybridq import formats
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from oracle import decode as oracle_decode
from oracle import tensor_amax
from oracle.bridge import (
    DTYPES,
    assert_bits_equal,
    assert_planes_equal,
    decode_plane,
    encode_plane,
    encode_planes,
    expected,
    oracle_spec,
    stat_of,
    values_of,
)
from oracle.samples import ALL_KINDS, sample


@st.composite
def cases(draw, name: str):
    spec = draw(st.sampled_from(options_of(name)))
    x = sample(
        draw(st.sampled_from(ALL_KINDS)),
        draw(SHAPES),
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.integers(0, 2**32 - 1)),
    )
    options = {}
    if spec.stochastic:
        options["seed"] = draw(st.integers(-(2**63), 2**63 - 1))
        options["row0"] = draw(st.integers(0, 300))
        options["col0"] = draw(st.integers(0, 300))
        if spec.signs is not None:  # a transform's groups cannot be cut
            options["row0"], options["col0"] = (16 * options[key] for key in ("row0", "col0"))
        options["stream"] = draw(st.integers(0, 5))
    return x, spec, options


def check(x: torch.Tensor, spec: PlaneSpec, direction: str, **options) -> dict:
    """Encode, compare with the oracle, return the plane."""
    stat = options.get("stat")
    want = expected(
        x, spec, direction, **{**options, "stat": None if stat is None else stat.numpy()}
    )
    got = encode_plane(x, spec, direction, **options)
    assert_planes_equal(got, want, f"{spec} {direction} {tuple(x.shape)} {x.dtype}")
    return got


@given(data=st.data())
def test_backend_equals_oracle(backend, fmt, direction, data):
    x, spec, options = data.draw(cases(fmt))
    check(x, spec, direction, **options)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_backend_equals_oracle_for_every_kind(backend, fmt, kind, seed):
    """Every kind of data meets every option of every format, both planes in one call."""
    for index, spec in enumerate(options_of(fmt)):
        x = sample(kind, (35, 70), list(DTYPES)[index % 3], seed + index)
        options = {"seed": seed + 5 * 2**32} if spec.stochastic else {}
        row, col = encode_planes(x, spec, spec, **options)
        assert_planes_equal(row, expected(x, spec, "rowwise", **options), f"{spec} rowwise")
        assert_planes_equal(col, expected(x, spec, "columnwise", **options), f"{spec} columnwise")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_backends_agree_on_larger_matrices(fmt, dtype, seed):
    """All backends against the reference, where the oracle would be slow."""
    from declared import BACKENDS

    x = sample("heavy", (129, 391), dtype, seed)
    for spec in options_of(fmt):
        options = {"seed": seed} if spec.stochastic else {}
        with hybridq.backend("reference"):
            want = encode_planes(x, spec, spec, **options)
        for name in BACKENDS:
            with hybridq.backend(name):
                got = encode_planes(x, spec, spec, **options)
            for mine, theirs, side in zip(got, want, ("rowwise", "columnwise"), strict=True):
                assert_planes_equal(mine, theirs, f"{name} {spec} {side}")


@pytest.mark.thinned(1, few=8)
def test_bits_do_not_depend_on_threads(backend, fmt, seed):
    x = sample("heavy", (150, 333), "bfloat16", seed)
    spec = options_of(fmt)[-1]
    options = {"seed": seed} if spec.stochastic else {}
    want = [expected(x, spec, side, **options) for side in ("rowwise", "columnwise")]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            got = encode_planes(x, spec, spec, **options)
            for mine, theirs in zip(got, want, strict=True):
                assert_planes_equal(mine, theirs, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_strides_do_not_matter(backend, fmt, direction, dtype, seed):
    """Transposed, stepped, offset and expanded inputs encode like their contiguous copies."""
    base = sample("normal", (66, 90), dtype, seed)
    views = {
        "transposed": base.t(),
        "stepped": base[::2, ::3],
        "offset": base[1:, 5:],
        "expanded row": base[:1].expand(33, 90),
        "expanded column": base[:, :1].expand(66, 40),
        "one row": base[3:4],
        "one column": base[:, 7:8],
    }
    spec = PlaneSpec(formats.format(fmt))
    for name, view in views.items():
        got = encode_plane(view, spec, direction)
        want = encode_plane(view.clone(memory_format=torch.contiguous_format), spec, direction)
        assert_planes_equal(got, want, name)
        assert_planes_equal(got, expected(view, spec, direction), name)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", [(0, 0), (0, 40), (40, 0), (1, 1), (1, 300), (300, 1)])
def test_degenerate_shapes(backend, fmt, direction, shape, seed):
    for spec in options_of(fmt):
        options = {"seed": seed} if spec.stochastic else {}
        check(sample("normal", shape, "bfloat16", seed), spec, direction, **options)


@pytest.mark.thinned(1)
@given(data=st.data())
def test_two_specs_in_one_call_are_two_calls(backend, fmt, data):
    """A hybrid pair's planes do not depend on each other, nor on being made together."""
    other = data.draw(st.sampled_from(formats.names()))
    row = data.draw(st.sampled_from(options_of(fmt)))
    col = data.draw(st.sampled_from(options_of(other)))
    x = sample(
        data.draw(st.sampled_from(ALL_KINDS)),
        data.draw(SHAPES),
        data.draw(st.sampled_from(sorted(DTYPES))),
        data.draw(st.integers(0, 2**32 - 1)),
    )
    options = {"seed": 77} if row.stochastic or col.stochastic else {}
    got = encode_planes(x, row, col, **options)
    assert_planes_equal(got[0], expected(x, row, "rowwise", **options), f"{row}")
    assert_planes_equal(got[1], expected(x, col, "columnwise", **options), f"{col}")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_columns_from_the_dequantized_rows(backend, fmt, dtype, seed):
    """The rowwise decode in FP32, rounded once to the input's dtype, then encoded."""
    x = sample("heavy", (45, 70), dtype, seed)
    row = PlaneSpec(formats.format(fmt))
    for other in ("mxfp8", "nvfp4", "fp8_e5m2", "fp8_128x128", "identity"):
        col = PlaneSpec(formats.format(other))
        plane = encode_plane(x, row)
        rounded = decode_plane(plane, row, *x.shape, dtype=x.dtype)
        for keep_row in (True, False):
            flat = torch.ops.hybridq.encode(
                x, str(row), str(col), col_source="rowwise_dequantized", keep_row=keep_row
            )
            want = expected(rounded, col, "columnwise")
            columns = dict(zip(want, flat[-len(want) :], strict=True))
            assert_planes_equal(columns, want, f"{fmt} then {other}")
            assert len(flat) == len(want) + (len(plane) if keep_row else 0)


def test_given_amax_replaces_the_matrixs_own(backend, fmt, direction, seed):
    """What a reduction over a group found rules; formats without a tensor amax ignore it."""
    x = sample("normal", (40, 50), "bfloat16", seed)
    spec = PlaneSpec(formats.format(fmt))
    for amax in (1e4, float(x.abs().max()), NAN, INF, 1e-42, 0.0):
        check(x, spec, direction, stat=stat_of(amax))


def cpu_variants() -> list[str]:
    """Instruction sets that the compiled core was built for and that this machine has."""
    core = pytest.importorskip("hybridq._core", reason="the compiled core is not built")
    return core.build_info()["tables"]


def test_every_cpu_variant_equals_oracle(fmt, seed):
    """The variants are one source compiled for several instruction sets: the same bits."""
    from hybridq import _core

    before, tested = _core.variant(), []
    try:
        for variant in cpu_variants():
            try:
                _core.set_variant(variant)
            except ValueError:
                continue  # this processor does not have it
            tested.append(variant)
            with hybridq.backend("cpu"):
                for index, kind in enumerate(ALL_KINDS):
                    spec = options_of(fmt)[index % len(options_of(fmt))]
                    x = sample(kind, (35, 150), list(DTYPES)[index % 3], seed + index)
                    options = {"seed": seed} if spec.stochastic else {}
                    row, col = encode_planes(x, spec, spec, **options)
                    assert_planes_equal(row, expected(x, spec, "rowwise", **options), variant)
                    assert_planes_equal(col, expected(x, spec, "columnwise", **options), variant)
                    want = oracle_decode(
                        expected(x, spec, "rowwise", **options),
                        oracle_spec(spec, x.dtype),
                        *x.shape,
                    )
                    assert_bits_equal(decode_plane(row, spec, *x.shape), want, variant)
    finally:
        _core.set_variant(before)
    assert before.removesuffix("-amx") in tested and "baseline" in tested


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_amax_op(backend, direction, kind, seed):
    """max |x| after the transform: NaN kept, inf stored as the FP32 maximum."""
    for dtype in DTYPES:
        x = sample(kind, (37, 53), dtype, seed)
        for signs, row_scaled in itertools.product((None, DEFAULT_SIGNS), (False, True)):
            spec = PlaneSpec(formats.format("nvfp4"), signs=signs, row_scaled=row_scaled)
            values = values_of(x if direction == "rowwise" else x.t())
            got = torch.ops.hybridq.amax(x, str(spec), direction)
            want = tensor_amax(values, oracle_spec(spec))
            assert_bits_equal(got, want, f"{dtype} {signs}", any_nan=False)


# --- the decided corner cases --------------------------------------------------------------------

QUANTIZED = [name for name in formats.names() if not formats.format(name).is_identity]
NAN, INF = float("nan"), float("inf")


def nan_codes(name: str) -> int:
    """The byte of a plane whose codes are all NaN's."""
    known = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x77, "e3m2": 0x1F, "e2m3": 0x1F}
    return known[formats.format(name).element.name]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], ids=hex)
def test_nan_takes_its_whole_block(backend, name, direction, bits):
    """Scale NaN, codes NaN, whatever the NaN's sign or payload; per tensor and NVFP4: all of it."""
    fmt = formats.format(name)
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x.view(torch.int16)[130, 140] = bits - (1 << 16 if bits >> 15 else 0)
    plane = check(x, PlaneSpec(fmt), direction)
    decoded = decode_plane(plane, PlaneSpec(fmt), 256, 256)
    if direction == "columnwise":
        decoded = decoded.t()
    if fmt.needs_tensor_amax:
        assert decoded.isnan().all()
        assert (plane["data"] == nan_codes(name)).all()
    else:
        height, width = fmt.block if direction == "rowwise" else fmt.block[::-1]
        top, left = 130 // height * height, 140 // width * width
        inside = torch.zeros(256, 256, dtype=torch.bool)
        inside[top : top + height, left : left + width] = True
        assert torch.equal(decoded.isnan(), inside)
        assert (decoded[~inside] == 1).all()
    scale = plane["scale"]
    if scale.dtype == torch.uint8:
        assert (scale == (0xFF if fmt.scale.name == "e8m0" else 0x7F)).any()
    else:
        assert scale.isnan().any()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sign", [1, -1])
def test_inf_stays_visible(backend, name, direction, sign):
    """inf saturates under a scale made for the FP32 maximum: about 3.4e38, or inf."""
    fmt = formats.format(name)
    x = torch.ones(64, 64)
    x[3, 5] = sign * INF
    plane = check(x, PlaneSpec(fmt), direction)
    decoded = decode_plane(plane, PlaneSpec(fmt), 64, 64)
    value = decoded[3, 5] if direction == "rowwise" else decoded[5, 3]
    assert value.item() * sign >= 3.3e38 or (fmt.power_of_two and value.item() * sign >= 1.7e38)
    assert not decoded.isnan().any()
    if fmt.scale.name == "e8m0":
        assert (plane["scale"] == 0xFE).any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_keep_their_signs(backend, name, direction):
    """All-zero tensors and blocks decode to exact zeros of the same sign."""
    fmt = formats.format(name)
    signs = torch.arange(64 * 64).reshape(64, 64) % 3 == 0
    zeros = torch.where(signs, -0.0, 0.0)
    mixed = zeros.clone()
    mixed[:32, :32] = 1.0
    for x in (zeros, mixed):
        plane = check(x, PlaneSpec(fmt), direction)
        decoded = decode_plane(plane, PlaneSpec(fmt), 64, 64)
        want = x if direction == "rowwise" else x.t()
        assert_bits_equal(decoded, want.contiguous(), name)
    if fmt.rule == "amax":
        plane = encode_plane(zeros, PlaneSpec(fmt), direction)
        assert (plane["scale"] == 1).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_subnormals_are_not_flushed(backend, name, direction):
    """FP32 and BF16 subnormals: the multiplier overflows or saturates as the rules say."""
    fmt = formats.format(name)
    steps = torch.arange(-2000, 2096, dtype=torch.float32).reshape(64, 64)
    for dtype, unit in ((torch.float32, 2.0**-149), (torch.bfloat16, 2.0**-133)):
        x = (steps % 90 * unit).to(dtype)
        assert (x != 0).any() and x.abs().max() < 2.0**-126
        for record in {fmt, replace(fmt, power_of_two=False)}:
            check(x, PlaneSpec(record), direction)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_thread_that_flushes_subnormals_changes_no_bit(backend, name):
    """`torch.set_flush_denormal(True)`, by the user or by another library, and it stays on."""
    spec = PlaneSpec(formats.format(name))
    x = torch.arange(-2000, 2096, dtype=torch.float32).reshape(64, 64) % 90 * 2.0**-149
    plane = check(x, spec, "rowwise")
    values = decode_plane(plane, spec, 64, 64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        again = encode_plane(x, spec, "rowwise")
        decoded = decode_plane(again, spec, 64, 64)
        is_on = (x[:1, 1] * torch.ones(1)).view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    for buffer, bits in plane.items():
        assert_bits_equal(again[buffer], bits, f"{name} {buffer}")
    assert_bits_equal(decoded, values, name)
    assert is_on


def test_overflowing_quotient_is_the_input_types_maximum_per_block(backend):
    """448 / tiny is inf: per block the input type's maximum, per tensor FP32's."""
    x = torch.full((1, 128), 2.0**-133, dtype=torch.bfloat16)
    block = replace(formats.format("fp8_1x128"), power_of_two=False)
    bf16_max = torch.finfo(torch.bfloat16).max
    plane = check(x, PlaneSpec(block), "rowwise")
    assert plane["scale"].item() == np.float32(1) / np.float32(bf16_max)
    plane = check(x.float(), PlaneSpec(block), "rowwise")
    assert plane["scale"].item() == np.float32(1) / np.float32(torch.finfo(torch.float32).max)
    plane = check(x, PlaneSpec(formats.format("fp8_e4m3")), "rowwise")
    assert plane["scale"].item() == np.float32(1) / np.float32(torch.finfo(torch.float32).max)
    plane = check(x, PlaneSpec(formats.format("fp8_1x128")), "rowwise")
    assert plane["scale"].item() == 2.0**-127


def test_overflowing_quotient_after_a_transform_is_bf16s_maximum(backend):
    """The transform's result is BF16, whatever came in; here it is x / 4, in the sign's order."""
    fmt = replace(formats.format("fp8_1x128"), power_of_two=False)
    spec = PlaneSpec(fmt, signs=0)
    bf16_max = torch.finfo(torch.bfloat16).max
    x = torch.zeros(1, 128)
    x[0, 0] = 2.0**-130
    plane = check(x, spec, "rowwise")
    assert plane["scale"].item() == np.float32(1) / np.float32(bf16_max)
    assert (check(x.t(), spec, "columnwise")["scale"] == plane["scale"]).all()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("exponent", range(-149, 128, 3))
def test_scale_bytes_at_every_exponent(backend, exponent):
    """Block amax just below, at and just above 448 * 2^e: E8M0 goes up one byte above it."""
    with np.errstate(over="ignore", under="ignore"):
        at = np.float32(448.0 * 2.0**exponent)
        around = [at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))]
    x = torch.zeros(3, 32)
    x[:, 0] = torch.from_numpy(np.array(around, dtype=np.float32))
    for name in ("mxfp8", "mxfp8_e5m2"):
        check(x, PlaneSpec(formats.format(name)), "rowwise")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
def test_scale_rules_at_every_exponent(backend, name, rule):
    """Every power of two of FP32, the values beside it, and those where `even` carries."""
    fmt = replace(formats.format(name), rule=rule)
    exponents = np.arange(-149, 128)
    powers = 2.0 ** exponents.astype(np.float64)
    # The largest mantissa of the element, and half a unit above it: from there `even` carries.
    carry = powers * (2 - 2.0**-fmt.element.mantissa_bits / 2)
    with np.errstate(over="ignore"):
        at = np.concatenate([powers, carry, powers * fmt.element.max / 2**fmt.element.emax])
        at = at.astype(np.float32)
        amax = np.stack(
            [at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))]
        ).reshape(-1)
    x = torch.zeros(len(amax), 32)
    x[:, 7] = torch.from_numpy(amax)
    x[:, 8] = x[:, 7] / 3
    check(x, PlaneSpec(fmt), "rowwise")
    check(x.t(), PlaneSpec(fmt, stochastic=True), "columnwise", seed=3)


def test_vanishing_blocks_saturate_and_decode_to_zero(backend):
    """NVFP4: a scale that underflows to 0 has the FP32 maximum as multiplier: codes +-6."""
    x = torch.full((2, 32), 1e-9)
    x[:, 1::2] *= -1
    x[:, 4] = 0.0
    x[0, 16:] = 3e4
    plane = check(x, PlaneSpec(formats.format("nvfp4")), "rowwise")
    assert plane["scale"][0, 0] == 0 and plane["scale"][0, 1] != 0
    assert plane["data"][0, 0] == 0xF7  # +6 and -6
    assert plane["data"][0, 2] == 0xF0  # 0 stays 0
    decoded = decode_plane(plane, PlaneSpec(formats.format("nvfp4")), 2, 32)
    assert (decoded[0, :16] == 0).all()


def test_padding_never_reaches_an_amax(backend, fmt, direction):
    """A tail's scale is that of what exists, also when eps or zeros fill the rest."""
    for tail in (1, 15, 17, 31, 33, 127, 129):
        check(torch.full((tail, tail), 1e-20), PlaneSpec(formats.format(fmt)), direction)


# --- stochastic rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_stochastic_rounding_never_moves_what_is_representable(backend, name, direction, seed):
    """Decoded values, encoded again under the same scales, keep their codes for any seed."""
    spec = PlaneSpec(formats.format(name))
    x = sample("normal", (64, 64), "float32", seed)
    plane = encode_plane(x, spec, direction)
    decoded = decode_plane(plane, spec, 64, 64)
    decoded = decoded if direction == "rowwise" else decoded.t()
    nearest = encode_plane(decoded, spec, direction)
    again = encode_plane(decoded, replace(spec, stochastic=True), direction, seed=seed)
    if spec.format.has_power_of_two_scales:
        assert_planes_equal(again, nearest, name)  # decoding was exact: nothing to round
    assert_planes_equal(
        again, expected(decoded, replace(spec, stochastic=True), direction, seed=seed), name
    )


def test_stochastic_rounding_has_no_bias(backend):
    """The mean of many draws of one value is the value, within 5 sigma; a floor would be 1/512 off.

    2^20 draws of x between codes 1 and 1.125 of E4M3: the variance of one draw is
    p (1 - p) gap^2 <= gap^2 / 4, hence sigma of the mean <= gap / 2 / 1024.
    """
    gap = 0.125
    x = torch.full((1024, 1024), 1.0 + gap * 77 / 256)
    spec = PlaneSpec(formats.format("fp8_e4m3"), stochastic=True)
    plane = encode_plane(x, spec, seed=1234, stat=stat_of(448.0))
    mean = decode_plane(plane, spec, 1024, 1024).double().mean().item()
    assert abs(mean - x[0, 0].item()) <= 5 * gap / 2 / 1024


def test_streams_and_seeds_draw_different_bits(backend, seed):
    x = sample("normal", (64, 64), "float32", seed)
    spec = PlaneSpec(formats.format("nvfp4"), stochastic=True)
    planes = [
        encode_plane(x, spec, seed=s, stream=stream)["data"]
        for s in (seed, seed + 1, seed + 2**32)
        for stream in (0, 1)
    ]
    for i, first in enumerate(planes):
        for second in planes[:i]:
            assert not torch.equal(first, second)
