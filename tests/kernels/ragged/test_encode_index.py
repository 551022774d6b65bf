"""`encode_ragged` and the statistics of groups of rows that an index names.

The oracle is the rows themselves, `x.index_select(0, index)`, encoded without an index by the
reference; planes by group are those of a loop over the groups (`group_loop`).
"""

from __future__ import annotations

import pytest
import torch

import emulated
import hybridq
import kernel_cases as cases
from hybridq.kernels import cpu
from hybridq.kernels.choice import EncodeRequest, registry
from hybridq.kernels.operators import encode_ragged as ops_ragged
from hybridq.kernels.ragged import group_loop
from ragged_cases import PAIRS, SIZES, SPECS, ends, same, text

MODULE = emulated.load()


def routed(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Which token each row is: some several times, some never."""
    return torch.randint(tokens, (rows,), generator=torch.Generator().manual_seed(seed))


def case(
    number: int, cols: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Sizes of groups, tokens, and the token of each row."""
    sizes, rest = SIZES[number]
    rows = sum(sizes) + rest
    x = cases.matrix(max(rows // 2, 1), cols, dtype, number, cases.SPECIALS[number % 5])
    return sizes, x, routed(rows, x.shape[0], number)


def seeds(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(11, 11 + len(sizes))


# ---- bits


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_an_index_have_the_planes_of_the_rows_themselves(name: str, encoder: str) -> None:
    row, col = PAIRS[name]
    for number in range(len(SIZES)):
        for cols in (72, 21) if number == 0 else (72,):
            sizes, x, index = case(number, cols, cases.DTYPES[number % 3])
            args = (ends(sizes), text(row), text(col), None, None, torch.tensor([11]))
            with hybridq.backend("reference"):
                want = torch.ops.hybridq.encode_ragged(x.index_select(0, index), *args)
            got = torch.ops.hybridq.encode_ragged(x, *args, index)
            same(got, want, f"{name}, {sizes}, {cols}, {x.dtype}")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_planes_by_group_are_those_of_a_loop(name: str, is_indexed: bool) -> None:
    """On a CPU, where one call makes them all; every dtype, aligned and not."""
    row, col = PAIRS[name]
    for number, (cols, dtype) in enumerate(
        [(72, torch.bfloat16), (33, torch.float32), (64, torch.float16), (1, torch.bfloat16)]
    ):
        sizes, x, index = case((0, 5, 2, 1)[number], cols, dtype)
        rows = x.index_select(0, index)
        own = [None if spec is None else spec.resolve(dtype) for spec in (row, col)]
        request = EncodeRequest(text(own[0]), text(own[1]), seed=seeds(sizes))
        with hybridq.backend("reference"):
            want = group_loop.encode_loop(rows, ends(sizes), *own, request)
        given = (x, ends(sizes), *request.planes(), index) if is_indexed else None
        given = given or (rows, ends(sizes), *request.planes())
        got = torch.ops.hybridq.encode_ragged(*given, by_group=True)
        same(got, want, f"{name}, {sizes}, {cols}, {dtype}")


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "mxfp8 | nvfp4 rht", "nvfp4 sr"])
def test_statistics_and_streams_by_group(name: str) -> None:
    row, col = PAIRS[name]
    sizes, x, index = case(0, 64, torch.bfloat16)
    rows, offsets = x.index_select(0, index), ends(sizes)
    row_stat = torch.linspace(0.5, 900.0, len(sizes)).view(-1, 1) if row.needs_amax else None
    col_stat = 3.0 * torch.ones(len(sizes), 1) if col.needs_amax else None
    for first, second in ((row_stat, col_stat), (row_stat, None), (None, col_stat)):
        request = EncodeRequest(
            row.text, col.text, first, second, seeds(sizes), row_stream=4, col_stream=9
        )
        want = group_loop.encode_loop(rows, offsets, row, col, request)
        call = torch.ops.hybridq.encode_ragged
        options = {**request.options(), "by_group": True}
        same(call(x, offsets, *request.planes(), index, **options), want, name)


@pytest.mark.parametrize("variant", ["baseline", "x86-64-v3", "x86-64-v4"])
def test_every_cpu_variant(variant: str) -> None:
    if variant not in cpu.core.build_info()["variants"]:
        pytest.skip(f"this CPU does not run {variant}")
    before = cpu.core.variant()
    try:
        cpu.core.set_variant(variant)
        for name in ("mxfp8", "nvfp4 rht", "nvfp4 rows", "16x16 mae", "fp8_e4m3", "mxfp8 | nvfp4"):
            sizes, x, index = case(0, 96, torch.bfloat16)
            row, col = PAIRS[name]
            args = (ends(sizes), row.text, col.text, None, None, seeds(sizes))
            with hybridq.backend("reference"):
                want = torch.ops.hybridq.encode_ragged(x[index], *args, by_group=True)
            got = torch.ops.hybridq.encode_ragged(x, *args, index, by_group=True)
            same(got, want, f"{name} {variant}")
    finally:
        cpu.core.set_variant(before)


def test_views_and_a_single_column() -> None:
    """What the core does not take at once is moved first."""
    index, offsets = torch.tensor([2, 0, 2, 1]), ends((3, 1))
    wide = torch.randn(3, 128)
    for x in (torch.randn(64, 3).t(), wide[:, ::2], wide[:, ::64], wide[:1, :64].expand(3, 64)):
        got = torch.ops.hybridq.encode_ragged(
            x, offsets, "mxfp8", "mxfp8", None, None, None, index, by_group=True
        )
        want = torch.ops.hybridq.encode_ragged(x[index], offsets, "mxfp8", "mxfp8", by_group=True)
        same(got, want, str(x.stride()))


def test_columns_of_what_the_rows_decode_to() -> None:
    sizes, x, index = case(0, 64, torch.bfloat16)
    for by_group in (True, False):
        given = (ends(sizes), "mxfp8", "nvfp4")
        options = {"col_source": "rowwise_dequantized", "by_group": by_group}
        got = torch.ops.hybridq.encode_ragged(x, *given, None, None, None, index, **options)
        want = torch.ops.hybridq.encode_ragged(x.index_select(0, index), *given, **options)
        same(got, want, str(by_group))


@pytest.mark.parametrize("name", [*SPECS])
def test_statistics_of_groups(name: str) -> None:
    spec = SPECS[name]
    for number in range(len(SIZES)):
        sizes, x, index = case(number, 40, cases.DTYPES[number % 3])
        rows, offsets = x.index_select(0, index), ends(sizes)
        for direction in ("rowwise", "columnwise"):
            if spec.row_scaled and direction == "rowwise":
                continue
            args = (offsets, spec.text, direction)
            got = torch.ops.hybridq.amax_ragged(x, *args, index)
            cases.same_values(got, torch.ops.hybridq.amax_ragged(rows, *args), f"{name} {sizes}")
        got = torch.ops.hybridq.largest_ragged(x, offsets, index)
        cases.same_values(got, torch.ops.hybridq.largest_ragged(rows, offsets), f"{sizes}")


# ---- one pass


def test_no_copy_of_the_rows_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By group on a CPU, of every pair of quantized planes."""
    moved = []
    plain = ops_ragged._moved

    def noting(x: torch.Tensor, request: EncodeRequest) -> tuple[torch.Tensor, EncodeRequest]:
        moved.append(x.shape)
        return plain(x, request)

    monkeypatch.setattr(ops_ragged, "_moved", noting)
    sizes, x, index = case(0, 64, torch.bfloat16)
    for name, (row, col) in PAIRS.items():
        quantized = not any(s is not None and s.format.is_identity for s in (row, col))
        moved.clear()
        args = (ends(sizes), text(row), text(col), None, None, seeds(sizes), index)
        torch.ops.hybridq.encode_ragged(x, *args, by_group=True)
        assert bool(moved) != quantized, name


#: Pairs of which the emulated kernels read aligned tokens through an index.
INDEXED = ("mxfp8", "mxfp4", "fp8_1x128", "nvfp4", "mxfp8 | nvfp4 rht", "mxfp8 | none")


@pytest.mark.skipif(MODULE is None, reason="the emulated kernels are not built (make emulation)")
def test_a_kernel_through_an_index_copies_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of BF16 and of other types; a number beyond x is a row of zeros."""

    def moved(x: torch.Tensor, request: EncodeRequest) -> tuple[torch.Tensor, EncodeRequest]:
        assert request.row_index is None
        return x, request

    sizes, x, index = case(0, 72, torch.bfloat16)
    index[[4, 140]] = torch.tensor([x.shape[0], -1])
    wide = torch.cat([x, x.new_zeros(1, 72)])
    within = torch.where((index < 0) | (index >= x.shape[0]), x.shape[0], index)
    registry.register_backend(emulated.make_backend(MODULE))
    monkeypatch.setattr(ops_ragged, "_moved", moved)
    try:
        for name in INDEXED:
            for dtype in cases.DTYPES:
                row, col = PAIRS[name]
                args = (ends(sizes), text(row), text(col))
                want = torch.ops.hybridq.encode_ragged(wide[within].to(dtype), *args)
                with hybridq.backend("emulated"):
                    MODULE.reset()
                    given = (x.to(dtype), *args, None, None, None, index)
                    got = torch.ops.hybridq.encode_ragged(*given)
                same(got, want, f"{name} {dtype}")
    finally:
        registry.unregister_backend("emulated")


# ---- the operators


@pytest.mark.parametrize("by_group", [True, False])
def test_opcheck(by_group: bool) -> None:
    ops, index = torch.ops.hybridq, torch.tensor([1, 1, 0, 3, 2, 0])
    x, offsets = torch.randn(4, 40), ends((2, 0, 3))
    args = (x, offsets, "mxfp8", "nvfp4", None, None, None, index)
    torch.library.opcheck(ops.encode_ragged.default, args, {"by_group": by_group})
    torch.library.opcheck(ops.amax_ragged.default, (x, offsets, "nvfp4", "rowwise", index))
    torch.library.opcheck(ops.largest_ragged.default, (x, offsets, index))


@pytest.mark.parametrize(
    "index", [torch.tensor([0, 4]), torch.tensor([-1, 0])], ids=["behind", "before"]
)
def test_a_row_that_there_is_not_is_an_error(index: torch.Tensor) -> None:
    call = torch.ops.hybridq.encode_ragged
    for by_group in (True, False):
        with pytest.raises((ValueError, IndexError), match="index"):
            given = (torch.randn(4, 64), ends((2,)), "mxfp8", "mxfp8", None, None, None, index)
            call(*given, by_group=by_group)


def test_a_wrong_index_says_why() -> None:
    x, offsets = torch.randn(4, 64), ends((2,))
    for index in (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[0, 1]])):
        with pytest.raises(ValueError, match="encode_ragged: row_index must be int64 \\[rows\\]"):
            torch.ops.hybridq.encode_ragged(x, offsets, "mxfp8", "", None, None, None, index)
        with pytest.raises(ValueError, match="largest_ragged: row_index must be int64"):
            torch.ops.hybridq.largest_ragged(x, offsets, index)
