"""Planes whose memory is filled again, gather after gather."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hybridq
from hybridq.distributed import Shards, StorageShards
from hybridq.distributed.parameters.gathered_storage import GatheredStorage
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
    asked = {"last_call": lambda: call, "changed": lambda: None}
    about = SimpleNamespace(inner=[], in_graph=False, **asked)
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
        assert got.operand_cache.nbytes == 0, "FSDP2 cannot free what is kept"
    assert len(addresses) == 1, "nothing was tested"


@pytest.mark.parametrize("cols", [COLS, 16])  # of 16, one block: scales transposed are a view
def test_planes_that_come_back_for_a_graph_are_whole(cols) -> None:
    """A recipe's derived pair, then values, then the pair again: each in memory of its size."""
    call = SimpleNamespace(derives=True)
    asked = {"last_call": lambda: call, "changed": lambda: None, "is_encoded": True}
    derives = {"derives_from": lambda plan: plan.derives}
    about = SimpleNamespace(inner=[], in_graph=True, **asked, **derives)
    storage = GatheredStorage(about)  # type: ignore
    for name in ("nvfp4_16x16", "bf16", "nvfp4_16x16", "mxfp8_32x32", "nvfp4_16x16", "nvfp4_16x16"):
        spec = hybridq.PlaneSpec.parse(name).resolve(torch.bfloat16)
        col = spec if spec.is_derivable and not spec.format.is_identity else None
        plan = StorageShards(spec, col, "original", Shards((ROWS,), cols))
        whole = build_storage(torch.randn(ROWS, cols).bfloat16(), spec, spec)
        storage.fill(plan, plan.pack([whole.rowwise], 0).view(1, -1))
        for mine, own in zip(storage.planes, whole.planes, strict=False):
            for buffer, wanted in zip(mine.tensors, own.tensors, strict=True):
                end = (buffer.storage_offset() + buffer.numel()) * buffer.element_size()
                assert end <= buffer.untyped_storage().nbytes(), f"{mine} reaches past its memory"
                assert torch.equal(buffer, wanted)
        for buffer in about.inner:
            buffer.untyped_storage().resize_(0)  # as FSDP2 does after a forward
        about.inner.clear()
