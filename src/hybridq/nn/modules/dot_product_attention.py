"""DotProductAttention: torch's SDPA with masks, windows, biases and packed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ... import settings
from ...errors import must_be_one_of
from ...recipes import QuantizerRole, Recipe, is_recomputing
from ...recipes.boundary import boundary_quantizer
from ..autograd import AttentionQuantizers, checkpoint, plain_attention, quantized_attention
from .attention_bias import (
    SOFTMAXES,
    added_bias,
    check_batch,
    check_softmax,
    largest_scores,
    with_offset,
)
from .attention_call import AttentionCall, Mask
from .attention_masks import WITHOUT_PADDING, Lengths, check_mask_type, diagonal, visible
from .constructor_arguments import checked
from .dealt_parameters import local_part
from .gathered_keys import attend_gathered, in_ring, ring_tokens
from .kv_cache import InferenceParams
from .packed_sequences import Packed, Packing, alike
from .parallel_options import ParallelOptions
from .written_options import Check, WrittenOptions, probability, settled, switch

__all__ = ["DotProductAttention"]

#: Layouts of queries, keys and values: s length, b batch, h heads, d features, t tokens of all.
FORMATS: Final = ("sbhd", "bshd", "thd")
_ORDERS: Final = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_BACK: Final = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}

#: Queries, keys and values `[batch, heads, length, features]`, and a call, to the mixed values.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]


def _name(module: Any, name: str, value: Any) -> Any:
    module.__dict__.pop("_bound", None)  # recipes are asked again
    return value


class DotProductAttention(WrittenOptions):
    """`softmax(q @ k.T * scale + bias) @ v`, by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        num_attention_heads: heads of queries.
        kv_channels: features of a head; or a pair, of keys and of values.
        num_gqa_groups: heads of keys and values, each of which serves as many heads of queries;
            None: as many as those.
        attention_dropout: probability, in training.
        qkv_format: `"sbhd"`: `[length, batch, heads, features]`; `"bshd"`: batch first; `"thd"`:
            `[tokens, heads, features]`, sequences one behind the other.
        attn_mask_type: as `MultiheadAttention` takes it.
        window_size: `(left, right)`, how many keys before and after its own a query sees; -1: all.
        sequence_parallel: dropout draws from torch's generator, not from the tracker's.
        tp_size: number of ranks that have the heads; tensors have this rank's.
        get_rng_state_tracker: returns what has `fork()`, a context in which dropout is drawn.
        tp_group: of those ranks, in the place of `tp_size`.
        layer_number: for readers.
        attention_type: `"self"` or `"cross"`, for readers.
        softmax_scale: multiplied with the scores; None: `1 / sqrt(features of a head)`.
        softmax_type: `"vanilla"`; `"off-by-one"`: one is added to the denominator;
            `"learnable"`: `exp(softmax_offset)` is, of the parameter `[heads]`.
        return_max_logit: the largest score of each head is returned too, for QK-clip.
        device: of that parameter.
        name: qualified name, for the roles of a recipe that quantizes attention.

    Under a recipe that asks for it (`qfactory.fp8_dpa`) queries, keys, values, weights and the
    gradients of result and scores are quantized, and the products are FP32, of what is decoded.

    Raises:
        ValueError: sizes do not divide, or an option is unknown.
        TypeError: a switch is no bool, or a size no int.

    Source: names and meanings of the arguments: Transformer Engine's DotProductAttention; the
        formula: Vaswani et al. (arXiv:1706.03762); of `softmax_type`: Miller, "Attention is off by
        one", and gpt-oss.

    Example:
        >>> import torch, hybridq
        >>> attention = hybridq.nn.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd")
        >>> q, k, v = (torch.randn(7, heads, 16) for heads in (4, 2, 2))
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> y = attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
        >>> y.shape
        torch.Size([7, 64])
    """

    #: The recipe of the last forward, for its recomputation.
    _last_recipe: Any = None
    #: The last recipe that quantizes attention, and its quantizers.
    _bound: tuple[Any, AttentionQuantizers | None] = (None, None)
    _written_options: ClassVar[Mapping[str, Check]] = {
        "attention_dropout": probability,
        "attention_type": settled,
        "return_max_logit": switch,
        "softmax_type": check_softmax,
        "name": _name,
    }

    @checked
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        device: Any = None,
        name: str = "",
    ) -> None:
        super().__init__()
        own = "attention"
        if qkv_format not in FORMATS:
            raise ValueError(f"{own}: qkv_format {must_be_one_of(FORMATS, qkv_format)}")
        if attention_type not in ("self", "cross"):
            raise ValueError(f"{own}: the type must be self or cross, got {attention_type!r}")
        check_mask_type(attn_mask_type, window_size)
        ranks = ParallelOptions(tp_group, tp_size)
        heads = num_attention_heads
        groups = heads if num_gqa_groups is None else num_gqa_groups
        if heads < 1 or groups < 1 or heads % groups:
            raise ValueError(
                f"{own}: num_attention_heads must be a multiple of num_gqa_groups, got "
                f"{heads} and {groups}"
            )
        self.num_attention_heads = ranks.share(own, "num_attention_heads", heads)
        self.num_gqa_groups = ranks.share(own, "num_gqa_groups", groups)
        self.kv_channels, self.qkv_format = kv_channels, qkv_format
        self.attention_dropout = attention_dropout
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.layer_number, self.attention_type = layer_number, attention_type
        self.name, self.return_max_logit = name, return_max_logit
        self.softmax_scale, self.softmax_type = softmax_scale, softmax_type
        self._tracker = None if sequence_parallel else get_rng_state_tracker
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type == "learnable":
            zeros = torch.zeros(self.num_attention_heads, dtype=torch.float32, device=device)
            self.softmax_offset = nn.Parameter(zeros)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        inference_params: InferenceParams | None = None,
    ) -> Any:
        """Return the mixed values, the heads' features one behind the other.

        Args:
            query: `[length, batch, heads, features]`, or as `qkv_format` says.
            key, value: the same, with their own length and `num_gqa_groups` heads.
            attention_mask: bool, True where a key is hidden, for the mask types that take one:
                broadcastable to `[batch, heads, queries, keys]`; of padding `[batch, 1, 1, keys]`,
                or a pair, of the queries' padding `[batch, 1, 1, queries]` and of that: then
                diagonals end at the last query and key that the pair shows of each sequence.
            qkv_format: for this call; None: the constructor's.
            cu_seqlens_q, cu_seqlens_kv: int `[batch + 1]`, cumulative lengths of the sequences,
                zero first; for `"thd"`. Given with the other layouts they say where the padding of
                each sequence begins, in the place of a mask.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: the same of the sequences' places, for
                `"thd"` with rows between them; the results there are zero.
            max_seqlen_q, max_seqlen_kv: at least the longest sequence, for `"thd"`; None: it is
                read from the lengths, for which a GPU is awaited. On a GPU a longer sequence gives
                NaN for what did not fit.
            attn_mask_type, window_size: for this call; None: the constructor's.
            bottom_right_diagonal: whether the diagonal of causal types, windows and ALiBi ends at
                the last query and key; None: it does for `no_mask`, `padding`, `arbitrary` and the
                types with `bottom_right`.
            checkpoint_core_attention: attention is computed again in the backward, not saved.
            core_attention_bias_type: `"no_bias"`, `"pre_scale_bias"`, `"post_scale_bias"` (added
                before or after the scores are scaled) or `"alibi"`.
            core_attention_bias: `[1 or batch, 1 or heads, queries, keys]`, floating; has a
                gradient.
            alibi_slopes: FP32 `[heads]` or `[batch, heads]`; None: those of the paper.
            inference_params: keys and values of the tokens before, to which these are added;
                lengths are the ones that it was told, and diagonals end at the last query and key.

        Returns:
            `[length, batch, heads * features]`; batch first for `"bshd"`; `[tokens, heads *
            features]` for `"thd"`. In the inputs' dtype. With `return_max_logit` a tuple of that
            and the largest scores, FP32 `[heads]`, without a gradient: scaled, with what is added,
            of what is seen, and of queries and keys as they came; a learnable offset is none.

        Raises:
            ValueError: shapes, lengths or masks that do not fit the layout or the mask type.
        """
        layout = self.qkv_format if qkv_format is None else qkv_format
        if layout not in FORMATS:
            raise ValueError(f"attention: qkv_format {must_be_one_of(FORMATS, layout)}")
        self._check(query, key, value, layout)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        window = self.window_size if window_size is None else window_size
        bias = (core_attention_bias_type, core_attention_bias, alibi_slopes)
        logits: list[torch.Tensor] | None = [] if self.return_max_logit else None
        call = AttentionCall.of(kind, window, attention_mask, bottom_right_diagonal, *bias, logits)
        attend = self.attending(checkpoint_core_attention, inference_params)
        packed = Packed(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        if layout == "thd":
            both = packed.packings(query.shape[0], key.shape[0])
            y = self.attend_packed(query, key, value, call, both, attend)
        else:
            q, k, v = (one.permute(_ORDERS[layout]) for one in (query, key, value))
            y = attend(q, k, v, call._replace(lengths=packed.lengths(q, k)))
            y = y.permute(_BACK[layout]).flatten(2)
        return (y, torch.stack(logits).amax(0)) if logits else y

    def attend_packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        both: tuple[Packing, Packing],
        attend: Attend,
    ) -> torch.Tensor:
        """Return the mixed values of packed sequences, `[tokens, heads * features]`.

        Args:
            query, key, value: `[tokens, heads, features]`.
            call: what else the call is told.
            both: how queries and keys lie in a padded batch.
            attend: what computes that.

        Raises:
            ValueError: ranks pass keys and values around (`context_parallel`).
        """
        queries, keys = both
        if settings.current().in_ring:
            raise ValueError(in_ring("packed sequences (cu_seqlens)"))
        groups = self._groups(query, call, both, attend)
        if groups:
            return self._attend_groups(query, key, value, call, both, attend, groups)
        call = call._replace(lengths=Lengths(queries.lengths, keys.lengths))
        q, k, v = (
            lies.pad(one).transpose(1, 2)
            for lies, one in ((queries, query), (keys, key), (keys, value))
        )
        return queries.unpad(attend(q, k, v, call).transpose(1, 2)).flatten(1)

    def _groups(
        self,
        query: torch.Tensor,
        call: AttentionCall,
        both: tuple[Packing, Packing],
        attend: Attend,
    ) -> list[list[int]]:
        """Return sequences of the same lengths, or nothing: then a padded batch is computed.

        That is done on a GPU, whose lengths would be awaited, under torch.compile, with keys of
        earlier steps, and where masks, biases or amaxes are those of the padded batch.
        """
        if torch.compiler.is_compiling() or not query.is_cpu:
            return []
        is_plain = call.mask is None and call.bias is None and attend in (self.attend, self._again)
        if not is_plain or call.mask_type == "arbitrary" or self.quantizers():
            return []
        if both[0].lengths.shape != both[1].lengths.shape:
            return []
        return alike(*both)

    def _attend_groups(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        both: tuple[Packing, Packing],
        attend: Attend,
        groups: list[list[int]],
    ) -> torch.Tensor:
        """Return what `attend_packed` returns, sequences of the same lengths in one batch each."""
        queries, keys = both
        order = queries.order(groups)
        of_keys = order if keys is queries else keys.order(groups)
        call = call._replace(mask_type=WITHOUT_PADDING.get(call.mask_type, call.mask_type))
        sizes, key_sizes = (
            [int(lies.lengths[group].sum()) for group in groups] for lies in (queries, keys)
        )
        parts = zip(
            query.index_select(0, order).split(sizes),
            key.index_select(0, of_keys).split(key_sizes),
            value.index_select(0, of_keys).split(key_sizes),
            groups,
            strict=True,
        )
        made = []
        for *tokens, group in parts:
            q, k, v = (one.unflatten(0, (len(group), -1)).transpose(1, 2) for one in tokens)
            slopes = call.slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[group]
            y = attend(q, k, v, call._replace(slopes=slopes))
            made.append(y.transpose(1, 2).flatten(0, 1).flatten(1))
        mixed = torch.cat(made)
        rows = mixed.new_zeros(query.shape[0], mixed.shape[1])
        return rows.index_copy(0, order, mixed)

    def attending(self, again: bool, cache: InferenceParams | None = None) -> Attend:
        """Return what computes attention: `attend`, computed again, or over what is kept.

        Args:
            again: attention is computed again in the backward.
            cache: what is kept of the tokens before, or None.

        Raises:
            ValueError: it is kept while ranks pass keys and values around (`context_parallel`).
        """
        if cache is None:
            return self._again if again else self.attend
        if settings.current().in_ring:
            raise ValueError(in_ring("inference_params"))

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
        ) -> torch.Tensor:
            new = (key.transpose(1, 2), value.transpose(1, 2))
            k, v = (one.transpose(1, 2) for one in cache.step(self, *new))
            at_end = True if call.at_end is None else call.at_end
            lengths = cache.lengths(query.device)
            call = call._replace(lengths=lengths, counts=None, at_end=at_end)
            return self.attend(query, k, v, call)

        return attend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Return the mixed values `[batch, heads, queries, features]`.

        Args:
            query: `[batch, heads, queries, features]`.
            key, value: `[batch, groups, keys, features]`.
            call: what else the call is told; padded queries give zeros, where lengths are told.

        Raises:
            ValueError: masks or biases do not fit; operands are quantized while ranks pass keys and
                values around (`context_parallel`).
        """
        ring = ring_tokens(call)
        if ring is not None:
            if call.logits is not None:
                raise ValueError(in_ring("return_max_logit"))
            return attend_gathered(self, query, key, value, call, ring)
        scale = self.softmax_scale
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        mask, is_causal = self._mask(query, key, call, scale)
        if call.logits is not None:
            own = None if call.lengths is None else call.lengths.queries
            call.logits.append(largest_scores(query, key, mask, is_causal, scale, own))
        if mask is not None and self.softmax_type != SOFTMAXES[0]:
            key, value, mask = with_offset(key, value, mask, local_part(self.softmax_offset))
        dropout = self.attention_dropout if self.training else 0.0
        quantizers = self.quantizers()
        grouped = query.shape[1] != key.shape[1]
        forked = nullcontext() if self._tracker is None or not dropout else self._tracker().fork()
        with forked:
            if quantizers is not None and settings.current().in_ring:
                raise ValueError(in_ring("a recipe with fp8_dpa"))
            if quantizers is None:
                y = plain_attention(query, key, value, mask, dropout, is_causal, grouped, scale)
            else:
                if is_causal:
                    sizes = (query.shape[2], key.shape[2])
                    mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
                y = quantized_attention(
                    *(self, query, key, value, mask, dropout, scale, quantizers)
                )
        if call.lengths is None:
            return y
        position = torch.arange(query.shape[2], dtype=torch.int64, device=query.device)
        there = position[:, None] < call.lengths.queries.view(-1, 1, 1, 1)
        return torch.where(there, y, 0.0)

    def quantizers(self) -> AttentionQuantizers | None:
        """Return what the recipe quantizes attention's operands by; None: it does not.

        Raises:
            NotImplementedError: it does, in code that torch compiles.
        """
        recipe = settings.current().recipe
        if torch.compiler.is_compiling():
            if isinstance(recipe, Recipe) and recipe.quantizes_attention:
                raise NotImplementedError(
                    "attention: a recipe with fp8_dpa quantizes attention in eager code only, got "
                    "code that torch compiles; leave the module out of torch.compile"
                )
            return None
        if is_recomputing():
            recipe = self._last_recipe
        else:
            self.__dict__["_last_recipe"] = recipe
        if not isinstance(recipe, Recipe) or not recipe.quantizes_attention:
            return None
        recipe = recipe.for_name(self.name)
        if not recipe.quantizes_attention:
            return None
        if self._bound[0] is not recipe:
            roles = (QuantizerRole("dpa", what, self.name) for what in AttentionQuantizers._fields)
            made = AttentionQuantizers(*[boundary_quantizer(recipe, role) for role in roles])
            self.__dict__["_bound"] = (recipe, made)
        found: AttentionQuantizers | None = self._bound[1]
        return found

    def _again(self, *given: Any) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.attend, *given)
        return made

    def _mask(
        self, query: torch.Tensor, key: torch.Tensor, call: AttentionCall, scale: float
    ) -> tuple[torch.Tensor | None, bool]:
        """Return the mask of SDPA, bool or FP32 to be added, and whether it is plainly causal."""
        sizes, device = (query.shape[2], key.shape[2]), query.device
        check_batch((query.shape[0], query.shape[1]), call.mask, call.bias, call.slopes)
        begin = diagonal(call.mask_type, *sizes, call.ends, call.at_end)
        own = (call.mask_type, call.window, call.mask, *sizes, device, call.lengths)
        seen, is_causal = visible(*own, begin)
        shape = (query.shape[1], *sizes)
        bias = added_bias(call.bias_type, call.bias, call.slopes, shape, begin, scale, device)
        if bias is None and self.softmax_type == SOFTMAXES[0]:
            return seen, is_causal
        if bias is None:
            bias = torch.zeros(1, 1, *sizes, dtype=torch.float32, device=device)
        if is_causal:
            seen = torch.ones(sizes, dtype=torch.bool, device=device).tril()
        bias = bias.to(torch.float32)
        return bias if seen is None else torch.where(seen, bias, -torch.inf), False

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str
    ) -> None:
        """Raise unless queries, keys and values have the heads and dimensions of the layout."""
        for what, one, heads in (
            ("query", query, self.num_attention_heads),
            ("key", key, self.num_gqa_groups),
            ("value", value, self.num_gqa_groups),
        ):
            if one.dim() != len(layout) or one.shape[-2] != heads:
                raise ValueError(
                    f"attention: {what} must be {' '.join(layout)} with {heads} heads, got shape "
                    f"{tuple(one.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                "attention: queries and keys must have the same features, keys and values the same "
                f"places, got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )

    def extra_repr(self) -> str:
        """Return the sizes and what the masks are, for `repr`."""
        return (
            f"num_attention_heads={self.num_attention_heads}, "
            f"num_gqa_groups={self.num_gqa_groups}, kv_channels={self.kv_channels}, "
            f"attn_mask_type={self.attn_mask_type}, qkv_format={self.qkv_format}"
        )
