"""Scenarios of FSDP2 with quantized parameters: `python fsdp2_quantized_program.py RANK WORLD STORE
NAME...`. As in `fsdp2_program.py`, all ranks see the same batch, and every bit is compared.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_program import SIZES, STEPS, Model, step, values
from fsdp2_program import models as values_gathered
from rank_program import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hybridq
from hybridq.distributed import QuantizedWeight, prepare_fsdp2, wire_nbytes
from hybridq.optim import AdamW, Muon

RECIPES = (
    *("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight"),
    *("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd"),
)


def models(
    sizes: tuple[int, ...], recipe: str, preserve: bool = True, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a model with quantized shards, and its unsharded twin."""
    torch.manual_seed(0)
    model = Model(sizes, options.pop("recompute", False)).bfloat16()
    with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=preserve):
        plain = hybridq.convert(model, least_width=0)
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    for layer in sharded.layers:
        fully_shard(layer, **options)
    fully_shard(sharded, **options)
    return sharded, plain


def check_planes(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    """All planes that the twin holds, byte for byte."""
    for layer, own in zip(sharded.layers, plain.layers, strict=True):
        local = layer.weight._local_tensor
        assert type(local) is QuantizedWeight, type(local)
        layer.unshard()
        for plane in own.weight.tensor_storage.planes:
            mine = layer.weight.tensor_storage.plane(plane.direction)
            assert mine.spec == plane.spec
            for name, buffer in plane.buffers.items():
                assert torch.equal(mine.buffers[name], buffer), f"{what}: {plane.direction} {name}"
        layer.reshard()


def train(pair: Any, recipe: Any, what: str, kind: Any = AdamW, **options: Any) -> list[Any]:
    sharded, plain = pair
    options = {"lr": 1e-2, **options}
    pairs = [(m, kind(m.parameters(), **options)) for m in (sharded, plain)]
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = torch.randn(48, plain.layers[0].in_features, dtype=torch.bfloat16)
        y = [step(*pair, x, recipe, number) for pair in pairs]
        assert torch.equal(*y), f"{what}: outputs differ in step {number}"
    check_planes(sharded, plain, what)
    return [optimizer for _, optimizer in pairs]


def matrix(only: str = "") -> None:
    """Every recipe in every alignment; or, with `some`, in one of them by turns."""
    for place, recipe in enumerate(RECIPES):
        for number, (name, sizes) in enumerate(SIZES.items()):
            if only and number != place % len(SIZES):
                continue
            what = f"{recipe}, {name}"
            sharded, plain = models(sizes, recipe)
            check_planes(sharded, plain, f"{what}, before")
            ours, theirs = train((sharded, plain), recipe, what)
            for mine, own in zip(sharded.parameters(), plain.parameters(), strict=True):
                for key, value in theirs.state[own].items():
                    whole = ours.state[mine][key]
                    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
                    assert torch.equal(whole, value), f"{what}: {key}"


def optimizers() -> None:
    sizes = SIZES["cut"]
    for recipe in ("nvfp4", "mxfp8_fwd_nvfp4_bwd"):
        train(models(sizes, recipe, preserve=False), recipe, "decoded masters")
        for kind, options in (
            (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
            (torch.optim.SGD, {"foreach": True}),
            (torch.optim.AdamW, {"foreach": False}),
            (torch.optim.AdamW, {"foreach": True}),
        ):
            # Torch's own loops over BF16 round otherwise behind a tensor's last whole vector.
            train(
                models((64, 128, 64, 64), recipe),
                recipe,
                f"{recipe} {kind} {options}",
                kind,
                **options,
            )
    sharded, plain = models((64, 128, 64, 64), "nvfp4")
    train((sharded, plain), "nvfp4", "fused", torch.optim.AdamW, fused=True)
    # Random bits follow the rows: shards round as the whole does.
    sharded, plain = models(sizes, "nvfp4")
    pairs = [
        (m, AdamW(m.parameters(), 1e-2, master_dtype=torch.bfloat16)) for m in (sharded, plain)
    ]
    for number in range(STEPS):
        x = torch.randn(48, sizes[0], generator=torch.Generator().manual_seed(number)).bfloat16()
        y = [step(*pair, x, "nvfp4", number) for pair in pairs]
        assert torch.equal(*y), f"stochastic masters, step {number}"
    check_planes(sharded, plain, "stochastic masters")
    sharded, plain = models(sizes, "nvfp4")
    pairs = []
    for model in (sharded, plain):
        matrices = [one for one in model.parameters() if one.dim() == 2]
        pairs.append((model, Muon(matrices, 1e-2, recipe="mxfp8")))
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = torch.randn(48, sizes[0]).bfloat16()
        y = [step(*pair, x, "nvfp4", number) for pair in pairs]
        assert torch.equal(*y), f"Muon, step {number}"
    check_planes(sharded, plain, "Muon")
    for kind in ("bf16", "fp8_block"):
        sharded, plain = models(sizes, "nvfp4")
        pairs = [(m, AdamW(m.parameters(), 1e-2, moments=kind)) for m in (sharded, plain)]
        for number in range(STEPS):
            torch.manual_seed(100 + number)
            x = torch.randn(48, sizes[0]).bfloat16()
            y = [step(*pair, x, "nvfp4", number) for pair in pairs]
            assert torch.equal(*y), f"moments in {kind}, step {number}"
        check_planes(sharded, plain, f"moments in {kind}")
        for mine, own in zip(sharded.parameters(), plain.parameters(), strict=True):
            ours, theirs = (one.state[p] for (_, one), p in zip(pairs, (mine, own), strict=True))
            for key, value in theirs.items():
                whole = ours[key].full_tensor() if hasattr(ours[key], "full_tensor") else ours[key]
                assert torch.equal(whole, value), f"moments in {kind}: {key}"


def policies() -> None:
    sizes = SIZES["cut"]
    hybrid = "mxfp8_fwd_nvfp4_bwd"
    train(models(sizes, "mxfp8", reshard_after_forward=False), "mxfp8", "no reshard")
    train(models(sizes, hybrid, recompute=True), hybrid, "recomputation")
    offload = CPUOffloadPolicy(pin_memory=False)
    train(models(sizes, "nvfp4", offload_policy=offload), "nvfp4", "offload")
    train(models(sizes, hybrid), None, "no recipe")
    # One of the planes is the recipe's, the other one is made of decoded values.
    train(models(sizes, "mxfp8"), "high_precision_fwd_mxfp8_bwd", "the backward's plane fits")
    train(models(sizes, "mxfp8"), hybrid, "the forward's plane fits")
    frozen = models(sizes, "mxfp8")
    for model in frozen:
        model.layers[1].weight.requires_grad_(False)
    train(frozen, "mxfp8", "frozen weight")
    sharded, plain = models(SIZES["uneven"], hybrid)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), hybridq.autocast(recipe=hybrid):
            x = torch.randn(5, 33, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
            assert torch.equal(sharded.eval()(x), plain.eval()(x))


def first_inference() -> None:
    """The first forward of all is one in inference mode: with shards of either kind."""
    x = torch.randn(5, 40, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    for name in ("mxfp8_fwd_nvfp4_bwd", "fp8_current"):
        for pair in (models(SIZES["cut"], name), values_gathered(SIZES["cut"])):
            for _ in range(2):
                with torch.inference_mode(), hybridq.autocast(recipe=name):
                    assert torch.equal(*[model.eval()(x) for model in pair]), name
            if name == "fp8_current":
                continue
            # Like torch's own parameters, which cannot be gathered outside any more.
            with hybridq.autocast(recipe=name):
                y = pair[0](x)
            try:
                y.sum().backward()
            except RuntimeError as error:
                assert "inference mode first" in str(error) and "no_grad() instead" in str(error)
            else:
                raise AssertionError("tensors of inference mode were changed outside")


def wire() -> None:
    rows = (64, 128, 64, 64)
    count = sum(a * b for a, b in itertools.pairwise(rows))
    mx, fp4, square = 33 / 32, 9 / 16, 1 / 2 + 1 / 256
    for recipe, forward, backward in (
        ("mxfp8", mx, mx),
        ("nvfp4", square, square),
        ("mxfp8_fwd_nvfp4_bwd", mx, fp4),
    ):
        sharded, plain = models(rows, recipe)
        pairs = [(m, AdamW(m.parameters(), lr=1e-2)) for m in (sharded, plain)]
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        for pair in pairs:
            step(*pair, x, recipe, 1)
        extra = 2 * 3 * 4 * dist.get_world_size()
        least = count * (forward + backward)
        assert least <= wire_nbytes(sharded) <= least + extra, (recipe, wire_nbytes(sharded))
        held = [
            b
            for layer in sharded.layers
            for p in layer.weight._local_tensor.held.planes
            for b in p.tensors
        ]
        nbytes = sum(b.numel() * b.element_size() for b in held)
        whole = sum(layer.weight.nbytes for layer in plain.layers)
        assert whole / dist.get_world_size() <= nbytes <= whole / dist.get_world_size() + 24


def state() -> None:
    sizes = SIZES["cut"]
    sharded, plain = models(sizes, "mxfp8")
    for model in (sharded, plain):  # a plain checkpoint, before the first forward
        torch.manual_seed(5)
        source = Model(sizes).bfloat16().state_dict()
        if model is sharded:
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                set_model_state_dict,
            )

            set_model_state_dict(model, source, options=StateDictOptions(full_state_dict=True))
        else:
            model.load_state_dict(source)
    check_planes(sharded, plain, "loaded")
    ours, theirs = train((sharded, plain), "mxfp8", "after loading")
    saved = sharded.state_dict()
    assert all(type(getattr(t, "_local_tensor", t)) is torch.Tensor for t in saved.values())
    whole = hybridq.dequantized_state_dict(plain)
    for name, tensor in values(sharded).items():
        assert torch.equal(tensor, whole[name]), name
    other, twin = models(sizes, "mxfp8")
    other.load_state_dict(saved)
    twin.load_state_dict(whole)
    check_planes(other, twin, "saved and loaded")
    pairs = []
    for model, known in ((other, ours), (twin, theirs)):
        optimizer = AdamW(model.parameters(), lr=1.0)
        optimizer.load_state_dict(known.state_dict())
        pairs.append((model, optimizer))
    x = torch.randn(48, sizes[0], generator=torch.Generator().manual_seed(9)).bfloat16()
    for number in range(2):
        assert torch.equal(*[step(*pair, x, "mxfp8", number) for pair in pairs])
    check_planes(other, twin, "resumed")


def saved_aside(folder: str) -> None:
    """A state whose rows lie within a block of other rows is saved by `async_save`, alone."""
    import torch.distributed.checkpoint as dcp

    sizes = (64, 128, 64)
    for recipe in ("fp8_block", "nvfp4", "mxfp8_fwd_nvfp4_bwd"):
        sharded, plain = models(sizes, recipe)
        saved = sharded.state_dict()
        for name, tensor in saved.items():
            local = tensor.to_local()
            assert local.storage_offset() == 0, (recipe, name)
            assert local.untyped_storage().nbytes() == local.nbytes, (recipe, name)
        group = dist.new_group()  # of the thread that writes
        dcp.async_save(saved, checkpoint_id=f"{folder}/{recipe}", process_group=group).result()
        loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        dcp.load(loaded, checkpoint_id=f"{folder}/{recipe}")
        whole = hybridq.dequantized_state_dict(plain)
        for name, tensor in loaded.items():
            assert torch.equal(tensor.full_tensor(), whole[name]), (recipe, name)


def ignored() -> None:
    """A parameter that `fully_shard` leaves out is trained if it was not prepared, or is named."""
    for is_prepared in (True, False):
        with hybridq.quantized_model_init("mxfp8"):
            model = hybridq.convert(Model((64, 64, 64, 64)), least_width=0)
        first, *others = model.layers
        for module in (model,) if is_prepared else others:
            prepare_fsdp2(module)
        fully_shard(model, ignored_params=set(first.parameters()))
        optimizer = AdamW(model.parameters(), lr=0.1)
        before = first.weight.dequantize()
        told = ""
        try:
            step(model, optimizer, torch.ones(32, 64), "mxfp8", 0)
        except RuntimeError as error:
            told = f"{error}"
        assert is_prepared == ("(ignored_params) must not be prepared" in told), told
        assert is_prepared or not torch.equal(first.weight.dequantize(), before)


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    for recipe in ("mxfp8", "nvfp4"):
        train(models(SIZES["cut"], recipe, mesh=mesh), recipe, f"HSDP {recipe}")


def refused() -> None:
    def factory(role: Any) -> Any:
        transformed = role.tensor_type == "weight"
        return hybridq.NVFP4Quantizer(with_rht=transformed, with_post_rht_amax=transformed)

    recipe = hybridq.CustomRecipe(factory)
    train(models((64, 128, 64, 64), recipe), recipe, "a transform of whole groups")
    try:
        models(SIZES["cut"], recipe)
    except NotImplementedError as error:
        text = str(error)
        assert "layers.0.weight [100, 40]" in text and "Hadamard transform" in text, text
        assert "multiples of 16 rows" in text, text
    else:
        raise AssertionError("a transform over two ranks was taken")


if __name__ == "__main__":
    main(globals())
