"""Perplexity of a language model on a text that is longer than what the model sees at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.inputs import wide

__all__ = ["Perplexity", "perplexity", "windows"]


@dataclass(frozen=True)
class Perplexity:
    """What `perplexity` found.

    Args:
        value: `exp(nll / tokens)`; NaN where a logit is NaN.
        nll: sum of the negative natural logarithms of the tokens' probabilities.
        tokens: how many were predicted.
        window, stride: of the text.
    """

    value: float
    nll: float
    tokens: int
    window: int
    stride: int


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield `(start, first, stop)` of windows over a text whose tokens are predicted once each.

    The model is given the tokens `[start, stop)`, and those `[first, stop)` count: each is
    predicted of all that stand before it in the window. Windows begin `stride` after one another.

    Args:
        length: of the text, in tokens.
        window: tokens that the model is given at most.
        stride: from 1 to `window - 1`: a token that counts is predicted of at least
            `window - stride` others, but for those of the first window.

    Example:
        >>> from hybridq.serving import windows
        >>> list(windows(10, 4, 2))
        [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    """
    first = 1
    for start in range(0, max(length - 1, 0), stride):
        stop = min(start + window, length)
        if first < stop:
            yield start, first, stop
            first = stop
        if stop == length:
            return


@torch.no_grad()
def perplexity(
    model: Callable[[torch.Tensor], Any],
    ids: torch.Tensor,
    *,
    window: int = 512,
    stride: int | None = None,
) -> Perplexity:
    """Return `exp(-1/N sum_i log p(x_i | x_s .. x_{i-1}))` of a text's tokens but the first.

    Each of the N tokens is predicted once, of the window that is the first to hold it (`windows`).
    Logarithms are taken in FP32 of the logits, and added in FP64.

    Args:
        model: `model(ids [1, n])` returns logits `[1, n, vocabulary]`, or what has them as
            `.logits`, as models of transformers do.
        ids: integers `[tokens]`, at least two.
        window: tokens that the model is given at once; at most what it was made for.
        stride: between windows; None: half a window.

    Raises:
        TypeError: `ids` is no tensor.
        ValueError: fewer than two tokens, another shape or dtype, a window or stride that leaves
            nothing to predict from, logits of another shape, or a token beyond the vocabulary.

    Source: docs of transformers, "Perplexity of fixed-length models"; there the mean of windows'
        means is taken, here that of tokens.

    Example:
        >>> import torch
        >>> from hybridq.serving import perplexity
        >>> fair = lambda ids: torch.zeros(*ids.shape, 8)  # of eight tokens, all alike
        >>> found = perplexity(fair, torch.arange(8), window=4)
        >>> round(found.value, 5), found.tokens
        (8.0, 7)
    """
    given: object = ids
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"perplexity: ids must be a tensor [tokens], got {type(given).__name__}")
    if ids.dim() != 1 or ids.is_floating_point() or ids.numel() < 2:
        raise ValueError(
            "perplexity: ids must be two integers or more, [tokens], got "
            f"{ids.dtype} {list(ids.shape)}"
        )
    own = window // 2 if stride is None else stride
    if not all(isinstance(one, int) for one in (window, own)) or not 1 <= own < window:
        raise ValueError(
            "perplexity: window must be at least 2 and stride from 1 to window - 1, integers, got "
            f"window={window}, stride={own}"
        )
    nll, count = 0.0, 0
    for start, first, stop in windows(len(ids), window, own):
        made = model(ids[None, start:stop])
        logits = getattr(made, "logits", made)
        _check_logits(logits, stop - start, ids[first:stop])
        logits = logits[0, first - start - 1 : -1]
        chances = torch.log_softmax(logits.float(), -1)
        wanted = ids[first:stop].to(chances.device)
        found = chances.gather(1, wanted[:, None])
        nll, count = nll - float(wide(found).sum()), count + len(wanted)
    mean = nll / count
    value = math.inf if mean >= 700.0 else math.exp(mean)  # of NaN, NaN
    return Perplexity(value, nll, count, window, own)


def _check_logits(logits: Any, count: int, wanted: torch.Tensor) -> None:
    """Raise for logits that are not those of the tokens, one by one."""
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if not isinstance(shape, list) or len(shape) != 3 or shape[:2] != [1, count]:
        raise ValueError(
            f"perplexity: of {count} tokens a model must return logits [1, {count}, vocabulary], "
            f"got {shape}; one that adds tokens of its own, or keeps the last logits only, is not "
            "asked of these tokens"
        )
    lowest, highest = int(wanted.min()), int(wanted.max())
    if lowest < 0 or highest >= shape[2]:
        raise ValueError(
            f"perplexity: ids must be from 0 to {shape[2] - 1}, as the model's vocabulary is, got "
            f"{lowest if lowest < 0 else highest}; is it the model's own tokenizer?"
        )
