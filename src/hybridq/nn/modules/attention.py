"""MultiheadAttention: torch's SDPA between quantized projections, of one sequence or of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..autograd import checkpoint, plain_attention
from ..weights import takes_separate_names
from .attention_call import AttentionCall, Mask
from .attention_masks import visible
from .attention_parts import INPUTS, OPTIONS, BiasApart, check_angles, check_shared, check_sizes
from .constructor_arguments import checked
from .dot_product_attention import DotProductAttention
from .exchange import SequenceExchange
from .kv_cache import InferenceParams
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .linear_part import InitMethod, one_dtype
from .packed_sequences import Packed, Packing
from .parallel_options import ParallelOptions
from .parallel_weights import SplitTogether
from .plain_norm import PlainNorm
from .quantized_module import QuantizedModule
from .rotary import apply_rotary
from .written_options import WrittenOptions

__all__ = ["MultiheadAttention"]

_TYPES: Final = ("self", "cross")

#: Angles for queries and keys, or one for each.
Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class MultiheadAttention(SplitTogether, WrittenOptions):
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
        qkv_format: `"sbhd"`: the input is `[length, batch, hidden]`; `"bshd"`: batch first;
            `"thd"`: `[tokens, hidden]`, sequences one behind the other.
        fuse_wgrad_accumulation: as for `Linear`, of the weight of every projection.
        set_parallel_mode: each rank has as many heads, of queries as of keys and values; the first
            projections are column parallel, the second one row parallel.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as for `Linear`.
        device, dtype: of the parameters; None: torch's defaults.
        name: qualified name for the roles that a recipe's factory sees: the projections are
            `<name>.layernorm_linear_qkv` or `<name>.linear_qkv`, and `<name>.proj`. Where it is
            None, `hybridq.convert` gives them the names that they have in the model.
        softmax_type: as `DotProductAttention` takes it; offset: `core_attention.softmax_offset`.

    Raises:
        ValueError: sizes do not divide, or an option is unknown.
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Source: names and meanings of the arguments: Transformer Engine's MultiheadAttention.

    Example:
        >>> import torch, hybridq
        >>> attention = hybridq.MultiheadAttention(64, 4, num_gqa_groups=2, input_layernorm=True)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = attention(torch.randn(10, 2, 64))
        >>> y.shape
        torch.Size([10, 2, 64])
    """

    _written_options = OPTIONS

    @checked
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
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.kv_channels = kv_channels or hidden_size // max(num_attention_heads, 1)
        check_sizes(hidden_size, num_attention_heads, self.num_gqa_groups, kv_channels)
        if attention_type not in _TYPES:
            raise ValueError(f"attention: the type must be self or cross, got {attention_type!r}")
        if return_layernorm_output and not input_layernorm:
            raise ValueError("attention: return_layernorm_output needs input_layernorm, got False")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"attention: name must be a string, got {type(name).__name__}")
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.return_bias, self.input_layernorm = bool(return_bias), bool(input_layernorm)
        self.return_layernorm_output = bool(return_layernorm_output)
        self.rotary_pos_interleaved = bool(rotary_pos_interleaved)
        self.qkv_weight_interleaved = bool(qkv_weight_interleaved)
        self.attention_type, self.qk_norm_before_rope = attention_type, bool(qk_norm_before_rope)
        if sequence_parallel and qkv_format == "bshd":
            raise ValueError(
                "attention: sequence_parallel takes qkv_format='sbhd' or 'thd', whose tokens lie "
                f"along the first dimension, got {qkv_format!r}"
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
            "init_method": init_method,
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "device": device,
            "dtype": one_dtype(type(self).__name__, dtype, params_dtype),
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
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
        # Its heads are this rank's; it has parameters with softmax_type="learnable" alone.
        self.core_attention = DotProductAttention(
            self.num_attention_heads,
            self.kv_channels,
            self.num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            sequence_parallel=sequence_parallel,
            get_rng_state_tracker=get_rng_state_tracker,
            attention_type=attention_type,
            softmax_type=softmax_type,
            device=device,
            name="" if name is None else f"{name}.core_attention",
        )
        #: Set where ranks share sequences (`hybridq.distributed.sequence_parallel`).
        self.exchange: SequenceExchange | None = None
        kind = BiasApart if self.return_bias else Linear
        inner = num_attention_heads * self.kv_channels
        if set_parallel_mode:
            options = {**options, "parallel_mode": "row"}
            self._share_norms()
        options["init_method"] = output_layer_init_method
        self.proj: Linear = kind(inner, hidden_size, name=own, **options)

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
        part = None if first is None else next(iter(first.parallel.values()), None)
        group = "" if part is None else part.group  # of one rank there are no parts
        norm: PlainNorm | None
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.group = group

    def _make_projections(
        self, hidden_size: int, name: str | None, norm: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Make what queries, keys and values come from."""
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        inner, of_keys = heads * self.kv_channels, groups * self.kv_channels
        is_cross = self.attention_type == "cross"
        first, short = ("query", "q") if is_cross else ("qkv", "qkv")
        width = self._size * (inner if is_cross else inner + 2 * of_keys)
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
            made = Linear(hidden_size, width, name=own, **options)
            setattr(self, "query_layer" if is_cross else "qkv", made)
        rows = {"query": inner} if is_cross else {"query": inner, "key": of_keys, "value": of_keys}
        takes_separate_names(made, {} if self.qkv_weight_interleaved else rows)
        if is_cross:
            own = None if name is None else f"{name}.linear_kv"
            width = 2 * self._size * of_keys
            self.key_value = Linear(hidden_size, width, name=own, **options)
            rows = {"key": of_keys, "value": of_keys}
            takes_separate_names(self.key_value, {} if self.qkv_weight_interleaved else rows)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask | None = None,
        *,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
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
    ) -> Any:
        """Return the attention's result.

        Args:
            hidden_states: `[length, batch, hidden_size]`; with `qkv_format="bshd"` batch first;
                with `"thd"` `[tokens, hidden_size]`.
            attention_mask: bool, True where a key is hidden, for the mask types that take one, or
                a pair, as `DotProductAttention.forward` takes it.
            encoder_output: `[length, batch, hidden_size]`, or batch first: what cross-attention
                takes keys and values of.
            attn_mask_type, window_size: for this call; None: the constructor's.
            is_first_microbatch: as `Linear.forward` takes it.
            rotary_pos_emb: angles `[at least length, 1, 1, at most features]` that queries and
                keys are rotated by, or a pair of them; see `RotaryPositionEmbedding`. Each packed
                sequence begins with the first.
            checkpoint_core_attention, core_attention_bias_type, core_attention_bias, alibi_slopes:
                as `DotProductAttention.forward` takes them.
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: the same.
            max_seqlen_q, max_seqlen_kv, inference_params: the same.

        Where ranks share sequences (`hybridq.distributed.sequence_parallel`), `hidden_states` and
        `encoder_output` are this rank's parts; masks and angles are of the whole sequences, and
        there are no biases, lengths, or tokens of steps before.

        Returns:
            As `hidden_states`; with `return_bias` and `return_layernorm_output` a tuple, as of
            `LayerNormLinear`.

        Raises:
            ValueError: a mask that the mask type does not take, or none where it needs one; or
                arguments that do not go together.
            RuntimeError, TypeError, RecipeError: as of `LayerNormLinear.forward`.
        """
        if (self.key_value is None) is not (encoder_output is None):
            raise ValueError(
                f"attention: encoder_output goes with attention_type='cross', got "
                f"{'none' if encoder_output is None else tuple(encoder_output.shape)} and "
                f"{self.attention_type!r}"
            )
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        window = self.window_size if window_size is None else window_size
        of_scores = (core_attention_bias_type, core_attention_bias, alibi_slopes)
        call = AttentionCall.of(kind, window, attention_mask, None, *of_scores)
        sizes = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        packed = Packed(*sizes, max_seqlen_q, max_seqlen_kv)
        if self.exchange is not None:
            check_shared(call, packed, self.core_attention, inference_params)
        if inference_params is not None and self.key_value is not None:
            raise ValueError("attention: inference_params go with self-attention, got 'cross'")
        normed, first = None, is_first_microbatch
        fused = self.layernorm_qkv if self.key_value is None else self.layernorm_query
        if fused is not None:
            made = fused(hidden_states, first)
            if self.return_layernorm_output:
                made, normed = made
        else:
            plain = self.qkv if self.key_value is None else self.query_layer
            made = plain(hidden_states, first)  # type: ignore[misc]
        both = None
        if made.dim() == 2 and self.qkv_format == "thd":
            key_tokens = hidden_states if encoder_output is None else encoder_output
            if self._size > 1:  # tokens may be dealt out before the projection
                key_tokens = made if encoder_output is None else encoder_output
            both = packed.packings(made.shape[0], key_tokens.shape[0])
            made = made.unsqueeze(0)
        elif made.dim() != 3 or self.qkv_format == "thd":
            raise ValueError(
                f"attention: the input must be {INPUTS[self.qkv_format]}, got shape "
                f"{tuple(hidden_states.shape)}"
            )
        if self.key_value is None or encoder_output is None:
            query, key, value = self._heads(made)
        else:
            others = self.key_value(encoder_output, first)
            query, key, value = self._cross_heads(made, others if both is None else others[None])
        if both is None:
            call = call._replace(lengths=packed.lengths(query, key))
        if self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if rotary_pos_emb is not None:
            query, key = self._rotated(query, key, rotary_pos_emb, both, inference_params)
        if not self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if self.exchange is not None:
            mixed = self._shared(query, key, value, call, checkpoint_core_attention)
        else:
            attend = self.core_attention.attending(checkpoint_core_attention, inference_params)
            if both is None:
                mixed = attend(query, key, value, call)
            else:
                q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
                mixed = self.core_attention.attend_packed(q, k, v, call, both, attend)
        if both is None:
            order = (2, 0, 1, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
            mixed = mixed.permute(order).flatten(2)
        y = self.proj(mixed, is_first_microbatch)
        more = [] if normed is None else [normed]
        if self.return_bias:
            more = [self.proj.of_all_tokens(self.proj.local_parameter("bias")), *more]
        return (y, *more) if more else y

    def _shared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        again: bool,
    ) -> torch.Tensor:
        """Return this rank's part of attention over sequences that lie on several ranks."""
        if self.exchange is None:
            raise RuntimeError("attention: no ranks share sequences, got a call for such")
        sizes = (query.shape[2] * self.exchange.world, key.shape[2] * self.exchange.world)
        mask, is_causal = visible(call.mask_type, call.window, call.mask, *sizes, query.device)
        dropout = self.core_attention.attention_dropout if self.training else 0.0

        def attend(q: Any, k: Any, v: Any, own: Any, grouped: bool) -> torch.Tensor:
            given = (q, k, v, own, dropout, is_causal, grouped)
            made: torch.Tensor = (
                checkpoint(plain_attention, *given) if again else plain_attention(*given)
            )
            return made

        return self.exchange.attend(attend, query, key, value, mask)

    def _rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        angles: Angles,
        both: tuple[Packing, Packing] | None,
        cache: InferenceParams | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, rotated by the angles of their positions."""
        of_queries, of_keys = angles if isinstance(angles, tuple) else (angles, angles)
        places: list[torch.Tensor | None] = [None, None]
        longest = (query.shape[2], key.shape[2])
        if self.exchange is not None:
            own = self.exchange.own_angles
            of_queries, of_keys = own(of_queries, longest[0]), own(of_keys, longest[1])
        if both is not None:
            places = [one.positions()[None] for one in both]
            longest = (both[0].longest, both[1].longest)
        if cache is not None:
            longest = (max(cache.sequences.values()),) * 2
            known = cache.positions(
                query.shape[2] if both is None else both[0].longest, query.device
            )
            if both is not None:
                known = both[0].tokens_of(known)[None]
            places = [known, known]
        check_angles(of_queries, of_keys, longest)
        interleaved = self.rotary_pos_interleaved
        return (
            apply_rotary(query, of_queries, interleaved, places[0]),
            apply_rotary(key, of_keys, interleaved, places[1]),
        )

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
