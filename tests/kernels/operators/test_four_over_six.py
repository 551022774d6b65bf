"""Four over six decides by sums of FP32 errors: their order, at blocks where it decides.

Near ties have another threshold where errors are added in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridq
from four_over_six_cases import far_below, near_ties
from hybridq.formats import PlaneSpec, format
from oracle import ELEMENTS, cast_nearest
from oracle.bridge import assert_planes_equal, encode_plane, encode_planes, expected, stat_of


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("bound", [256.0, 448.0])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_near_ties_fall_on_the_side_of_the_rules(backend, name, bound, error):
    fmt = format(name)
    x, count = near_ties(fmt.block[0], bound, error)
    assert count >= 4
    spec = PlaneSpec(fmt, tensor_bound=bound, four_over_six=error)
    row, col = encode_planes(x, spec, spec)
    assert_planes_equal(row, expected(x, spec, "rowwise"), "rowwise")
    assert_planes_equal(col, expected(x, spec, "columnwise"), "columnwise")
    wide = x.reshape(2 * count, fmt.block[0], 16).permute(1, 0, 2).reshape(fmt.block[0], -1)
    assert_planes_equal(encode_plane(wide, spec), expected(wide, spec), "side by side")


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_a_square_decides_once_for_both_directions(backend, error):
    """In the order of the rowwise matrix: the transpose alone would decide some otherwise."""
    differ = 0
    for bound in (256.0, 448.0):
        x, _ = near_ties(16, bound, error)
        spec = PlaneSpec(format("nvfp4_16x16"), tensor_bound=bound, four_over_six=error)
        t = hybridq.quantize(x, spec)
        alone = hybridq.quantize(x, None, spec)
        derived = t.rowwise.derive()
        for plane in (t.columnwise, alone.columnwise):
            assert torch.equal(plane.data, derived.data) and torch.equal(plane.scale, derived.scale)
        # Whatever the memory's order is: the rows are those of the matrix.
        flipped = hybridq.quantize(x.t().contiguous().t(), spec)
        assert torch.equal(flipped.rowwise.scale, t.rowwise.scale)
        assert torch.equal(flipped.columnwise.scale, t.columnwise.scale)
        transposed = hybridq.quantize(x.t().contiguous(), spec, None)
        differ += int((transposed.rowwise.scale != t.columnwise.scale).sum())
    assert differ > 0


def test_a_tie_goes_to_the_six(backend):
    """A block of one value c: 6 and 4 both hit it exactly, with equal errors of zero."""
    x = torch.full((16, 16), 3.0)
    for name in ("nvfp4", "nvfp4_16x16"):
        spec = PlaneSpec(format(name), tensor_bound=256.0, four_over_six="mae")
        plane = encode_plane(x, spec)
        assert (plane["data"] == 0x77).all() and (plane["scale"] == 0x78).all()  # 6 and 2^8


@pytest.mark.parametrize("bound", [256.0, 448.0])
@pytest.mark.parametrize("whole", [1.7, 3.1, 1e-3])
def test_the_base_divides_by_six_first(backend, bound, whole):
    """Block amax whose base lies halfway between two E4M3 scales, and their FP32 neighbours: there
    `amax * (s_enc * fp32(1/6))`, which is right without four over six, gives other scales."""
    e4m3, step = ELEMENTS["e4m3"], np.arange(-3, 4, dtype=np.int32)
    s_enc = np.float32(bound * 6) / np.float32(whole)
    middles = (e4m3.magnitudes[1:] + e4m3.magnitudes[:-1]) / 2
    at = (middles * 6 / s_enc).astype(np.float32)
    amax = (at.view(np.int32)[:, None] + step).reshape(-1).view(np.float32)
    amax = amax[amax <= np.float32(whole)]
    bases = (amax / np.float32(6)) * s_enc, amax * (s_enc * np.float32(1 / 6))
    assert (cast_nearest(bases[0], e4m3) != cast_nearest(bases[1], e4m3)).any()
    x = torch.zeros(len(amax), 16)
    x[:, 5] = torch.from_numpy(amax)
    for error in ("mae", "mse"):
        spec = PlaneSpec(format("nvfp4"), tensor_bound=bound, four_over_six=error)
        got = encode_plane(x, spec, stat=stat_of(whole))
        assert_planes_equal(got, expected(x, spec, stat=whole), f"{bound} {whole}")


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_each_row_of_a_row_scaled_plane_decides_by_its_own_amax(backend, error):
    """Rows of amax 1, 4, 16, ...: another row's amax would decide most blocks otherwise."""
    x = torch.rand(48, 40, generator=torch.Generator().manual_seed(5)) - 0.5
    x = x * 4.0 ** (torch.arange(48) % 6)[:, None] * 4.0 ** (torch.arange(40) % 5)
    spec = PlaneSpec(format("nvfp4"), row_scaled=True, four_over_six=error)
    row, col = encode_planes(x, spec, spec)
    assert_planes_equal(row, expected(x, spec, "rowwise"), "rowwise")
    assert_planes_equal(col, expected(x, spec, "columnwise"), "columnwise")


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("bound", [256.0, 448.0])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_blocks_far_below_the_tensors_amax(backend, name, bound, error):
    """Scales are subnormal there, and so coarse that elements are up to 12 of them."""
    x = far_below(bound)
    spec = PlaneSpec(format(name), tensor_bound=bound, four_over_six=error)
    want = expected(x, spec, "rowwise")
    assert {0, 1, 2, 3, 4} <= set(want["scale"].reshape(-1).tolist())
    row, col = encode_planes(x, spec, spec)
    assert_planes_equal(row, want, "rowwise")
    assert_planes_equal(col, expected(x, spec, "columnwise"), "columnwise")
