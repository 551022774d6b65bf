"""torch.distributed's own collectives of quantized tensors: reads are decoded, writes refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybridq
from rank_runs import needs_gloo

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced")]

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRITES = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce, async": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "all_reduce_coalesced": lambda t: dist.distributed_c10d.all_reduce_coalesced([t, t.detach()]),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "recv": lambda t: dist.irecv(t, 0),
    "recv, any source": lambda t: dist.irecv(t),
    "all_gather": lambda t: dist.all_gather([t], t.detach()),
    "all_gather, base": lambda t: torch.ops.c10d._allgather_base_(t, X, dist.group.WORLD.boxed()),
    "gather": lambda t: dist.gather(t.detach(), [t], dst=0),
    "scatter": lambda t: dist.scatter(t, [X], 0),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [X]),
    "all_to_all": lambda t: dist.all_to_all([t], [X]),
    "all_to_all_single": lambda t: dist.all_to_all_single(t, X),
    "functional": lambda t: torch.ops._c10d_functional.all_reduce_(
        t, "sum", dist.group.WORLD.group_name
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_quantized_tensor_is_refused(name) -> None:
    t = hybridq.quantize(X, "mxfp8", columnwise="nvfp4")
    planes = [buffer.clone() for buffer in t.tensor_storage.flatten()[0]]
    with pytest.raises(RuntimeError, match=r"_: torch.distributed cannot write.*t.dequantize\(\)"):
        WRITES[name](t)
    assert all(map(torch.equal, planes, t.tensor_storage.flatten()[0]))


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_decoded_part_is_refused(name) -> None:
    t = hybridq.quantize(torch.cat([X, X], 1), "mxfp8")
    part, want = t[:, 3:67], t.dequantize()[:, 3:67]
    with pytest.raises(RuntimeError, match="decoded copy"):
        WRITES[name](part)
    assert torch.equal(part.dequantize(), want)


def test_what_is_read_is_decoded() -> None:
    t = hybridq.quantize(X, "mxfp8")
    for own in (t, hybridq.quantize(torch.cat([X, X], 1), "mxfp8")[:, 3:67]):
        found = [torch.zeros(4, 64)]
        dist.all_gather(found, own)
        assert torch.equal(found[0], own.dequantize())
        dist.gather(own, found, dst=0)
        assert torch.equal(found[0], own.dequantize())


def test_lists_of_lists_are_no_null_pointers() -> None:
    t = hybridq.quantize(X, "mxfp8")
    with pytest.raises(RuntimeError, match="data pointer"):
        dist.scatter(torch.zeros(4, 64), [t], 0)


def test_what_the_error_says_is_right() -> None:
    t = hybridq.quantize(X, "mxfp8", columnwise="mxfp8")
    values = t.dequantize()
    dist.all_reduce(values)
    t.copy_(values)
    want = hybridq.quantize(values, "mxfp8", columnwise="mxfp8")
    pairs = zip(t.tensor_storage.flatten()[0], want.tensor_storage.flatten()[0], strict=True)
    assert all(torch.equal(got, made) for got, made in pairs)
