"""FSDP2 under delayed scaling: `python fsdp2_delayed_program.py RANK WORLD STORE NAME...`.

As in `fsdp2_program.py` all ranks see the same batch, and a sharded run is the unsharded one in
every bit, its histories included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fsdp2_program import SIZES, check_equal, models, step
from rank_program import logged, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import hybridq
from hybridq import DelayedScalingRequest, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer
from hybridq.distributed import count_traffic, prepare_fsdp2, wire_nbytes
from hybridq.nn.delayed_scaling.state import states_of
from hybridq.recipes import DelayedScaling

STEPS = 5


class Weights:
    """A factory: weights by this quantizer or request, inputs and gradients delayed."""

    reads_names = False

    def __init__(self, weight: Any) -> None:
        self.weight, self.other = weight, DelayedScalingRequest(amax_history_len=3)

    def __call__(self, role: Any) -> Any:
        return self.weight if role.tensor_type == "weight" else self.other


def pair(row: Any, col: Any, **options: Any) -> Any:
    quantizer = HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **options)
    return hybridq.CustomRecipe(Weights(quantizer))


def recipes() -> dict[str, Any]:
    """One scale for both planes, one for each, for one of them only, of decoded values."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    request, decoded = DelayedScalingRequest, {"columnwise_source": "rowwise_dequantized"}
    return {
        "recipe": DelayedScaling(amax_history_len=2),
        "most recent": DelayedScaling(margin=1, amax_compute_algo="most_recent"),
        "not reduced": DelayedScaling(reduce_amax=False),
        "a rank alone": DelayedScaling(amax_reduction_group=alone),
        "two histories": pair(request(amax_history_len=2), request(margin=2, amax_history_len=4)),
        "forward only": pair(request(amax_history_len=2), MXFP8Quantizer()),
        "forward only, NVFP4": pair(request(), NVFP4Quantizer()),
        "backward only": pair(MXFP8Quantizer(), request(amax_history_len=2)),
        "decoded, forward only": pair(request(amax_history_len=2), MXFP8Quantizer(), **decoded),
        "decoded, NVFP4": pair(request(), NVFP4Quantizer(), **decoded),
        "decoded, backward only": pair(NVFP4Quantizer(), request(margin=1), **decoded),
        "decoded, both": pair(request(margin=-2), request(amax_history_len=2), **decoded),
    }


def check_histories(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    """Scales, histories, and what was recorded since the last update, of every place."""
    count = 0
    for mine, own in zip(sharded.modules(), plain.modules(), strict=True):
        for part, state in states_of(own).items():
            have, want = states_of(mine)[part].exported(), state.exported()
            assert have.keys() == want.keys(), f"{what}: {have.keys()}, {want.keys()}"
            for key, tensor in want.items():
                assert torch.equal(have[key], tensor), f"{what}: {key}: {have[key]}, {tensor}"
            count += len(want)
    assert count, what


def train(
    pairs: tuple[nn.Module, nn.Module],
    recipe: Any,
    what: str,
) -> None:
    sharded, plain = pairs
    features = plain.layers[0].in_features
    both = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in pairs]
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = torch.randn(48, features, dtype=torch.bfloat16) * (1 + number)
        chosen = recipe(number) if callable(recipe) else recipe
        y = [step(*one, x, chosen, number) for one in both]
        assert torch.equal(*y), f"{what}: outputs differ in step {number}"
        check_histories(sharded, plain, f"{what}, step {number}")
    check_equal(sharded, plain, what)


def matrix(only: str = "") -> None:
    """Every recipe in every alignment; or, with `some`, in one of them by turns."""
    with logged() as messages:
        for place, (key, recipe) in enumerate(recipes().items()):
            for number, (name, sizes) in enumerate(SIZES.items()):
                if not only or number == place % len(SIZES):
                    train(models(sizes), recipe, f"{key}, {name}")
    assert not any("is gathered as" in one for one in messages), messages


def few(name: str) -> None:
    """Three kinds of recipes in one alignment."""
    for key in ("recipe", "two histories", "decoded, both"):
        train(models(SIZES[name]), recipes()[key], f"{key}, {name}")


def policies() -> None:
    sizes, made = SIZES["cut"], recipes()
    for key in ("recipe", "two histories", "decoded, both"):
        recipe = made[key]
        train(models(sizes, reshard_after_forward=False), recipe, f"no reshard, {key}")
        train(models(sizes, recompute=True), recipe, f"recomputation, {key}")
    offload = CPUOffloadPolicy(pin_memory=False)
    train(models(sizes, offload_policy=offload), made["recipe"], "offload")
    changing = (made["recipe"], "mxfp8", made["forward only"], None, made["recipe"])
    train(models(sizes), lambda number: changing[number], "recipe changes")
    frozen = models(sizes)
    for model in frozen:
        model.layers[1].weight.requires_grad_(False)
    train(frozen, made["two histories"], "frozen weight")


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    for key in ("recipe", "forward only"):
        train(models(SIZES["uneven"], mesh=mesh), recipes()[key], f"HSDP {key}")


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(24, SIZES["cut"][0], generator=generator).bfloat16() * (1 + number)


def microbatches() -> None:
    """Two forwards and backwards to an update; what evaluation sees is not recorded."""
    for key in ("recipe", "two histories"):
        recipe, pairs = recipes()[key], models(SIZES["cut"])
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in pairs]
        for number in range(4):
            outputs: list[list[torch.Tensor]] = [[], []]
            for model, out in zip(pairs, outputs, strict=True):
                for part in range(2):
                    with hybridq.autocast(recipe=recipe, is_first_microbatch=part == 0):
                        y = model(batch(2 * number + part))
                    y.float().square().mean().backward()
                    out.append(y.detach())
                    with hybridq.autocast(recipe=recipe), torch.no_grad():
                        out.append(model.eval()(batch(9)))
                    model.train()
            for y, own in zip(*outputs, strict=True):
                assert torch.equal(y, own), f"{key}, step {number}"
            check_histories(*pairs, f"{key}, before update {number}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            check_histories(*pairs, f"{key}, after update {number}")


def told_by_nobody() -> None:
    """Loops without an optimizer of torch: a gather sees that its shard was written.

    Without `prepare_fsdp2` a forward does, and no gather that comes between is a write.
    """
    both = DelayedScaling(amax_history_len=2)
    inputs = hybridq.CustomRecipe(Weights(MXFP8Quantizer()))  # not the weights themselves
    for reshard, prepare, recipe in (
        *((True, prepare_fsdp2, both), (False, prepare_fsdp2, both), (True, None, both)),
        (True, prepare_fsdp2, inputs),
    ):
        options = {"reshard_after_forward": reshard, "prepare": prepare or (lambda model: model)}
        pairs = models(SIZES["cut"], **options)
        outputs: list[list[torch.Tensor]] = [[], []]
        for model, out in zip(pairs, outputs, strict=True):  # one after the other
            for number in range(4):
                for part in range(2):
                    with hybridq.autocast(recipe=recipe):
                        y = model(batch(2 * number + part))
                    y.float().square().mean().backward()
                    out.append(y.detach())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad * 0.1)
                        parameter.grad = None
        for model in pairs:
            for module in model.modules():
                assert not any(state.owner.is_told for state in states_of(module).values())
        for number, (y, own) in enumerate(zip(*outputs, strict=True)):
            assert torch.equal(y, own), f"reshard {reshard}, {prepare}, forward {number}"
        hybridq.update_scaling()  # of the one that was last
        check_histories(*pairs, f"reshard {reshard}, {prepare}")


def update_before_backward() -> None:
    """Another model's optimizer steps between a forward and its backward: the old scales stay."""
    pairs, grads = models(SIZES["cut"]), []
    for model in pairs:
        with hybridq.autocast(recipe="fp8_delayed"):
            x = batch(3).requires_grad_()
            y = model(x)  # all scales are 1
            hybridq.update_scaling(model)
            y.float().square().mean().backward()
            grads.append(x.grad)
    assert torch.equal(*grads)
    check_histories(*pairs, "update before the backward")


def not_finite() -> None:
    """A NaN in one rank's rows is recorded by all of them."""
    pairs = models(SIZES["cut"])
    for value in (float("nan"), float("inf")):
        for model in pairs:
            with torch.no_grad():
                weight = model.layers[0].weight
                if model is pairs[1]:
                    weight[0, 0] = value
                elif dist.get_rank() == 0:
                    weight._local_tensor[0, 0] = value
            with hybridq.autocast(recipe=DelayedScaling(amax_history_len=2)):
                model(batch(1)).float().sum().backward()
        found = [states_of(model.layers[0])[""].exported() for model in pairs]
        names = [key for key in found[1] if key.startswith("weight.")]
        assert len(names) == 2 and not bool(found[1]["weight.e4m3.history"].isfinite().all())
        for key in names:
            mine, own = (one[key] for one in found)
            assert torch.allclose(mine, own, 0.0, 0.0, equal_nan=True), (value, mine, own)
        hybridq.update_scaling()


def loaded() -> None:
    """Histories of an unsharded run, and a run that goes on from there; scales are new at once."""
    from hybridq.distributed import ScalingHistory

    sharded, plain = models(SIZES["aligned"])
    recipe = recipes()["decoded, NVFP4"]  # with an amax of what the scale made
    train((sharded, plain), recipe, "before")
    other, twin = models(SIZES["aligned"])
    for model in (other, twin):  # under scales that are not the loaded ones
        with hybridq.autocast(recipe=recipe):
            model(torch.ones(8, 64).bfloat16()).float().sum().backward()
        model.zero_grad()
        ScalingHistory(model).load_state_dict(ScalingHistory(plain).state_dict())
    train((other, twin), recipe, "loaded")


def wire() -> None:
    """One byte per value each way, four from each rank for scale and amax, no more collectives."""
    sizes, world = (64, 128, 64, 64), dist.get_world_size()
    counted = {}
    for recipe in ("fp8_current", "fp8_delayed"):
        sharded, _ = models(sizes)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-2)
        for number in range(2):
            step(sharded, optimizer, batch_of(64), recipe, number)
        before = wire_nbytes(sharded)
        with count_traffic() as traffic:
            step(sharded, optimizer, batch_of(64), recipe, 3)
        counted[recipe] = (wire_nbytes(sharded) - before, traffic.calls_by_kind)
    (nbytes, calls), (delayed, delayed_calls) = counted.values()
    assert delayed - nbytes == 2 * 3 * 4 * world, counted
    # A reduction of maxima there; here that of the update, which every run has.
    assert delayed_calls == {**calls, "all_reduce": 1}, counted


def batch_of(features: int) -> torch.Tensor:
    return torch.ones(8, features).bfloat16()


if __name__ == "__main__":
    main(globals())
