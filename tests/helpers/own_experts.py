"""A class of experts of any layout, whose forward is a loop over the experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experts_oracle import Formats, Plain, Product
from hybridq.moe import ExpertsLayout

EXPERTS, HIDDEN, INNER = 5, 48, 40

FUNCTIONS = {
    "relu": F.relu,
    "srelu": lambda v: F.relu(v).square(),
    "gelu": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "qgelu": lambda v: v * torch.sigmoid(1.702 * v),
}


def clamped(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """SwiGLU of alternating gate and up, with limits."""
    gate, up = h[..., ::2].clamp(max=3.0), h[..., 1::2].clamp(-3.0, 3.0)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


class OwnExperts(nn.Module):
    """Experts held as `layout` says.

    Args:
        layout: how.
        dtype: of the parameters.
        sizes: E, H and I.
    """

    def __init__(
        self,
        layout: ExpertsLayout,
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, INNER),
    ) -> None:
        super().__init__()
        self.own, self.formats = layout, None
        experts, hidden, inner = sizes
        width = 2 * inner if layout.has_gate and len(layout.first) == 1 else inner

        def make(name, *shape, scale=1.0):
            setattr(self, name, nn.Parameter((scale * torch.randn(*shape)).to(dtype)))

        for name in layout.first:
            shape = (hidden, width) if layout.is_transposed else (width, hidden)
            make(name, experts, *shape, scale=hidden**-0.5)
        shape = (inner, hidden) if layout.is_transposed else (hidden, inner)
        make(layout.down, experts, *shape, scale=inner**-0.5)
        for name in layout.first_biases:
            if name:
                make(name, experts, width)
        if layout.down_bias:
            make(layout.down_bias, experts, hidden)
        if layout.scale:
            make(layout.scale, experts)
        if layout.post_norm:
            self.norm = nn.LayerNorm(hidden, dtype=dtype)

    def in_double(self, formats: Formats | None) -> OwnExperts:
        """Return these experts in FP64, their products between planes of these formats."""
        made = OwnExperts(self.own, torch.float64, (self._count(), *self._features()))
        made.load_state_dict(self.state_dict())
        made.formats = formats
        return made

    def _count(self) -> int:
        return getattr(self, self.own.down).shape[0]

    def _features(self) -> tuple[int, int]:
        return self.own.features(self)

    def _product(self, x, name, bias, e):
        weight = getattr(self, name)[e]
        weight = weight.t() if self.own.is_transposed else weight
        kind = Plain if self.formats is None else Product
        y = kind.apply(x, weight, self.formats)
        return y if bias is None else y + getattr(self, bias)[e]

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """Return what one expert makes of its tokens."""
        own = self.own
        parts = [
            self._product(x, name, bias, e)
            for name, bias in zip(own.first, own.first_biases, strict=True)
        ]
        if not isinstance(own.activation, str):
            hidden = own.activation(self, parts[0])
        elif not own.has_gate:
            hidden = FUNCTIONS[own.activation](parts[0])
        else:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
            if len(parts) == 1 and not own.is_concatenated:
                gate, up = parts[0][..., ::2], parts[0][..., 1::2]
            hidden = FUNCTIONS[own.activation](gate) * up
        y = self._product(hidden, own.down, own.down_bias, e)
        y = self.norm(y) if own.post_norm else y
        return y * getattr(self, own.scale)[e] if own.scale else y

    def forward(self, tokens, second=None, shares=None):
        """As the layout's `takes` says."""
        if self.own.takes != "routing":
            count = self._count()
            sizes = [tokens.shape[0] // count] * count if second is None else second.tolist()
            parts = tokens.split([*sizes, tokens.shape[0] - sum(sizes)])
            made = [self.expert(part, e) for e, part in enumerate(parts[:-1])]
            return torch.cat([*made, torch.zeros_like(parts[-1])])
        total = torch.zeros_like(tokens)
        for e in range(self._count()):
            token, place = (second == e).nonzero(as_tuple=True)
            if not len(token):
                continue
            x, share = tokens[token], shares[token, place, None]
            where = self.own.router_weights
            y = self.expert(x * share if where == "input" else x, e)
            total = total.index_add(0, token, y * share if where == "output" else y)
        return total


def routing(tokens: int, experts: int = EXPERTS, top: int = 2, seed: int = 0):
    """Return experts and weights `[T, k]`: none of the last expert, one token of the first."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, -1] = -1
    scores[:, 0] = -0.5
    if tokens:
        scores[tokens // 2, 0] = 2
    best = scores.topk(top, dim=1)
    return best.indices, best.values.abs().softmax(-1)
