"""Tile kernels at any edge and any address, bit for bit against the CPU core.

Every access is checked: a load or store beyond x or a plane is an error, and so is one that is not
aligned to its size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import emulated
import kernel_cases as cases
from four_over_six_cases import far_below, near_ties
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec, format
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.cpu.backend import core_spec
from hybridq.kernels.inputs.addresses import DTYPES

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

KERNELS = cases.Kernels(emulated.make_backend(MODULE).ops, "cpu")
#: Planes of which both directions have a tile kernel, and those of which each has one alone.
BOTH = {
    name: PlaneSpec.parse(name)
    for name in (
        *("fp8_e4m3", "fp8_e5m2", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp8_e5m2"),
        *("mxfp8_32x32", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4_16x16"),
        *("nvfp4;rows", "nvfp4;bound=256;4o6=mae", "nvfp4;4o6=mse", "nvfp4;4o6=mae;rows"),
        *("nvfp4_16x16;bound=256;4o6=mae", "nvfp4_16x16;4o6=mse"),
    )
}
BOTH["nvfp4 sr"] = replace(BOTH["nvfp4"], stochastic=True)
ROTATED = {
    "nvfp4 rht": replace(BOTH["nvfp4"], signs=DEFAULT_SIGNS),
    "nvfp4 rht sr": replace(BOTH["nvfp4"], signs=DEFAULT_SIGNS, stochastic=True),
    "nvfp4 rht rows": replace(BOTH["nvfp4"], signs=DEFAULT_SIGNS, row_scaled=True),
}
GENERAL = ["EncodeGeneral", "EncodeGeneral"]
EXTENTS = (1, 15, 16, 17, 31, 33, 127, 129)


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    """Lanes, warps and blocks run in an order of each test's own."""
    MODULE.set_seed(seed)
    MODULE.reset()


def launches(x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None) -> list[str]:
    """Compare the planes with the core's, and return which kernels wrote them."""
    MODULE.reset()
    cases.check_encode(KERNELS, x, row, col)
    return list(MODULE.kernels())


def path(x: torch.Tensor, row: PlaneSpec | None, col: PlaneSpec | None) -> str:
    """Return which kernels would encode x, to planes that any allocator gives."""
    made = [spec and (core_spec(spec)[0], 256, 256, 256, 256, *6 * [0]) for spec in (row, col)]
    return MODULE.encode_path(x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride(), *made)


def view(rows: int, cols: int, number: int, special: str) -> torch.Tensor:
    """Return `[rows, cols]` by number: whole, in wider rows, from another address, transposed."""
    dtype = cases.DTYPES[number // 4 % 3]
    if number % 4 == 0:
        return cases.matrix(rows, cols, dtype, number, special)
    if number % 4 == 3:
        return cases.matrix(cols, rows, dtype, number, special).t()
    skipped, wider = ((1, 3), (2, 2))[number % 4 - 1]  # odd rows; rows of words, if cols are even
    wide = cases.matrix(rows + 1, cols + wider, dtype, number, special)
    return wide[1:, skipped : skipped + cols]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [*BOTH, *ROTATED])
@pytest.mark.parametrize("cols", EXTENTS)
@pytest.mark.parametrize("rows", EXTENTS)
def test_any_extent_takes_the_tile_kernel(rows: int, cols: int, name: str) -> None:
    number = EXTENTS.index(rows) + 3 * EXTENTS.index(cols) + len(name)
    spec, special = BOTH.get(name), cases.SPECIALS[number % 5]
    for i in range(2):
        x = view(rows, cols, number + i, special)
        if spec is not None:
            # Four over six adds up a square by rows, which must lie as a tile's do.
            by_rows = spec.four_over_six is not None and spec.format.is_square
            is_tile = not by_rows or x.stride(1) == 1 or cols == 1
            assert launches(x, spec, spec) == (["EncodeTile"] if is_tile else GENERAL)
        else:
            alone = ROTATED[name]
            for row, col in ((alone, None), (None, alone), (alone, alone)):
                assert set(launches(x, row, col)) == {"EncodeTile"}


@pytest.mark.parametrize(
    "exponent", [-149, -126, -116, -113, -110, -104, -101, -100, 0, 100, 101, 116, 117, 118, 127]
)
@pytest.mark.parametrize("name", [name for name in BOTH if "4o6" in name])
def test_four_over_six_under_any_factor(name: str, exponent: int) -> None:
    """Where what codes decode to is normal for sure, and where it under- or overflows.

    Blocks are up to 2^17 apart. At -116, -113, 117, 118 and 127 some of them are chosen otherwise
    if powers of two are taken out of products and divisions.
    """
    generator = torch.Generator().manual_seed(exponent % 7)
    rows, cols = 128, 192
    x = torch.rand(rows, cols, generator=generator, dtype=torch.float64) - 0.5
    apart = torch.randint(0, 18, (rows // 16, cols // 16), generator=generator)
    x = torch.ldexp(x, 1 - apart.repeat_interleave(16, 0).repeat_interleave(16, 1))
    x[:, 3] = 1.0  # of every row, and of a column; of the tensor
    x[5] = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        own = torch.ldexp(x, torch.tensor(exponent)).to(torch.float32).to(dtype)
        wide = torch.nn.functional.pad(own, (1, 2))[:, 1:-2]
        for one in (own, wide[:-3, :-5]):
            assert launches(one, BOTH[name], BOTH[name]) == ["EncodeTile"]


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("bound", [256.0, 448.0])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_four_over_six_that_estimates_do_not_decide(name: str, bound: float, error: str) -> None:
    spec = PlaneSpec(format(name), tensor_bound=bound, four_over_six=error)
    height = spec.format.block[0]
    ties, count = near_ties(height, bound, error)
    wide = ties.reshape(2 * count, height, 16).permute(1, 0, 2).reshape(height, -1)
    eighths = torch.randint(-16, 17, (64, 160), generator=torch.Generator().manual_seed(8)) / 8
    for x in (ties, wide, far_below(bound), eighths):
        assert launches(x, spec, spec) == ["EncodeTile"]
        assert launches(x.bfloat16(), spec, spec) == ["EncodeTile"]


@pytest.mark.parametrize("name", ["mxfp8", "fp8_1x128", "nvfp4"])
@pytest.mark.parametrize("offset", range(1, 16, 2))
def test_pairs_begin_at_any_address(name: str, offset: int) -> None:
    """Whole tiles of 128 columns, each line at another place; the planes' buffers lie anywhere."""
    spec = BOTH[name]
    rows, cols = 131, 193
    x = cases.matrix(rows, cols + 1, torch.bfloat16, offset, "normal")[:, offset % 2 :]
    x = x[:, :cols]
    stat = cases.cpu_ops()["amax"](x, spec) if spec.needs_amax else None
    want = cases.cpu_ops()["encode"](x, spec, spec, EncodeRequest("", "", stat, stat))
    kernels = emulated.EmulatedKernels(MODULE)
    got, planes = [], []
    with kernels.launch(x.device):
        for shape in (x.shape, x.shape[::-1]):
            own = []
            for buffer in spec.buffers(*shape)[:2]:
                at = offset * (4 if buffer.dtype == torch.float32 else 1)
                size = torch.Size(buffer.shape).numel() * buffer.dtype.itemsize
                room = torch.empty(size + at + 64, dtype=torch.uint8)
                own.append(room[at : at + size].view(buffer.dtype).view(buffer.shape))
            got += own
            pointers = [kernels.pointer(buffer, True) for buffer in own]
            planes.append((core_spec(spec)[0], *pointers, kernels.pointer(stat), *7 * [0]))
        source = kernels.pointer(x)
        MODULE.encode(source, DTYPES[x.dtype], rows, cols, *x.stride(), *planes, False, False, 0)
    assert MODULE.kernels() == ["EncodeTile"]
    want = [buffer for i, buffer in enumerate(want) if len(want) == 4 or i not in (2, 5)]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        cases.assert_same(g, w, f"{name}: buffer {i}")


@pytest.mark.parametrize("shape", [(4095, 2880), (1000, 1601), (7, 50257), (8193, 72)])
def test_shapes_of_models_never_reach_the_general_kernel(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    nvfp4, rotated, by_row = BOTH["nvfp4"], ROTATED["nvfp4 rht"], BOTH["nvfp4;rows"]
    pairs = [(spec, spec) for spec in BOTH.values()]
    pairs += [
        (nvfp4, rotated),
        (by_row, BOTH["mxfp8"]),
        (by_row, ROTATED["nvfp4 rht rows"]),
        (BOTH["mxfp8"], rotated),
        (BOTH["nvfp4 sr"], ROTATED["nvfp4 rht sr"]),
    ]
    for row, col in pairs:
        for own in (x, x[1:, 1:]):
            assert path(own, row, col) == "pair", f"{row} | {col}"
            assert path(own, row, None) == path(own, None, col) == "tile", f"{row} | {col}"
            assert path(own, col, None) == path(own, None, row) == "tile", f"{col} | {row}"


def test_a_shard_that_begins_within_a_counter_has_the_general_kernel() -> None:
    """Its random bytes are those of two counters: no tile kernel draws both."""
    x = cases.matrix(33, 50, torch.bfloat16, 2, "normal")
    for col0, kernel in ((16, "EncodeTile"), (3, "EncodeGeneral")):
        MODULE.reset()
        cases.check_encode(KERNELS, x, BOTH["nvfp4 sr"], None, col0=col0)
        assert MODULE.kernels() == [kernel]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [*BOTH, *ROTATED, "mxfp8 rht"])
@pytest.mark.parametrize("cols", [1, 7, 15, 17, 50, 129, 144, 258])
@pytest.mark.parametrize("special", ["normal", "nan", "tiny"])
def test_planes_of_any_width_are_decoded(name: str, cols: int, special: str) -> None:
    """Rows that no vector fits to, and those that are transformed back, to every type."""
    rotated = replace(BOTH["mxfp8"], signs=DEFAULT_SIGNS)
    spec = {**BOTH, **ROTATED, "mxfp8 rht": rotated}[name]
    MODULE.reset()
    for rows in (3, 70):
        cases.check_decode(KERNELS, cases.matrix(rows, cols, torch.bfloat16, cols, special), spec)
    if spec.signs is not None:  # an operand stays under the transform
        assert ("DecodeRotated" if cols % 16 == 0 else "DecodeGroups") in MODULE.kernels()
    elif cols % 8 != 0:
        assert "DecodeGroups" in MODULE.kernels()
