"""FSDP2 of frozen bases with adapters: `python fsdp2_frozen_program.py RANK WORLD STORE NAME...`.

All ranks see the same batch, and a sharded run is the unsharded one in every bit: bases that hold
their rowwise planes alone have columnwise ones of what those decode to, sharded or not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from fsdp2_experts_program import LAYOUTS
from rank_program import main
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import QuantizedWeight, prepare_fsdp2, wire_nbytes
from hybridq.moe import convert_experts
from own_experts import HIDDEN, OwnExperts, routing

RECIPES = (
    "mxfp8",
    "nvfp4",
    "nvfp4_1d_weight",
    "fp8_current",
    "fp8_delayed",
    "fp8_block",
    "mxfp8_fwd_nvfp4_bwd",
    "nvfp4_fwd_mxfp8_bwd",
)
STEPS = 3


class Adapted(nn.Module):
    """A frozen base with an adapter beside it."""

    def __init__(self, base: nn.Module, into: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(into, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, out, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Groups(nn.Module):
    """A GroupedLinear with its splits."""

    def __init__(self, splits: list[int], *args: int, **options: Any) -> None:
        super().__init__()
        self.splits, self.grouped = splits, hybridq.GroupedLinear(len(splits), *args, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(x, self.splits)


def linears(dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    return [
        Adapted(hybridq.Linear(64, 96, dtype=dtype), 64, 96),
        Adapted(hybridq.Linear(96, 64, bias=False, dtype=dtype), 96, 64),
    ]


def fused() -> list[nn.Module]:
    options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    return [
        Adapted(hybridq.LayerNormLinear(64, 64, **options), 64, 64),
        Adapted(hybridq.LayerNormMLP(64, 128, activation="swiglu", **options), 64, 64),
    ]


def groups() -> list[nn.Module]:
    options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    return [
        Adapted(Groups([16, 32], 64, 64, **options), 64, 64),
        Adapted(Groups([32, 16], 64, 64, single_grouped_weight=True, **options), 64, 64),
    ]


def models(recipe: str, made: Callable[[], list[nn.Module]]) -> tuple[nn.Module, nn.Module]:
    """Return a model of frozen bases, to be sharded, and the same again."""
    torch.manual_seed(0)
    with hybridq.quantized_model_init(recipe, frozen=True):
        plain = nn.Sequential(*made())
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(".base." not in name)
    return copy.deepcopy(plain), plain


def shard(model: nn.Module, reshard: bool = True) -> nn.Module:
    prepare_fsdp2(model)
    for part in (*model, model):
        fully_shard(part, reshard_after_forward=reshard)
    held = [one._local_tensor for one in model.parameters() if not one.requires_grad]
    assert any(isinstance(one, QuantizedWeight) for one in held), "nothing was tested"
    return model


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def train(sharded: nn.Module, plain: nn.Module, recipe: str | None, what: str) -> None:
    """Assert that all results, gradients and adapters are those of the unsharded model."""
    optimizers = [
        torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        for model in (sharded, plain)
    ]
    for step in range(STEPS):
        torch.manual_seed(10 + step)
        x, results = torch.randn(48, 64).bfloat16(), []
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            own = x.clone().requires_grad_()
            torch.manual_seed(step)
            with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(own)
            y.float().square().mean().backward()
            optimizer.step()
            trained = [local(one) for one in model.parameters() if one.requires_grad]
            results.append([y.detach(), own.grad, *trained])
            optimizer.zero_grad()
        for number, (mine, whole) in enumerate(zip(*results, strict=True)):
            assert torch.equal(mine, whole), f"{what}, step {step}, tensor {number}"


def recipes() -> None:
    """Linear modules under each recipe, gathered again in the backward or not."""
    for recipe in RECIPES:
        for reshard in (True, False):
            sharded, plain = models(recipe, linears)
            train(shard(sharded, reshard), plain, recipe, f"{recipe}, reshard {reshard}")


def modules() -> None:
    """Fused modules, groups, and modules within checkpoints."""
    for recipe in ("mxfp8", "mxfp8_fwd_nvfp4_bwd", "nvfp4_fwd_mxfp8_bwd"):
        for made in (fused, groups):
            sharded, plain = models(recipe, made)
            train(shard(sharded), plain, recipe, f"{recipe}, {made.__name__}")
        sharded, plain = (
            nn.Sequential(*map(checkpoint_wrapper, model)) for model in models(recipe, linears)
        )
        train(shard(sharded), plain, recipe, f"{recipe}, checkpoints")


def other_recipes() -> None:
    """A recipe of other formats than the base's, or none: what is decoded is the same."""
    for recipe in ("mxfp8_fwd_nvfp4_bwd", "nvfp4", "fp8_current", None):
        sharded, plain = models("mxfp8", linears)
        train(shard(sharded), plain, recipe, f"mxfp8 under {recipe}")


def traffic() -> None:
    """A step gathers the one plane that there is, forward and backward."""
    sharded, plain = models("mxfp8", linears)
    shard(sharded)
    before = wire_nbytes(sharded)
    train(sharded, plain, "mxfp8", "traffic")
    values = 2 * 64 * 96
    planes = values + values // 32
    moved = (wire_nbytes(sharded) - before) / STEPS
    assert 2 * planes <= moved <= 2.1 * planes, (moved, planes)


def experts() -> None:
    """Experts in both orientations, whose gates' weights are trained."""
    for recipe in ("mxfp8", "mxfp8_fwd_nvfp4_bwd"):
        for number, layout in enumerate(LAYOUTS):
            results = []
            for is_sharded in (True, False):
                torch.manual_seed(0)
                with hybridq.quantized_model_init(recipe, frozen=True):
                    block = convert_experts(OwnExperts(layout, torch.bfloat16), layout)
                    block.quantize_initial_weights()
                if is_sharded:
                    fully_shard(prepare_fsdp2(block))
                torch.manual_seed(1)
                x = torch.randn(24, HIDDEN).bfloat16().requires_grad_()
                indices, weights = routing(24)
                with hybridq.autocast(recipe=recipe):
                    y = block(x, indices, weights.bfloat16())
                y.float().square().mean().backward()
                results.append((y.detach(), x.grad))
            for mine, whole in zip(*results, strict=True):
                assert torch.equal(mine, whole), f"{recipe}, layout {number}"


def compiled() -> None:
    """Compiled blocks: a graph encodes the second plane itself."""
    for recipe in ("mxfp8", "mxfp8_fwd_nvfp4_bwd"):
        sharded, plain = models(recipe, linears)
        for block in (*sharded, *plain):
            block.compile()
        train(shard(sharded), plain, recipe, f"{recipe}, compiled")


if __name__ == "__main__":
    main(globals())
