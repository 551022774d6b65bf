"""The same model of other modules: what ``--modules`` chooses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..nn import LayerNormMLP, Linear, RMSNormLinear
from .hf_moe import HfMoe
from .model import OWN, Attention, Block, FeedForward, ModelConfig, Transformer

PLAIN = "plain"


class FusedBlock(nn.Module):
    """A block whose norms, and whose SwiGLU, are parts of the modules that quantize their result.

    Args:
        block: the block of separate modules; its parameters are taken over.
        eps: epsilon of the norms.
    """

    def __init__(self, block: Block, eps: float) -> None:
        super().__init__()
        self.attention = _fused_attention(block.attention, block.attention_norm, eps)
        if isinstance(block.ffn, FeedForward):
            self.mlp: nn.Module = _fused_mlp(block.ffn, block.ffn_norm, eps)
        else:  # experts quantize their own input, after the router has seen it
            self.mlp = nn.Sequential(block.ffn_norm, block.ffn)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(x)
        result: Tensor = attended + self.mlp(attended)
        return result


def _fused_attention(attention: Attention, norm: nn.RMSNorm, eps: float) -> Attention:
    weight = attention.qkv.weight
    qkv = RMSNormLinear(weight.shape[1], weight.shape[0], eps, bias=False, device="meta")
    qkv.layer_norm_weight, qkv.weight = nn.Parameter(norm.weight), nn.Parameter(weight)
    attention.qkv = qkv  # type: ignore[assignment]
    return attention


def _fused_mlp(ffn: FeedForward, norm: nn.RMSNorm, eps: float) -> LayerNormMLP:
    hidden, width = ffn.down.weight.shape
    mlp = LayerNormMLP(
        hidden,
        width,
        eps,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        device="meta",
    )
    mlp.layer_norm_weight = nn.Parameter(norm.weight)
    mlp.fc1_weight = nn.Parameter(ffn.gate_up.weight)
    mlp.fc2_weight = nn.Parameter(ffn.down.weight)
    return mlp


def _fused(model: Transformer) -> Transformer:
    eps = model.config.norm_eps
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    model.blocks = nn.ModuleList(FusedBlock(block, eps) for block in blocks)
    return model


VARIANTS: dict[str, Callable[[Transformer], Transformer]] = {
    PLAIN: lambda model: model,
    "fused": _fused,
}
"""By name: what turns the model of separate modules into the variant, with the same values."""


def build_model(
    config: ModelConfig, linear: type[nn.Linear] = Linear, modules: str = PLAIN
) -> Transformer | HfMoe:
    """Return the model of a configuration, its weights drawn from torch's global generator.

    Args:
        config: the sizes and the family.
        linear: class of the projections of the demo's own model.
        modules: a name in ``VARIANTS``.

    Raises:
        ImportError: the family is of a package that is not installed.
    """
    if config.family == OWN:
        return VARIANTS[modules](Transformer(config, linear))
    return HfMoe(config)
