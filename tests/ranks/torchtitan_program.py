"""Experts that torchtitan deals out over ranks, each with the tokens of its own experts."""

from __future__ import annotations

import copy
import re
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

sys.modules["torchtitan"] = types.ModuleType("torchtitan")

from rank_program import main  # noqa: E402

import hybridq  # noqa: E402
from hybridq.integrations.torchtitan import parallelize_under  # noqa: E402
from torchtitan_like import GroupedExperts, Model, parallelize  # noqa: E402

SIZES = torch.tensor([5, 0, 7, 4])


def dealt_out() -> None:
    """Values and gradients of a rank's experts are those of one process, to the bit."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.get_rank()
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(16, 32)
    whole = hybridq.convert(copy.deepcopy(plain))
    dims = types.SimpleNamespace(tp=1, ep=2, mesh=mesh)
    given = parallelize_under(parallelize, "mxfp8")(plain, parallel_dims=dims)
    own = slice(0, 5) if rank == 0 else slice(5, 16)
    y = given(x[own], SIZES[2 * rank : 2 * rank + 2])
    with hybridq.autocast(recipe="mxfp8"):
        want = whole(x[own], SIZES * torch.tensor([1, 1, 0, 0] if rank == 0 else [0, 0, 1, 1]))
    assert torch.equal(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    experts = slice(2 * rank, 2 * rank + 2)
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        grad = getattr(given.experts, name).grad.to_local()
        assert torch.equal(grad, getattr(whole.experts, name).grad[experts]), name
    assert torch.equal(given.into.weight.grad, whole.into.weight.grad)


def refused() -> None:
    """Parts of experts, and recipes that would name another rank's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sizes, x = SIZES, torch.randn(16, 32)
    for dim, recipe, words in (
        (1, "mxfp8", "expert by expert, Shard(0), got "),
        (0, hybridq.recipes.ByName([("*experts*", "mxfp8")], "bf16"), "reads names"),
    ):
        experts = hybridq.convert(torch.nn.ModuleDict({"experts": GroupedExperts()}))["experts"]
        for name, one in list(experts.named_parameters()):
            made = torch.nn.Parameter(distribute_tensor(one, mesh, [Shard(dim)]))
            experts.register_parameter(name, made)
        try:
            with hybridq.autocast(recipe=recipe):
                experts(x, sizes if dim else sizes[:2])
        except NotImplementedError as error:
            assert re.search(re.escape(words), str(error)), error
        else:
            raise AssertionError(words)


def sharded() -> None:
    """FSDP2 deals experts out, too, and gathers them: every one keeps its history."""
    torch.manual_seed(0)
    plain, x = hybridq.convert(Model()), torch.randn(16, 32)
    own = copy.deepcopy(plain)
    fully_shard(own.experts)
    fully_shard(own)
    assert len(own.experts.scaled_weights()) == len(plain.experts.scaled_weights()) == 12
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (own, plain)]
    for number in range(4):
        outputs = []
        for one, optimizer in zip((own, plain), optimizers, strict=True):
            with hybridq.autocast(recipe="fp8_delayed"):
                outputs.append(one(x * (number + 1), SIZES))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main(globals())
