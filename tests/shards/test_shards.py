"""Planes of shards, put together, against the planes of the whole: the same bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import hybridq
from hybridq import PlaneSpec
from hybridq.distributed import PlaneShards, Shards, StorageShards
from hybridq.storage import TensorStorage, build_storage

COLS = 48
#: Rows of the ranks: aligned, as torch.chunk cuts, blocks over three ranks, ranks without rows,
#: one row each, odd numbers.
SHARDS = {
    "aligned": (128, 128),
    "chunks of 100": Shards.chunks(100, COLS, 4).sizes,
    "chunks of 9": Shards.chunks(9, COLS, 4).sizes,
    "uneven": (37, 0, 5, 91),
    "one row each": (1,) * 5,
    "one rank": (70,),
    "empty ends": (0, 33, 31, 0),
}
FORMATS = hybridq.formats.names()
PAIRS = [("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("fp8_1x128", "mxfp8"), ("mxfp8", "bf16"),
         ("bf16", "mxfp8"), ("fp8_e4m3", "nvfp4"), ("nvfp4_16x16", "fp8_e5m2")]  # fmt: skip


def spec(name: str, **options: object) -> PlaneSpec:
    return replace(PlaneSpec.parse(name).resolve(torch.bfloat16), **options)


def reduced(every: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """What a max-reduction over all ranks gives, NaN kept."""
    return [
        torch.stack(list(parts)).view(torch.int32).amax(0).view(torch.float32)
        for parts in zip(*every, strict=True)
    ]


def sharded(
    x: torch.Tensor, plan: StorageShards, seed: torch.Tensor | None = None
) -> tuple[TensorStorage, torch.Tensor]:
    """Run all ranks in turn."""
    world = plan.shards.world
    values = [x[slice(*plan.shards.range(rank))] for rank in range(world)]
    planes: list[list] = [[] for _ in range(world)]
    for place, step in enumerate(plan.steps):
        if place:
            values = [
                plan.next_values(own, planes[rank][0], rank) if own.shape[0] else own
                for rank, own in enumerate(values)
            ]
        for shards in step:
            maxima = reduced([shards.maxima(own, rank) for rank, own in enumerate(values)])
            for rank, own in enumerate(values):
                if own.shape[0]:
                    known = shards.kept(maxima, rank)
                    planes[rank].append(shards.encode(own, rank, known, seed))
    payloads = torch.zeros(world, plan.payload, dtype=torch.uint8)
    for rank in range(world):
        if planes[rank]:
            payloads[rank] = plan.pack(planes[rank], rank)
    made = plan.unpack(payloads)
    return (made.with_usage(True, True) if plan.derives else made), payloads


def check(x: torch.Tensor, sizes: tuple[int, ...], row, col, source="original", seed=None) -> None:
    plan = StorageShards(row, col, source, Shards(sizes, x.shape[1]))
    assert plan.problem is None
    whole = build_storage(x, row, col, col_source=source, seed=seed)
    made, payloads = sharded(x, plan, seed)
    for direction in ("rowwise", "columnwise"):
        got, want = getattr(made, direction), getattr(whole, direction)
        assert (got is None) == (want is None)
        if want is None:
            continue
        assert got.spec == want.spec and got.matrix == want.matrix
        for name, buffer in want.buffers.items():
            mine = got.buffers[name]
            assert mine.shape == buffer.shape and mine.dtype == buffer.dtype
            equal = mine.contiguous().view(torch.uint8) == buffer.contiguous().view(torch.uint8)
            assert equal.all(), (got.direction, name)
    assert payloads.shape[1] == max(plan.nbytes(rank) for rank in range(len(sizes)))


def _values(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, COLS, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    x[:, 3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("name", FORMATS)
def test_both_planes_of_every_format(name, sizes) -> None:
    check(_values(sum(sizes)), sizes, spec(name), spec(name))


@pytest.mark.parametrize("name", FORMATS)
def test_the_hooks_of_a_plane_by_the_names_of_their_like(name, direction) -> None:
    x = _values(96)
    plane = PlaneShards(spec(name), direction, Shards((32, 64), COLS))
    whole = getattr(build_storage(x, spec(name), spec(name)), direction)
    assert plane.fsdp_buffer_fields == tuple(whole.buffers)
    parts = [x[slice(*plane.shards.range(rank))] for rank in range(2)]
    maxima = reduced([plane.maxima(own, rank) for rank, own in enumerate(parts)])
    sent = [
        plane.fsdp_extract_buffers(plane.encode(own, rank, plane.kept(maxima, rank), None), rank)
        for rank, own in enumerate(parts)
    ]
    made = plane.fsdp_assign_gathered(sent)
    for field in plane.fsdp_buffer_fields:
        assert torch.equal(made.buffers[field].view(torch.uint8),
                           whole.buffers[field].contiguous().view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("pair", PAIRS, ids="|".join)
def test_hybrid_pairs_of_either_source(pair, source, sizes) -> None:
    check(_values(sum(sizes)), sizes, *(spec(name) for name in pair), source)


@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_one_direction_and_options(dtype, sizes) -> None:
    x = _values(sum(sizes)).clamp(-6e4, 6e4).to(dtype)
    for row, col in itertools.product([spec("mxfp8"), None], [spec("nvfp4"), None]):
        if row or col:
            check(x, sizes, row, col)
    check(x, sizes, spec("nvfp4", row_scaled=True), spec("nvfp4", row_scaled=True))
    check(x, sizes, spec("nvfp4", four_over_six="mse"), spec("mxfp8"))
    check(x, sizes, spec("nvfp4", signs=0xD7E8), spec("mxfp8"))


@pytest.mark.parametrize("sizes", [(70,), (32, 16, 14), (48, 45), (16, 1)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_transform_of_rows_has_codes_behind_the_last_one(name, sizes) -> None:
    if name == "mxfp8":
        sizes = tuple(2 * size for size in sizes)
    check(_values(sum(sizes)), sizes, spec(name), spec(name, signs=0xD7E8))
    check(_values(sum(sizes)), sizes, None, spec(name, signs=0xD7E8))


@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4"), ("mxfp8", "nvfp4")], ids="|".join)
def test_stochastic_rounding_counts_in_the_whole(pair, sizes) -> None:
    planes = [spec(name, stochastic=True) for name in pair]
    check(_values(sum(sizes)), sizes, *planes, seed=torch.tensor([11]))


@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "nvfp4", "fp8_e4m3", "fp8_128x128"])
def test_one_bad_value_beside_a_boundary(name, special, sizes) -> None:
    x = _values(sum(sizes))
    for start in {start for start in Shards(sizes, COLS).starts if 0 < start < len(x)} or {1}:
        for place in (start - 1, start):
            bad = x.clone()
            bad[place, 7] = special
            check(bad, sizes, spec(name), spec(name))


def test_derivable_planes_travel_once_and_bytes_are_few() -> None:
    shards = Shards.chunks(256, 128, 4)
    square = StorageShards(spec("mxfp8_32x32"), spec("mxfp8_32x32"), "original", shards)
    assert square.derives and square.payload == 64 * 128 + 2 * 4
    both = StorageShards(spec("mxfp8"), spec("nvfp4"), "original", shards)
    row = 64 * 128 + 64 * 4
    col = 128 * 64 // 2 + 128 * 4 + 4
    assert both.payload == row + col < 0.85 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"signs": 1}, "Hadamard transform"), ({"four_over_six": "mae"}, "four-over-six")],
)
def test_what_a_shard_cannot_know_is_said(options, reason) -> None:
    plan = StorageShards(spec("mxfp8"), spec("nvfp4", **options), "original", Shards((8, 24), 4))
    assert reason in plan.problem
    aligned = StorageShards(plan.row, plan.col, "original", Shards((16, 16), 4))
    assert aligned.problem is None
    check(_values(32)[:, :16].contiguous(), (16, 16), plan.row, plan.col)
