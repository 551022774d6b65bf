"""Experts of DBRX, whose matrices lie one below the other in parameters of two dimensions.

The parameters stay; as stacks `[E, out, in]` they are views. The loop over the experts is a method
of the module around them, which calls the experts once where a recipe changes anything.

Source: transformers 5.23, models/dbrx/modeling_dbrx.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU, DbrxExperts

from ... import settings
from ..._log import log_once
from ...moe import Experts, ExpertsLayout, as_experts

__all__ = ["DbrxMatrices", "RoutedDbrxExperts", "RowsLayout", "convert_dbrx", "route_dbrx"]

_NAMES = ("w1", "v1", "w2")


@dataclass(frozen=True)
class RowsLayout(ExpertsLayout):
    """How DBRX holds its experts: gate, up and down `[E * I, H]` each.

    Args:
        activation: as of an `ExpertsLayout`; its names are those of `DbrxMatrices`.
    """

    gate_up: str | tuple[str, str] | None = ("gates", "ups")
    down: str = "downs"

    def features(self, module: nn.Module) -> tuple[int, int] | None:
        """Return H and I of a module.

        Args:
            module: of DBRX's experts.
        """
        own: Any = module
        return own.hidden_size, own.ffn_hidden_size

    def reason_against(self, module: nn.Module) -> str | None:
        """Return why a module does not hold its experts so; None: it does.

        Args:
            module: of DBRX's experts.
        """
        own: Any = module
        shape = (own.moe_num_experts * own.ffn_hidden_size, own.hidden_size)
        for name in _NAMES:
            one = module._parameters.get(name)
            if one is None or tuple(one.shape) != shape:
                got = None if one is None else list(one.shape)
                return f"{name} must be {list(shape)}, got {got}"
            if one.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return f"{name} is {one.dtype}"
        return None


class DbrxMatrices(DbrxExpertGLU):
    """DBRX's experts with their matrices as stacks."""

    def _stack(self, one: torch.Tensor) -> torch.Tensor:
        return one.view(self.moe_num_experts, self.ffn_hidden_size, self.hidden_size)

    @property
    def gates(self) -> torch.Tensor:
        """`[E, I, H]`."""
        return self._stack(self.w1)

    @property
    def ups(self) -> torch.Tensor:
        """`[E, I, H]`."""
        return self._stack(self.v1)

    @property
    def downs(self) -> torch.Tensor:
        """`[E, H, I]`, of a parameter that has each transposed."""
        return self._stack(self.w2).mT


class RoutedDbrxExperts(DbrxExperts):
    """DBRX's loop over the experts, which under a recipe is one call of them."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sum over each token's experts, as transformers' own.

        Args:
            hidden_states: `[batch, sequence, H]`.
            top_k_index, top_k_weights: `[T, k]`.
        """
        experts: Any = self.mlp
        if isinstance(experts, Experts) and not experts.leaves_all_plain(experts.training_recipe()):
            flat = hidden_states.reshape(-1, self.hidden_size)
            made: torch.Tensor = experts(flat, top_k_index, top_k_weights)
            return made.view(hidden_states.shape[0], -1, self.hidden_size)
        own: torch.Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
        return own


def convert_dbrx(module: nn.Module, layout: RowsLayout) -> None:
    """Convert a module of DBRX's experts in place.

    Args:
        module: a DbrxExpertGLU.
        layout: of it.
    """
    module.__class__ = DbrxMatrices
    as_experts(module, layout)
    if settings.current().model_init is not None:
        log_once(
            "quantized_model_init:dbrx",
            "quantized_model_init: the experts of DBRX stay in high precision: a parameter has the "
            "matrices of all experts one below the other, which share no planes",
        )


def route_dbrx(model: nn.Module) -> None:
    """Have the loops around converted experts call them once.

    Args:
        model: any, after `convert`.
    """
    for module in model.modules():
        if type(module) is DbrxExperts and isinstance(module.mlp, Experts):
            module.__class__ = RoutedDbrxExperts
