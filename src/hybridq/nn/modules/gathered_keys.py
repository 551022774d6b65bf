"""Attention with masks where ranks share sequences in a ring: keys and values are gathered.

A ring has causal attention and no other, since what a rank multiplies in a turn are keys of another
rank, under one mask for all turns. With the keys of all ranks before it a rank computes its own
queries' rows of any mask, exactly as one process does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from .attention_bias import SOFTMAXES
from .attention_masks import band, check_given

if TYPE_CHECKING:
    from .attention_call import AttentionCall

__all__ = ["RingTokens", "attend_gathered", "check_module_in_ring", "in_ring", "ring_tokens"]


def in_ring(what: str) -> str:
    """Return why attention is not computed where ranks pass keys and values around.

    Args:
        what: was asked for.
    """
    return (
        "attention: in the block of context_parallel it has masks and windows, in high precision, "
        f"of whole sequences, got {what}; take hybridq.distributed.sequence_parallel"
    )


def check_module_in_ring(need_weights: bool, has_bias: bool, add_zero_attn: bool) -> None:
    """Raise for what `nn.MultiheadAttention` would compute of a rank's tokens alone.

    Args:
        need_weights: of its forward.
        has_bias: whether it has `bias_k` and `bias_v`.
        add_zero_attn: of the module.

    Raises:
        ValueError: one of them is true.
    """
    given = {
        "need_weights=True": need_weights,
        "add_bias_kv=True": has_bias,
        "add_zero_attn=True": add_zero_attn,
    }
    found = [name for name, is_given in given.items() if is_given]
    if found:
        raise ValueError(
            "context_parallel: nn.MultiheadAttention must have the keys of all ranks and no "
            "others, and gives no weights there (need_weights=False), got " + " and ".join(found)
        )


class RingTokens(Protocol):
    """Whose tokens a rank of a ring has.

    Attributes:
        length: of the whole sequences.
    """

    @property
    def length(self) -> int:
        """Return the length of the whole sequences."""
        ...

    def places(self, device: torch.device) -> torch.Tensor:
        """Return where this rank's tokens stand in the whole sequences: int64 `[own length]`.

        Args:
            device: of the result.
        """
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads of all tokens, in their order; the gradient is the sum of all ranks'.

        Args:
            x: `[batch, heads, own length, features]`.
        """
        ...

    def attention(self, *given: Any, **options: Any) -> torch.Tensor:
        """Return torch's `scaled_dot_product_attention` of tensors that this rank has.

        Args:
            given, options: its arguments.
        """
        ...


def ring_tokens(call: AttentionCall) -> RingTokens | None:
    """Return whose tokens ranks of a ring have, where a call has a mask that the ring has not.

    torch puts its ring into the place of its function, for all threads: that is where it is known.

    Args:
        call: of attention.
    """
    if torch.compiler.is_compiling():
        return None
    found: RingTokens | None = getattr(F.scaled_dot_product_attention, "ring_tokens", None)
    if found is None or (call.mask is None and max(call.window or (-1,)) < 0):
        return None
    return found


def attend_gathered(
    core: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    ring: RingTokens,
) -> torch.Tensor:
    """Return the mixed values of this rank's queries, over the keys of all ranks.

    Args:
        core: the attention module.
        query: `[batch, heads, own length, features]`.
        key, value: `[batch, groups, own length, features]`.
        call: with a window, or a mask of the whole sequences.
        ring: whose tokens this rank has.

    Raises:
        ValueError: the mask is not of the whole sequences, or there is more than masks and windows.
    """
    for what, is_given in (
        ("padded lengths (cu_seqlens)", call.lengths is not None),
        ("a pair of masks", call.counts is not None),
        ("core_attention_bias_type or alibi_slopes", call.bias_type != "no_bias"),
        (f"softmax_type={core.softmax_type!r}", core.softmax_type != SOFTMAXES[0]),
        ("a recipe with fp8_dpa", core.quantizers() is not None),
    ):
        if is_given:
            raise ValueError(in_ring(what))
    places = ring.places(query.device)
    seen = own_rows(call, places, ring.length)
    scale = core.softmax_scale
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    dropout = core.attention_dropout if core.training else 0.0
    grouped = query.shape[1] != key.shape[1]
    keys, values = ring.gather(key), ring.gather(value)
    return ring.attention(
        query, keys, values, seen, dropout, False, scale=scale, enable_gqa=grouped
    )


def own_rows(call: AttentionCall, places: torch.Tensor, length: int) -> torch.Tensor | None:
    """Return the rows of a mask that this rank's queries have, True where a key is seen.

    Args:
        call: of attention.
        places: of the queries in the whole sequences, which are as long as those of the keys.
        length: of these.

    Raises:
        ValueError: the mask is not of the whole sequences, or no bool; or the mask type takes none.
    """
    given = call.mask
    check_given(call.mask_type, given)
    seen = band(call.mask_type, call.window, places[:, None], length)
    if given is None:
        return seen
    rows = given.shape[-2] if given.dim() > 1 else 1
    if given.shape[-1] not in (1, length) or rows not in (1, length):
        raise ValueError(
            "attention: in the block of context_parallel attention_mask must be that of the whole "
            f"sequences, [batch, heads, {length}, {length}] or broadcastable to that, and none of "
            f"the buffers, got shape {tuple(given.shape)}"
        )
    own = given if rows == 1 else given.index_select(-2, places)
    return ~own if seen is None else seen & ~own
