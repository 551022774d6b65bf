"""Modules of transformers that multiply by matrices of their own which are no linear layers.

Block-diagonal maps, experts that all tokens go through, and attention whose projections are
parameters with an axis for the heads. Each class here is a base, of which `linears` derives one
together with transformers' own: without a recipe that one's forward runs.

Source: transformers 5.23, the models named by each class: shapes and order of their products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...nn import GroupedModule, QuantizedModule
from ...nn.modules import run_part
from ...recipes import Recipe

__all__ = ["BlockLinear", "GatedBlocks", "HeadProjections", "SharedExperts", "features_of_heads"]

#: XLNet's projections: of queries, keys, values and positions, and of the output.
_HEADS: Final = ("q", "k", "v", "r", "o")


class _Products(TorchFunctionMode):
    """Context: a forward's own calls of one function go to `take`, where that returns a result.

    Args:
        function: of torch.
        take: `take(*args)`, what the function would return; None: it is called.
    """

    def __init__(self, function: Callable[..., Any], take: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._take = function, take

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = self._take(*args) if func is self._function and not kwargs else None
        return func(*args, **(kwargs or {})) if found is None else found


def _ends(groups: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return where each of some groups of equally many rows ends, int32."""
    return torch.arange(1, groups + 1, dtype=torch.int32, device=device) * rows


class BlockLinear(GroupedModule):
    """DeepSeek-V4's block-diagonal map: `[..., G, in]` to `[..., G, out]`, weight `[G out, in]`.

    Each block has planes of its own. The weight, which is one matrix, stays in high precision
    inside `quantized_model_init`, which says so, and FSDP2 gathers its values.
    """

    weight: nn.Parameter
    n_groups: int
    #: None: what is multiplied is a view of the weight.
    weight_parts: Mapping[str, str] = {}

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        return ()

    def values_because(self) -> Mapping[str, str]:
        return {"weight": "it is one matrix whose blocks have planes each"}

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        own = self.own_part(self.weight)
        return [(str(g), own) for g in range(self.n_groups)]

    def _counts(self) -> list[tuple[str, int]]:
        return [("", self.n_groups)]

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view(self.n_groups, -1, parameter.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = self.training_recipe()
        if self.leaves_all_plain(recipe):
            plain: torch.Tensor = super().forward(x)
            return plain
        groups, into = x.shape[-2:]
        rows = x.reshape(-1, groups, into).transpose(0, 1)
        ends = _ends(groups, rows.shape[1], x.device)
        y = self.grouped_product(recipe, "weight", None, rows.reshape(-1, into), ends)
        y = y.view(groups, -1, y.shape[-1]).transpose(0, 1)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class GatedBlocks(GroupedModule):
    """RecurrentGemma's recurrence: two gates by block-diagonal maps, weights `[G, in, out]`."""

    holds_transposed = True
    weight_parts: Mapping[str, str] = {
        one: one for one in ("input_gate_weight", "recurrent_gate_weight")
    }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = self.training_recipe()
        if self.leaves_all_plain(recipe):
            return super().forward(*args, **kwargs)
        with _Products(torch.baddbmm, lambda *given: self._gate(recipe, *given)):
            return super().forward(*args, **kwargs)

    def _gate(
        self, recipe: Recipe | None, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `x @ weight + bias` of each block, `[G, T, out]`; None: of another's weight."""
        name = next((one for one in self.weight_parts if weight is getattr(self, one)), None)
        if name is None:
            return None
        groups, rows, into = x.shape
        ends = _ends(groups, rows, x.device)
        own = name.replace("_weight", "_bias")
        y = self.grouped_product(recipe, name, own, x.reshape(-1, into), ends)
        return y.view(groups, rows, -1)


class SharedExperts(GroupedModule):
    """Inkling's shared experts: all tokens go through each, gates are given from outside."""

    weight_parts: Mapping[str, str] = {one: one for one in ("gate_proj", "up_proj", "down_proj")}
    n_shared_experts: int
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
        recipe = self.training_recipe()
        if self.leaves_all_plain(recipe):
            plain: torch.Tensor = super().forward(hidden_states, gammas)
            return plain
        count, width = self.n_shared_experts, hidden_states.shape[-1]
        x = hidden_states.reshape(-1, width)
        ends = _ends(count, x.shape[0], x.device)
        x = x.repeat(count, 1)
        gate = self.grouped_product(recipe, "gate_proj", None, x, ends)
        up = self.grouped_product(recipe, "up_proj", None, x, ends)
        share = gammas.reshape(-1, count).t().reshape(-1, 1)
        y = self.grouped_product(recipe, "down_proj", None, self.act_fn(gate) * up * share, ends)
        summed = y.view(count, -1, width).float().sum(0)
        return summed.to(hidden_states.dtype).view(hidden_states.shape)


class HeadProjections(QuantizedModule):
    """XLNet's attention: projections are parameters `[hidden, heads, head size]`.

    They stay in high precision inside `quantized_model_init`, which says so, and FSDP2 gathers
    values.
    """

    weight_parts: Mapping[str, str] = {}

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        return ()

    def values_because(self) -> Mapping[str, str]:
        return dict.fromkeys(_HEADS, "it has an axis for the heads, and planes are of matrices")

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        del recipe
        return _HEADS

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(part, getattr(self, part)) for part in _HEADS]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = self._recipe()
        if recipe is None or all(self.plan_of(recipe, one).is_plain for one in _HEADS):
            return super().forward(*args, **kwargs)
        with _Products(torch.einsum, lambda *given: self._project(recipe, *given)):
            return super().forward(*args, **kwargs)

    def _project(
        self, recipe: Recipe, how: str, x: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the product with one of the projections; None: with something else."""
        weight: Any = rest[0] if len(rest) == 1 else None
        name = next((one for one in _HEADS if weight is getattr(self, one)), None)
        if name is None:
            return None
        matrix = weight.flatten(1)
        if name == "o":  # from heads to hidden
            return run_part(self, name, recipe, x.flatten(2), matrix, None)
        y = run_part(self, name, recipe, x.to(weight.dtype), matrix.t(), None)
        return y.unflatten(-1, weight.shape[1:])


def features_of_heads(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of XLNet's projections.

    Args:
        module: its attention.
    """
    weight: Any = module._parameters["q"]
    return weight.shape[0], weight[0].numel()
