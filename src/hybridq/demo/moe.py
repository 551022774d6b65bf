"""A mixture of experts: a router sends each token to its best experts, each a SwiGLU layer.

All experts are two grouped linear modules, so that their GEMMs run under the recipe like those of
any other projection. The router is a plain linear layer in FP32: which experts a token goes to must
not depend on a recipe's rounding more than its input does. How many tokens each expert gets stays
on the device. There is no auxiliary loss and no token is dropped: recipes are compared by the loss
of the task.

Source: Shazeer et al. (arXiv:1701.06538); the weights of the chosen experts sum to 1 as in Mixtral
(arXiv:2401.04088).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import GroupedLinear

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """`sum over a token's experts e of p[e] * down[e](silu(gate[e](x)) * up[e](x))`.

    Args:
        hidden: width of the residual stream.
        ffn: width of one expert.
        experts: how many there are.
        top: how many of them each token goes to.

    Raises:
        ValueError: `top` is not in 1..experts.
    """

    def __init__(self, hidden: int, ffn: int, experts: int, top: int) -> None:
        super().__init__()
        if not 1 <= top <= experts:
            raise ValueError(f"MixtureOfExperts: top must be in 1..{experts}, got {top}")
        self.experts, self.top = experts, top
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = GroupedLinear(experts, hidden, 2 * ffn, bias=False)
        self.down = GroupedLinear(experts, ffn, hidden, bias=False)

    def reset_parameters(self, residual: float = 1.0) -> None:
        """Draw all weights anew, those that add to the residual stream `residual` times smaller."""
        nn.init.normal_(self.router.weight, std=1 / math.sqrt(self.router.in_features))
        for layer, shrink in ((self.gate_up, 1.0), (self.down, residual)):
            for weight in layer.parameters():
                nn.init.normal_(weight, std=1 / (math.sqrt(layer.in_features) * shrink))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of each token of x `[T, hidden]`, both `[T, top]`."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router.weight.float())
        best, chosen = logits.topk(self.top, dim=-1)
        return best.softmax(-1), chosen

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts of each token make of it.

        Args:
            x: `[..., hidden]`.

        Returns:
            The same shape, in the compute dtype.
        """
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        expert = chosen.flatten()
        order = torch.argsort(expert, stable=True)
        # bincount would wait for a GPU, to know how long its result is.
        splits = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        splits = splits.scatter_add(0, expert, torch.ones_like(expert))
        gate, up = self.gate_up(tokens[order // self.top], splits).chunk(2, -1)
        y = self.down(F.silu(gate) * up, splits)
        back = y[torch.argsort(order)].view(-1, self.top, x.shape[-1])
        mixed = (back * weights[..., None].to(back.dtype)).sum(1)
        return mixed.view(x.shape)
