"""Encode of the core: layout, independence of strides, threads, variants, pairs and shards."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from core_tools import (
    DTYPES,
    SPECS,
    encode,
    encode_pair,
    same_bytes,
    sample,
    tensor_amax,
    transposed,
    using_variant,
)
from hybridq import _core

SHAPES = [
    *((1, 1), (1, 40), (40, 1), (3, 33), (16, 16)),
    *((33, 65), (129, 47), (130, 257), (150, 2100)),
]
VARIANTS = _core.build_info()["tables"]


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(params=VARIANTS)
def variant(request):
    with using_variant(request.param):
        yield request.param


def column_plane(x, spec):
    """Return what the column plane of x must be, made as a row plane."""
    return (
        transposed(encode(x, spec), x.shape[1]) if spec.decides_by_rows else encode(_turn(x), spec)
    )


def _turn(x):
    return x.T.contiguous()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_column_plane_is_the_row_plane_of_the_transpose(spec, dtype):
    """Two different kernels (along and down) write the same bytes."""
    for shape in SHAPES:
        x = sample(*shape, dtype)
        for y in (x, _turn(x)):
            assert same_bytes(encode(y, spec, columnwise=True), column_plane(y, spec)), shape


def _squares_near_a_tie(spec, stat):
    """Yield squares [16, 16n], one square times n factors between which the choice flips."""
    for seed in range(60):
        block = torch.rand(16, 1, 16, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        low, high = 0.3, 3.6
        for _ in range(4):
            factors = torch.linspace(low, high, 256)
            x = block * factors[:, None]
            x[0, :, 0] = 3.6  # the same amax, so that the candidates are the same
            x = x.reshape(16, -1).contiguous()
            scale = encode(x, spec, stat=stat)[1][0]
            flips = (scale[1:] != scale[:-1]).nonzero()
            if len(flips) == 0:
                break
            low, high = factors[int(flips[0])].item(), factors[int(flips[0]) + 1].item()
            yield x


@pytest.mark.parametrize("name", ["nvfp4_16x16_4o6_mae", "nvfp4_16x16_4o6_mse"])
def test_square_four_over_six_decides_once_for_both_planes(name, variant):
    """Near a tie the order of the sums decides: it is the given matrix's, for every layout."""
    spec, stat = SPECS[name], torch.tensor([16.0])
    seen = 0
    for x in _squares_near_a_tie(spec, stat):
        row, col = encode_pair(x, spec, spec, stats=(stat, stat))
        assert same_bytes(col, transposed(row, x.shape[1]))
        assert same_bytes(encode(x, spec, columnwise=True, stat=stat), col)
        fortran = _turn(x).T
        got = encode_pair(fortran, spec, spec, stats=(stat, stat))
        assert same_bytes(got[0], row) and same_bytes(got[1], col)
        # Xᵀ as a matrix of its own decides by its own rows, and there lies the difference.
        seen += not same_bytes(encode(_turn(x), spec, stat=stat), col)
        if seen == 3:
            break
    assert seen == 3, "no square was close enough to a tie to test anything"


def test_squares_that_choose_by_other_rules_choose_apart(variant):
    """In one pass the second plane takes the first one's choice only where it is its own."""
    mae, mse = SPECS["nvfp4_16x16_4o6_mae"], SPECS["nvfp4_16x16_4o6_mse"]
    stats = [torch.tensor([v]) for v in (4.0, 5.0)]
    for x in (sample(130, 257, torch.bfloat16, special=False), sample(47, 33, special=False)):
        pairs = [(mae, mse, 0, 0), (mse, replace(mse, tensor_bound=256.0), 0, 0), (mae, mae, 0, 1)]
        for row, col, i, j in (*pairs, (mae, mae, 0, 0), (mse, SPECS["nvfp4_16x16"], 0, 0)):
            got = encode_pair(x, row, col, stats=(stats[i], stats[j]))
            assert same_bytes(got[0], encode(x, row, stat=stats[i]))
            assert same_bytes(got[1], encode(x, col, columnwise=True, stat=stats[j]))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("special", ["nan", "inf", "zero", "tiny", "huge"])
def test_column_plane_with_special_values(spec, special):
    x = sample(70, 90, special=False)
    value = {"nan": float("nan"), "inf": -float("inf"), "zero": 0.0, "tiny": 1e-44, "huge": 3e38}
    x[3, 5] = value[special]
    if special in ("zero", "tiny"):
        x *= value[special]
    assert same_bytes(encode(x, spec, columnwise=True), column_plane(x, spec))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("other", ["fp8_128x128", "mxfp8", "nvfp4", "nvfp4_rht_sr", "fp8_e4m3_sr"])
def test_a_pair_in_one_pass_is_two_single_planes(spec, other):
    for shape in ((40, 1), (33, 65), (130, 257)):
        x = sample(*shape, torch.bfloat16)
        row, col = encode_pair(x, spec, SPECS[other], streams=(3, 4))
        assert same_bytes(row, encode(x, spec, stream=3))
        assert same_bytes(col, encode(x, SPECS[other], columnwise=True, stream=4))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_any_stride_gives_the_bytes_of_the_contiguous_copy(spec, dtype):
    big = sample(90, 150, dtype)
    one = sample(1, 70, dtype)
    storage = big.view(-1)
    views = {
        "transposed": big.T,
        "sliced": big[3:70:2, 5:133:3],
        "columns": big[:, 10:77],
        "expanded rows": one.expand(50, 70),
        "expanded columns": one.T.expand(70, 33),
        "expanded both": big[3:4, 5:6].expand(37, 40),
        "overlapping": storage.as_strided((40, 50), (3, 1)),
    }
    for name, view in views.items():
        copy = view.contiguous()
        for columnwise in (False, True):
            got = encode(view, spec, columnwise)
            assert same_bytes(got, encode(copy, spec, columnwise)), (name, columnwise)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("flip", [(0,), (1,), (0, 1)])
def test_negative_strides(spec, flip):
    """torch has no negative strides; NumPy, and a C caller, do."""
    x = sample(37, 50)
    flipped = torch.flip(x, flip).contiguous()
    itemsize, (s0, s1) = x.element_size(), x.stride()
    offset = (36 * s0 if 0 in flip else 0) + (49 * s1 if 1 in flip else 0)
    strides = (-s0 if 0 in flip else s0), (-s1 if 1 in flip else s1)
    for columnwise in (False, True):
        want = encode(flipped, spec, columnwise)
        got = [torch.empty_like(b) for b in want]
        stat = tensor_amax(flipped, columnwise, spec.signs, spec.row_scaled)
        out = _core.PlaneOut(
            spec.native, got[0].data_ptr(), got[1].data_ptr(), stat.data_ptr(), 0x0123456789ABCDEF
        )
        planes = (None, out) if columnwise else (out, None)
        pointer = x.data_ptr() + offset * itemsize
        _core.encode(pointer, "float32", 37, 50, *strides, *planes, 1)
        assert same_bytes(got, want)


def test_thread_count_changes_nothing(spec):
    x = sample(300, 520, torch.bfloat16)
    want = encode_pair(x, spec, spec)
    for threads in (2, 3, 7):
        got = encode_pair(x, spec, spec, threads=threads)
        assert same_bytes(got[0], want[0]) and same_bytes(got[1], want[1])


@pytest.mark.thinned(2)
@pytest.mark.skipif(len(VARIANTS) < 2, reason="this CPU runs only one variant")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_variants_agree(spec, dtype):
    for shape in ((33, 65), (130, 257)):
        x = sample(*shape, dtype)
        planes = []
        for name in VARIANTS:
            with using_variant(name):
                planes.append(encode_pair(x, spec, spec))
        for other in planes[1:]:
            assert same_bytes(other[0], planes[0][0]) and same_bytes(other[1], planes[0][1])


@pytest.mark.parametrize("row0, col0", [(0, 16), (128, 0), (5, 7), (33, 129)])
def test_shards_draw_the_random_bytes_of_the_whole(row0, col0):
    """Per tensor, so that the scale is the same: a shard's codes are the whole's, cut out."""
    spec = SPECS["fp8_e4m3_sr"]
    x = sample(200, 300, special=False)
    stat = x.abs().amax().reshape(1)
    shard = x[row0 : row0 + 60, col0 : col0 + 90]
    for columnwise in (False, True):
        whole = encode(x, spec, columnwise, stat=stat)[0]
        whole = whole.T if columnwise else whole
        part = encode(shard, spec, columnwise, stat=stat, row0=row0, col0=col0)[0]
        part = part.T if columnwise else part
        assert torch.equal(part, whole[row0 : row0 + 60, col0 : col0 + 90])


def test_stochastic_rounding_uses_seed_and_stream():
    x = sample(64, 64, special=False)
    spec = SPECS["mxfp8_sr"]
    base = encode(x, spec)[0]
    assert not torch.equal(base, encode(x, spec, stream=1)[0])
    assert not torch.equal(base, encode(x, spec, seed=0x0123456789ABCDEE)[0])  # low word
    assert not torch.equal(base, encode(x, spec, seed=0x1123456789ABCDEF)[0])  # high word
    assert torch.equal(base, encode(x, spec)[0])


def test_empty_matrices(spec):
    for shape in ((0, 0), (0, 17), (17, 0)):
        counts = shape if spec.row_scaled else (1, 1)
        stats = tuple(torch.zeros(count) for count in counts)
        for plane in encode_pair(torch.empty(shape), spec, spec, stats=stats):
            assert plane[0].numel() == 0
            if spec.block == (0, 0):  # the scale of amax 0: 1, or that of eps
                assert plane[1].item() == (1.0 if spec.eps == 0 else 2.0**-25)


def test_flush_to_zero_of_the_caller_is_ignored():
    x = torch.full((32, 64), 1e-41)
    want = encode(x, SPECS["mxfp8"])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        got = encode(x, SPECS["mxfp8"])
    finally:
        torch.set_flush_denormal(False)
    assert same_bytes(got, want)
    assert int(want[0].max()) > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_runs_serially_and_gets_the_same_bytes():
    """A team exists before the fork; a child that asked it for work would hang."""
    x = sample(600, 600, torch.bfloat16)
    spec = SPECS["mxfp8"]
    want = encode(x, spec, threads=2)
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(60)  # ends a child that hangs
        try:
            status = 0 if same_bytes(encode(x, spec, threads=2), want) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_calls_from_several_threads():
    inputs = [sample(200, 300, torch.bfloat16, seed=s) for s in range(6)]
    spec = SPECS["nvfp4_rht_sr"]
    want = [encode_pair(x, spec, SPECS["mxfp8"]) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: encode_pair(x, spec, SPECS["mxfp8"], threads=2), inputs))
    for a, b in zip(got, want, strict=True):
        assert same_bytes(a[0], b[0]) and same_bytes(a[1], b[1])
