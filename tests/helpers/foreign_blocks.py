"""Modules of transformers that multiply by matrices of their own, small, with what they take."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.inkling import modeling_inkling as inkling
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as gemma
from transformers.models.xlnet import modeling_xlnet as xlnet

import hybridq

__all__ = ["KINDS", "converted", "made", "run"]


def _deepseek() -> tuple[nn.Module, tuple[Any, ...], Any]:
    return deepseek.DeepseekV4GroupedLinear(64, 4 * 48, 4), (torch.randn(2, 12, 4, 64),), deepseek


def _gemma() -> tuple[nn.Module, tuple[Any, ...], Any]:
    config = SimpleNamespace(num_attention_heads=2, lru_width=128)
    where = torch.arange(12).expand(2, -1)
    return gemma.RecurrentGemmaRglru(config), (torch.randn(2, 12, 128), where), gemma


def _inkling() -> tuple[nn.Module, tuple[Any, ...], Any]:
    config = SimpleNamespace(
        n_shared_experts=2, moe_intermediate_size=96, hidden_size=64, hidden_act="silu"
    )
    module = inkling.InklingSharedExperts(config)
    return module, (torch.randn(2, 12, 64), torch.rand(2, 12, 2)), inkling


def _xlnet() -> tuple[nn.Module, tuple[Any, ...], Any]:
    config = transformers.XLNetConfig(d_model=64, n_head=2, d_inner=64, n_layer=1, dropout=0.0)
    h, places = torch.randn(12, 2, 64), torch.randn(24, 2, 64)
    module = xlnet.XLNetRelativeAttention(config).eval()
    return module, (h, None, None, None, places, None), xlnet


KINDS = {"deepseek": _deepseek, "gemma": _gemma, "inkling": _inkling, "xlnet": _xlnet}


def made(kind: str) -> tuple[nn.Module, tuple[Any, ...], Any]:
    torch.manual_seed(0)
    module, given, home = KINDS[kind]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5)
    return module, given, home


def converted(module: nn.Module) -> nn.Module:
    return hybridq.convert(nn.ModuleDict({"own": copy.deepcopy(module)}))["own"]


def run(module: nn.Module, given: tuple[Any, ...], recipe: Any = None) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the first input and of all parameters."""
    x = given[0].clone().requires_grad_()
    module.zero_grad()
    if hasattr(module, "recurrent_states"):
        module.recurrent_states = None
    torch.manual_seed(1)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = module(x, *given[1:])
        y = y[0] if isinstance(y, tuple) else y
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    grads = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}
