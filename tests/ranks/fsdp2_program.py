"""Scenarios of FSDP2, run by every rank: `python fsdp2_program.py RANK WORLD STORE NAME...`.

All ranks see the same batch, so the average of their gradients is the gradient of one of them, bit
for bit, and a sharded run must be the unsharded one in every bit over several optimizer steps.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_program import logged, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hybridq
from hybridq.distributed import GatheredWeight, count_traffic, prepare_fsdp2, wire_nbytes
from hybridq.shards import reduction as work

#: Deterministic and stochastic, uniform and hybrid, derivable and not, scales per tensor and block.
RECIPES = (
    *("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight"),
    *("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd"),
)

#: Features of three layers: shards are aligned; or misaligned, uneven, with blocks cut.
SIZES = {"aligned": (64, 128, 64, 32), "cut": (40, 100, 36, 20), "uneven": (33, 70, 51, 7)}
STEPS = 3
#: Saves results of products, and of what a gather of planes calls.
SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.cat.default, torch.ops.hybridq.encode.default],
)


class Model(nn.Module):
    def __init__(self, sizes: tuple[int, ...], recompute: bool | str = False) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = layer
            how = {"context_fn": SELECTIVE} if self.recompute == "selective" else {}
            x = checkpoint(run, x, use_reentrant=False, **how) if self.recompute else run(x)
            x = torch.tanh(x)
        return x


def models(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a model whose weights are gathered as planes, and its unsharded twin."""
    recompute = options.pop("recompute", False)
    prepare = options.pop("prepare", prepare_fsdp2)
    is_one_unit = options.pop("is_one_unit", False)
    torch.manual_seed(0)
    plain = hybridq.convert(Model(sizes, recompute), least_width=0).to(dtype)
    sharded = prepare(copy.deepcopy(plain))
    for layer in () if is_one_unit else sharded.layers:
        fully_shard(layer, **options)
    fully_shard(sharded, **options)
    return sharded, plain


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, recipe: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    (y.float() - 0.3).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }


def check_equal(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    mine, whole = values(sharded), values(plain)
    assert mine.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(mine[name].to(tensor.device), tensor), f"{what}: {name} differs"


def train(
    sharded: nn.Module,
    plain: nn.Module,
    recipe: Any,
    what: str,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> None:
    features = plain.layers[0].in_features
    pairs = [(m, optimizer(m.parameters(), lr=1e-2)) for m in (sharded, plain)]
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = torch.randn(48, features, dtype=dtype)
        chosen = recipe(number) if callable(recipe) else recipe
        y = [step(*pair, x, chosen, number) for pair in pairs]
        assert torch.equal(*y), f"{what}: outputs differ in step {number}"
    check_equal(sharded, plain, what)


def matrix(only: str = "") -> None:
    """Every recipe in every alignment; or, with `some`, in one of them by turns."""
    for place, recipe in enumerate(RECIPES):
        for number, (name, sizes) in enumerate(SIZES.items()):
            if not only or number == place % len(SIZES):
                train(*models(sizes), recipe, f"{recipe}, {name}")


def units(only: str = "") -> None:
    """Several weights in one unit, which are gathered, encoded and filled together."""
    one: dict[str, Any] = {"is_one_unit": True, "reshard_after_forward": True}
    recipes = (*RECIPES, decoded_recipe(), "fp8_delayed")
    for number, recipe in enumerate(recipes[4::2] if only else recipes):
        names = ("uneven", "cut") if number % 2 else ("aligned", "uneven")
        for name in names[number % 2 :][:1] if only else names:
            train(*models(SIZES[name], **one), recipe, f"one unit, {recipe}, {name}")
    sizes = SIZES["uneven"]
    by_step = lambda number: ("mxfp8", "nvfp4", None)[number]  # noqa: E731
    train(*models(sizes, **one), by_step, "one unit, recipe changes")
    train(*models(sizes, recompute=True, **one), "nvfp4", "one unit, recomputation")
    if not only:
        stays = {**one, "reshard_after_forward": False}
        train(*models(sizes, **stays), "mxfp8", "one unit that stays gathered")
        offload_policy = CPUOffloadPolicy(pin_memory=False)
        train(*models(sizes, offload_policy=offload_policy, **one), "nvfp4", "one unit, offload")
    frozen = models(SIZES["cut"], **one)
    for model in frozen:
        model.layers[0].weight.requires_grad_(False)
    train(*frozen, "nvfp4", "one unit, first weight frozen")
    # A rank writes its shard of one of them: all are gathered again, with the maxima found anew.
    sharded, plain = models(SIZES["cut"], **one)
    train(sharded, plain, "nvfp4", "one unit, before a write")
    whole = plain.layers[1].weight.detach()
    rows = -(-whole.shape[0] // dist.get_world_size())
    with torch.no_grad():
        if dist.get_rank() == 1:
            sharded.layers[1].weight._local_tensor.mul_(3.0)
        whole[rows : 2 * rows] *= 3.0
    train(sharded, plain, "nvfp4", "one unit, one rank wrote")
    # Training, inference and training by turns: what fills planes must not outlive them.
    x = torch.randn(5, SIZES["cut"][0], dtype=torch.bfloat16)
    for recipe in ("nvfp4", "mxfp8", "nvfp4"):
        with torch.inference_mode(), hybridq.autocast(recipe=recipe):
            assert torch.equal(sharded.eval()(x), plain.eval()(x))
        train(sharded.train(), plain.train(), recipe, f"one unit, {recipe} after inference")


def prefetched() -> None:
    """Units of several weights whose gathers begin before their modules compute."""
    torch.manual_seed(0)
    sizes = (40, 72, 40)
    plain = nn.Sequential(*(hybridq.convert(Model(sizes), least_width=0) for _ in range(3)))
    plain = plain.bfloat16()
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    first, second, third = sharded
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, plain)]
    for number, recipe in enumerate(("mxfp8", "nvfp4", "nvfp4", "mxfp8_fwd_nvfp4_bwd")):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(number)).bfloat16()
        if number == 2:
            sharded.unshard()
            third.unshard(async_op=True)
        pairs = zip((sharded, plain), optimizers, strict=True)
        assert torch.equal(*(step(*pair, x, recipe, number) for pair in pairs)), number
    check_equal(sharded, plain, "prefetched units")


def decoded_recipe() -> Any:
    return hybridq.CustomRecipe(decoded)


def wire() -> None:
    rows = (64, 128, 64, 64)
    count = sum(a * b for a, b in itertools.pairwise(rows))
    mx, square = 33 / 32, 1 / 2 + 1 / 256  # bytes per value; 16x16 blocks
    for recipe, forward, backward in (
        ("mxfp8", mx, mx),
        ("nvfp4", square, square),
        ("mxfp8_fwd_high_precision_bwd", mx, mx),  # its backward decodes the rowwise plane
    ):
        sharded, plain = models(rows)
        train(sharded, plain, recipe, recipe)
        per_step = wire_nbytes(sharded) / STEPS
        # Of a two-level format the amax travels too, four bytes from each rank.
        extra = 2 * 3 * 4 * dist.get_world_size()
        least = count * (forward + backward)
        assert least <= per_step <= least + extra, (recipe, per_step, count)


def reductions() -> None:
    """One for all weights: in the first gather, and after each step of an optimizer."""
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        sharded, _ = models(SIZES["cut"], **options)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        x = torch.randn(48, SIZES["cut"][0], dtype=torch.bfloat16)
        for number in range(STEPS):
            with count_traffic() as traffic, hybridq.autocast(recipe="nvfp4"):
                loss = sharded(x).float().sum()
            calls = traffic.calls_by_kind.get("all_reduce", 0)
            assert calls == (number == 0), (options, number, calls)
            with count_traffic() as traffic:
                loss.backward()
            assert "all_reduce" not in traffic.calls_by_kind, (options, number)
            optimizer.step()
        with torch.no_grad():  # a write that no optimizer makes
            for parameter in sharded.parameters():
                parameter.mul_(2.0)
        with count_traffic() as traffic, hybridq.autocast(recipe="nvfp4"):
            sharded(x)
        assert traffic.calls_by_kind["all_reduce"] == 1


def offload() -> None:
    """Shards are moved for each gather, as from a host to a GPU: still one reduction for all."""

    def moved(shard: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.ops.aten._to_copy.default(shard)  # which nobody keeps

    GatheredWeight.to = moved
    try:
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        sharded, plain = models(SIZES["cut"], **options)
        train(sharded, plain, "nvfp4", "moved for gathers")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        x = torch.randn(48, SIZES["cut"][0], dtype=torch.bfloat16)
        for _ in range(STEPS):
            with count_traffic() as traffic, hybridq.autocast(recipe="nvfp4"):
                sharded(x).float().sum().backward()
            assert "all_reduce" not in traffic.calls_by_kind
            with count_traffic() as traffic:
                optimizer.step()
            assert traffic.calls_by_kind["all_reduce"] == 1
        # The last gather's shard is gone when another recipe asks for other planes.
        sharded, plain = models(SIZES["cut"], reshard_after_forward=False, **options)
        for recipe in ("mxfp8", "nvfp4"):
            train(sharded, plain, recipe, "moved, and gathered again")
    finally:
        del GatheredWeight.to


def decoded(role: Any) -> Any:
    """Of weights, a columnwise plane that is made of the decoded rowwise one."""
    source = "rowwise_dequantized" if role.tensor_type == "weight" else "original"
    return hybridq.quantizer("mxfp8", columnwise="nvfp4", columnwise_source=source)


def chunks() -> None:
    """Maxima reduced by few at a time are those reduced at once, and a rank keeps its own."""
    whole, most = dist.all_reduce, 50
    sizes: list[int] = []

    def seen(tensor: torch.Tensor, *args: Any) -> Any:
        sizes.append(tensor.numel())
        return whole(tensor, *args)

    dist.all_reduce, work.MAXIMA_AT_ONCE = seen, most
    try:
        for recipe in ("nvfp4_1d_weight", "fp8_block", hybridq.CustomRecipe(decoded)):
            sharded, plain = models(SIZES["cut"])
            train(sharded, plain, recipe, f"{recipe} in chunks")
            assert max(sizes) == most and len(sizes) > 2 * STEPS, sizes
            for layer in sharded.layers:
                shard = layer.weight._local_tensor
                for parts in shard._about.known._maxima.values():
                    # A statistic, and the blocks at both ends of this rank's rows.
                    assert sum(part.numel() for part in parts) <= 1 + 2 * shard.shape[1]
            sizes.clear()
    finally:
        dist.all_reduce, work.MAXIMA_AT_ONCE = whole, 1 << 25


def written_by_turns() -> None:
    """A rank alone writes shards by no optimizer, of one unit and then of another."""
    sharded, plain = models(SIZES["cut"])
    x = torch.randn(5, SIZES["cut"][0], dtype=torch.bfloat16)
    for number in (0, 1, 0, 1, 1):
        with torch.no_grad():
            if dist.get_rank() == 1:
                sharded.layers[number].weight._local_tensor[:1].mul_(3.0)
            first = -(-plain.layers[number].weight.shape[0] // dist.get_world_size())
            plain.layers[number].weight[first : first + 1].mul_(3.0)
        for _ in range(2):
            with torch.no_grad(), hybridq.autocast(recipe="nvfp4"):
                assert torch.equal(sharded(x), plain(x)), number


def replicated() -> None:
    """torch's own replicas of whole weights gather nothing."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        return  # this torch makes them otherwise
    sharded, plain = (hybridq.convert(nn.Linear(40, 48), least_width=0) for _ in range(2))
    replicate(prepare_fsdp2(sharded))
    try:
        sharded(torch.ones(3, 40))
    except RuntimeError as error:
        assert "weight must be sharded by fully_shard" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    single = copy.deepcopy(plain)
    replicate(plain)
    for model in (single, plain):
        with hybridq.autocast(recipe="mxfp8"):
            model(torch.ones(3, 40)).square().sum().backward()
    assert torch.equal(plain.weight.grad.to_local(), single.weight.grad)


def collectives() -> None:
    """One all-gather for a unit; one more where its uneven shards lack room for a large rest."""
    large = (513, 512)  # of 257 x 512 values, a 32nd is less than half of what padding would cost
    for shape, recipe, most in (
        ((64, 64), "mxfp8", 1),
        ((65, 64), "mxfp8", 1),
        ((65, 64), "nvfp4", 1),
        (large, "mxfp8", 2),
    ):
        torch.manual_seed(0)
        layers = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
        plain = hybridq.convert(nn.Sequential(*layers), least_width=0)
        model = fully_shard(prepare_fsdp2(copy.deepcopy(plain)))
        x = torch.randn(3, shape[1])
        for _ in range(3):
            with hybridq.autocast(recipe=recipe), count_traffic() as traffic, torch.no_grad():
                model.unshard()
                for layer, twin in zip(model, plain, strict=True):
                    assert torch.equal(layer(x), twin(x)), (shape, recipe)
                model.reshard()
        assert traffic.calls_by_kind["all_gather"] == most, (shape, recipe, traffic.calls_by_kind)


def policies() -> None:
    sizes = SIZES["cut"]
    train(*models(sizes, reshard_after_forward=False), "mxfp8", "no reshard")
    for how in (True, "selective"):
        train(*models(sizes, recompute=how), "mxfp8_fwd_nvfp4_bwd", f"recomputation {how}")
    train(*models(sizes, offload_policy=CPUOffloadPolicy(pin_memory=False)), "nvfp4", "offload")
    train(*models(sizes, torch.float32), "fp8_current", "FP32", torch.float32)
    sharded, plain = models(sizes, torch.float32)
    # Its vectors round differently at other places in memory, so weights are compared as they are.
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, fused=True)
    for number in range(STEPS):
        x = torch.randn(48, sizes[0], generator=torch.Generator().manual_seed(number))
        plain.load_state_dict(values(sharded))
        with hybridq.autocast(recipe="nvfp4"):
            assert torch.equal(sharded(x), plain(x)), f"fused, step {number}"
        step(sharded, optimizer, x, "nvfp4", number)
    train(*models(sizes), lambda number: ("mxfp8", "nvfp4", None)[number], "recipe changes")
    train(*models(sizes), None, "no recipe")
    frozen = models(sizes)
    for model in frozen:
        model.layers[1].weight.requires_grad_(False)
    train(*frozen, "mxfp8", "frozen weight")


def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded, plain = models(SIZES["cut"], torch.float32, mp_policy=policy)
    x = torch.randn(48, plain.layers[0].in_features)
    for recipe in ("mxfp8", "nvfp4"):
        with hybridq.autocast(recipe=recipe):
            torch.manual_seed(1)
            mine = sharded(x.bfloat16())
            torch.manual_seed(1)
            twin = copy.deepcopy(plain).bfloat16()
            assert torch.equal(mine, twin(x.bfloat16())), recipe
        mine.float().sum().backward()
    assert sharded.layers[0].weight.dtype == torch.float32


def accumulation() -> None:
    for reshard in (True, False):
        sharded, plain = models(SIZES["cut"], reshard_after_forward=reshard)
        x = torch.randn(2, 48, 40, dtype=torch.bfloat16)
        for model in (sharded, plain):
            for number, part in enumerate(x):
                if model is sharded:
                    model.set_requires_gradient_sync(number == 1)
                with hybridq.autocast(recipe="mxfp8"):
                    y = model(part)
                y.float().sum().backward()
        for (name, mine), own in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            # BF16 sums in another order: of the micro-batches here, of the ranks there.
            assert torch.allclose(mine.grad.full_tensor(), own.grad, rtol=2e-2, atol=1e-3), name


def inference() -> None:
    sharded, plain = models(SIZES["uneven"])
    x = torch.randn(5, 33, dtype=torch.bfloat16)
    for mode in (torch.no_grad, torch.inference_mode):
        for recipe in ("mxfp8_fwd_nvfp4_bwd", "fp8_current"):
            with mode(), hybridq.autocast(recipe=recipe):
                assert torch.equal(sharded.eval()(x), plain.eval()(x))


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    for recipe in ("mxfp8", "nvfp4"):
        train(*models(SIZES["cut"], mesh=mesh), recipe, f"HSDP {recipe}")


def state() -> None:
    sharded, plain = models(SIZES["cut"])
    train(sharded, plain, "nvfp4", "before")
    saved = sharded.state_dict()
    assert all(type(getattr(t, "_local_tensor", t)) is torch.Tensor for t in saved.values())
    other, twin = models(SIZES["cut"])
    other.load_state_dict(saved)
    twin.load_state_dict(plain.state_dict())
    train(other, twin, "nvfp4", "loaded")
    assert type(other.layers[0].weight._local_tensor).__name__ == "GatheredWeight"


def gathered_in_high_precision() -> None:
    def factory(role: Any) -> Any:
        rht = role.tensor_type == "weight"
        return hybridq.NVFP4Quantizer(with_rht=rht, with_post_rht_amax=rht)

    recipe = hybridq.CustomRecipe(factory)
    with logged() as messages:
        train(*models(SIZES["cut"]), recipe, "transform")
        train(*models(SIZES["aligned"]), recipe, "transform, aligned")
    told = [one for one in messages if "fsdp2" in one]
    assert bool(told) == (dist.get_rank() == 0), told
    assert all("Hadamard transform" in one for one in told), told
    assert len(told) == len(set(told))


def freed() -> None:
    sharded, _ = models((64, 256, 256, 64))
    with hybridq.autocast(recipe="mxfp8"):
        y = sharded(torch.randn(8, 64, dtype=torch.bfloat16))
    abouts = [layer.weight._local_tensor._about for layer in sharded.layers]
    assert all(about.inner for about in abouts)
    held = [buffer for about in abouts for buffer in about.inner]
    assert sum(b.untyped_storage().nbytes() for b in held) == 0  # after the forward
    y.float().sum().backward()
    held = [buffer for about in abouts for buffer in about.inner]
    assert sum(b.untyped_storage().nbytes() for b in held) == 0


if __name__ == "__main__":
    main(globals())
