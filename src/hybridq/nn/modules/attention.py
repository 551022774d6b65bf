"""MultiheadAttention: torch's SDPA between quantized projections, of one sequence or of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ...recipes.roles import GRAD_INPUT
from ..autograd import plain_attention, with_quantized_gradient
from ..weights import takes_separate_names
from .attention_masks import check_mask_type, visible
from .exchange import SequenceExchange
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .linear_part import InitMethod, one_dtype, run_part
from .parallel_options import ParallelOptions
from .plain_norm import PlainNorm
from .quantized_module import QuantizedModule
from .rotary import apply_rotary

__all__ = ["MultiheadAttention"]

_FORMATS: Final = ("sbhd", "bshd")
_TYPES: Final = ("self", "cross")

#: Angles for queries and keys, or one for each.
Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _BiasApart(Linear):
    """A linear module that leaves its bias to whoever calls it."""

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor:
        """Return `input @ weight.T`."""
        self._check_first(is_first_microbatch)
        recipe, first = self._recipe(), is_first_microbatch
        if recipe is not None and fp8_grad:
            input = with_quantized_gradient(input, self._boundary_quantizer(recipe, GRAD_INPUT))
        y = run_part(self, "", recipe, input, self.weight, None, first)
        return y if recipe is None or not fp8_output else self._quantized_output(y, recipe)


class MultiheadAttention(nn.Module):
    """Attention: projection to queries, keys and values, SDPA, projection back.

    The projections run under the recipe of `hybridq.autocast`; attention itself is
    `torch.nn.functional.scaled_dot_product_attention`. Submodules: `layernorm_qkv` with
    `input_layernorm`, else `qkv`; of cross-attention `layernorm_query` or `query_layer`, and
    `key_value`; `q_norm` and `k_norm` with `qk_norm_type`; `proj`. A state_dict with
    `query_weight`, `key_weight`, `value_weight` (and biases) in the place of one `weight`, as
    Transformer Engine's by default, is taken too where rows are not interleaved.

    Args:
        hidden_size: columns of the input and of the output.
        num_attention_heads: number of heads of queries.
        kv_channels: features of a head; None: `hidden_size / num_attention_heads`.
        attention_dropout: probability, in training.
        layernorm_epsilon: of the norm.
        init_method, output_layer_init_method: of the first and of the second projection's weight,
            as `LayerNormLinear` takes it.
        attn_mask_type: `"causal"`, `"no_mask"`, `"padding"`, `"padding_causal"`, `"arbitrary"`,
            `"causal_bottom_right"` or `"padding_causal_bottom_right"`, whose diagonal ends at the
            last query and key.
        window_size: `(left, right)`, how many keys before and after its own a query sees; -1: all.
        num_gqa_groups: number of heads of keys and values, each of which serves as many heads of
            queries; None: as many as those.
        params_dtype: another name of `dtype`.
        return_bias: the bias of the second projection is returned and not added.
        input_layernorm: a norm stands before the first projection.
        return_layernorm_output: the norm's result is returned too.
        rotary_pos_interleaved: features 2i and 2i + 1 of a head are rotated together, not i and
            i + d/2.
        zero_centered_gamma, normalization: as `LayerNormLinear` takes them.
        qkv_weight_interleaved: the first projection's rows lie group by group (its queries, key,
            value); else all queries, all keys, all values.
        bias: whether the projections have a bias.
        attention_type: `"self"`; `"cross"`: keys and values are of `encoder_output`.
        qk_norm_type: None, `"RMSNorm"`, `"LayerNorm"` or `"L2Normalization"` of each head's
            queries and keys, in high precision.
        qk_norm_eps: of these norms.
        qk_norm_before_rope: they come before the rotary positions, else after.
        qkv_format: `"sbhd"`: the input is `[length, batch, hidden]`; `"bshd"`: batch first.
        fuse_wgrad_accumulation: as for `Linear`, of the weight of every projection.
        set_parallel_mode: each rank has as many heads, of queries as of keys and values; the first
            projections are column parallel, the second one row parallel.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as for `Linear`.
        device, dtype: of the parameters; None: torch's defaults.
        name: qualified name for the roles that a recipe's factory sees: the projections are
            `<name>.layernorm_linear_qkv` or `<name>.linear_qkv`, and `<name>.proj`. Where it is
            None, `hybridq.convert` gives them the names that they have in the model.

    Raises:
        ValueError: sizes do not divide, or an option is unknown.
        TypeError: `name` is no string.

    Source: names and meanings of the arguments: Transformer Engine's MultiheadAttention.

    Example:
        >>> import torch, hybridq
        >>> attention = hybridq.MultiheadAttention(64, 4, num_gqa_groups=2, input_layernorm=True)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = attention(torch.randn(10, 2, 64))
        >>> y.shape
        torch.Size([10, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        input_layernorm: bool = False,
        return_layernorm_output: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        attention_type: str = "self",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        qkv_format: str = "sbhd",
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.kv_channels = kv_channels or hidden_size // max(num_attention_heads, 1)
        _check_sizes(hidden_size, num_attention_heads, self.num_gqa_groups, kv_channels)
        if qkv_format not in _FORMATS:
            raise ValueError(f"attention: the format must be sbhd or bshd, got {qkv_format!r}")
        if attention_type not in _TYPES:
            raise ValueError(f"attention: the type must be self or cross, got {attention_type!r}")
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"attention: dropout must be in [0, 1), got {attention_dropout}")
        if return_layernorm_output and not input_layernorm:
            raise ValueError("attention: return_layernorm_output needs input_layernorm, got False")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"attention: name must be a string, got {type(name).__name__}")
        self.attention_dropout, self.qkv_format = float(attention_dropout), qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        check_mask_type(attn_mask_type, window_size)
        self.return_bias, self.input_layernorm = bool(return_bias), bool(input_layernorm)
        self.return_layernorm_output = bool(return_layernorm_output)
        self.rotary_pos_interleaved = bool(rotary_pos_interleaved)
        self.qkv_weight_interleaved = bool(qkv_weight_interleaved)
        self.attention_type, self.qk_norm_before_rope = attention_type, bool(qk_norm_before_rope)
        if sequence_parallel and qkv_format != "sbhd":
            raise ValueError(
                "attention: sequence_parallel takes qkv_format='sbhd', whose tokens lie along the "
                f"first dimension, got {qkv_format!r}"
            )
        ranks = ParallelOptions(tp_group, tp_size, sequence_parallel)
        self._size = ranks.size("attention") if set_parallel_mode else 1
        if set_parallel_mode:
            for what in ("num_attention_heads", "num_gqa_groups"):
                setattr(self, what, ranks.share("attention", what, getattr(self, what)))
        options: dict[str, Any] = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "parallel_mode": "column" if set_parallel_mode else None,
            "sequence_parallel": sequence_parallel,
            "get_rng_state_tracker": get_rng_state_tracker,
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "device": device,
            "dtype": one_dtype(type(self).__name__, dtype, params_dtype),
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "init_method": init_method,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        self._make_projections(hidden_size, name, norm, options)
        self.q_norm: PlainNorm | None = None
        self.k_norm: PlainNorm | None = None
        if qk_norm_type is not None:
            weights = {"device": device, "dtype": options["dtype"]}
            of_head: tuple[Any, ...] = (self.kv_channels, qk_norm_type, qk_norm_eps)
            self.q_norm = PlainNorm(*of_head, **weights)
            self.k_norm = PlainNorm(*of_head, **weights)
        own = None if name is None else f"{name}.proj"
        #: Set where ranks share sequences (`hybridq.distributed.sequence_parallel`).
        self.exchange: SequenceExchange | None = None
        kind = _BiasApart if self.return_bias else Linear
        inner = num_attention_heads * self.kv_channels
        if set_parallel_mode:
            options = {**options, "parallel_mode": "row"}
            self._share_norms()
        self.proj: Linear = kind(inner, hidden_size, name=own, **options)
        _filled(self.proj, output_layer_init_method)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the group of the ranks that have the other heads: see `Linear`.

        Args:
            tp_group: a process group of `tp_size` ranks, or its name; None changes nothing.
        """
        for child in self.modules():
            if isinstance(child, QuantizedModule):
                child.set_tensor_parallel_group(tp_group)
        self._share_norms()

    def _share_norms(self) -> None:
        """Have the gradients of norms of heads summed over the ranks that have the heads."""
        first = next((m for m in self.modules() if isinstance(m, QuantizedModule)), None)
        group = "" if first is None else next(iter(first.parallel.values())).group
        norm: PlainNorm | None
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.group = group

    def _make_projections(
        self, hidden_size: int, name: str | None, norm: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Make what queries, keys and values come from."""
        inner, of_keys = (
            n * self.kv_channels for n in (self.num_attention_heads, self.num_gqa_groups)
        )
        is_cross = self.attention_type == "cross"
        first, short = ("query", "q") if is_cross else ("qkv", "qkv")
        size = self._size
        width = size * (inner if is_cross else inner + 2 * of_keys)
        # None where they do not belong, so that every attribute is there.
        self.qkv: Linear | None = None
        self.layernorm_qkv: LayerNormLinear | None = None
        self.query_layer: Linear | None = None
        self.layernorm_query: LayerNormLinear | None = None
        self.key_value: Linear | None = None
        made: Linear | LayerNormLinear
        if self.input_layernorm:
            own = None if name is None else f"{name}.layernorm_linear_{short}"
            made = LayerNormLinear(hidden_size, width, name=own, **norm, **options)
            setattr(self, f"layernorm_{first}", made)
        else:
            own = None if name is None else f"{name}.linear_{short}"
            made = _filled(Linear(hidden_size, width, name=own, **options), norm["init_method"])
            setattr(self, "query_layer" if is_cross else "qkv", made)
        rows = {"query": inner} if is_cross else {"query": inner, "key": of_keys, "value": of_keys}
        takes_separate_names(made, {} if self.qkv_weight_interleaved else rows)
        if is_cross:
            own = None if name is None else f"{name}.linear_kv"
            both = Linear(hidden_size, 2 * size * of_keys, name=own, **options)
            self.key_value = _filled(both, norm["init_method"])
            rows = {"key": of_keys, "value": of_keys}
            takes_separate_names(self.key_value, {} if self.qkv_weight_interleaved else rows)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Angles | None = None,
    ) -> Any:
        """Return the attention's result.

        Args:
            hidden_states: `[length, batch, hidden_size]`; with `qkv_format="bshd"` batch first.
            attention_mask: bool, True where a key is hidden, for the mask types that take one:
                broadcastable to `[batch, heads, queries, keys]`; of padding `[batch, 1, 1, keys]`.
            encoder_output: `[length, batch, hidden_size]`, or batch first: what cross-attention
                takes keys and values of.
            attn_mask_type, window_size: for this call; None: the constructor's.
            is_first_microbatch: as `Linear.forward` takes it.
            rotary_pos_emb: angles `[at least length, 1, 1, at most features]` that queries and
                keys are rotated by, or a pair of them; see `RotaryPositionEmbedding`.

        Where ranks share sequences (`hybridq.distributed.sequence_parallel`), `hidden_states` and
        `encoder_output` are this rank's parts; masks and angles are of the whole sequences.

        Returns:
            As `hidden_states`; with `return_bias` and `return_layernorm_output` a tuple, as of
            `LayerNormLinear`.

        Raises:
            ValueError: a mask that the mask type does not take, or none where it needs one.
            RuntimeError, TypeError, RecipeError: as of `LayerNormLinear.forward`.
        """
        if (self.key_value is None) is not (encoder_output is None):
            raise ValueError(
                f"attention: encoder_output goes with attention_type='cross', got "
                f"{'none' if encoder_output is None else tuple(encoder_output.shape)} and "
                f"{self.attention_type!r}"
            )
        normed, first = None, is_first_microbatch
        fused = self.layernorm_qkv if self.key_value is None else self.layernorm_query
        if fused is not None:
            made = fused(hidden_states, first)
            if self.return_layernorm_output:
                made, normed = made
        else:
            plain = self.qkv if self.key_value is None else self.query_layer
            made = plain(hidden_states, first)  # type: ignore[misc]
        if made.dim() != 3:
            raise ValueError(
                "attention: the input must have a length, a batch and a hidden size, got shape "
                f"{tuple(hidden_states.shape)}"
            )
        if self.key_value is None or encoder_output is None:
            query, key, value = self._heads(made)
        else:
            query, key, value = self._cross_heads(made, self.key_value(encoder_output, first))
        if self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if rotary_pos_emb is not None:
            pair = self._own_angles(rotary_pos_emb, query.shape[2], key.shape[2])
            query = apply_rotary(query, pair[0], self.rotary_pos_interleaved)
            key = apply_rotary(key, pair[1], self.rotary_pos_interleaved)
        if not self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        window = self.window_size if window_size is None else window_size
        check_mask_type(kind, window)
        world = 1 if self.exchange is None else self.exchange.world
        sizes = (query.shape[2] * world, key.shape[2] * world)
        mask, is_causal = visible(kind, window, attention_mask, *sizes, query.device)
        dropout = self.attention_dropout if self.training else 0.0
        if self.exchange is None:
            grouped = self.num_gqa_groups != self.num_attention_heads
            mixed = plain_attention(query, key, value, mask, dropout, is_causal, grouped)
        else:
            mixed = self.exchange.attend(
                lambda q, k, v, own, grouped: plain_attention(
                    q, k, v, own, dropout, is_causal, grouped
                ),
                *(query, key, value, mask),
            )
        order = (2, 0, 1, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
        y = self.proj(mixed.permute(order).flatten(2), is_first_microbatch)
        others = ([self.proj.bias] if self.return_bias else []) + (
            [] if normed is None else [normed]
        )
        return (y, *others) if others else y

    def _heads(self, made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values `[batch, heads, length, features]`."""
        heads, groups, features = self.num_attention_heads, self.num_gqa_groups, self.kv_channels
        lead = made.shape[:2]
        order = (1, 2, 0, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
        if self.qkv_weight_interleaved:
            each = made.view(*lead, groups, heads // groups + 2, features)
            parts = [p.flatten(2, 3) for p in each.split([heads // groups, 1, 1], 3)]
        else:
            parts = list(
                made.view(*lead, heads + 2 * groups, features).split([heads, groups, groups], 2)
            )
        return tuple([part.permute(order) for part in parts])

    def _cross_heads(self, query: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the same of queries, and of keys and values of another sequence."""
        groups, features = self.num_gqa_groups, self.kv_channels
        order = (1, 2, 0, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
        lead = made.shape[:2]
        if self.qkv_weight_interleaved:
            key, value = made.view(*lead, groups, 2, features).unbind(3)
        else:
            key, value = made.view(*lead, 2, groups, features).unbind(2)
        heads = query.view(*query.shape[:2], self.num_attention_heads, features)
        return tuple([part.permute(order) for part in (heads, key, value)])

    def _own_angles(
        self, angles: Angles, queries: int, keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the angles of this rank's queries and keys."""
        of_queries, of_keys = angles if isinstance(angles, tuple) else (angles, angles)
        if self.exchange is None:
            return of_queries, of_keys
        own = self.exchange.own_angles
        return own(of_queries, queries), own(of_keys, keys)

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, normed if there are norms of them."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return (
            f"num_attention_heads={self.num_attention_heads}, "
            f"num_gqa_groups={self.num_gqa_groups}, kv_channels={self.kv_channels}, "
            f"attn_mask_type={self.attn_mask_type}, qkv_format={self.qkv_format}"
        )


def _filled(module: Linear, init_method: InitMethod | None) -> Linear:
    """Return the module, its weight filled by `init_method` if there is one."""
    if init_method is not None:
        with module.drawing.drawing(), torch.no_grad():
            init_method(module.weight)
            if module.bias is not None:
                module.bias.zero_()
    return module


def _check_sizes(hidden: int, heads: int, groups: int, features: int | None) -> None:
    if heads < 1 or (features is None and hidden % heads):
        raise ValueError(
            "attention: hidden_size must be a multiple of num_attention_heads, or kv_channels "
            f"given, got {hidden} and {heads}"
        )
    if groups < 1 or heads % groups:
        raise ValueError(
            "attention: num_attention_heads must be a multiple of num_gqa_groups, got "
            f"{heads} and {groups}"
        )
