"""Attention of hybridq with Transformer Engine's order of arguments.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/attention`.
"""

from __future__ import annotations

from typing import Any

from .. import nn
from .._log import log_once
from .children import join, own_children
from .extra_state import WithoutExtraState
from .norms import OwnNorm
from .reading import Readings
from .rope import RotaryPositionEmbedding
from .signatures import constructor, forward, prepare, with_arguments
from .whole_sequences import WholeSequences, refuse_parts

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
]


def _prepare_attention(given: dict[str, Any]) -> None:
    given["name"] = given["name"] or ""
    refuse_parts("te.DotProductAttention", given.pop("cp_group"))


def _without_needless_mask(module: Any, given: dict[str, Any]) -> None:
    """Take away a mask that the mask type says nothing of, as Transformer Engine does, and say so.

    Args:
        module: with `attn_mask_type`.
        given: the arguments of its forward.
    """
    kind = given.get("attn_mask_type") or module.attn_mask_type
    if given.get("attention_mask") is None or "padding" in kind or kind == "arbitrary":
        return
    given["attention_mask"] = None
    log_once(
        f"te.attention_mask.{kind}",
        f"attention: attention_mask is not looked at, since the mask type {kind!r} takes none",
    )


@with_arguments
class InferenceParams(nn.InferenceParams):
    """`hybridq.nn.InferenceParams`; keys and values are kept in their own dtype and layout.

    What it has no like of raises, by the argument's name.
    """

    __init__ = constructor(
        nn.InferenceParams,
        "max_batch_size, max_sequence_length, num_heads_kv=16, head_dim_k=16, dtype=None, "
        "head_dim_v=None, is_paged=False, total_num_pages=None, page_size=None, "
        "num_heads_q=None, head_dim_q=None, max_ctx_len=None, qkv_format='bshd', "
        "custom_cache_manager=None",
        idle=frozenset(
            {
                *("num_heads_kv", "head_dim_k", "dtype", "head_dim_v", "num_heads_q"),
                *("head_dim_q", "max_ctx_len", "qkv_format"),
            }
        ),
    )

    def allocate_memory(self, layer_number: int) -> None:
        """Do nothing: memory is taken where a module first runs, of its own heads and dtype.

        Args:
            layer_number: of an attention module.
        """


@with_arguments
class MultiheadAttention(WholeSequences, WithoutExtraState, nn.MultiheadAttention):
    """`hybridq.MultiheadAttention`; what it has no like of raises, by the argument's name."""

    __init__ = constructor(
        nn.MultiheadAttention,
        "hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, "
        "layernorm_epsilon=1e-5, init_method=None, output_layer_init_method=None, "
        "layer_number=None, attn_mask_type='causal', window_size=None, "
        "bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, "
        "fuse_wgrad_accumulation=False, get_rng_state_tracker=None, "
        "sequence_parallel=False, params_dtype=None, return_bias=False, "
        "return_layernorm_output=False, input_layernorm=False, attention_type='self', "
        "set_parallel_mode=False, fuse_qkv_params=False, zero_centered_gamma=False, "
        "qkv_weight_interleaved=True, rotary_pos_interleaved=False, ub_overlap_ag=False, "
        "ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, "
        "ub_bulk_wgrad=False, bias=True, normalization='LayerNorm', device=None, "
        "qkv_format='sbhd', name=None, qk_norm_type=None, qk_norm_eps=1e-6, "
        "qk_norm_before_rope=False, softmax_type='vanilla', seq_length=None, "
        "micro_batch_size=None",
        prepare,
        own_children,
    )

    forward = forward(
        nn.MultiheadAttention,
        "hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, "
        "window_size=None, is_first_microbatch=None, checkpoint_core_attention=False, "
        "inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias', "
        "core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, "
        "cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, "
        "max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None",
        prepare=_without_needless_mask,
    )


@with_arguments
class DotProductAttention(WholeSequences, WithoutExtraState, nn.DotProductAttention):
    """`hybridq.nn.DotProductAttention`; what it has no like of raises, by the argument's name."""

    __init__ = constructor(
        nn.DotProductAttention,
        "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, "
        "qkv_format='sbhd', attn_mask_type='causal', window_size=None, sequence_parallel=False, "
        "tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, "
        "attention_type='self', cp_group=None, cp_global_ranks=None, cp_stream=None, "
        "cp_comm_type='p2p', softmax_scale=None, softmax_type='vanilla', return_max_logit=False, "
        "bottom_right_diagonal=None, name=None",
        _prepare_attention,
        idle=frozenset({"cp_global_ranks", "cp_stream", "cp_comm_type"}),
    )

    forward = forward(
        nn.DotProductAttention,
        "query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, "
        "cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, "
        "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, "
        "window_size=None, checkpoint_core_attention=False, core_attention_bias_type='no_bias', "
        "core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, "
        "pad_between_seqs=None, fp8_output=False, num_splits=1, bottom_right_diagonal=None",
        {"query_layer": "query", "key_layer": "key", "value_layer": "value"},
        _without_needless_mask,
    )


class ProjectionApart(Readings, nn.BiasApart):
    """The last projection of a MultiheadAttention that returns its bias."""


for _class in (MultiheadAttention, DotProductAttention, RotaryPositionEmbedding):
    join(_class, f"{__package__}.pytorch.attention")
for _class in (ProjectionApart, OwnNorm):
    join(_class)
