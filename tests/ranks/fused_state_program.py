"""States, FSDP2 and planes of modules that `FusedParallel` dealt out.

`python fused_state_program.py RANK WORLD STORE NAME...`. Every rank computes the whole module too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fused_style_program import CASES, matrices, recipe_of
from mesh_program import mesh_of, whole
from rank_program import logged, main
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import hybridq
from hybridq.direction import COLUMNWISE, ROWWISE
from hybridq.distributed import (
    FusedParallel,
    ScalingHistory,
    joined_state,
    prepare_fsdp2,
    separate_state,
)
from hybridq.formats import PlaneSpec
from hybridq.nn.autograd.slot_encoder import SlotEncoder
from hybridq.nn.modules import linear_part
from hybridq.storage import Plane
from hybridq.tensor import is_quantized

HIDDEN, BATCH = 128, 2
RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current", "fp8_block", "fp8_delayed")


@contextmanager
def watched(see: Any) -> Iterator[None]:
    """Have `see` told of each product that modules make in the block, before it is made."""
    plain = linear_part._product

    def product(own: Any, *rest: Any) -> Any:
        see(own)
        return plain(own, *rest)

    linear_part._product = product
    try:
        yield
    finally:
        linear_part._product = plain


def made(case: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(CASES[case]())


def dealt_out(case: str, tp: int, *, sharded: bool = False, prepare: bool = False) -> nn.Module:
    """Return a model over a mesh, or whole for no ranks."""
    model = made(case)
    if not tp:
        return model
    mesh = mesh_of(tp)
    parallelize_module(model, mesh["tp"], {"0": FusedParallel()})
    if prepare:
        prepare_fsdp2(model)
    return fully_shard(model, mesh=mesh["dp"]) if sharded else model


def one_loss(model: Any, optimizer: Any, recipe: Any, step: int) -> float:
    torch.manual_seed(step)
    x = torch.randn(16, BATCH, HIDDEN)
    with hybridq.autocast(recipe=recipe):
        loss = (model(x) - 0.3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": separate_state(model, weights),
        "optimizer": separate_state(model, moments),
        "scaling": ScalingHistory(model),
    }


def checkpoints(text: str) -> None:
    """Saved by any number of ranks, loaded by any other, whole too: the same losses.

    A way is a number of tensor-parallel ranks, 0 of a whole module; with f under FSDP2, with p
    prepared for it.
    """
    folder, case, *ways = text.split(",")
    for name in ("mxfp8_fwd_nvfp4_bwd", "fp8_delayed"):
        recipe = recipe_of(case, name)
        losses: list[list[float]] = []
        for number, way in enumerate(ways):
            how = {"sharded": way[1:] != "", "prepare": "p" in way}
            model = dealt_out(case, int(way[0]), **how)
            optimizer = hybridq.optim.AdamW(model.parameters(), lr=1e-3)
            if number == 0:
                for step in range(2):
                    one_loss(model, optimizer, recipe, step)
            else:
                load(model, optimizer, f"{folder}/{name}-{number - 1}")
            # Each saves what it has loaded, for the next one.
            state = state_of(model, optimizer)
            dcp.save(state, checkpoint_id=f"{folder}/{name}-{number}")
            losses.append([one_loss(model, optimizer, recipe, step) for step in (2, 3)])
        first = torch.tensor(losses[0])
        for way, found in zip(ways, losses, strict=True):
            assert torch.allclose(torch.tensor(found), first, rtol=1e-5), (name, way, losses)


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=joined_state(model, state["model"]),
        optim_state_dict=joined_state(model, state["optimizer"]),
    )


def whole_values(text: str) -> None:
    """What `full_tensor` gives is the whole module's own parameter, under FSDP2 too."""
    for case in text.split(","):
        wanted = separate_state(made(case), made(case).state_dict())
        for sharded in (False, True):
            found = dealt_out(case, 2, sharded=sharded).state_dict()
            assert list(found) == list(wanted), (case, list(found))
            for name, one in found.items():
                assert torch.equal(whole(one), wanted[name]), (case, sharded, name)


def fsdp2(text: str) -> None:
    """Tensor parallelism x FSDP2, planes of single matrices travelling: losses of one process."""
    for case in text.split(","):
        for name in RECIPES:
            recipe = recipe_of(case, name)
            with logged() as messages:
                models = [dealt_out(case, 2, sharded=True, prepare=True), dealt_out(case, 0)]
            if dist.get_rank() == 0 and name == RECIPES[0] and case != "interleaved":
                assert any("quantized together" in one for one in messages), messages
            losses = []
            for model in models:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
                losses.append([one_loss(model, optimizer, recipe, step) for step in range(3)])
            assert torch.allclose(*map(torch.tensor, losses), rtol=2e-4), (case, name, losses)
            found = hybridq.distributed.wire_nbytes(models[0])
            assert found > 0, (case, name)
            for parameter, (_, full) in zip(
                models[0].parameters(), separate(models[1]).items(), strict=True
            ):
                error = float((whole(parameter) - full).norm() / full.norm().clamp_min(1e-6))
                assert error < 1e-3, (case, name, error)


def replicas(text: str) -> None:
    """Tensor parallelism under DistributedDataParallel: losses of one process."""
    for case in text.split(","):
        for name in RECIPES:
            recipe, model = recipe_of(case, name), dealt_out(case, 2)
            dp = mesh_of(2)["dp"]
            wrapped = nn.parallel.DistributedDataParallel(model, device_mesh=dp)
            losses = []
            for one in (wrapped, made(case)):
                optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-3)
                losses.append([one_loss(one, optimizer, recipe, step) for step in range(3)])
            assert torch.allclose(*map(torch.tensor, losses), rtol=2e-4), (case, name, losses)


def separate(model: nn.Module) -> dict[str, torch.Tensor]:
    return separate_state(model, dict(model.named_parameters()))


def planes(text: str) -> None:
    """Planes that products take of every part are the parts of the whole's, byte for byte."""
    for case in text.split(","):
        for name in PLANES:
            recipe = NVFP4 if name == "nvfp4" else name
            part = of_whole_blocks(case)
            parallelize_module(part, mesh_of(dist.get_world_size())["tp"], FusedParallel())
            seen = encoded(part, recipe)
            assert len(seen) == NUM_PARTS[case], (case, list(seen))
            check_parts(case, part, seen, recipe)


def gathered(text: str) -> None:
    """So are those that travel among the ranks of FSDP2; the others are encoded of values."""
    for case in text.split(","):
        for name in PLANES:
            recipe, mesh = NVFP4 if name == "nvfp4" else name, mesh_of(2)
            part = of_whole_blocks(case)
            parallelize_module(part, mesh["tp"], FusedParallel())
            single = {id(one) for one in prepare_fsdp2(part).modules() if is_single(one)}
            fully_shard(part, mesh=mesh["dp"])
            found: dict[tuple[Any, str], Any] = {}

            def see(own: Any, found: Any = found) -> None:
                if is_quantized(own.weight):
                    storage = own.weight.tensor_storage
                    both = [storage.plane(one).tensors for one in (ROWWISE, COLUMNWISE)]
                    found[own.module, own.name] = [[b.clone() for b in one] for one in both]

            with watched(see), hybridq.autocast(recipe=recipe), torch.no_grad():
                part(inputs(part))
            assert {id(module) for module, _ in found} == single, (case, name, list(found))
            check_parts(case, part, found, recipe)


def is_single(module: Any) -> bool:
    """Return whether a module has a weight that is one matrix."""
    parts = list(getattr(module, "weight_parts", {}).values())
    return any(parts.count(part) == 1 for part in parts)


def check_parts(case: str, part: nn.Module, seen: Any, recipe: Any) -> None:
    """Compare planes, by module and linear part, with those of the whole module."""
    single = of_whole_blocks(case)
    places, values = matrices(single), dict(single.named_parameters())
    for (module, of_part), buffers in seen.items():
        path = next(path for path, one in part.named_modules() if one is module)
        names = [one for one, owner in module.weight_parts.items() if owner == of_part]
        found = [places[f"{path}.{one}".lstrip(".")] for one in names]
        weight = values[found[0][0]].detach()
        placements = getattr(module, names[0]).placements
        dim, tp = placements[-1].dim, getattr(module, names[0]).device_mesh.size(-1)
        wholes = [at for _, at in found] if dim == 0 else [slice(0, weight.shape[1])]
        slot = module.plan_of(hybridq.recipes.get(recipe), of_part).weight
        check_same(buffers, weight, slot, dim, [own_piece(one, tp) for one in wholes])


PLANES = ("mxfp8", "nvfp4", "fp8_current", "fp8_block")
#: Both kinds of planes; weights are rounded to nearest by the recipe as it is.
NVFP4 = hybridq.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
#: Linear parts with a weight.
NUM_PARTS = {"norm": 1, "mlp": 2, "attention": 2, "layer": 4, "interleaved": 4}


def of_whole_blocks(case: str) -> nn.Module:
    """Return a module whose matrices give each of two ranks whole blocks of 128."""
    torch.manual_seed(0)
    heads, options = 8, {"num_gqa_groups": 4, "attention_dropout": 0.0}
    if case == "norm":
        return hybridq.LayerNormLinear(256, 512)
    if case == "mlp":
        return hybridq.LayerNormMLP(256, 512, activation="swiglu")
    if case == "attention":
        return hybridq.MultiheadAttention(512, heads, **options)
    is_one = case == "interleaved"
    options = {"activation": "geglu", "hidden_dropout": 0.0, **options}
    return hybridq.TransformerLayer(512, 512, heads, qkv_weight_interleaved=is_one, **options)


def own_piece(rows: slice, world: int) -> tuple[int, int]:
    """Return where this rank's part of a matrix begins and ends in the whole parameter."""
    size = (rows.stop - rows.start) // world
    start = rows.start + dist.get_rank() % world * size
    return start, start + size


def inputs(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(128, 1, next(model.parameters()).shape[-1], requires_grad=True)


def encoded(model: nn.Module, recipe: Any) -> dict[tuple[Any, str], Any]:
    """Return the buffers of both planes of all weights that a forward makes."""
    found: dict[tuple[Any, str], Any] = {}
    now: list[Any] = []
    plain = SlotEncoder.encode

    def encode(self: Any, x: torch.Tensor, with_row: bool, with_col: bool) -> Any:
        made = plain(self, x, with_row, with_col)
        if self.slot == "weight":
            assert with_row and with_col
            found[now[-1]] = made
        return made

    SlotEncoder.encode = encode
    try:
        see = watched(lambda part: now.append((part.module, part.name)))
        with see, hybridq.autocast(recipe=recipe):
            model(inputs(model))
    finally:
        SlotEncoder.encode = plain
    return found


def check_same(
    buffers: Any, weight: torch.Tensor, slot: Any, dim: int, pieces: list[tuple[int, int]]
) -> None:
    """Compare planes of a part with the pieces of the planes of the whole, and their values."""
    wanted = torch.ops.hybridq.encode(
        weight, slot.row.spec, slot.col.spec, col_source=slot.col_source
    )
    rows, cols = weight.shape
    size = sum(stop - start for start, stop in pieces)
    own_shape = (size, cols) if dim == 0 else (rows, size)
    for direction, text, own in zip(
        (ROWWISE, COLUMNWISE), (slot.row, slot.col), buffers, strict=True
    ):
        spec = PlaneSpec.parse(text.spec)
        names = [one.name for one in spec.buffers(*weight.shape)]
        whole_buffers = [wanted.pop(0) for _ in names]
        full = Plane(spec, direction, rows, cols, zip(names, whole_buffers, strict=True))
        mine = Plane(spec, direction, *own_shape, zip(names, own, strict=True))
        assert not spec.format.is_identity
        at = 0
        for start, stop in pieces:
            theirs, ours = full.part(dim, start, stop), mine.part(dim, at, at + stop - start)
            for a, b in zip(ours.tensors, theirs.tensors, strict=True):
                assert torch.equal(*(one.clone().view(torch.uint8) for one in (a, b))), spec
            values = full.dequantize().narrow(dim, start, stop - start)
            assert torch.equal(mine.dequantize().narrow(dim, at, stop - start), values), spec
            at += stop - start


if __name__ == "__main__":
    main(globals())
