"""What is added to the scores of attention: ALiBi, a bias of the caller's, a softmax's offset."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...errors import must_be_one_of
from .written_options import one_of, said

__all__ = [
    "BIASES",
    "SOFTMAXES",
    "added_bias",
    "alibi_slopes",
    "check_batch",
    "check_softmax",
    "largest_scores",
    "with_offset",
]

#: What is added: nothing; the bias before or after the scores are scaled; ALiBi's.
BIASES: Final = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
#: Of the denominator: nothing more; one more; one more that each head learns the logarithm of.
SOFTMAXES: Final = ("vanilla", "off-by-one", "learnable")


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return ALiBi's slopes, FP32 `[heads]`: `2 ** (-8 i / n)` for i = 1 ... n, n a power of two.

    Of another number of heads, n is the power of two below, and the others take every second slope
    of `2 n` heads.

    Args:
        heads: of queries.

    Source: Press et al., Train Short, Test Long (arXiv:2108.12409), and its authors' code for
        other numbers of heads.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def added_bias(
    kind: str,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    shape: tuple[int, int, int],
    begin: int | torch.Tensor,
    scale: float,
    device: torch.device,
) -> torch.Tensor | None:
    """Return what is added to scaled scores, broadcastable to `[batch, heads, queries, keys]`.

    Args:
        kind: of `BIASES`.
        bias: `[1 or batch, 1 or heads, queries, keys]`, for the two kinds that take one.
        slopes: FP32 `[heads]` or `[batch, heads]`, for `"alibi"`; None: `alibi_slopes`.
        shape: heads, queries, keys.
        begin: position of the first query among the keys, or int `[batch, 1, 1, 1]`.
        scale: of the scores.
        device: of ALiBi's.

    Raises:
        ValueError: there is no such kind, or a bias is missing, of another shape, or too many.
    """
    if kind not in BIASES:
        raise ValueError(f"attention: core_attention_bias_type {must_be_one_of(BIASES, kind)}")
    takes = kind in BIASES[1:3]
    if takes is (bias is None):
        raise ValueError(
            f"attention: core_attention_bias_type={kind!r} {'needs a' if takes else 'takes no'} "
            f"core_attention_bias, got {'none' if bias is None else tuple(bias.shape)}"
        )
    if slopes is not None and kind != "alibi":
        raise ValueError(f"attention: alibi_slopes go with 'alibi', got {kind!r}")
    heads, queries, keys = shape
    if bias is not None:
        if bias.dim() != 4 or bias.shape[1] not in (1, heads) or bias.shape[2:] != shape[1:]:
            raise ValueError(
                "attention: core_attention_bias must be [1 or batch, 1 or heads, queries, keys], "
                f"got {tuple(bias.shape)} for {heads} heads, {queries} queries and {keys} keys"
            )
        return bias * scale if kind == "pre_scale_bias" else bias
    if kind != "alibi":
        return None
    if slopes is None:
        slopes = alibi_slopes(heads)
    slopes = slopes.to(device)
    if slopes.shape[-1:] != (heads,) or slopes.dim() > 2:
        raise ValueError(
            f"attention: alibi_slopes must be [heads] or [batch, heads] of {heads} heads, got "
            f"{tuple(slopes.shape)}"
        )
    query = torch.arange(queries, dtype=torch.int64, device=device)[:, None] + begin
    distance = (query - torch.arange(keys, dtype=torch.int64, device=device)).abs()
    return -slopes.to(torch.float32).view(-1, heads, 1, 1) * distance


def check_batch(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Raise where something is of other sequences or heads than the queries are.

    Args:
        shape: sequences of the batch, and heads.
        mask: `[batch, heads, queries, keys]`, each of them or 1, or its last dimensions, or None.
        bias: `[1 or batch, 1 or heads, queries, keys]`, or None.
        slopes: `[heads]` or `[batch, heads]`, or None.

    Raises:
        ValueError: it is.
    """
    batch, heads = shape
    given = (("attention_mask", mask, 4), ("core_attention_bias", bias, 4))
    for name, one, dims in (*given, ("alibi_slopes", slopes, 2)):
        own = () if one is None else tuple(one.shape)
        if len(own) == dims and own[0] not in (1, batch):
            raise ValueError(
                f"attention: {name} must be of as many sequences as the batch has, {batch}, or of "
                f"1 for all, got {own}"
            )
    if mask is not None and mask.dim() > 2 and mask.shape[-3] not in (1, heads):
        raise ValueError(
            f"attention: attention_mask must be of {heads} heads, or of 1 for all, got "
            f"{tuple(mask.shape)}"
        )


def check_softmax(module: Any, name: str, value: Any) -> Any:
    """Return a softmax of `SOFTMAXES`; a learnable one has a parameter, made with the module.

    Args:
        module: a DotProductAttention.
        name: of the option.
        value: that is written.

    Raises:
        ValueError: there is no such softmax.
        AttributeError: the module has no offsets.
    """
    one_of(*SOFTMAXES)(module, name, value)
    if value == SOFTMAXES[-1] and getattr(module, "softmax_offset", module) is None:
        text = f"{name} {value!r} is settled when the module is made, which has no softmax_offset"
        raise AttributeError(said(module, f"{text}; make another module"))
    return value


def largest_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    queries: torch.Tensor | None,
) -> torch.Tensor:
    """Return the largest score of each head that a softmax is taken of, FP32 `[heads]`.

    Scores are FP32, scaled and with what is added; minus infinity of a head that sees no key. One
    head's are made at a time, without a graph.

    Args:
        query: `[batch, heads, queries, features]`.
        key: `[batch, groups, keys, features]`.
        mask: as SDPA takes it, broadcastable to `[batch, heads, queries, keys]`, or None.
        is_causal: whether a query sees keys up to its own alone.
        scale: of scores.
        queries: how many queries each sequence has, int `[batch]`; None: all.
    """
    heads, each = query.shape[1], query.shape[1] // key.shape[1]
    sizes = (query.shape[2], key.shape[2])
    if is_causal:
        mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    wide = None if mask is None else mask.detach().expand(query.shape[0], heads, *sizes)
    there = None
    if queries is not None:
        position = torch.arange(sizes[0], dtype=torch.int64, device=query.device)
        there = (position < queries.view(-1, 1)).unsqueeze(-1)
    found = []
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        for head in range(heads):
            q, k = query[:, head].float(), key[:, head // each].float()
            scores = q @ k.mT * scale
            own = None if wide is None else wide[:, head]
            if own is not None and own.dtype == torch.bool:
                scores = scores.masked_fill(~own, -torch.inf)
            elif own is not None:
                scores = scores + own
            if there is not None:
                scores = scores.masked_fill(~there, -torch.inf)
            least = torch.full((1,), -torch.inf, dtype=torch.float32, device=query.device)
            found.append(torch.cat((scores.flatten(), least)).amax())
    return torch.stack(found)


def with_offset(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and what is added, with one more key that adds to the denominator alone.

    Its score is the offset, since it is zero, and so is its value.

    Args:
        key, value: `[batch, heads, keys, features]`.
        bias: floating, four dimensions, broadcastable to `[batch, heads, queries, keys]`.
        offset: `[heads]`; None: zero.
    """
    pad = (0, 0, 0, 1)
    more_keys, more_values = (torch.nn.functional.pad(one, pad) for one in (key, value))
    if offset is None:
        return more_keys, more_values, torch.nn.functional.pad(bias, (0, 1))
    wide = bias.expand(-1, offset.shape[0], -1, -1)
    own = offset.to(bias.dtype).view(1, -1, 1, 1).expand(*wide.shape[:3], 1)
    return more_keys, more_values, torch.cat((wide, own), -1)
