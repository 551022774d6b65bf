"""What experts in stacks multiply: the tokens of each, and what it makes of them in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..moe import ExpertsLayout
from ..nn.autograd import Activation, apply
from ..reference import ACTIVATIONS
from ..tensor import is_quantized
from .stored import Reads

__all__ = ["ExpertCall", "Tokens", "given_tokens"]

_COUNTS: Final = {"routing": 3, "sizes": 2, "batches": 1}
#: Names of the functions of one value, to the gated activation of it.
_GATED: Final = {one.core: name for name, one in ACTIVATIONS.items() if one.is_gated}
_Sees = Mapping[str, Sequence[Callable[[torch.Tensor], object] | None]]


class Tokens(NamedTuple):
    """The tokens of one call of a module of experts.

    Attributes:
        rows: `[T, H]`.
        of_expert: of each expert the numbers of its rows, int64.
        shares: of each expert the factors of its rows, where these are multiplied before; else
            None.
    """

    rows: torch.Tensor
    of_expert: list[torch.Tensor]
    shares: list[torch.Tensor] | None


def given_tokens(
    module: nn.Module,
    layout: ExpertsLayout,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tokens:
    """Return the tokens of a call, and whose they are.

    Args:
        module: of experts.
        layout: how it holds them.
        names: of its forward's arguments.
        args, kwargs: of the call.
    """
    wanted = _COUNTS[layout.takes]
    given = [*args[:wanted], *(kwargs[one] for one in names[len(args) : wanted] if one in kwargs)]
    experts = int(getattr(module, layout.down).shape[0])
    rows = given[0].dequantize() if is_quantized(given[0]) else given[0]
    rows = rows.detach().reshape(-1, rows.shape[-1])
    numbers = torch.arange(rows.shape[0], dtype=torch.int64, device=rows.device)
    if layout.takes == "sizes":
        sizes = torch.as_tensor(given[1], dtype=torch.int64, device="cpu").tolist()
        return Tokens(rows, list(numbers.split([*sizes, len(numbers) - sum(sizes)])[:-1]), None)
    if layout.takes == "batches":  # as many rows of each; zeros are of tokens that went elsewhere
        parts = numbers.chunk(experts) if len(numbers) else [numbers] * experts
        return Tokens(rows, [part[rows[part].any(1)] for part in parts], None)
    top, count = given[1].reshape(-1), given[1].shape[-1]
    top = torch.where((top >= 0) & (top < experts), top, experts)  # of no expert here
    order = torch.argsort(top, stable=True)
    parts = order.split(torch.bincount(top, minlength=experts + 1).tolist())[:experts]
    shares = None
    if layout.router_weights == "input":
        weights = given[2].detach().reshape(-1)
        shares = [weights[part] for part in parts]
    return Tokens(rows, [part // count for part in parts], shares)


@dataclass(frozen=True)
class ExpertCall:
    """Who sees what in a call of a module of experts.

    Args:
        inputs: by the name of a stack, of each expert who sees its rows; None: nobody.
        outputs: the same of results.
        all_experts: each expert is shown every token.
        reads: how the values of matrices are read.
    """

    inputs: _Sees
    outputs: _Sees
    all_experts: bool
    reads: Reads

    def show(self, module: nn.Module, layout: ExpertsLayout, tokens: Tokens) -> None:
        """Show the rows of a call.

        Args:
            module: of experts.
            layout: how it holds them.
            tokens: of the call.
        """
        for e, own in enumerate(tokens.of_expert):
            x = tokens.rows if self.all_experts else tokens.rows[own]
            if tokens.shares is not None and not self.all_experts:
                x = x * tokens.shares[e][:, None].to(x.dtype)
            if x.shape[0]:
                self._show_expert(module, layout, e, x)

    def _show_expert(self, module: Any, layout: ExpertsLayout, e: int, x: torch.Tensor) -> None:
        for name in layout.first:
            _tell(self.inputs, name, e, x)
        seen = (self.inputs, layout.down), *((self.outputs, name) for name in layout.weights)
        if all(not one.get(name) or one[name][e] is None for one, name in seen):
            return
        made = []
        for name, bias in zip(layout.first, layout.first_biases, strict=True):
            made.append(self._product(module, layout, name, bias, e, x))
            _tell(self.outputs, name, e, made[-1])
        hidden = x
        if made:
            hidden = _activated(module, layout, made[0] if len(made) == 1 else torch.cat(made, 1))
        _tell(self.inputs, layout.down, e, hidden)
        if self.outputs.get(layout.down) and self.outputs[layout.down][e] is not None:
            y = self._product(module, layout, layout.down, layout.down_bias, e, hidden)
            _tell(self.outputs, layout.down, e, y)

    def _product(
        self,
        module: Any,
        layout: ExpertsLayout,
        name: str,
        bias: str | None,
        e: int,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Return the rows by one expert's matrix, in their dtype."""
        matrix = self.reads(module, name, e).to(x.dtype)
        added = None if bias is None else getattr(module, bias)[e].detach().to(x.dtype)
        return torch.nn.functional.linear(x, matrix.t() if layout.is_transposed else matrix, added)


def _tell(sees: _Sees, name: str, e: int, rows: torch.Tensor) -> None:
    see = sees[name][e] if sees.get(name) else None
    if see is not None:
        see(rows)


def _activated(module: Any, layout: ExpertsLayout, h: torch.Tensor) -> torch.Tensor:
    """Return the hidden values, `[rows, I]`: by the rule of hybridq's experts."""
    if not isinstance(layout.activation, str):
        return layout.activation(module, h)
    if not layout.has_gate:
        return apply(h, Activation(layout.activation), None, None)
    if len(layout.first) == 1 and not layout.is_concatenated:
        h = h.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return apply(h, Activation(_GATED[layout.activation]), None, None)
