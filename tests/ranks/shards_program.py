"""Scenarios of what ranks do with their own shards: `python shards_program.py RANK WORLD STORE
NAME...`.

What one rank alone does must not make the others wait: the group's timeout is short, so that a wait
is an error and not minutes.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_program import SIZES, Model, check_equal, models, step
from fsdp2_quantized_program import check_planes
from fsdp2_quantized_program import models as quantized_models
from fsdp2_quantized_program import train as train_quantized
from rank_program import logged, main
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import count_traffic, prepare_fsdp2
from hybridq.optim import AdamW


def batch(features: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, features, generator=generator).bfloat16()


def readers() -> None:
    """What rank 0 alone makes of its shard, writing to something else, is nobody else's affair."""
    sharded, plain = models(SIZES["uneven"])
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (sharded, plain)]

    @torch.no_grad()
    def reads() -> None:
        shards = [layer.weight.to_local() for layer in sharded.layers]
        shard = shards[0].detach()
        buffer = torch.empty(shard.shape, dtype=shard.dtype).copy_(shard)
        torch.abs(shard, out=buffer)
        torch._foreach_add_([buffer], [shard])
        mean = shard.clone().abs_()
        averages = [one.detach().clone() for one in shards]
        torch._foreach_lerp_(averages, [one * 1.05 for one in shards], 0.5)
        torch.empty_like(shard).copy_(shard).mul_(2)
        shard.new_zeros(shard.shape).add_(1)
        shard.float().mul_(2), shard.to(torch.float16, copy=True).mul_(2)
        assert type(mean) is torch.Tensor and type(averages[0]) is torch.Tensor
        assert torch.allclose(averages[0].float(), shard.float() * 1.025, rtol=1e-2)

    for recipe in ("nvfp4", "fp8_delayed"):
        for number in range(3):
            if dist.get_rank() == 0:
                reads()
            with count_traffic() as traffic:
                y = [step(*pair, batch(33, number), recipe, number) for pair in pairs]
            assert torch.equal(*y), (recipe, number)
            if recipe == "nvfp4":  # maxima: in the first gather, and after each step
                assert traffic.calls_by_kind["all_reduce"] == (2 if number == 0 else 1), number
    check_equal(sharded, plain, "readers")


def writers() -> None:
    """A write to one rank's rows, by any view of them, is noticed by all, with or without steps."""
    for recipe in ("nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd", "fp8_delayed"):
        sharded, plain = models(SIZES["uneven"])
        for number in range(3):
            if number:
                rows = sharded.layers[0].weight.to_local().shape[0]
                for model in (sharded, plain):
                    with torch.no_grad():
                        weight = model.layers[0].weight
                        if model is plain:
                            part = weight[:rows] if dist.get_rank() == 0 else None
                        else:
                            part = weight.to_local() if dist.get_rank() == 0 else None
                        if part is not None:
                            part.select(0, 0).mul_(30.0)
                            part.t()[1].fill_(7.0 * number)
                # The unsharded twin has what rank 0 has written.
                dist.broadcast(plain.layers[0].weight.detach(), 0)
            outputs = []
            for model in (sharded, plain):
                torch.manual_seed(number)
                with hybridq.autocast(recipe=recipe):
                    y = model(batch(33, number))
                y.float().square().mean().backward()
                model.zero_grad()
                outputs.append(y.detach())
            assert torch.equal(*outputs), (recipe, number)


def averages() -> None:
    """Of quantized shards too: on one rank only, and they move."""
    sharded, plain = quantized_models(SIZES["uneven"], "nvfp4")
    if dist.get_rank() == 0:
        with torch.no_grad():
            shards = [layer.weight.to_local() for layer in sharded.layers]
            for kind in (torch.clone, lambda one: one.float(), torch.empty_like, copied):
                kept = kind(shards[0].detach())
                kept.copy_(shards[0])
                assert type(kept) is torch.Tensor
                torch._foreach_lerp_([kept], [(shards[0] * 1.05).to(kept.dtype)], 0.5)
                want = shards[0].dequantize().float() * 1.025
                assert torch.allclose(kept.float(), want, rtol=1e-2)
            assert shards[0].tolist() == shards[0].dequantize().tolist()
            try:
                shards[0].new_zeros(shards[0].shape).add_(1)
            except RuntimeError as error:
                assert "layers.0.weight holds no values of its own" in str(error)
            else:
                raise AssertionError("a shard that is none was written")
    train_quantized((sharded, plain), "nvfp4", "averages")


def copied(shard: torch.Tensor) -> torch.Tensor:
    return torch.empty(shard.shape, dtype=shard.dtype).copy_(shard)


def first_inference() -> None:
    """The first forward of all is one in inference mode, with padded shards of either kind."""
    for recipe in ("mxfp8", "fp8_current"):
        for pair in (models(SIZES["uneven"]), quantized_models(SIZES["uneven"], recipe)):
            for _ in range(2):
                with torch.inference_mode(), hybridq.autocast(recipe=recipe):
                    assert torch.equal(*[model(batch(33)) for model in pair]), recipe
            assert hybridq.distributed.wire_nbytes(pair[0])


def assigned() -> None:
    """Planes stay where shards are replaced: by checkpoints, by device moves, from meta tensors."""
    for kind in (models, quantized_models):
        made = [] if kind is models else ["mxfp8"]
        whole, plain = kind(SIZES["uneven"], *made)
        source = {n: t.clone() for n, t in hybridq.dequantized_state_dict(plain).items()}
        for way in ("broadcast", "assign", "empty"):
            sharded = on_meta(SIZES["uneven"], *made)
            if way == "broadcast":
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(
                    sharded, dict(source) if dist.get_rank() == 0 else {}, options=options
                )
            elif way == "assign":
                state = whole.state_dict()
                sharded.load_state_dict({n: t.clone() for n, t in state.items()}, assign=True)
            else:
                sharded.to_empty(device="cpu").load_state_dict(whole.state_dict())
            twin = copy.deepcopy(plain)
            if made:
                twin.load_state_dict(source)
                check_planes(sharded, twin, way)
            optimizers = AdamW if made else torch.optim.AdamW
            for number in range(2):
                pairs = [(m, optimizers(m.parameters(), lr=1e-2)) for m in (sharded, twin)]
                y = [step(*pair, batch(33, number), "mxfp8", number) for pair in pairs]
                assert torch.equal(*y), (kind, way, number)
            assert hybridq.distributed.wire_nbytes(sharded), (kind, way)


def on_meta(sizes: tuple[int, ...], *recipe: str) -> nn.Module:
    with torch.device("meta"), hybridq.quantized_model_init(*recipe, enabled=bool(recipe)):
        model = prepare_fsdp2(hybridq.convert(Model(sizes).bfloat16(), least_width=0))
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def reset() -> None:
    """Quantized on the meta device, sharded, and filled there: what was drawn, quantized once."""
    sharded = on_meta(SIZES["uneven"], "nvfp4").to_empty(device="cpu")
    values = on_meta(SIZES["uneven"]).to_empty(device="cpu")
    twin = quantized_models(SIZES["uneven"], "nvfp4")[1]
    for model in (sharded, values):
        torch.manual_seed(3)
        for layer in model.layers:
            layer.reset_parameters()
    twin.load_state_dict({n: t.full_tensor() for n, t in values.state_dict().items()})
    check_planes(sharded, twin, "reset")
    train_quantized((sharded, twin), "nvfp4", "reset")


def nested(model: nn.Module, recipes: tuple[str | None, ...]) -> nn.Module:
    """Let each block run under a recipe of its own."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer, recipe in zip(model.layers, recipes, strict=True):
            with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
                x = torch.tanh(layer(x))
        return x

    model.forward = forward
    return model


def recipes_of_blocks() -> None:
    """A gather that begins under another recipe brings what its module computes with."""
    for recipes in (("mxfp8", "nvfp4", "mxfp8"), ("nvfp4", None, "fp8_current")):
        for early in (False, True):
            pair = [nested(model, recipes) for model in models(SIZES["uneven"])]
            layers = pair[0].layers
            if not early:
                layers[0].set_modules_to_forward_prefetch([layers[1]])
                layers[1].set_modules_to_forward_prefetch([layers[2]])
            both = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in pair]
            for number in range(3):
                if early and number:
                    layers[1].unshard()
                with count_traffic() as traffic:
                    y = [run_nested(*one, batch(33, number), number) for one in both]
                assert torch.equal(*y), (recipes, early, number)
            check_equal(*pair, f"{recipes}, {early}")
            if number:  # known by then: each weight travels once for each direction
                gathers = traffic.calls_by_kind["all_gather"]
                assert gathers <= 3 * 2 * 2, (recipes, early, gathers)


def run_nested(model: nn.Module, optimizer: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    y = model(x)
    (y.float() - 0.3).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def recipes_of_graphs() -> None:
    """The same where blocks are compiled: what is in force in front of them decides."""
    pair = [nested(model, ("mxfp8", "nvfp4", "mxfp8")) for model in models(SIZES["aligned"])]
    layers = pair[0].layers
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[1].set_modules_to_forward_prefetch([layers[2]])
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    both = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in pair]
    for number in range(2):
        y = [run_nested(*one, batch(64, number), number) for one in both]
        assert torch.equal(*y), number
    check_equal(*pair, "graphs")


def reshard_to_two() -> None:
    """`reshard_after_forward=2` on four ranks: the right bits, and a word about what is kept."""
    with logged() as messages:
        pair = models(SIZES["cut"], reshard_after_forward=2)
        both = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in pair]
        for number in range(2):
            y = [step(*one, batch(40, number), "mxfp8_fwd_nvfp4_bwd", number) for one in both]
            assert torch.equal(*y), number
        check_equal(*pair, "reshard")
    told = [one for one in messages if "layers.0 is resharded" in one]
    if dist.get_rank() == 0:
        assert len(told) == 1 and "reshard_after_forward=True, got 2" in told[0], told
    else:
        assert not messages, messages


def recipes_in_flight() -> None:
    """Backwards that come after a forward under another recipe, and planes that stay between."""
    for reshard in (True, False):
        pair = models(SIZES["uneven"], reshard_after_forward=reshard)
        for model in pair:
            if model is pair[0]:
                model.set_requires_gradient_sync(False)
            losses = []
            for recipe in ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd"):
                torch.manual_seed(1)
                with hybridq.autocast(recipe=recipe):
                    losses.append(model(batch(33)).float().square().mean())
            if model is pair[0]:
                kept = torch.stack(losses).detach()
            else:
                assert torch.equal(kept, torch.stack(losses).detach())
            for loss in losses:
                torch.manual_seed(2)
                loss.backward()
        for mine, own in zip(pair[0].layers, pair[1].layers, strict=True):
            mine.unshard()
            assert torch.equal(mine.weight.grad, own.weight.grad)


if __name__ == "__main__":
    main(globals(), timeout=240.0 if "recipes_of_graphs" in sys.argv else 30.0)
