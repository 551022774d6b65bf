"""A family of models: how a small random one is made, and what it is given.

Every model has two or a few layers of 64 features; its weights are drawn so that activations keep
their size from layer to layer, since at a library's own 0.02 a comparison would compare nearly
nothing. Nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = [
    "DECODER",
    "SIDE",
    "TEXT",
    "VISION",
    "VOCABULARY",
    "Family",
    "both",
    "classes",
    "draw_weights",
    "images",
    "pairs",
    "speech",
    "tokens",
    "waves",
]

VOCABULARY, BATCH, LENGTH, SIDE = 96, 2, 32, 32
#: What most families call the same.
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}


def tokens(_: Any = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def both(_: Any = None) -> dict[str, torch.Tensor]:
    return {**tokens(), "labels": torch.randint(3, VOCABULARY, (BATCH, LENGTH // 2))}


def ids(_: Any = None) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}


def classes(_: Any = None) -> dict[str, torch.Tensor]:
    return {**ids(), "labels": torch.randint(0, 2, (BATCH,))}


def pixels(_: Any = None) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE)}


def images(_: Any = None) -> dict[str, torch.Tensor]:
    return {**pixels(), "labels": torch.randint(0, 2, (BATCH,))}


def waves(_: Any = None) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 1600)}


def speech(config: Any) -> dict[str, torch.Tensor]:
    frames = 2 * config.max_source_positions
    features = torch.randn(BATCH, config.num_mel_bins, frames)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (BATCH, 16))}


def pairs(_: Any = None) -> dict[str, Any]:
    return {**ids(), **pixels(), "return_loss": True}


@dataclass(frozen=True)
class Family:
    """One family of models.

    Args:
        name: its own.
        kind: what sort of model it is.
        model: the class of transformers.
        config: the class of its configuration.
        options: of the configuration.
        inputs: from the configuration to what `forward` takes.
        generates: it has `generate` of tokens.
        attention: `"eager"` where the library has no other for it.
    """

    name: str
    kind: str
    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[Any], dict[str, Any]] = field(default=tokens)
    generates: bool = True
    attention: str = "sdpa"

    def build(self, seed: int = 0) -> nn.Module:
        """Return a model with drawn weights, in FP32, in evaluation mode."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        torch.manual_seed(seed)
        made = getattr(transformers, self.model)._from_config(
            config, attn_implementation=self.attention, dtype=torch.float32
        )
        draw_weights(made)
        return made.eval()

    def batch(self, model: Any, seed: int = 1) -> dict[str, Any]:
        """Return one batch that the model takes."""
        torch.manual_seed(seed)
        return self.inputs(model.config)


def draw_weights(model: nn.Module) -> None:
    """Draw all matrices so that a product keeps the size of what it is given."""
    seen: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() < 2 or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if isinstance(module, nn.Embedding):
                    parameter.normal_(std=0.3)
                else:
                    parameter.normal_(std=1 / math.sqrt(parameter[0].numel()))
