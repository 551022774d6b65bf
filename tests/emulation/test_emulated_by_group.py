"""Tokens whose groups have amaxes of their own, by the tile kernels, against a loop over groups."""

from __future__ import annotations

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
import ragged_cases
from hybridq import reference
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from hybridq.kernels.choice import EncodeRequest, registry
from hybridq.kernels.operators import encode_ragged as operator
from hybridq.kernels.ragged import encode_loop, is_by_group
from hybridq.kernels.ragged.group_loop import column_part

MODULE = emulated.load()
if MODULE is None:
    pytest.skip("the emulated kernels are not built (make emulation)", allow_module_level=True)

BACKEND = emulated.make_backend(MODULE)
RHT = f"rht={DEFAULT_SIGNS:04x}"
#: Specs of both planes, and whether rows may be read through an index.
PAIRS = {
    "nvfp4 | nvfp4": ("nvfp4", "nvfp4", True),
    "nvfp4 | nvfp4 rht": ("nvfp4", f"nvfp4;{RHT}", True),
    "nvfp4 sr | nvfp4 rht sr": ("nvfp4;sr", f"nvfp4;sr;{RHT}", False),
    "nvfp4 sr": ("nvfp4;sr", "nvfp4;sr", False),
    "mxfp8 | nvfp4": ("mxfp8", "nvfp4", True),
    "nvfp4 | mxfp8": ("nvfp4", "mxfp8", True),
    "mxfp8 | nvfp4 rht sr": ("mxfp8", f"nvfp4;sr;{RHT}", False),
    "fp8_e4m3": ("fp8_e4m3", "fp8_e4m3", True),
    "fp8_e5m2": ("fp8_e5m2", "fp8_e5m2", False),
    "4o6": ("nvfp4;bound=256;4o6=mae", "nvfp4;bound=256;4o6=mae", False),
    "rows | mxfp8": ("nvfp4;rows", "mxfp8", False),
    "none | nvfp4": ("", "nvfp4", True),
    "none | fp8_e5m2": ("", "fp8_e5m2", False),
    "none | nvfp4 rht sr": ("", f"nvfp4;sr;{RHT}", False),
    "nvfp4 | none": ("nvfp4", "", True),
}
SIZES = [((3, 0, 130, 128, 7), 5), ((0, 0), 4), ((256,), 0), ((1,) * 9, 1)]


@pytest.fixture(autouse=True)
def _random_order(seed: int):
    MODULE.set_seed(seed)
    MODULE.reset()


def _tokens(sizes: tuple[int, ...], rest: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Groups of magnitudes far apart; tokens of no group larger than all."""
    made = cases.matrix(sum(sizes) + rest, cols, torch.float32, len(sizes), "zeros")
    for g, (begin, end) in enumerate(ragged_cases.bounds(sizes)):
        made[begin:end] *= 5.0 ** (g % 5 - 2)
    made[sum(sizes) :] = 3e4
    return made.to(dtype)


def _drawn(x, spec, sizes, seed, stream, is_col):
    """The planes of each group as stochastic ones are: the bytes are those of all tokens."""
    made = []
    for (begin, end), at in zip(
        ragged_cases.bounds(sizes), ragged_cases.places(sizes), strict=True
    ):
        own = x[begin:end].t() if is_col else x[begin:end]
        place = {"col0": at} if is_col else {"row0": begin}
        if is_col:  # blocks and draws of whole padded tiles
            own = torch.nn.functional.pad(own, (0, -own.shape[1] % 128))
        planes = reference.encode_plane(own, spec, seed=seed, stream=stream, **place)
        made.append(
            column_part(planes, spec, own.shape[0], 0, end - begin, 0) if is_col else planes
        )
    return made


def _check(got, want, row, col, cols, sizes, drawn=None) -> None:
    """Compare planes group by group; stochastic ones with `drawn`, by plane, or not at all."""
    assert [(one.shape, one.dtype) for one in got] == [(one.shape, one.dtype) for one in want]
    cut = (ragged_cases.parts_of(buffers, row, col, cols, sizes) for buffers in (got, want))
    for mine, other in zip(*cut, strict=True):
        expected = other.buffer
        if mine.spec.stochastic:
            if drawn is None or sizes[mine.group] == 0:
                continue
            expected = drawn[mine.is_col][mine.group][mine.number].view(mine.buffer.shape)
        cases.assert_same(mine.buffer.contiguous(), expected.contiguous(), str(mine[:4]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sizes,rest", SIZES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_planes_of_groups_have_the_loops_bits(
    name: str, sizes: tuple[int, ...], rest: int, dtype: torch.dtype
) -> None:
    first, second, takes_index = PAIRS[name]
    row, col = (PlaneSpec.parse(one) if one else None for one in (first, second))
    offsets, seed = ragged_cases.ends(sizes), torch.full((len(sizes),), 11)
    for cols, is_indexed in ((72, False), (72, True), (33, False)):
        if col is None and not is_indexed:
            continue
        x = _tokens(sizes, rest, cols, dtype)
        given, index = x, None
        if is_indexed:
            index = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
            given = torch.empty_like(x).index_copy_(0, index, x)
        request = EncodeRequest(
            first, second, seed=seed, row_stream=3, col_stream=8, by_group=True, row_index=index
        )
        MODULE.reset()
        groups = ragged_cases.as_groups(offsets, x.shape[0])
        got = BACKEND.ops["encode_ragged"](given, groups, row, col, request)
        if is_indexed and not takes_index:
            assert got is None
            continue
        amaxes = {"AmaxAlong", "AmaxStrided"} if row is not None and row.row_scaled else set()
        assert set(MODULE.kernels()) <= {"EncodeTile", "EncodeIndexed", "Zero"} | amaxes
        want = encode_loop(x, offsets, row, col, request._replace(row_index=None, by_group=False))
        drawn = [
            _drawn(x, spec, sizes, seed[:1], stream, is_col) if spec and spec.stochastic else None
            for spec, stream, is_col in ((row, 3, False), (col, 8, True))
        ]
        _check(got, want, row, col, cols, sizes, drawn)


@pytest.mark.parametrize("name", ["nvfp4 | nvfp4 rht", "fp8_e4m3", "mxfp8 | nvfp4", "4o6"])
def test_statistics_that_are_given(name: str) -> None:
    first, second, _ = PAIRS[name]
    row, col = PlaneSpec.parse(first), PlaneSpec.parse(second)
    sizes = (3, 20, 130, 40)
    offsets, x = ragged_cases.ends(sizes), _tokens(sizes, 2, 64, torch.bfloat16)
    stats = [
        torch.linspace(0.5, high, len(sizes)).view(-1, 1) if is_by_group(spec, is_col) else None
        for spec, is_col, high in ((row, False, 900.0), (col, True, 30.0))
    ]
    request = EncodeRequest(first, second, *stats, by_group=True)
    got = BACKEND.ops["encode_ragged"](
        x, ragged_cases.as_groups(offsets, x.shape[0]), row, col, request
    )
    want = encode_loop(x, offsets, row, col, request._replace(by_group=False))
    _check(got, want, row, col, 64, sizes)


def test_what_no_kernel_makes_is_refused_before_it_begins() -> None:
    x, offsets = torch.randn(268, 64).bfloat16(), ragged_cases.ends((200, 60))
    for row, col in (
        ("nvfp4_16x16", "nvfp4"),  # squares would lie in two groups
        (f"nvfp4;{RHT}", "nvfp4"),  # rows with a transform
        ("nvfp4", "nvfp4;rows"),  # an amax of each column of each group
        ("fp8_e4m3", "fp8_e5m2"),  # rows by group have tiles of their columns alone
    ):
        MODULE.reset()
        specs = PlaneSpec.parse(row), PlaneSpec.parse(col)
        request = EncodeRequest(row, col, by_group=True)
        assert (
            BACKEND.ops["encode_ragged"](x, ragged_cases.as_groups(offsets, 268), *specs, request)
            is None
        )
        assert MODULE.kernels() == []


@pytest.mark.parametrize(
    "first,second,kernels",
    [
        ("nvfp4", f"nvfp4;{RHT}", {"EncodeTile", "Zero"}),
        ("nvfp4;sr", f"nvfp4;sr;{RHT}", {"EncodeTile", "Zero"}),
        ("fp8_e4m3", "fp8_e4m3", {"EncodeTile", "Zero"}),
        # Rows that no kernel makes beside these columns are made of operations on all tokens.
        ("fp8_e4m3", "fp8_e5m2", {"EncodeTile", "Zero", "AmaxAlong"}),
        ("nvfp4", "", {"EncodeTile", "AmaxAlong"}),
        ("nvfp4;sr", "", {"EncodeTile", "AmaxAlong"}),
        ("nvfp4", "nvfp4;rows", {"EncodeTile", "AmaxAlong"}),
        ("bf16", "nvfp4", {"EncodeTile", "AmaxAlong"}),
    ],
)
def test_the_operator_as_on_a_device(monkeypatch, first: str, second: str, kernels: set) -> None:
    """By group, with the emulated backend where a device's would be."""
    monkeypatch.setattr(operator, "is_host", lambda device: False)
    row, col = (PlaneSpec.parse(one) if one else None for one in (first, second))
    sizes, cols = (3, 0, 130, 128), 72
    offsets, seed = ragged_cases.ends(sizes), torch.arange(4)
    x = _tokens(sizes, 5, cols, torch.bfloat16)
    request = EncodeRequest(first, second, seed=seed, by_group=True)
    want = encode_loop(x, offsets, row, col, request._replace(by_group=False))
    registry.register_backend(BACKEND)
    try:
        with hybridq.backend("emulated"):
            MODULE.reset()
            got = torch.ops.hybridq.encode_ragged(
                x, offsets, first, second, None, None, seed, by_group=True
            )
            assert set(MODULE.kernels()) <= kernels
    finally:
        registry.unregister_backend("emulated")
    _check(got, want, row, col, cols, sizes)
