"""Perplexity in strided windows, against its formula in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridq.serving import perplexity, windows

VOCABULARY = 11
IDS = torch.arange(29) * 7 % VOCABULARY


def model(ids: torch.Tensor) -> torch.Tensor:
    """Logits that depend on all tokens up to each, and on how many there are."""
    places = torch.arange(ids.shape[1], dtype=torch.float64)
    sums = torch.cumsum(ids.double() * (places + 1), 1)
    classes = torch.arange(VOCABULARY, dtype=torch.float64)
    return torch.sin(sums[..., None] * (classes + 1)).float() * 3


def oracle(ids: np.ndarray, window: int, stride: int) -> tuple[float, int]:
    """Each token but the first once: in the first window, by start, that has it."""
    total, count = 0.0, 0
    for i in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), stride) if i < s + window)
        logits = model(torch.from_numpy(ids[None, start : i + 1]))[0, -2].numpy().astype(np.float64)
        total += np.log(np.exp(logits).sum()) - logits[ids[i]]
        count += 1
    return total, count


@pytest.mark.parametrize(
    ("window", "stride"), [(29, 14), (64, 32), (8, 4), (8, 7), (8, 1), (2, 1), (5, 3), (28, 2)]
)
def test_it_is_the_formula(window: int, stride: int) -> None:
    found = perplexity(model, IDS, window=window, stride=stride)
    nll, count = oracle(IDS.numpy(), window, stride)
    assert found.tokens == count == len(IDS) - 1
    np.testing.assert_allclose(found.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(found.value, np.exp(nll / count), rtol=1e-5)


@pytest.mark.parametrize("length", [2, 3, 9, 30])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (6, 2), (6, 5), (40, 1)])
def test_every_token_but_the_first_counts_once(length: int, window: int, stride: int) -> None:
    made = list(windows(length, window, stride))
    assert [i for _, first, stop in made for i in range(first, stop)] == list(range(1, length))
    assert all(stop - start <= window and start < first for start, first, stop in made)
    assert all(first - start >= window - stride for start, first, _ in made[1:])


def test_a_model_that_knows_all_and_one_that_knows_nothing() -> None:
    def knows(ids):
        return 1000.0 * torch.nn.functional.one_hot((ids + 7) % VOCABULARY, VOCABULARY)

    assert perplexity(knows, IDS, window=8).value == 1.0
    assert perplexity(lambda ids: 0 - knows(ids), IDS, window=8).value == float("inf")


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [
        (IDS[:1], {}, "two integers or more"),
        (IDS[None], {}, r"got torch.int64 \[1, 29\]"),
        (IDS.float(), {}, "two integers or more"),
        (IDS, {"window": 1}, "window must be at least 2"),
        (IDS, {"window": 8, "stride": 8}, "stride from 1 to window - 1"),
        (IDS, {"window": 8, "stride": 0}, "stride from 1 to window - 1"),
        (IDS, {"window": 8.0}, r"integers, got window=8.0"),
        (IDS + VOCABULARY, {}, rf"ids must be from 0 to {VOCABULARY - 1}, .* tokenizer"),
        (IDS - VOCABULARY, {}, rf"ids must be from 0 to {VOCABULARY - 1}, .* got -"),
    ],
)
def test_wrong_arguments(ids, options, text) -> None:
    with pytest.raises(ValueError, match=text):
        perplexity(model, ids, **options)


@pytest.mark.parametrize(
    "made",
    [
        lambda ids: torch.zeros(1, ids.shape[1] + 2, VOCABULARY),  # of a prompt that is learnt
        lambda ids: torch.zeros(1, 1, VOCABULARY),  # the last logits alone
        lambda ids: torch.zeros(*ids.shape),
        lambda ids: None,
    ],
)
def test_logits_that_are_not_those_of_the_tokens_are_refused(made) -> None:
    with pytest.raises(ValueError, match=r"of 8 tokens a model must return logits \[1, 8, vocab"):
        perplexity(made, IDS, window=8)


def test_a_nan_is_no_infinite_perplexity() -> None:
    found = perplexity(lambda ids: torch.full((*ids.shape, VOCABULARY), math.nan), IDS, window=8)
    assert math.isnan(found.value) and math.isnan(found.nll)
    with pytest.raises(TypeError, match=r"ids must be a tensor .* got list"):
        perplexity(model, [1, 2, 3])
