"""Tensor parallelism x FSDP2: `python mesh_program.py RANK WORLD STORE NAME...`.

Every rank computes the whole model too. All ranks see one batch, so that the mean of the gradients
over the data-parallel ranks is the gradient of one process, but for the order of FP32 sums.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_program import main
from tensor_parallel_program import Mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.distributed import ScalingHistory, prepare_fsdp2
from hybridq.nn.modules import linear_part

RECIPES = ("mxfp8_fwd_nvfp4_bwd", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "fp8_block")
SIZES = {"aligned": (128, 512), "halves": (96, 192), "cut": (136, 365)}
STEPS = 2


def mesh_of(tp: int) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def made(size: str) -> nn.Module:
    torch.manual_seed(0)
    return hybridq.convert(Mlp(*SIZES[size]), least_width=0)


def dealt_out(size: str, tp: int, prepare: bool) -> nn.Module:
    """Return the same model over a mesh: tensor parallelism first, then planes, then FSDP2."""
    model, mesh = made(size), mesh_of(tp)
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if prepare:
        prepare_fsdp2(model)
    return fully_shard(model, mesh=mesh["dp"])


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: Any, recipe: str, hidden: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Return outputs and gradients of some steps, and the weights behind them."""
    found: list[torch.Tensor] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    torch.manual_seed(3)
    for _ in range(steps):
        x = torch.randn(33, hidden)
        with hybridq.autocast(recipe=recipe):
            y = model(x)
        (whole(y) - 0.3).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [whole(y).detach(), whole(norm)]
        found += [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(parameter.detach()) for parameter in model.parameters()]


def check_near(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error = float((a - b).norm() / b.norm())
        assert error < (1e-6 if number == 0 else 5e-3), (what, number, error)


def values(text: str) -> None:
    """Plain `fully_shard` of weights that tensor parallelism split: values travel."""
    tp, *names = text.split(",")
    for name, recipe in itertools.product(names, RECIPES):
        model = dealt_out(name, int(tp), False)
        hidden = SIZES[name][0]
        check_near(train(model, recipe, hidden), train(made(name), recipe, hidden), recipe + name)


@contextmanager
def watched(see: Any) -> Iterator[None]:
    """Have `see` told of each product that modules make in the block: module, and local weight."""
    plain = linear_part._product

    def product(own: Any, *rest: Any) -> Any:
        see(own.module, own.weight)
        return plain(own, *rest)

    linear_part._product = product
    try:
        yield
    finally:
        linear_part._product = plain


def check_planes(
    model: Any, single: nn.Module, x: torch.Tensor, recipe: str, wants_planes: bool
) -> None:
    """What modules find are parts of the planes of the whole weight, by bytes."""
    values = dict(single.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values[name].copy_(whole(parameter))
    names = {module: name for name, module in model.named_modules()}
    seen = []

    def see(module: Any, own: Any) -> None:
        weight = values[names[module] + ".weight"].detach().to(own.dtype)
        check_part(own, weight, module.plan_of(hybridq.recipes.get(recipe)).weight, wants_planes)
        seen.append(module)

    with watched(see), hybridq.autocast(recipe=recipe), torch.no_grad():
        model(x)
    assert len(seen) == sum(isinstance(module, hybridq.Linear) for module in names)


def check_part(own: Any, weight: torch.Tensor, slot: Any, wants_planes: bool) -> None:
    """Compare the planes of a part with those of the whole weight, which are cut."""
    rank, world = dist.get_rank() % TP[0], TP[0]
    is_cut = 0 if own.shape[0] < weight.shape[0] else 1
    buffers = torch.ops.hybridq.encode(
        weight, slot.row.spec, slot.col.spec, col_source=slot.col_source
    )
    for direction in ("rowwise", "columnwise"):
        plane = own.tensor_storage.plane(direction)
        spec, dim = plane.spec, is_cut if direction == "rowwise" else 1 - is_cut
        assert spec.format.is_identity != wants_planes, spec
        shape = weight.shape if direction == "rowwise" else weight.shape[::-1]
        for one in () if spec.format.is_identity else spec.buffers(*shape):
            mine, theirs = plane.buffers[one.name], buffers.pop(0)
            if mine.shape != theirs.shape:
                theirs = theirs.chunk(world, dim)[rank]
            mine, theirs = (part.flatten().clone().view(torch.uint8) for part in (mine, theirs))
            assert torch.equal(mine, theirs), (spec, direction, one.name)


TP = [2]


def planes(text: str) -> None:
    """Planes travel among data-parallel ranks, and are parts of the planes of the whole."""
    tp, *names = text.split(",")
    TP[0] = int(tp)
    for size, recipe in itertools.product(names, RECIPES):
        model, hidden = dealt_out(size, TP[0], True), SIZES[size][0]
        found = train(model, recipe, hidden)
        check_near(found, train(made(size), recipe, hidden), recipe + size)
        if recipe != "fp8_delayed":
            model.reshard()
            is_whole = size == "aligned" or (size == "halves" and recipe != "fp8_block")
            x = torch.randn(33, hidden)
            check_planes(model, made(size), x, recipe, is_whole or TP[0] == 1)


def demo() -> None:
    """The demo's model under TP2 x FSDP2: the planes of all its weights, after some steps."""
    from hybridq.demo.data import Corpus
    from hybridq.demo.fsdp import ShardedTrainer
    from hybridq.demo.model import ModelConfig, Transformer
    from hybridq.demo.train import TrainConfig

    recipe, config = "mxfp8_fwd_nvfp4_bwd", ModelConfig(2, 64, 2, 64, 32)
    data = torch.arange(4000, dtype=torch.uint8).remainder(97)
    corpus = Corpus(data[:3000], data[3000:], (), (), "numbers", False)
    trainer = ShardedTrainer(
        TrainConfig(config, 4, 2, eval_batches=2, eval_points=1), recipe, corpus, 2
    )
    assert len(list(trainer.steps())) == 2
    single = hybridq.convert(Transformer(config, hybridq.Linear))
    x = torch.randint(0, 97, (2, 32))
    check_planes(trainer.model, single, x, recipe, True)


def checkpoints(text: str) -> None:
    """Saved under one mesh, loaded under others: weights, moments, histories; the same losses."""
    folder, tp, *others = text.split(",")
    for recipe in ("mxfp8_fwd_nvfp4_bwd", "fp8_delayed"):
        losses = []
        for number, one in enumerate((tp, *others)):
            model = dealt_out("halves", int(one), True)
            optimizer = hybridq.optim.AdamW(model.parameters(), lr=1e-3)
            path = f"{folder}/{recipe}"
            if number == 0:
                for step in range(2):
                    one_loss(model, optimizer, recipe, step)
                dcp.save(state_of(model, optimizer), checkpoint_id=path)
            else:
                state = state_of(model, optimizer)
                dcp.load(state, checkpoint_id=path)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
            losses.append([one_loss(model, optimizer, recipe, step) for step in (2, 3)])
        for found in losses[1:]:
            assert torch.allclose(torch.tensor(found), torch.tensor(losses[0]), rtol=1e-4), losses


def one_loss(model: Any, optimizer: Any, recipe: str, step: int) -> float:
    torch.manual_seed(step)
    x = torch.randn(33, 96)
    with hybridq.autocast(recipe=recipe):
        loss = (whole(model(x)) - 0.3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaling": ScalingHistory(model)}


def replicas() -> None:
    """Tensor parallelism under DistributedDataParallel."""
    mesh = mesh_of(2)
    for recipe in RECIPES:
        single, model = made("halves"), made("halves")
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        wrapped = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
        losses = []
        for one in (wrapped, single):
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-3)
            losses.append([one_loss(one, optimizer, recipe, step) for step in range(3)])
        assert torch.allclose(*map(torch.tensor, losses), rtol=1e-4), (recipe, losses)


def written() -> None:
    """Weights on two meshes, tensor parallelism's and FSDP2's own, that no optimizer writes."""
    torch.manual_seed(0)
    single = hybridq.convert(nn.Sequential(Mlp(96, 365), nn.Linear(96, 7)), least_width=0)
    model, mesh = copy.deepcopy(single), mesh_of(1)
    parallelize_module(model[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(prepare_fsdp2(model), mesh=mesh["dp"])
    for recipe in RECIPES:
        losses: list[list[float]] = [[], []]
        for both, found in zip((model, single), losses, strict=True):
            optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3, eps=1e-3)
            for step in range(3):
                found.append(one_loss(both, optimizer, recipe, step))
                with torch.no_grad():
                    for parameter in both.parameters():
                        parameter.mul_(1.1)
        assert losses[0] == losses[1], (recipe, losses)


def recomputed() -> None:
    """Layers under FSDP2 whose activations are recomputed."""
    for recipe in RECIPES:
        plain, model = dealt_out("halves", 2, True), dealt_out("halves", 2, True)
        inner = model.forward
        model.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        losses = []
        for one in (plain, model):
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
            losses.append([one_loss(one, optimizer, recipe, step) for step in range(3)])
        assert losses[0] == losses[1], (recipe, losses)


def refused() -> None:
    """Errors say what to do."""
    mesh = mesh_of(2)
    model = prepare_fsdp2(made("aligned"))
    try:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    except RuntimeError as error:
        assert "call parallelize_module, then prepare_fsdp2" in str(error), error
    else:
        raise AssertionError("tensor parallelism after prepare_fsdp2 was taken")
    model = prepare_fsdp2(made("aligned"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()}, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    try:
        model(torch.randn(2, 128))
    except RuntimeError as error:
        assert "call parallelize_module, then prepare_fsdp2" in str(error), error
    else:
        raise AssertionError("a weight that was prepared, and then split, was gathered")
    try:
        prepare_fsdp2(dealt_out("aligned", 2, False))
    except RuntimeError as error:
        assert "call prepare_fsdp2 after parallelize_module" in str(error), error
    else:
        raise AssertionError("sharded weights were prepared")
    with hybridq.quantized_model_init(recipe="mxfp8"):
        quantized = hybridq.Linear(64, 64)
    try:
        parallelize_module(quantized, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    except NotImplementedError as error:
        assert "take hybridq.distributed.ColwiseParallel" in str(error), error
    else:
        raise AssertionError("torch's style split a quantized weight")


if __name__ == "__main__":
    main(globals())
