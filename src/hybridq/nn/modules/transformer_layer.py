"""TransformerLayer: attention and feed-forward network of a transformer, encoder or decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F

from .attention import Angles, MultiheadAttention
from .attention_call import Mask
from .constructor_arguments import checked
from .kv_cache import InferenceParams
from .layernorm_mlp import LayerNormMLP
from .linear_part import InitMethod, one_dtype
from .parallel_options import mark_own_tokens
from .parallel_weights import SplitTogether
from .plain_norm import PlainNorm
from .written_options import Check, WrittenOptions, probability, said, settled

__all__ = ["TransformerLayer"]

_TYPES: Final = ("encoder", "decoder")


def _drop_path(module: Any, name: str, value: Any) -> float:
    """Return the probability that a sample skips a branch: 1 too, and 0 where tokens are packed."""
    rate = 1.0 if value == 1 else probability(module, name, value)
    attention = module._modules.get("self_attention")
    if rate and attention is not None and attention.qkv_format == "thd":
        text = f"{name} goes with samples of their own dimension, got {value} for 'thd'"
        raise ValueError(said(module, text))
    return rate


class TransformerLayer(SplitTogether, WrittenOptions):
    """`h = x + dropout(attention(x))`, `y = h + dropout(mlp(h))`, with norms inside the two.

    The linear parts run under the recipe of `hybridq.autocast`. Submodules: `self_attention`
    (`layernorm_qkv`, `proj`), `inter_attention` of a decoder (`layernorm_query`, `key_value`,
    `proj`), `layernorm_mlp`, and `layernorm` with `output_layernorm`.

    Args:
        hidden_size: columns of the input and of the output.
        ffn_hidden_size: columns inside the feed-forward network.
        num_attention_heads: number of heads of queries.
        num_gqa_groups: number of heads of keys and values; None: as many.
        layernorm_epsilon: of both norms.
        hidden_dropout, attention_dropout: probabilities, in training.
        init_method: of the weights of the first projection of attention and of fc1, as
            `LayerNormLinear` takes it.
        output_layer_init_method: of the weights of the second projection and of fc2.
        kv_channels: features of a head; None: `hidden_size / num_attention_heads`.
        self_attn_mask_type, window_size: as `MultiheadAttention` takes `attn_mask_type` and
            `window_size`.
        enc_dec_attn_mask_type, enc_dec_window_size: the same of a decoder's cross-attention.
        params_dtype: another name of `dtype`.
        apply_residual_connection_post_layernorm: what is added is the norm's result, not its
            input.
        output_layernorm: a norm of the layer's result, in high precision, and none before the
            first projection.
        parallel_attention_mlp: attention and network take the same input, and their sum is added.
        layer_type: `"encoder"`; `"decoder"`: between attention and network stands attention to
            `encoder_output`.
        drop_path_rate: probability, in training, that a sample skips a branch; the others are
            scaled up. A decoder's cross-attention is never skipped.
        rotary_pos_interleaved, qkv_weight_interleaved: as `MultiheadAttention` takes them.
        zero_centered_gamma, normalization, activation, activation_params, bias: as `LayerNormMLP`
            takes them.
        fuse_wgrad_accumulation: as for `Linear`, of the weight of every linear part.
        set_parallel_mode: attention and network are dealt out over ranks, as `MultiheadAttention`
            and `LayerNormMLP` take it.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as for `Linear`.
        device, dtype: of the parameters; None: torch's defaults.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: as `MultiheadAttention` takes them.
        attn_input_format: `"sbhd"`: the input is `[length, batch, hidden_size]`; `"bshd"`: batch
            first; `"thd"`: `[tokens, hidden_size]`, sequences one behind the other.
        softmax_type: as `DotProductAttention` takes it.
        name: qualified name for the roles that a recipe's factory sees, which are then of
            `<name>.self_attention.layernorm_linear_qkv`, `<name>.self_attention.proj`,
            `<name>.layernorm_mlp.fc1` and `<name>.layernorm_mlp.fc2`, and of
            `<name>.inter_attention.layernorm_linear_q`, `.linear_kv` and `.proj`. Where it is None,
            `hybridq.convert` gives them the names that they have in the model.

    Raises:
        ValueError: sizes do not divide, or an option is unknown.
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Source: names, meanings and defaults of the arguments: Transformer Engine's TransformerLayer.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.TransformerLayer(
        ...     64, 160, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu"
        ... )
        >>> angles = hybridq.RotaryPositionEmbedding(16)(10)
        >>> with hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        ...     y = layer(torch.randn(10, 2, 64), rotary_pos_emb=angles)
        >>> y.shape
        torch.Size([10, 2, 64])
    """

    _written_options: ClassVar[Mapping[str, Check]] = {
        "hidden_dropout": probability,
        "drop_path_rate": _drop_path,
        "layer_type": settled,
        "residual_post_layernorm": settled,
    }

    @checked
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        device: Any = None,
        attn_input_format: str = "sbhd",
        dtype: torch.dtype | None = None,
        name: str | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if drop_path_rate and attn_input_format == "thd":
            raise ValueError(
                f"{owner}: drop_path_rate goes with samples of their own dimension, got 'thd'"
            )
        if layer_type not in _TYPES:
            raise ValueError(f"{owner}: layer_type must be encoder or decoder, got {layer_type!r}")
        is_post = bool(apply_residual_connection_post_layernorm)
        if parallel_attention_mlp and (is_post or output_layernorm or layer_type == "decoder"):
            raise ValueError(
                f"{owner}: parallel_attention_mlp goes with an encoder whose residuals are its "
                "inputs, got one of layer_type='decoder', output_layernorm and "
                "apply_residual_connection_post_layernorm too"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{owner}: name must be a string, got {type(name).__name__}")
        self.hidden_dropout = hidden_dropout
        self.drop_path_rate, self.layer_type = drop_path_rate, layer_type
        self.parallel_attention_mlp = bool(parallel_attention_mlp)
        self.residual_post_layernorm = is_post
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "get_rng_state_tracker": get_rng_state_tracker,
            "device": device,
            "dtype": one_dtype(owner, dtype, params_dtype),
        }
        attention: dict[str, Any] = {
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "qkv_format": attn_input_format,
            "softmax_type": softmax_type,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            input_layernorm=not output_layernorm,
            return_layernorm_output=is_post and not output_layernorm,
            name=None if name is None else f"{name}.self_attention",
            **attention,
            **shared,
        )
        self.inter_attention: MultiheadAttention | None = None
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                input_layernorm=True,
                return_layernorm_output=is_post,
                name=None if name is None else f"{name}.inter_attention",
                **attention,
                **shared,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=is_post,
            name=None if name is None else f"{name}.layernorm_mlp",
            **shared,
        )
        self.layernorm: PlainNorm | None = None
        if output_layernorm:
            own = (hidden_size, normalization, layernorm_epsilon, zero_centered_gamma)
            self.layernorm = PlainNorm(*own, device, shared["dtype"])
            if sequence_parallel:
                for own_name, _ in self.layernorm.named_parameters():
                    mark_own_tokens(self.layernorm, own_name)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the group of the ranks that have the other parts: see `Linear`.

        Args:
            tp_group: a process group of `tp_size` ranks, or its name; None changes nothing.
        """
        parts = (self.self_attention, self.inter_attention, self.layernorm_mlp)
        for part in parts:
            if part is not None:
                part.set_tensor_parallel_group(tp_group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask | None = None,
        *,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Mask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Angles | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        inference_params: InferenceParams | None = None,
    ) -> torch.Tensor:
        """Return the layer's result.

        Args:
            hidden_states: `[length, batch, hidden_size]`; with `attn_input_format="bshd"` batch
                first; with `"thd"` `[tokens, hidden_size]`.
            attention_mask, rotary_pos_emb: as `MultiheadAttention.forward` takes them.
            self_attn_mask_type, window_size: for this call; None: the constructor's.
            encoder_output: `[length, batch, hidden_size]`, or batch first, for a decoder.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size: of its attention to
                that, as those of its self-attention.
            is_first_microbatch: as `Linear.forward` takes it.
            checkpoint_core_attention: of both attentions, as `DotProductAttention.forward` takes
                it.
            core_attention_bias_type, core_attention_bias, alibi_slopes, inference_params: of the
                self-attention, the same.
            cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of `hidden_states`, the same.
            cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv: of a decoder's `encoder_output`;
                of an encoder the lengths of `hidden_states` once more.

        Returns:
            As `hidden_states`.

        Raises:
            ValueError, RuntimeError, TypeError, RecipeError: as of `MultiheadAttention.forward`.
        """
        first = is_first_microbatch
        of_queries: dict[str, Any] = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
        }
        of_keys: dict[str, Any] = {
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_kv": max_seqlen_kv,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            is_first_microbatch=first,
            rotary_pos_emb=rotary_pos_emb,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
            **of_queries,
            **(of_keys if self.inter_attention is None else {}),
        )
        if self.parallel_attention_mlp:
            both = attended + self.layernorm_mlp(hidden_states, first)
            return self._add(hidden_states, both, self.drop_path_rate)
        hidden = self._add(hidden_states, attended, self.drop_path_rate)
        if self.inter_attention is not None:
            attended = self.inter_attention(
                hidden,
                enc_dec_attn_mask,
                encoder_output=encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                is_first_microbatch=first,
                checkpoint_core_attention=checkpoint_core_attention,
                **of_queries,
                **of_keys,
            )
            hidden = self._add(hidden, attended)
        elif encoder_output is not None:
            raise ValueError(
                f"{type(self).__name__}: encoder_output goes with layer_type='decoder', got "
                f"{self.layer_type!r}"
            )
        y = self._add(hidden, self.layernorm_mlp(hidden, first), self.drop_path_rate)
        return y if self.layernorm is None else self.layernorm(y)

    def _add(self, residual: torch.Tensor, made: Any, drop_path_rate: float = 0.0) -> torch.Tensor:
        """Return residual plus branch; `made` has the residual with it where that is a norm's."""
        if isinstance(made, tuple):
            made, residual = made
        made = F.dropout(made, self.hidden_dropout, self.training)
        if drop_path_rate and self.training:
            shape = [1] * made.dim()
            batch = 1 if self.self_attention.qkv_format == "sbhd" else 0  # whose samples skip
            shape[batch] = made.shape[batch]
            stays = torch.rand(shape, dtype=torch.float32, device=made.device) >= drop_path_rate
            kept = 1.0 - drop_path_rate or 1.0  # of 1 nothing stays
            made = torch.where(stays, made / kept, 0.0)
        return residual + made
