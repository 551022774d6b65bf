"""TransformerLayer: attention and feed-forward network of a pre-norm transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Angles, MultiheadAttention
from .fused import InitMethod, one_dtype
from .layernorm_mlp import LayerNormMLP

__all__ = ["TransformerLayer"]


class TransformerLayer(nn.Module):
    """`h = x + dropout(attention(x))`, `y = h + dropout(mlp(h))`, with norms inside the two.

    Four linear parts run under the recipe of `hybridq.autocast`. Submodules: `self_attention`
    (`layernorm_qkv`, `proj`) and `layernorm_mlp`.

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
        params_dtype: another name of `dtype`.
        apply_residual_connection_post_layernorm: what is added is the norm's result, not its
            input.
        rotary_pos_interleaved, qkv_weight_interleaved: as `MultiheadAttention` takes them.
        zero_centered_gamma, normalization, activation, bias: as `LayerNormMLP` takes them.
        device, dtype: of the parameters; None: torch's defaults.
        attn_input_format: `"sbhd"`: the input is `[length, batch, hidden_size]`; `"bshd"`: batch
            first.
        name: qualified name for the roles that a recipe's factory sees, which are then of
            `<name>.self_attention.layernorm_linear_qkv`, `<name>.self_attention.proj`,
            `<name>.layernorm_mlp.fc1` and `<name>.layernorm_mlp.fc2`. Where it is None,
            `hybridq.convert` gives them the names that they have in the model.

    Raises:
        ValueError: sizes do not divide, or an option is unknown.
        TypeError: `name` is no string.

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
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if not 0.0 <= hidden_dropout < 1.0:
            raise ValueError(f"{owner}: hidden_dropout must be in [0, 1), got {hidden_dropout}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{owner}: name must be a string, got {type(name).__name__}")
        self.hidden_dropout = float(hidden_dropout)
        self.residual_post_layernorm = bool(apply_residual_connection_post_layernorm)
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "bias": bias,
            "return_layernorm_output": self.residual_post_layernorm,
            "device": device,
            "dtype": one_dtype(owner, dtype, params_dtype),
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            rotary_pos_interleaved=rotary_pos_interleaved,
            qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format,
            name=None if name is None else f"{name}.self_attention",
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            name=None if name is None else f"{name}.layernorm_mlp",
            **shared,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Angles | None = None,
    ) -> torch.Tensor:
        """Return the layer's result.

        Args:
            hidden_states: `[length, batch, hidden_size]`; with `attn_input_format="bshd"` batch
                first.
            attention_mask, rotary_pos_emb: as `MultiheadAttention.forward` takes them.
            self_attn_mask_type, window_size: for this call; None: the constructor's.
            is_first_microbatch: as `Linear.forward` takes it.

        Returns:
            As `hidden_states`.

        Raises:
            ValueError, RuntimeError, TypeError, RecipeError: as of `MultiheadAttention.forward`.
        """
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            rotary_pos_emb=rotary_pos_emb,
        )
        hidden = self._add(hidden_states, attended)
        return self._add(hidden, self.layernorm_mlp(hidden, is_first_microbatch))

    def _add(self, residual: torch.Tensor, made: Any) -> torch.Tensor:
        if self.residual_post_layernorm:
            made, residual = made
        return residual + F.dropout(made, self.hidden_dropout, self.training)
