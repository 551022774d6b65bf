"""A byte-level decoder-only transformer: RMSNorm, rotary attention, SwiGLU.

The class of every projection is an argument, so the same file builds the plain model
(``torch.nn.Linear``) and the quantized one (``hybridq.Linear``), from the same random numbers.
Projections that read the same input are one matrix (query, key and value; gate and up): their
input is then quantized once, and not two or three times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.autograd import plain_attention, plain_linear
from ..nn.modules.exchange import SequenceExchange
from .moe import MixtureOfExperts

VOCABULARY_SIZE = 256
"""One token per byte value: no tokenizer, and a loss in nats per byte."""

OWN, QWEN3_MOE = "own", "qwen3_moe"
"""Families of models: the one of this file, and one of transformers."""


@dataclass(frozen=True)
class ModelConfig:
    """Every size of the model. The default has 3.1 million parameters.

    Args:
        layers: number of transformer blocks.
        hidden: width of the residual stream.
        heads: attention heads; must divide ``hidden`` into an even head size (rotary pairs).
        ffn: width of the SwiGLU feed-forward layer.
        sequence: longest sequence, in bytes.
        rope_base: base of the rotary angles.
        norm_eps: epsilon of RMSNorm.
        experts: 0, or how many experts take the place of each feed-forward layer, each half as
            wide as it: with two experts per token that is the same work.
        top: how many experts each token goes to.
        family: whose code the model is: ``"own"``, or ``"qwen3_moe"`` of transformers.

    Raises:
        ValueError: a size is not positive, ``heads`` does not fit ``hidden``, or the family is
            unknown, or has no experts.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    ffn: int = 640
    sequence: int = 128
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    experts: int = 0
    top: int = 2
    family: str = OWN

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "sequence"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"ModelConfig: {name} must be at least 1, got {value}")
        if self.experts < 0 or (self.experts and not 1 <= self.top <= self.experts):
            raise ValueError(
                "ModelConfig: experts must be 0 or more, and top at least 1 and at most experts, "
                f"got experts={self.experts} with top={self.top}"
            )
        if self.family not in (OWN, QWEN3_MOE) or (self.family == QWEN3_MOE and not self.experts):
            raise ValueError(
                f"ModelConfig: family must be {OWN!r}, or {QWEN3_MOE!r} with experts, got "
                f"{self.family!r} with experts={self.experts}"
            )
        if self.hidden % self.heads or self.head_size % 2:
            raise ValueError(
                "ModelConfig: hidden must be heads times an even head size, "
                f"got hidden={self.hidden} with heads={self.heads}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Rotary(nn.Module):
    """Rotates pairs of a head's features by an angle proportional to the position.

    Source: Su et al., RoFormer (arXiv:2104.09864), with the two halves of a head as the pairs.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.head_size // 2
        frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(config.sequence, dtype=torch.float32), frequency)
        self.register_buffer("cos", torch.cat((angle.cos(), angle.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angle.sin(), angle.sin()), -1), persistent=False)

    def forward(self, x: Tensor, exchange: SequenceExchange | None = None) -> Tensor:
        """Rotate ``x [..., length, head_size]``, a rank's part; dtype and shape are kept."""
        length, head_size = x.shape[-2:]
        cos, sin = self.cos[:length], self.sin[:length]
        if exchange is not None:
            cos, sin = (exchange.own_angles(table, length) for table in (self.cos, self.sin))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return x * cos + x.roll(head_size // 2, -1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions, through torch's own kernel."""

    def __init__(self, config: ModelConfig, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.num_attention_heads = self.num_gqa_groups = config.heads
        #: Set where ranks share sequences (``hybridq.distributed.sequence_parallel``).
        self.exchange: SequenceExchange | None = None
        self.qkv = linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = linear(config.hidden, config.hidden, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = (
            self.qkv(x).view(batch, length, 3, self.num_attention_heads, -1).permute(2, 0, 3, 1, 4)
        )
        query, key, value = heads.unbind(0)
        query, key = self.rotary(query, self.exchange), self.rotary(key, self.exchange)
        if self.exchange is None:
            mixed = plain_attention(query, key, value, is_causal=True)
        else:
            mixed = self.exchange.attend(_causal, query, key, value, None)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return result


def _causal(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_grouped: bool
) -> Tensor:
    return plain_attention(query, key, value, is_causal=True)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``. Source: Shazeer (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.gate_up = linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def _feed_forward(config: ModelConfig, linear: type[nn.Linear]) -> nn.Module:
    if config.experts:
        width = max(config.ffn // 2, 1)
        return MixtureOfExperts(config.hidden, width, config.experts, config.top)
    return FeedForward(config, linear)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, linear)
        self.ffn_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.ffn = _feed_forward(config, linear)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x))
        result: Tensor = attended + self.ffn(self.ffn_norm(attended))
        return result


class Head(nn.Linear):
    """``nn.Linear`` in high precision, by a product that is fast on any CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T``, in torch.autocast's dtype."""
        return plain_linear(x, self.weight, self.bias)


class Transformer(nn.Module):
    """The language model. ``lm_head`` is never quantized.

    Args:
        config: the sizes.
        linear: the class of every projection: ``nn.Linear`` or a subclass with its constructor.
    """

    def __init__(self, config: ModelConfig, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY_SIZE, config.hidden)
        self.blocks = nn.ModuleList(Block(config, linear) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = Head(config.hidden, VOCABULARY_SIZE, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, in the order of the modules, from torch's global generator."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0)
            elif isinstance(module, MixtureOfExperts):
                module.reset_parameters(math.sqrt(2 * self.config.layers))
            elif isinstance(module, nn.Linear) and not name.endswith(".router"):
                std = 1 / math.sqrt(module.in_features)
                # What adds to the residual stream starts small, so that its variance does not
                # grow with depth (Radford et al., 2019).
                if name.endswith((".out", ".down")):
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: ``[batch, length]`` int64 in 0..255, ``length <= config.sequence``.

        Returns:
            ``[batch, length, 256]`` in the compute dtype.

        Raises:
            ValueError: the sequence is longer than the model's rotary table.
        """
        if tokens.shape[-1] > self.config.sequence:
            raise ValueError(
                f"Transformer: sequence must be at most {self.config.sequence}, "
                f"got {tokens.shape[-1]}"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.parameters())
