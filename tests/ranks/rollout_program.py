"""Weights pushed from FSDP2: `python rollout_program.py RANK WORLD STORE NAME...`.

What a sharded model pushes must be what its unsharded twin does, in every bit, on every rank.
"""

from __future__ import annotations

import copy
import itertools
import warnings

import torch
from rank_program import main
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hybridq
from hybridq.distributed import count_traffic, prepare_fsdp2
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.rollout import weights

#: Recipe, layout, dtype of the masters, and whether FSDP2 casts them to BF16.
CASES = (
    ("mxfp8", "modelopt", torch.bfloat16, False),
    ("nvfp4", "modelopt", torch.float32, True),
    ("fp8_current", "compressed-tensors", torch.float32, False),
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Model(nn.Module):
    """Two units, with a norm and a buffer in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((64, 96), (96, 64)))
        self.norm = nn.LayerNorm(64)
        self.register_buffer("scale", torch.tensor([2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.scale


def twins(dtype: torch.dtype, casts: bool) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model, and its unsharded twin."""
    torch.manual_seed(0)
    plain = hybridq.convert(Model()).to(dtype)
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    options = {"mp_policy": POLICY} if casts else {}
    for layer in sharded.layers:
        fully_shard(layer, **options)
    fully_shard(sharded, **options)
    return sharded, plain


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The names in one order of the model's modules, the tensors in every byte."""
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        both = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(*both), name


def pushed(model: nn.Module, layout: str, recipe: str, **options) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in weights(model, layout, recipe=recipe, **options)}


def matrices() -> None:
    for (recipe, layout, dtype, casts), stepped in itertools.product(CASES, (False, True)):
        sharded, plain = twins(dtype, casts)
        inputs = torch.bfloat16 if casts else dtype
        if stepped:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(inputs)
            for model in (sharded, plain.to(inputs)):
                with hybridq.autocast(recipe=recipe):
                    loss = model(x).float().square().mean()
                loss.backward()
            return_to(plain, sharded)
        twin = plain.to(inputs)  # what the forward takes
        assert_same(pushed(sharded, layout, recipe), pushed(twin, layout, recipe))
        assert all(isinstance(one, DTensor) for one in sharded.parameters()), "sharded again"


def return_to(plain: nn.Module, sharded: nn.Module) -> None:
    """Step the sharded model, and give the twin its values."""
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    for (_, one), (_, other) in zip(
        plain.named_parameters(), sharded.named_parameters(), strict=True
    ):
        one.data.copy_(other.full_tensor())


def travels() -> None:
    """Of quantized weights only planes travel, and each unit is freed before the next one."""
    sharded, _ = twins(torch.float32, False)
    with count_traffic() as traffic:
        open_units = []
        for name, _ in weights(sharded, "modelopt", recipe="mxfp8"):
            gathered = [
                path
                for path, unit in sharded.named_modules()
                if isinstance(unit, FSDPModule)
                and not any(isinstance(p, DTensor) for p in unit.parameters(recurse=False))
                and list(unit.parameters(recurse=False))
            ]
            open_units.append((name, gathered))
    assert max(len(gathered) for _, gathered in open_units) == 1, open_units
    high = sum(4 * layer.weight.numel() for layer in sharded.layers)
    assert traffic.nbytes < high, (traffic, high)


def ends_early() -> None:
    """Who takes no more tensors leaves no unit gathered."""
    sharded, plain = twins(torch.bfloat16, False)
    iterator = weights(sharded, "modelopt", recipe="mxfp8")
    next(iterator)
    next(iterator)
    iterator.close()
    assert all(isinstance(one, DTensor) for one in sharded.parameters())
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        assert torch.equal(sharded(x), plain(x))


def quantized() -> None:
    """Shards in low precision: their planes, whole."""
    torch.manual_seed(0)
    with hybridq.quantized_model_init("mxfp8"):
        plain = hybridq.convert(Model().bfloat16())
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert_same(pushed(sharded, "modelopt", "mxfp8"), pushed(plain, "modelopt", "mxfp8"))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 128, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 64))

    def forward(self, x: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return x


def experts() -> None:
    torch.manual_seed(0)
    plain = nn.Module()
    plain.experts = convert_experts(Experts().bfloat16(), ExpertsLayout())
    sharded = prepare_fsdp2(copy.deepcopy(plain))
    fully_shard(sharded.experts)
    for recipe in ("mxfp8", "nvfp4"):
        assert_same(pushed(sharded, "modelopt", recipe), pushed(plain, "modelopt", recipe))


if __name__ == "__main__":
    warnings.simplefilter("ignore", hybridq.HybridQWarning)
    main({one.__name__: one for one in (matrices, travels, ends_early, quantized, experts)})
