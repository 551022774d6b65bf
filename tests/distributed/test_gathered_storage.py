"""Planes whose memory is filled again, gather after gather."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hybridq
from hybridq.distributed import Shards, StorageShards
from hybridq.distributed.gathered_storage import GatheredStorage
from hybridq.storage import Plane, build_storage

ROWS, COLS = 96, 128


@pytest.mark.parametrize("derives", [False, True])
@pytest.mark.parametrize("name", hybridq.formats.names())
def test_what_gemms_make_of_a_gather_is_not_taken_for_the_next_ones(name, derives) -> None:
    """The same addresses and versions in each gather, but other values."""
    spec = hybridq.PlaneSpec.parse(name).resolve(torch.bfloat16)
    if derives and not spec.is_derivable:
        pytest.skip("has no derived plane")
    plan = StorageShards(spec, None, "original", Shards((ROWS,), COLS))
    call = SimpleNamespace(derives=True)
    about = SimpleNamespace(inner=[], in_graph=False, last_call=lambda: call)
    storage = GatheredStorage(about)  # type: ignore
    sizes = (32, ROWS) if derives else (32, COLS)
    other = hybridq.quantize(torch.randn(sizes).bfloat16(), "mxfp8").rowwise
    addresses = set()
    for _ in range(4):
        whole = build_storage(torch.randn(ROWS, COLS).bfloat16(), spec, spec)
        storage.fill(plan, plan.pack([whole.rowwise], 0).view(1, -1))
        addresses.add(storage.rowwise.data.data_ptr())
        direction = "columnwise" if derives else "rowwise"
        want, got = getattr(whole, direction), storage.plane(direction)
        fresh = Plane(want.spec, direction, ROWS, COLS, dict(want.buffers))
        for _ in range(3):
            assert torch.equal(hybridq.gemm(other, got), hybridq.gemm(other, fresh))
        assert got.kept.nbytes == 0, "FSDP2 cannot free what is kept"
    assert len(addresses) == 1, "nothing was tested"
