"""FSDP2 of quantized experts and embeddings: `python fsdp2_held_experts_program.py RANK WORLD STORE
NAME...`.

As in `fsdp2_experts_program.py`: each rank has tokens of its own, the unsharded twin runs the
ranks' batches in turn, and gradients are added in FP32, in their order: all bits are equal.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_experts_program import LAYOUTS
from rank_program import main
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hybridq
from hybridq.demo.fsdp import RankOrderSum, mean_in_order
from hybridq.distributed import QuantizedWeight, prepare_fsdp2, wire_nbytes
from hybridq.moe import convert_experts
from hybridq.optim import AdamW
from hybridq.tensor import is_quantized
from own_experts import HIDDEN, OwnExperts, routing

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd")
ROWS, STEPS = 37, 3
POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32)


class Model(nn.Module):
    """A table of rows, and blocks of experts in both orientations, with residuals."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
            self.table = hybridq.nn.Embedding(ROWS, HIDDEN, dtype=torch.bfloat16)
            self.blocks = nn.ModuleList()
            for number, layout in enumerate(LAYOUTS):
                block = convert_experts(OwnExperts(layout, torch.bfloat16), layout)
                block.set_name(f"blocks.{number}")
                block.quantize_initial_weights()
                self.blocks.append(block)

    def forward(self, tokens: torch.Tensor, indices: Any, weights: Any) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            own = 1 * x  # its gradients are summed by themselves, sharded or not
            x = x + block(own, indices, weights.to(x.dtype))
        return x


def shard(model: nn.Module) -> nn.Module:
    prepare_fsdp2(model)
    for part in (model.table, *model.blocks, model):
        fully_shard(part, mp_policy=POLICY)
    for part in (model.table, *model.blocks, model):
        part.set_custom_reduce_scatter(RankOrderSum())
    return model


def models(recipe: str) -> tuple[nn.Module, nn.Module]:
    """Return a model whose shards are quantized, and its unsharded twin."""
    torch.manual_seed(0)
    plain = Model(recipe)
    low = [name for name, one in plain.named_parameters() if is_quantized(one)]
    sharded = shard(copy.deepcopy(plain))
    held = dict(sharded.named_parameters())
    assert all(type(held[name]._local_tensor) is QuantizedWeight for name in low), low
    assert len(low) >= 3, low
    return sharded, plain


def step(model: nn.Module, recipe: Any, number: int, rank: int) -> torch.Tensor:
    torch.manual_seed(10 * number + rank)
    tokens = torch.randint(ROWS, (23,))
    batch = tokens, *routing(23, seed=100 * number + rank)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = model(*batch)
    (y.float() - 0.3).square().mean().backward()
    return y.detach()


def check_planes(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    """All planes that the twin holds, byte for byte, and what is in high precision."""
    for mine, own in zip(sharded.modules(), plain.modules(), strict=True):
        if not own._parameters:
            continue
        mine.unshard()
        for name, whole in own._parameters.items():
            got = mine._parameters[name]
            if not is_quantized(whole):
                assert torch.equal(got, whole), f"{what}: {name}"
                continue
            pairs = [(got, whole)]
            if whole.dim() == 3:  # of the transposed layout as it is multiplied
                whole = whole.mT if got.is_transposed else whole
                pairs = list(zip(got.matrices(), whole.unbind(0), strict=True))
            for a, b in pairs:
                for plane in b.tensor_storage.planes:
                    for key, buffer in plane.buffers.items():
                        found = a.tensor_storage.plane(plane.direction).buffers[key]
                        assert torch.equal(found, buffer), f"{what}: {name} {plane.direction} {key}"
        mine.reshard()


def train(
    pair: tuple[nn.Module, nn.Module],
    recipe: Any,
    what: str,
    optimizers: Any = None,
    start: int = 0,
) -> list[Any]:
    sharded, plain = pair
    own, other = optimizers or (AdamW(one.parameters(), lr=1e-2) for one in pair)
    for number in range(start, start + STEPS):
        y = step(sharded, recipe, number, dist.get_rank())
        torch.manual_seed(number)  # moments are rounded stochastically
        own.step()
        own.zero_grad()
        found, outputs = [], []
        for rank in range(dist.get_world_size()):
            outputs.append(step(plain, recipe, number, rank))
            found.append([one.grad.float() for one in plain.parameters()])
            plain.zero_grad()
        for one, parts in zip(plain.parameters(), zip(*found, strict=True), strict=True):
            one.grad = mean_in_order(parts).to(one.dtype)
        torch.manual_seed(number)
        other.step()
        other.zero_grad()
        assert torch.equal(y, outputs[dist.get_rank()]), f"{what}: outputs, step {number}"
    check_planes(sharded, plain, what)
    return [own, other]


def recipes(only: str = "") -> None:
    """Every family; an FSDP2 unit for each block and the table."""
    for recipe in (only,) if only else RECIPES:
        pair = models(recipe)
        check_planes(*pair, f"{recipe}, before")
        train(pair, recipe, recipe)
    if not only:
        train(models("mxfp8"), None, "no recipe")
        train(models("mxfp8"), "nvfp4", "another recipe")


def wire() -> None:
    """What is gathered are the bytes of the planes, and not those of values."""
    for recipe in ("mxfp8", "nvfp4"):
        sharded, plain = models(recipe)
        step(sharded, recipe, 0, dist.get_rank())
        world = dist.get_world_size()
        expected = 0
        for one in plain.parameters():
            if is_quantized(one):  # padded to the rank that has most
                share = -(-one.shape[0] // world) * world / one.shape[0]
                planes = one.tensor_storage.planes
                expected += share * sum(plane.nbytes for plane in planes) * (3 - len(planes))
        held = [
            p._local_tensor.held for p in sharded.parameters() if hasattr(p._local_tensor, "held")
        ]
        assert expected <= wire_nbytes(sharded) <= 1.01 * expected, (recipe, expected)
        nbytes = torch.tensor([sum(plane.nbytes for one in held for plane in one.planes)])
        dist.all_reduce(nbytes)
        whole = sum(one.nbytes for one in plain.parameters() if is_quantized(one))
        # Of the table's blocks those that two ranks share are on both.
        assert whole <= nbytes.item() <= 1.02 * whole, (recipe, nbytes, whole)


def stored(folder: str) -> None:
    """Written as decoded values: by torch's own checkpoints, into a model from the meta device."""
    recipe = "nvfp4"
    pair = models(recipe)
    optimizers = train(
        pair, recipe, "before", [AdamW(m.parameters(), 1e-2, moments="fp8_block") for m in pair]
    )
    weights, moments = get_state_dict(pair[0], optimizers[0])
    assert all(type(one._local_tensor) is torch.Tensor for one in weights.values())
    whole = hybridq.dequantized_state_dict(pair[1])
    for name, one in weights.items():
        assert torch.equal(one.full_tensor(), whole[name]), name
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(folder))

    with torch.device("meta"):
        other = Model(recipe)
    other = shard(other).to_empty(device="cpu")
    set_model_state_dict(other, dict(whole), options=StateDictOptions(full_state_dict=True))
    twin = models(recipe)[1]
    twin.load_state_dict(whole)
    check_planes(other, twin, "made on the meta device, and loaded")

    loaded = models(recipe)[0]
    optimizer = AdamW(loaded.parameters(), 1e-2, moments="fp8_block")
    weights, moments = get_state_dict(loaded, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=Path(folder))
    set_state_dict(loaded, optimizer, model_state_dict=weights, optim_state_dict=moments)
    check_planes(loaded, twin, "loaded from a distributed checkpoint")
    other = AdamW(twin.parameters(), 1e-2, moments="fp8_block")
    other.load_state_dict(optimizers[1].state_dict())
    train((loaded, twin), recipe, "resumed", [optimizer, other], start=STEPS)


if __name__ == "__main__":
    main({one.__name__: one for one in (recipes, wire, stored)})
