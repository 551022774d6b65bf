"""FSDP2 of GroupedLinear: `python fsdp2_grouped_program.py RANK WORLD STORE NAME...`.

Every rank has tokens and sizes of groups of its own. The unsharded twin runs the ranks' batches in
turn, with their seeds; gradients are added in FP32, in the order of the ranks, on both sides. So a
sharded run is the unsharded one in every bit.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from faults_program import fails
from fsdp2_program import values
from rank_program import logged, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.demo.fsdp import RankOrderSum, mean_in_order
from hybridq.distributed import GatheredWeight, QuantizedWeight, prepare_fsdp2, wire_nbytes
from hybridq.nn.autograd import grouped_function

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd")
#: Recipes whose planes are saved, decoded, or derived in a way of their own.
MORE = (
    *("fp8_block", "nvfp4_1d_weight", "mxfp8_fwd_high_precision_bwd"),
    *("high_precision_fwd_mxfp8_bwd",),
)
#: Groups and features: shards are even; blocks are cut; shards are uneven.
SIZES = {"even": (4, (64, 128, 64)), "cut": (3, (40, 100, 36)), "uneven": (5, (33, 70, 51))}
TOKENS, STEPS = 29, 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Experts(nn.Module):
    """Layers of experts one after the other, each a group of FSDP2's."""

    def __init__(
        self, groups: int, features: tuple[int, ...], single: bool, **options: Any
    ) -> None:
        super().__init__()
        self.recompute = options.pop("recompute", False)
        pairs = itertools.pairwise(features)
        self.layers = nn.ModuleList(
            hybridq.GroupedLinear(
                groups, a, b, single_grouped_weight=single, name=f"layers.{n}", **options
            )
            for n, (a, b) in enumerate(pairs)
        )

    def forward(self, x: torch.Tensor, sizes: Any) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, sizes, use_reentrant=False)
            else:
                x = layer(x, sizes)
            x = torch.tanh(x)
        return x


def models(size: str, single: bool, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model, and its unsharded twin."""
    init = options.pop("init", None)
    recompute = options.pop("recompute", False)
    torch.manual_seed(0)
    with hybridq.quantized_model_init(init, enabled=init is not None):
        kind = {"dtype": None if init is None else torch.bfloat16, "recompute": recompute}
        plain = Experts(*SIZES[size], single, **kind)
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    count = len(plain.layers) * (1 if single else SIZES[size][0])
    kinds = (GatheredWeight, QuantizedWeight)
    assert len([p for p in sharded.parameters() if isinstance(p, kinds)]) == count
    policy = POLICY if init is None else MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in sharded.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(sharded, mp_policy=policy, **options)
    for module in sharded.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(RankOrderSum())
    return sharded, plain


def batch(plain: nn.Module, number: int, rank: int) -> tuple[torch.Tensor, list[int]]:
    """Return a rank's tokens and their sizes of groups; some have none."""
    torch.manual_seed(1000 * number + rank)
    groups = plain.layers[0].num_gemms
    x = torch.randn(TOKENS, plain.layers[0].in_features).bfloat16()
    cuts = sorted(torch.randint(TOKENS + 1, (groups - 1,)).tolist())
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    if (number + rank) % 2:
        sizes[0], sizes[-1] = 0, sizes[0] + sizes[-1]  # the first expert has none
    return x, sizes


def forward(model: nn.Module, recipe: Any, seed: int, x: Any, sizes: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x, sizes)


def backward(y: torch.Tensor) -> None:
    (y.float() - 0.3).square().mean().backward()


def step_in_turn(plain: nn.Module, optimizer: Any, recipe: Any, number: int, device: bool) -> Any:
    """Train the twin; return the ranks' outputs."""
    is_held = any(hasattr(p, "tensor_storage") for p in plain.parameters())
    model = plain if is_held else copy.deepcopy(plain).bfloat16()
    outputs, found = [], []
    for rank in range(dist.get_world_size()):
        x, sizes = batch(plain, number, rank)
        y = forward(model, recipe, number, x, torch.tensor(sizes) if device else sizes)
        backward(y)
        outputs.append(y.detach())
        found.append([p.grad.float() for p in model.parameters()])
        model.zero_grad()
    for parameter, parts in zip(plain.parameters(), zip(*found, strict=True), strict=True):
        parameter.grad = mean_in_order(parts).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return outputs


def check_equal(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    mine, whole = values(sharded), hybridq.dequantized_state_dict(plain)
    assert mine.keys() == whole.keys()
    for name, tensor in whole.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(mine[name], tensor), f"{what}: {name} differs"


def train(
    pair: tuple[nn.Module, nn.Module],
    recipe: Any,
    what: str,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    device: bool = False,
) -> None:
    sharded, plain = pair
    own, other = (optimizer(model.parameters(), lr=1e-2) for model in pair)
    for number in range(STEPS):
        chosen = recipe(number) if getattr(recipe, "is_by_step", False) else recipe
        x, sizes = batch(plain, number, dist.get_rank())
        y = forward(sharded, chosen, number, x, torch.tensor(sizes) if device else sizes)
        backward(y)
        own.step()
        own.zero_grad()
        outputs = step_in_turn(plain, other, chosen, number, device)
        assert torch.equal(y, outputs[dist.get_rank()]), f"{what}: outputs, step {number}"
    check_equal(sharded, plain, what)


def matrix(only: str = "") -> None:
    for recipe in RECIPES:
        for size in (only,) if only else SIZES:
            for single in (False, True):
                train(models(size, single), recipe, f"{recipe}, {size}, single {single}")


def more_recipes() -> None:
    for recipe in MORE:
        for single in (False, True):
            train(models("uneven", single), recipe, f"{recipe}, single {single}")


def transforms() -> None:
    """Of whole matrices they travel as planes, whatever the number of ranks, without a warning."""

    def transformed(role: Any) -> Any:
        is_weight = role.tensor_type == "weight"
        return hybridq.NVFP4Quantizer(with_rht=is_weight, with_post_rht_amax=is_weight)

    def either(role: Any) -> Any:
        return hybridq.NVFP4Quantizer(nvfp4_use_4over6=role.tensor_type == "weight")

    for factory in (transformed, either):
        recipe = hybridq.CustomRecipe(factory)
        with logged() as messages:
            pair = models("cut", True)
            train(pair, recipe, factory.__name__)
        assert not any("fsdp2" in one for one in messages), messages
        groups, features = SIZES["cut"]
        plain = STEPS * 2 * groups * sum(a * b for a, b in itertools.pairwise(features)) * 2
        assert 0 < wire_nbytes(pair[0]) < plain, factory.__name__


def by_group(role: Any) -> Any:
    """A factory that quantizes each group otherwise; the third one's weight not at all."""
    group = int(role.name.rpartition(".")[2]) % 4
    if group == 2 and role.tensor_type == "weight":
        return hybridq.IdentityQuantizer()
    return hybridq.quantizer(("mxfp8", "nvfp4", "fp8_e4m3", "nvfp4")[group])


def sizes_and_groups() -> None:
    """Sizes on the device, quantizers by group, no recipe, recipes that change."""
    unlike = hybridq.CustomRecipe(by_group)
    by_step = lambda number: ("mxfp8", "nvfp4", None)[number]  # noqa: E731
    by_step.is_by_step = True
    for single in (False, True):
        train(models("cut", single), "nvfp4", f"device, single {single}", device=True)
        for size in SIZES:
            train(models(size, single), unlike, f"unlike groups, {size}, single {single}")
        train(models("uneven", single), unlike, f"unlike, device, {single}", device=True)
        train(models("cut", single), None, f"no recipe, single {single}")
        train(models("cut", single), None, f"no recipe, device, {single}", device=True)
        for size in ("even", "uneven"):
            train(models(size, single), by_step, f"changes, {size}, single {single}")


def policies() -> None:
    hybrid = "mxfp8_fwd_nvfp4_bwd"
    offload = CPUOffloadPolicy(pin_memory=False)
    for single in (False, True):
        for size in ("even", "uneven"):
            what = f"{size}, single {single}"
            pair = models(size, single, reshard_after_forward=False)
            train(pair, hybrid, f"no reshard, {what}")
            pair = models(size, single, reshard_after_forward=False)
            train(pair, hybridq.CustomRecipe(by_group), f"no reshard, unlike, {what}")
            train(models(size, single, recompute=True), hybrid, f"recomputed, {what}")
        train(models("cut", single, offload_policy=offload), "nvfp4", f"offload, {single}")
        pair = models("cut", single)
        twin = copy.deepcopy(pair[1]).bfloat16()
        x, sizes = batch(pair[1], 0, 0)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = [forward(model, hybrid, 0, x, sizes) for model in (pair[0], twin)]
            assert torch.equal(*y), f"{mode}, single {single}"
        train(pair, hybrid, f"after inference, single {single}")
        for model in pair:
            model.layers[0].requires_grad_(False)
        for _ in range(2):
            with hybridq.autocast(recipe=hybrid):
                y = [
                    model(x.detach().requires_grad_(), sizes)
                    for model in (pair[0], copy.deepcopy(pair[1]).bfloat16())
                ]
            assert torch.equal(*y), f"frozen, single {single}"


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    for single in (False, True):
        # The same batch on all ranks: torch itself adds the copies' gradients.
        sharded, plain = models("cut", single, mesh=mesh)
        twin = copy.deepcopy(plain).bfloat16()
        x, sizes = batch(plain, 0, 0)
        for recipe in RECIPES:
            y = [forward(model, recipe, 0, x, sizes) for model in (sharded, twin)]
            assert torch.equal(*y), f"HSDP, {recipe}, single {single}"
            for one in y:
                backward(one)
            for mine, own in zip(sharded.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine.grad.full_tensor(), own.grad.float()), f"HSDP, {recipe}"
            sharded.zero_grad()
            twin.zero_grad()


def quantized(only: str = "") -> None:
    """Parameters in low precision, with a weight for each group."""
    held(False, only)


def quantized_stacks(only: str = "") -> None:
    """Parameters in low precision, of all groups together."""
    held(True, only)


def more_quantized_stacks() -> None:
    """Other planes, recipes that are not the parameters' own, policies."""
    for recipe in ("fp8_block", "nvfp4_1d_weight"):
        train_held("uneven", True, recipe, recipe)
    hybrid = "mxfp8_fwd_nvfp4_bwd"
    offload = CPUOffloadPolicy(pin_memory=False)
    train_held("uneven", True, hybrid, hybrid, offload_policy=offload)
    train_held("cut", True, hybrid, hybrid, reshard_after_forward=False)
    train_held("even", True, hybrid, hybrid, recompute=True)
    sharded, plain = models("uneven", True, init=hybrid)
    x, sizes = batch(plain, 0, 0)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = [forward(model, hybrid, 0, x, sizes) for model in (sharded, plain)]
        assert torch.equal(*y), mode


def train_held(size: str, single: bool, init: Any, recipe: Any, **options: Any) -> None:
    what = f"quantized by {init}, under {recipe}, {size}, single {single}, {options}"
    pair = models(size, single, init=init, **options)
    train(pair, recipe, what, hybridq.optim.AdamW)
    check_planes(*pair, what)


def held(single: bool, only: str) -> None:
    for recipe in RECIPES:
        for size in (only,) if only else SIZES:
            train_held(size, single, recipe, recipe)
    for recipe in ("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd"):
        train_held("uneven", single, recipe, recipe)
    unlike = hybridq.CustomRecipe(by_group)
    if not single:  # what a stack is quantized by is asked for once
        train_held("uneven", single, unlike, unlike)
    for other in (None, "nvfp4"):
        train_held("cut", single, "mxfp8", other)
    pair = models("cut", single, init="mxfp8_fwd_nvfp4_bwd")
    train(pair, None, "quantized, no recipe, device", hybridq.optim.AdamW, device=True)


def check_planes(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    """All planes that the twin holds, byte for byte."""
    for layer, own in zip(sharded.layers, plain.layers, strict=True):
        layer.unshard()
        is_single = "weight" in layer._parameters
        for group in range(own.num_gemms):
            whole = own.weight[group] if is_single else getattr(own, f"weight{group}")
            if not hasattr(whole, "tensor_storage"):
                continue  # in high precision
            mine = layer.weight.storages[group] if is_single else None
            mine = mine or getattr(layer, f"weight{group}").tensor_storage
            for plane in whole.tensor_storage.planes:
                for name, buffer in plane.buffers.items():
                    got = mine.plane(plane.direction).buffers[name]
                    assert torch.equal(got, buffer), f"{what}: {group} {plane.direction} {name}"
        layer.reshard()


class Seen(TorchDispatchMode):
    """Notes which of hybridq's operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hybridq":
            self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@contextmanager
def seen_in_modules(model: nn.Module) -> Iterator[tuple[Seen, Seen]]:
    """Note what the forwards and the backwards of GroupedLinear run, the gathers left out."""
    forward, backward = Seen(), Seen()
    run = grouped_function._backward

    def noted(*args: Any) -> Any:
        with backward:
            return run(*args)

    for layer in model.layers:
        own = layer.forward

        def call(*args: Any, own: Any = own) -> Any:
            with forward:
                return own(*args)

        layer.forward = call
    grouped_function._backward = noted
    try:
        yield forward, backward
    finally:
        grouped_function._backward = run
        for layer in model.layers:
            del layer.forward


def encoded_once() -> None:
    """Tokens are encoded; of the weights nothing is encoded or decoded behind a gather."""
    for recipe in (*RECIPES, hybridq.CustomRecipe(by_group)):
        for single, init in itertools.product((False, True), (None, recipe)):
            if single and init is not None and not isinstance(init, str):
                continue  # what a stack is quantized by is asked for once
            sharded, plain = models("uneven", single, init=init)
            x, sizes = batch(plain, 0, dist.get_rank())
            for _ in range(2):
                with seen_in_modules(sharded) as (in_forward, in_backward):
                    backward(forward(sharded, recipe, 0, x, sizes))
                want = {"encode_ragged", "grouped_gemm"}
                assert in_forward.names == want, (recipe, single, in_forward.names)
                also = {"bias_grad_ragged", "transpose"}  # a plane that is another one, transposed
                assert in_backward.names <= want | also, (recipe, single, in_backward.names)


def wire() -> None:
    """What arrives are the bytes of the planes, and the amax of those formats that have one."""
    world = dist.get_world_size()
    groups, features = SIZES["even"]
    pairs = list(itertools.pairwise(features))
    count = groups * sum(a * b for a, b in pairs)
    mx, fp4, square = 33 / 32, 9 / 16, 1 / 2 + 1 / 256
    for recipe, forwards, backwards, amaxes in (
        ("mxfp8", mx, mx, 0),
        ("nvfp4", square, square, 2),
        ("mxfp8_fwd_nvfp4_bwd", mx, fp4, 1),
    ):
        for single, init in itertools.product((False, True), (None, recipe)):
            sharded, plain = models("even", single, init=init)
            x, sizes = batch(plain, 0, dist.get_rank())
            backward(forward(sharded, recipe, 0, x, sizes))
            # A matrix on one rank has its amax there; of one on all ranks, each sends it.
            extra = 4 * len(pairs) * groups * amaxes * (1 if single else world)
            assert wire_nbytes(sharded) == count * (forwards + backwards) + extra, recipe


def unlike_ranks() -> None:
    """A recipe that differs in one group on one rank, from the start and in mid-run."""

    def odd(role: Any) -> Any:
        is_odd = dist.get_rank() == 1 and role.name.endswith("2") and role.tensor_type == "weight"
        return hybridq.quantizer("nvfp4" if is_odd else "mxfp8")

    recipe = hybridq.CustomRecipe(odd)

    def run(model: nn.Module, chosen: Any) -> torch.Tensor:
        x, sizes = batch(model, 0, 0)
        return forward(model, chosen, 0, x, sizes)

    for single in (False, True):
        model, _ = models("cut", single)
        text = "the quantizer of layers.0.2:weight"
        fails("at the start", partial(run, model, recipe), text, "nvfp4", "on rank 1")
        model, _ = models("cut", single)
        backward(run(model, "mxfp8"))
        text = "a recipe must change on all ranks in the same step"
        fails("in mid-run", partial(run, model, recipe), text, "layers.0.weight")


def state() -> None:
    for single, init in itertools.product((False, True), (None, "nvfp4")):
        kind = torch.optim.AdamW if init is None else hybridq.optim.AdamW
        pair = models("uneven", single, init=init)
        train(pair, "nvfp4", "before", kind)
        saved = pair[0].state_dict()
        tensors = [one for one in saved.values() if isinstance(one, torch.Tensor)]
        assert all(type(getattr(t, "_local_tensor", t)) is torch.Tensor for t in tensors)
        other = models("uneven", single, init=init)
        other[0].load_state_dict(saved)
        other[1].load_state_dict(hybridq.dequantized_state_dict(pair[1]))
        train(other, "nvfp4", f"loaded, single {single}", kind)


if __name__ == "__main__":
    main(globals())
