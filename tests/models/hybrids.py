"""Decoders with products that are no linear layers: recurrences, block-diagonal maps, others."""

from __future__ import annotations

from typing import Any

from .decoders import decoder
from .family import DECODER, VOCABULARY, Family

__all__ = ["HYBRIDS"]

_GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

HYBRIDS = (
    decoder(
        "RecurrentGemma",
        "RecurrentGemma",
        "state space and attention",
        num_hidden_layers=3,
        lru_width=64,
        attention_window_size=16,
        head_dim=16,
    ),
    Family(
        "Mamba",
        "state space",
        "MambaForCausalLM",
        "MambaConfig",
        {**DECODER, "state_size": 8, "time_step_rank": 8},
        attention="eager",
    ),
    Family(
        "Falcon-Mamba",
        "state space",
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {**DECODER, "state_size": 8, "time_step_rank": 8},
        attention="eager",
    ),
    Family(
        "XLNet",
        "dense",
        "XLNetLMHeadModel",
        "XLNetConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_inner": 128,
            "n_layer": 2,
            "n_head": 4,
            "pad_token_id": 0,
        },
        attention="eager",
    ),
    decoder(
        "DeepSeek-V4",
        "DeepseekV4",
        "experts",
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        qk_rope_head_dim=8,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=16,
        hc_mult=2,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=128,
        sliding_window=16,
        attention="eager",
    ),
    decoder(
        "Qwen3.5",
        "Qwen3_5",
        "state space and attention",
        config="Qwen3_5TextConfig",
        head_dim=16,
        num_hidden_layers=4,
        **_GATED_DELTA,
    ),
    decoder(
        "Qwen3.5-MoE",
        "Qwen3_5Moe",
        "state space and experts",
        config="Qwen3_5MoeTextConfig",
        head_dim=16,
        num_hidden_layers=4,
        shared_expert_intermediate_size=64,
        **_MOE,
        **_GATED_DELTA,
    ),
    decoder(
        "Inkling",
        "Inkling",
        "experts",
        config="InklingTextConfig",
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=16,
        rel_extent=16,
        d_rel=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=64,
    ),
)
