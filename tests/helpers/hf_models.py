"""Small random models of transformers, saved as folders, with weights large enough to matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridq import QuantizedTensor

transformers = pytest.importorskip("transformers", minversion="5.23")

#: What forwards and their outputs call a KV cache.
CACHE = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "tied": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **GROUPED,
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "wide": ("LlamaConfig", {**GROUPED, "hidden_size": 256, "intermediate_size": 256}),
    "wide_moe": (
        "Qwen3MoeConfig",
        {
            **GROUPED,
            "hidden_size": 128,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **SIZES,
            "intermediate_size": 96,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**GROUPED, "num_local_experts": 4, "head_dim": 16}),
    "llama4": (
        "Llama4TextConfig",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
            "head_dim": 16,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}
IDS = torch.arange(24).reshape(2, 12) * 5 % 96


def config(kind: str) -> Any:
    """The configuration of a small model."""
    name, options = CONFIGS[kind]
    return getattr(transformers, name)(**options)


def make(kind: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """A model with weights five times as large as transformers draws them."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def saved(kind: str, folder: Path, **options: Any) -> Path:
    """A folder with such a model."""
    make(kind, **options).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: Any) -> torch.Tensor:
    """What a model says."""
    with torch.no_grad():
        return model(IDS).logits


def quantized(model: nn.Module) -> dict[str, QuantizedTensor]:
    """Quantized parameters by name."""
    named = model.named_parameters()
    return {name: one for name, one in named if isinstance(one, QuantizedTensor)}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers of two models are equal, bit for bit, and of equal quantizers."""
    mine, others = one.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    assert list(mine) == list(others)
    for name, value in mine.items():
        same = others[name]
        assert type(value) is type(same) and value.dtype == same.dtype, name
        if not isinstance(value, QuantizedTensor):
            assert torch.equal(value, same), name
            continue
        assert value.quantizer.text == same.quantizer.text, name
        pairs = zip(value.tensor_storage.planes, same.tensor_storage.planes, strict=True)
        for plane, again in pairs:
            assert (plane.direction, plane.spec) == (again.direction, again.spec), name
            for buffer, bits in plane.buffers.items():
                mine_bytes, other_bytes = (
                    x.view(torch.uint8) for x in (bits, again.buffers[buffer])
                )
                assert torch.equal(mine_bytes, other_bytes), (name, plane.direction, buffer)


def save_tokenizer(folder: Path) -> None:
    """Give a folder a tokenizer: the words w0 to w89 are the tokens 2 to 91, between spaces."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(90)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    kind = transformers.PreTrainedTokenizerFast
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<s>", "pad_token": "<s>"}
    kind(tokenizer_object=made, **special).save_pretrained(folder)
