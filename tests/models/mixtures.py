"""Every family of mixtures that transformers marks, as small random models, made by one rule.

A family's configuration gets small sizes under all names that such sizes have; few families need
options of their own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .family import VOCABULARY, draw_weights

__all__ = ["REFUSED", "UNTRIED", "batch_of", "build", "marked"]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    "moe_num_experts": 8,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_k"), 2),
    **dict.fromkeys(("moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 4,
    "index_topk": 16,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 16),
    "mamba_expand": 2,
    "output_router_logits": True,
}
#: What single families need beside, or instead.
_OPTIONS: dict[str, dict[str, Any]] = {
    "beam": {"num_hidden_layers": 4},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "deepseek_v4": {"output_router_logits": False},
    "dots3_note": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "flint": {"num_hidden_layers": 4},
    "gemma4": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    },
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "num_hidden_layers": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "glm4v_moe": {"head_dim": 128},
    "ernie4_5_vl_moe": {
        "hidden_size": 128,  # one head, of the size of its rotary sections
        "moe_intermediate_size": [64, 64],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["attention", "moe"], "n_group": 1},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
#: Families of which no small text model is made here, and why.
UNTRIED: dict[str, str] = {}
#: Families that `parallelize_experts` refuses, and what it says.
REFUSED: dict[str, str] = {}


def marked() -> dict[str, tuple[str, ...]]:
    """Return the families whose experts transformers marks, with the names of those classes."""
    import transformers

    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = re.findall(
            r"@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)", file.read_text()
        )
        if names:
            found[file.parent.name] = tuple(names)
    return found


def _models(family: str) -> Iterator[Any]:
    """Give the classes of a family's text models, those that make a loss first."""
    import transformers

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = {
        name: one
        for name, one in vars(module).items()
        if inspect.isclass(one)
        and issubclass(one, transformers.PreTrainedModel)
        and one.__module__ == module.__name__
        and getattr(one, "config_class", None) is not None
    }
    for ending in ("ForCausalLM", "TextModel", "Model"):
        yield from (
            one
            for name, one in own.items()
            if name.endswith(ending) and not re.search("PreTrained|Vision|Audio", name)
        )


def _config(family: str, kind: Any) -> Any:
    """Return a small configuration of a class."""
    known, default = {}, kind()
    for name, value in _SIZES.items():
        try:
            has = hasattr(default, name)
        except Exception:  # a size of each layer
            has = False
        if has:
            known[name] = value
    if "qk_rope_head_dim" in known:  # multi-head latent attention
        known.pop("head_dim", None)
        known["num_key_value_heads"] = 4
    return kind(**{**known, **_OPTIONS.get(family, {})})


def build(family: str, seed: int = 0) -> nn.Module:
    """Return a small model of a family with drawn weights, in FP32, in evaluation mode.

    Args:
        family: as `marked` has it.
        seed: of the weights.
    """
    names, problems = marked()[family], []
    for kind in _models(family):
        if getattr(kind.config_class(), "sub_configs", None):
            continue  # of images and text
        torch.manual_seed(seed)
        config = _config(family, kind.config_class)
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
        if not any(type(one).__name__ in names for one in model.modules()):
            problems.append(f"{kind.__name__} has no experts")
            continue
        draw_weights(model)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by tokens: zeros, all of them one expert
                buffer.copy_(torch.rand(*buffer.shape[:-1], 8).topk(buffer.shape[-1]).indices)
        made: nn.Module = model.eval()
        return made
    raise LookupError(f"{family}: {problems}")


def batch_of(model: Any, seed: int = 1) -> dict[str, Any]:
    """Return one batch that a model takes.

    Args:
        model: of `build`.
        seed: of the tokens.
    """
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, 32))
    takes = inspect.signature(type(model).forward).parameters
    labels = {"labels": ids.clone()} if "labels" in takes else {}
    return {"input_ids": ids, "use_cache": False, **labels}
