"""A small model, converted and adapted by PEFT, with adapters that are not zero."""

from __future__ import annotations

import peft
import torch
from torch import nn

import hybridq
from hybridq.integrations.peft import LoraLinear

RECIPES = ("nvfp4", "mxfp8", "fp8_current")


class Net(nn.Module):
    """Two layers with something between them, one with a bias."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.down = nn.Linear(96, 64, bias=False, dtype=dtype)
        self.lm_head = nn.Linear(64, 16, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(torch.tanh(self.up(x))))


def net(recipe: str | None, *, frozen: bool = True) -> nn.Module:
    """The same values always; of a recipe: in its planes."""
    torch.manual_seed(0)
    made = Net()
    if recipe is None:
        return hybridq.convert(made)
    with hybridq.quantized_model_init(recipe, frozen=frozen):
        return hybridq.convert(made)


def config(**options) -> object:
    given = {"target_modules": ["up", "down"], "r": 4, "lora_alpha": 8, **options}
    return peft.LoraConfig(**given)


def adapted(recipe: str | None, *, frozen: bool = True, **options) -> nn.Module:
    """A model with an adapter whose B is not zero."""
    model = peft.get_peft_model(net(recipe, frozen=frozen), config(**options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def call(model: nn.Module, recipe: str | None, x: torch.Tensor) -> torch.Tensor:
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x)


def inputs(rows: int = 8, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5)).bfloat16()


def same(one: hybridq.QuantizedTensor, other: hybridq.QuantizedTensor) -> bool:
    """Whether two tensors have the same planes, bit for bit."""
    mine, layout = one.tensor_storage.flatten()
    others, theirs = other.tensor_storage.flatten()
    return layout == theirs and all(map(torch.equal, mine, others))


def layers(model: nn.Module) -> list[LoraLinear]:
    return [one for one in model.modules() if isinstance(one, LoraLinear)]
