"""A mixture of experts of Hugging Face's transformers as the demo's language model: Qwen3-MoE.

Nothing of the model is ours: `hybridq.convert` finds its projections and its experts. Bytes are its
tokens, as of the demo's own model, and the sizes are the demo's too.

Source: transformers' Qwen3MoeForCausalLM (Qwen3 technical report, arXiv:2505.09388).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ..integrations import require
from .model import VOCABULARY_SIZE, ModelConfig

__all__ = ["HfMoe"]


class HfMoe(nn.Module):
    """Qwen3-MoE with random weights.

    Args:
        config: the sizes; each expert is half as wide as `ffn`.

    Raises:
        ImportError: transformers is not installed, or of a version that is not known to work.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        require("transformers")
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        self.config = config
        sizes: Any = Qwen3MoeConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            moe_intermediate_size=max(config.ffn // 2, 1),
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.head_size,
            num_experts=config.experts,
            num_experts_per_tok=config.top,
            norm_topk_prob=True,
            max_position_embeddings=config.sequence,
            rope_theta=config.rope_base,
            rms_norm_eps=config.norm_eps,
            use_cache=False,
        )
        self.model: Any = Qwen3MoeForCausalLM(sizes)
        self._draw()

    def _draw(self) -> None:
        """Draw as the demo's own model does: a product keeps the size of what it is given."""
        shrink = math.sqrt(2 * self.config.layers)
        for name, weight in self.model.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(weight, std=1.0)
            elif weight.dim() > 1:
                std = 1 / math.sqrt(weight.shape[-1])
                residual = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(weight, std=std / shrink if residual else std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte `[batch, length, 256]` of tokens `[batch, length]`."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(p.numel() for p in self.parameters())
