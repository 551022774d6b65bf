"""Routers under Transformer Engine's names, against loops over tokens in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hybridq.te.pytorch.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

EXPERTS = 12


def score(kind: str, x: float) -> float:
    if kind == "sigmoid":
        return 1 / (1 + math.exp(-x))
    return math.sqrt(math.log1p(math.exp(x)))


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    parts = [math.exp(value - top) for value in values]
    return [part / sum(parts) for part in parts]


def one_token(row, topk, pre, groups, of_groups, factor, kind, bias) -> dict[int, float]:
    """The weights of the chosen experts of one token."""
    scores = row if kind == "softmax" else [score(kind, x) for x in row]
    if kind == "softmax" and pre:
        scores = softmax(row)
    choosing = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = range(len(row))
    if of_groups:
        size = len(row) // groups
        sums = {
            g: sum(sorted(choosing[g * size : (g + 1) * size])[::-1][: topk // of_groups])
            for g in range(groups)
        }
        best = sorted(sums, key=lambda g: -sums[g])[:of_groups]
        allowed = [g * size + i for g in best for i in range(size)]
    chosen = sorted(allowed, key=lambda e: -choosing[e])[:topk]
    weights = [scores[e] for e in chosen]
    if kind == "softmax" and not pre:
        weights = softmax(weights)
    elif kind != "softmax" and topk > 1:
        weights = [w / sum(weights) for w in weights]
    return {e: w * (factor or 1.0) for e, w in zip(chosen, weights, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("kind", "pre", "biased"),
    [
        ("softmax", False, False),
        ("softmax", True, False),
        ("sigmoid", False, False),
        ("sigmoid", False, True),
        ("sqrtsoftplus", False, True),
    ],
)
def test_weights_are_those_of_a_loop(kind, pre, biased, grouped, topk, dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, EXPERTS).to(dtype).requires_grad_()
    bias = torch.linspace(0.4, 0, EXPERTS) if biased else None
    groups, of_groups = (4, 2 if topk > 1 else 1) if grouped else (None, None)
    given = (pre, groups, of_groups, 1.5, kind, bias)
    probs, chosen = fused_topk_with_score_function(logits, topk, *given)
    assert probs.dtype == dtype and chosen.dtype == torch.bool
    wanted = torch.zeros(2, 9, EXPERTS, dtype=torch.float64)
    for t, row in enumerate(logits.detach().double().flatten(0, 1).tolist()):
        made = one_token(row, topk, *given[:-1], bias.tolist() if biased else [0.0] * EXPERTS)
        for e, weight in made.items():
            wanted.view(-1, EXPERTS)[t, e] = weight
    assert torch.equal(chosen, wanted != 0)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert torch.allclose(probs.double(), wanted, rtol=tolerance, atol=0)
    if dtype == torch.float32:
        weight = torch.randn(probs.shape)
        (grad,) = torch.autograd.grad((probs * weight).sum(), logits)
        step = 1e-6
        x = logits.detach().double()
        moved = []
        for e in range(EXPERTS):
            shifts = []
            for sign in (1, -1):
                at = x.clone()
                at[..., e] += sign * step
                out, _ = fused_topk_with_score_function(at, topk, *given)
                shifts.append((out * weight).sum(-1))
            moved.append((shifts[0] - shifts[1]) / (2 * step))
        assert torch.allclose(grad.double(), torch.stack(moved, -1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("topk", [1, 3])
def test_scores_of_the_balance_loss(kind, topk) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, EXPERTS, dtype=torch.bfloat16, requires_grad=True)
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits, topk, kind)
    assert scores.dtype == torch.float32 and scores.requires_grad
    for row, made, marks in zip(logits.tolist(), scores.tolist(), chosen.tolist(), strict=True):
        wanted = softmax(row) if kind == "softmax" else [score(kind, x) for x in row]
        if topk > 1 and kind != "softmax":
            wanted = [w / sum(wanted) for w in wanted]
        assert made == pytest.approx(wanted, rel=1e-5)
        best = sorted(range(EXPERTS), key=lambda e: -row[e])[:topk]
        assert [e for e in range(EXPERTS) if marks[e]] == sorted(best)
    scores.square().sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.any()


@pytest.mark.parametrize("counts", [torch.int64, torch.int32, torch.bfloat16])
def test_the_balance_loss(counts) -> None:
    torch.manual_seed(2)
    probs = torch.rand(10, EXPERTS, requires_grad=True)
    tokens = torch.randint(0, 9, (EXPERTS,)).to(counts)
    for total in (40, torch.tensor(40)):
        loss = fused_moe_aux_loss(probs, tokens, total, EXPERTS, 2, 0.01)
        sums = probs.detach().double().sum(0) * tokens.double()
        wanted = 0.01 * EXPERTS * float(sums.sum()) / (2 * 40 * 40)
        assert loss.dtype == torch.float32 and float(loss) == pytest.approx(wanted, rel=1e-5)
        (grad,) = torch.autograd.grad(loss, probs)
        each = 0.01 * EXPERTS * tokens.double() / (2 * 40 * 40)
        assert torch.allclose(grad.double(), each.expand(10, -1), rtol=1e-5)


def test_the_balance_loss_of_each_sequence() -> None:
    """Megatron-Core lays the experts of all sequences of a batch side by side."""
    torch.manual_seed(2)
    probs, tokens = torch.rand(10, 3, EXPERTS), torch.randint(0, 9, (3, EXPERTS))
    loss = fused_moe_aux_loss(probs.flatten(1), tokens.flatten(), 10, EXPERTS, 2, 0.01)
    each = [fused_moe_aux_loss(probs[:, b], tokens[b], 10, EXPERTS, 2, 0.01) for b in range(3)]
    assert float(loss) == pytest.approx(float(sum(each)), rel=1e-5)


def test_maps_of_bits_and_of_numbers() -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, EXPERTS)
    given = (logits, 3, False, None, None, None, "softmax", None)
    probs, marks = fused_topk_with_score_function(*given)
    for form in ("bitmap_u8", 1, RoutingMapFormat.BITMAP_U8):
        _, bits = fused_topk_with_score_function(*given, form)
        assert bits.dtype == torch.uint8 and bits.shape == (5, 2)
        for t in range(5):
            for e in range(EXPERTS):
                assert bool(bits[t, e // 8] >> (e % 8) & 1) == bool(marks[t, e])
    numbers = torch.empty(5, 3, dtype=torch.int32)
    again, written = fused_topk_with_score_function(*given, topk_indices=numbers)
    assert written is numbers and torch.equal(again, probs)
    assert torch.equal(torch.zeros_like(marks).scatter(1, numbers.long(), True), marks)


def test_equal_scores_go_to_the_first() -> None:
    for kind in ("softmax", "sigmoid"):
        _, marks = fused_topk_with_score_function(
            torch.zeros(2, EXPERTS), 2, False, None, None, None, kind, None
        )
        assert marks.nonzero()[:, 1].tolist() == [0, 1, 0, 1]


def test_bad_arguments_are_told() -> None:
    logits = torch.randn(4, EXPERTS)

    def run(x=logits, topk=2, groups=None, of_groups=None, kind="softmax", bias=None, **others):
        fused_topk_with_score_function(
            x, topk, False, groups, of_groups, None, kind, bias, **others
        )

    for message, changed in (
        (
            "score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'",
            {"kind": "relu"},
        ),
        ("topk must be 1 to 12, got 13", {"topk": 13}),
        ("topk must be 1 to 12, got 0", {"topk": 0}),
        ("logits must be floating", {"x": logits.int()}),
        ("num_groups must divide 12 experts, got 5", {"groups": 5, "of_groups": 2}),
        ("num_groups must divide 12 experts, got None", {"of_groups": 2}),
        ("group_topk must be at most topk 2 and 4 groups", {"groups": 4, "of_groups": 3}),
        ("expert_bias must be None beside softmax", {"bias": torch.zeros(EXPERTS)}),
        (
            r"expert_bias must be \[12\], got one of \(3,\)",
            {"kind": "sigmoid", "bias": torch.zeros(3)},
        ),
        ("routing_map_format must be one of bytemap, bitmap_u8", {"routing_map_format": "bits"}),
        (r"topk_indices must be \(4, 2\)", {"topk_indices": torch.empty(4, 3)}),
        ("qb_histogram must be None", {"qb_histogram": torch.zeros(1)}),
        ("qb_histogram_mode must be None", {"qb_histogram_mode": "two_kernel"}),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changed)
    with pytest.raises(ValueError, match=r"probs must be \[tokens, 3\]"):
        fused_moe_aux_loss(torch.rand(4, 2), torch.ones(2), 4, 3, 1, 0.1)
    with pytest.raises(ValueError, match=r"tokens_per_expert must be \[2\]"):
        fused_moe_aux_loss(torch.rand(4, 2), torch.ones(3), 4, 2, 1, 0.1)
