"""What is added to the scores of attention: ALiBi, a bias of the caller's, a softmax's offset."""

from __future__ import annotations

from typing import Final

import torch

from ...errors import must_be_one_of

__all__ = ["BIASES", "SOFTMAXES", "added_bias", "alibi_slopes", "check_batch", "with_offset"]

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
