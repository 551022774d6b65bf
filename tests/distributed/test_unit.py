"""What the weights of a unit send together, and where it lies in what FSDP2 gathers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import PlaneShards, Shards, StorageShards, prepare_fsdp2
from hybridq.distributed.encoding import ShardEncoder, ShardWork, UnitPayload, zeros
from hybridq.distributed.units import Room, Unit

TRAILER = 16


@pytest.mark.parametrize("payload", [0, 1, 100, 640, 1000, 4800, 9999, 70_000])
@pytest.mark.parametrize("shape", [(4, 16), (3, 5, 7), (1, 1), (0, 8), (257, 512)])
def test_a_room_holds_what_is_sent_in_tensors_of_one_shape(shape, payload) -> None:
    room = Room.of(shape, False, payload)
    sent = torch.arange(room.sent_nbytes(payload), dtype=torch.int64).to(torch.uint8)
    parts, rest = room.split(sent)
    assert all(part.shape == shape for part in parts)
    assert len(parts) <= 4 + 3
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    assert torch.equal(torch.cat([*flat, *([] if rest is None else [rest])]), sent)
    assert room.gathered_nbytes(payload) == sum(part.numel() for part in flat)
    # More than whole bytes per value is padded, or travels by itself where it would be much.
    padding = len(sent) - payload - TRAILER
    assert rest is None or padding == 0
    assert padding <= max(1 << 16, torch.Size(shape).numel())


def test_even_shards_are_sent_as_they_are() -> None:
    room = Room.of((4, 16), True, 100)
    sent = torch.zeros(room.sent_nbytes(70), dtype=torch.uint8)
    assert len(sent) == room.gathered_nbytes(70) == 70 + TRAILER
    (part,), rest = room.split(sent)
    assert part is sent and rest is None


@pytest.mark.parametrize("sizes", [(64, 64), (33, 32), (40, 40, 20), (48, 16, 0)])
@pytest.mark.parametrize("name", hybridq.formats.names())
def test_rows_are_encoded_past_the_dispatcher_as_by_it(name, sizes) -> None:
    """The same bytes, of each rank, each direction and both planes at once."""
    spec = hybridq.PlaneSpec.parse(name).resolve(torch.bfloat16)
    pairs = ((spec, None), (None, spec), (spec, spec))
    count = sum(_encode_past(StorageShards(*pair, "original", Shards(sizes, 96))) for pair in pairs)
    assert count or spec.format.is_identity or spec.signs is not None


@pytest.mark.parametrize("sizes", [(64, 64), (33, 32), (48, 16, 0)])
@pytest.mark.parametrize("way", ["both travel", "one travels", "of one source"])
@pytest.mark.parametrize("row", ["mxfp8", "nvfp4", "nvfp4_16x16", "fp8_e4m3", "fp8_128x128"])
@pytest.mark.parametrize("col", ["mxfp8", "nvfp4", "fp8_e4m3"])
def test_both_planes_are_encoded_past_the_dispatcher(row, col, way, sizes) -> None:
    specs = [hybridq.PlaneSpec.parse(name).resolve(torch.bfloat16) for name in (row, col)]
    source = "original" if way == "of one source" else "rowwise_dequantized"
    sends_row = way != "one travels"
    plan = StorageShards(*specs, source, Shards(sizes, 96), sends_row=sends_row)
    assert plan.derives or (len(plan.planes), len(plan.sent)) == (2, 1 + sends_row)
    assert _encode_past(plan) == 2 * len(sizes)


def _encode_past(plan: StorageShards) -> int:
    """Hold what each rank encodes past the dispatcher to what it encodes by it; return how many."""
    torch.manual_seed(0)
    if plan.problem:
        return 0
    dtype, count = torch.bfloat16, 0
    x = torch.randn(plan.shards.rows, plan.shards.cols)
    high = x.split(plan.shards.sizes)
    works = [ShardWork(plan, own.to(dtype), rank, x.device) for rank, own in enumerate(high)]
    for step, planes in enumerate(plan.steps):
        for known, work in zip(_maxima(works, planes), works, strict=True):
            work.maxima.update(known)
            work.run(step)
    for rank, work in enumerate(works):
        for x in (high[rank], high[rank].to(dtype)):  # converted first, and read where it is
            encoder = ShardEncoder.of(plan, rank, (x.dtype, dtype), 64)
            if encoder is None:
                continue
            count += 1
            payload = UnitPayload(encoder.end)
            payload.memory.fill_(0xA5)
            encoder.bind(payload)
            payload.parts.append(zeros(encoder.padding))
            for _ in range(2):  # the memory comes and goes
                payload.begin()
                assert encoder.take(x, work.maxima)
                made = [torch.full(one.shape, 0x5A, dtype=torch.uint8) for one in payload.parts]
                payload.write(made)
                payload.bound()
                sent = torch.cat([one.reshape(-1) for one in made])
                assert torch.equal(sent, work.payload())
            assert not encoder.take(x.double(), work.maxima)
    return count


def _maxima(
    works: list[ShardWork], planes: tuple[PlaneShards, ...]
) -> list[dict[str, list[torch.Tensor]]]:
    """What each rank knows when all have reduced."""
    found: list[dict[str, list[torch.Tensor]]] = [{} for _ in works]
    for plane in planes:
        own = [plane.maxima(work._rows(), work.rank) for work in works]
        both = [torch.stack(parts).amax(0) for parts in zip(*own, strict=True)]
        for rank, known in enumerate(found):
            known[plane.direction] = plane.kept(both, rank)
    return found


def test_parameters_that_come_in_another_order_are_refused() -> None:
    layers = prepare_fsdp2(nn.ModuleList(hybridq.Linear(8, 8) for _ in range(3)))
    tensors = [layer.weight.data for layer in layers]
    unit = Unit([tensor._about for tensor in tensors])
    unit._begin = lambda *_: None  # type: ignore[method-assign]
    policy = SimpleNamespace(param_dtype=None)
    unit.inputs(tensors[0], None, policy)
    with pytest.raises(RuntimeError, match=r"got 2.weight in the place of 1.weight"):
        unit.inputs(tensors[2], None, policy)
    with pytest.raises(RuntimeError, match=r"0.weight, 1.weight, 2.weight must be gathered tog"):
        unit.receive(())
