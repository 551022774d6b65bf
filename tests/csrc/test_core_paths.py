"""The core's fast paths: that they are taken, and that they write the bytes of the general one.

A view with a gap between its columns is read by the general path, a contiguous matrix by the path
that reads x in its own type. The general path is held to the slow model (test_core_encode.py) and
to the oracle; here the two meet on every 16-bit input, odd tails, NaN, offsets and large planes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core_tools import (
    DTYPES,
    SPECS,
    decode,
    encode,
    encode_pair,
    hadamard,
    same_bytes,
    sample,
    tensor_amax,
    using_variant,
)
from hybridq import _core

VARIANTS = _core.build_info()["tables"]
#: All but four over six of blocks that no format has.
FAST = [name for name, spec in SPECS.items() if not spec.four_over_six or spec.block[1] == 16]
SHAPES = [(1, 1), (2, 15), (3, 33), (33, 16), (129, 47), (130, 517), (40, 1030), (9, 4130)]


@pytest.fixture(params=VARIANTS)
def variant(request):
    with using_variant(request.param):
        yield request.param


def path(x, row, col) -> str:
    """Return how the core would encode x: `raw`, `two passes` or `general`."""
    keep = [torch.zeros(1, dtype=torch.uint8), torch.ones(1)]
    planes = [
        None
        if spec is None
        else _core.PlaneOut(
            spec.native, keep[0].data_ptr(), keep[0].data_ptr(), keep[1].data_ptr(), 0, 0, 0, 0
        )
        for spec in (row, col)
    ]
    return _core.encode_path(x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride(), *planes)


def gapped(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap between neighbouring columns."""
    wide = torch.full((x.shape[0], 2 * x.shape[1]), 7.0, dtype=x.dtype)
    wide[:, ::2] = x
    return wide[:, ::2]


def agrees(x, spec, **options) -> None:
    """Both paths write the same planes of x, in both directions."""
    other = gapped(x)
    for columnwise in (False, True):
        pair = (None, spec) if columnwise else (spec, None)
        if x.numel() > 1:
            assert path(x, *pair) == "raw" and path(other, *pair) == "general"
        got = encode(x, spec, columnwise, **options)
        assert same_bytes(got, encode(other, spec, columnwise, **options)), columnwise


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a 16-bit dtype, shuffled [254, 256] or so: blocks mix magnitudes."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(5))
    return values[order][: values.numel() // 256 * 256].view(-1, 256)


@pytest.mark.parametrize("name", FAST)
def test_paths_agree_on_odd_shapes(name, variant):
    spec = SPECS[name]
    for shape in SHAPES:
        for dtype in DTYPES if shape[1] < 600 else (torch.bfloat16,):
            agrees(sample(*shape, dtype), spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAST)
def test_paths_agree_on_every_half(name, dtype, variant):
    """Shuffled, and scaled down by rows so that the scales are small as well."""
    spec = SPECS[name]
    x = every_half(dtype)
    agrees(x, spec)
    small = x.float() * torch.exp2(-torch.arange(len(x)).float() % 120)[:, None]
    agrees(small.to(dtype), spec)


@pytest.mark.parametrize("name", FAST)
def test_paths_agree_where_values_are_special(name, variant):
    """NaN in an odd last block (whose padding nibble stays 0), infinities, and zeros."""
    spec = SPECS[name]
    for special in (float("nan"), -float("inf"), 0.0, 1e-39, 3e38):
        x = sample(35, 77, torch.bfloat16, special=False)
        x[:, 70:] = special
        x[31:, :] = special
        agrees(x, spec)
        x = torch.full((35, 77), special, dtype=torch.bfloat16)
        agrees(x, spec)


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "nvfp4", "nvfp4_rht_sr", "fp8_1x128"])
def test_paths_agree_at_any_address(name, variant):
    spec, x = SPECS[name], sample(70, 300, torch.bfloat16)
    for first in (1, 2, 7, 32):
        part = x[:, first : first + 256]
        assert path(part, spec, spec) == "raw"
        for columnwise in (False, True):
            got = encode(part, spec, columnwise, row0=5, col0=9)
            want = encode(gapped(part), spec, columnwise, row0=5, col0=9)
            assert same_bytes(got, want)


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "nvfp4", "mxfp8_32x32", "nvfp4_rht_sr"])
def test_planes_that_are_stored_past_the_caches(name):
    """A plane of some MiB: its lines are streamed, whole and partial ones."""
    spec = SPECS[name]
    for cols in (4096, 4097):
        x = sample(2100, cols, torch.bfloat16)
        stats = [None, None]
        if spec.needs_amax:
            stats = [tensor_amax(x, columnwise, spec.signs) for columnwise in (False, True)]
        options = {"stats": tuple(stats), "streams": (1, 2)}
        row, col = encode_pair(x, spec, spec, **options)
        want = encode_pair(gapped(x), spec, spec, **options)
        assert same_bytes(row, want[0]) and same_bytes(col, want[1])
        threaded = encode_pair(x, spec, spec, threads=2, **options)
        assert same_bytes(row, threaded[0]) and same_bytes(col, threaded[1])


@pytest.mark.parametrize("name", [name for name in FAST if SPECS[name].four_over_six])
def test_four_over_six_under_any_factor(name, variant):
    """From the smallest FP32 to the largest, and statistics that the elements do not have."""
    spec = SPECS[name]
    x = sample(35, 77, special=False)
    for exponent in (
        -149,
        -140,
        -127,
        -110,
        -101,
        -100,
        -99,
        -60,
        -41,
        -40,
        -39,
        0,
        97,
        100,
        101,
        120,
        126,
    ):
        factor = torch.tensor(2.0).double() ** exponent
        agrees((x.double() * factor).float(), spec)
        for bound in (0.5, 1.0, 448.0):
            agrees((x.double() * factor).float(), replace(spec, tensor_bound=bound))
        stat = (torch.tensor([0.75]).double() * factor).float()
        for columnwise in (False, True):
            count = (77 if columnwise else 35) if spec.row_scaled else 1
            options = {"stat": stat.expand(count).contiguous(), "columnwise": columnwise}
            assert same_bytes(encode(x, spec, **options), encode(gapped(x), spec, **options))


@pytest.mark.parametrize("name", [name for name in FAST if SPECS[name].four_over_six])
def test_four_over_six_at_ties_and_near_them(name, variant):
    """Values that both scales decode to, and those one step beside: errors are equal or nearly."""
    spec = SPECS[name]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 2.5, 5.0, 0.75])
    index = torch.randint(len(values), (96, 256), generator=torch.Generator().manual_seed(3))
    x = values[index]
    step = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(4))
    beside = (x.bfloat16().view(torch.int16) + step.short() * (x > 0)).view(torch.bfloat16)
    for each in (x, x * 1.5, x.bfloat16(), beside, beside.float() * 1.1):
        agrees(each, spec)


def test_which_path_is_taken():
    x, nvfp4, mxfp8 = sample(40, 70), SPECS["nvfp4"], SPECS["mxfp8"]
    over, rows, transformed = (SPECS[n] for n in ("nvfp4_4o6_mae", "nvfp4_rows", "nvfp4_rht"))
    long = SPECS["nvfp4_1x128_4o6"]
    half = x.bfloat16()
    for every in (x, half, x.half()):
        both = "two passes" if every is half else "raw"  # FP8 on 16-bit integers, FP4 not
        assert path(every, mxfp8, nvfp4) == path(every.T, mxfp8, nvfp4) == both
        assert path(every, mxfp8, mxfp8) == path(every.T, nvfp4, nvfp4) == "raw"
        assert path(every[::2], mxfp8, None) == path(every[:, 3:], None, mxfp8) == "raw"
        assert path(every[:, ::2], mxfp8, mxfp8) == "general"
        for row, col in ((over, None), (None, rows), (over, rows), (rows, rows), (over, nvfp4)):
            assert path(every, row, col) == path(every.T, row, col) == "raw"
        assert path(every, long, None) == path(every, None, long) == "general"
        assert path(every, long, mxfp8) == path(every, mxfp8, long) == "two passes"
        assert path(every, transformed, transformed) == path(every.T, None, transformed) == "raw"


def test_two_passes_write_both_planes():
    x = sample(70, 90)
    for other in ("nvfp4_1x128_4o6", "nvfp4_64x64_4o6"):
        for row, col in ((SPECS["mxfp8"], SPECS[other]), (SPECS[other], SPECS["fp8_1x128"])):
            assert path(x, row, col) == "two passes"
            pair = encode_pair(x, row, col)
            assert same_bytes(pair[0], encode(x, row))
            assert same_bytes(pair[1], encode(x, col, columnwise=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), 0.0])
def test_amax_of_a_transform_is_that_of_its_result(special, dtype, variant):
    """Along rows, down columns (a transposed view), and by the general path, over odd shapes."""
    for shape in [*SHAPES, (300, 1100)]:
        x = sample(*shape, dtype, special=False)
        if special is not None:
            x[-1, -1] = special
        for view in (x, x.T):
            plain = view.contiguous()
            rotated = hadamard(plain, 0xD7E8).float().abs()
            most = torch.finfo(torch.float32).max
            for per_row in (False, True):
                largest = rotated.amax(1) if per_row else rotated.max().reshape(1)
                want = largest.nan_to_num(nan=float("nan"), posinf=most)
                for one in (view, plain, gapped(plain)):
                    got = tensor_amax(one, signs=0xD7E8, per_row=per_row)
                    assert torch.equal(got.view(torch.int32), want.view(torch.int32)), shape


@pytest.mark.parametrize("name", [name for name in FAST if SPECS[name].signs >= 0])
def test_a_transform_of_any_nan(name, variant):
    """A NaN whose lower bits are set must stay one when it is rounded to BF16."""
    x = sample(35, 77, special=False)
    bits = (0x7FFFFFFF, -1, 0x7F800001, 0x7FC0FFFF, -0x7F8001)
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    x[::7, 3], x[4, 16:21] = nan, nan
    agrees(x, SPECS[name])
    half = torch.tensor((0x7FFF, -1, 0x7C01, 0x7E0F, -0x3FF), dtype=torch.int16).view(torch.float16)
    y = x.half()
    y[::7, 3], y[4, 16:21] = half, half
    agrees(y, SPECS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "mxfp8_e5m2", "nvfp4", "mxfp6_e3m2"])
def test_decode_of_a_large_plane_is_that_of_its_rows(name, dtype):
    """Beyond some MiB a result is streamed; a few rows of it are not."""
    spec, rows, cols = SPECS[name], 1100, 2085
    x = sample(rows, cols, torch.bfloat16, special=False)
    amax = tensor_amax(x) if spec.needs_amax else None
    data, scale = encode(x, spec, stat=amax)
    for operand in (False, True):
        whole, flag = decode((data, scale), spec, rows, cols, dtype, amax, operand)
        flags = False
        for r in range(0, rows, 100):
            part = data[r : r + 100], scale if spec.block == (0, 0) else scale[r : r + 100]
            got, one = decode(part, spec, len(part[0]), cols, dtype, amax, operand)
            assert torch.equal(got, whole[r : r + 100])
            flags |= one
        assert flags == flag


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_nothing_behind_a_short_row_is_decoded(name, variant):
    """The bytes after a plane are NaN codes: they must change neither a value nor the flag."""
    spec = replace(SPECS[name])
    for cols in (1, 15, 31, 33, 47):
        x = sample(3, cols, torch.bfloat16, special=False)
        amax = torch.tensor([8.0]) if spec.needs_amax else None
        data, scale = encode(x, spec, stat=amax)
        want = decode((data, scale), spec, 3, cols, torch.bfloat16, amax, True)
        behind = torch.full((data.numel() + 64,), 0xFF, dtype=torch.uint8)
        behind[: data.numel()] = data.flatten()
        moved = behind[: data.numel()].view(data.shape)
        got = decode((moved, scale), spec, 3, cols, torch.bfloat16, amax, True)
        assert torch.equal(got[0], want[0]) and got[1] == want[1]
