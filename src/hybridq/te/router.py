"""Routers of a mixture under Transformer Engine's names: scores, the best experts, their balance.

They are operators of torch here, in FP32 (FP64 for FP64), on any device.

Source: names, arguments and meanings: Transformer Engine's router functions; groups of experts:
DeepSeek-V3, arXiv:2412.19437, 2.1.2; the balance loss: Switch Transformers, arXiv:2101.03961, (4).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import torch
from torch.nn import functional as F

from ..errors import must_be_one_of

__all__ = [
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

#: Added to sums that divide.
_TINY: Final = 1e-20


class RoutingMapFormat(IntEnum):
    """How a map says which experts a token goes to.

    Attributes:
        BYTEMAP: bool `[..., E]`.
        BITMAP_U8: uint8 `[..., ceil(E / 8)]`; expert e is bit `e % 8` of byte `e // 8`.
    """

    BYTEMAP = 0
    BITMAP_U8 = 1


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def _sqrtsoftplus(logits: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits).sqrt()


#: By name, what makes scores of logits.
_SCORES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: None = None,
    qb_bin_bounds: None = None,
    qb_histogram_mode: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's best experts, and which they are.

    Scores of sigmoid and sqrtsoftplus are divided by the sum of those that are chosen, where there
    is more than one. Of equal scores the first expert is the better one.

    Args:
        logits: `[..., E]`, floating.
        topk: how many experts a token goes to.
        use_pre_softmax: of softmax: over all experts, else over the chosen ones.
        num_groups: of as many experts each, which lie one behind the other; None: no groups.
        group_topk: how many groups a token's experts come from: those with the greatest sums of
            their `topk // group_topk` best scores; None or 0: from any.
        scaling_factor: of the weights; None: 1.
        score_function: `"softmax"`, `"sigmoid"` or `"sqrtsoftplus"`.
        expert_bias: `[E]`, added to the scores that choose and not to the weights; not of softmax.
            It has no gradient. None: nothing is added.
        routing_map_format: a `RoutingMapFormat`, `"bytemap"` or `"bitmap_u8"`.
        topk_indices: integers `[..., topk]` that are written and returned in place of a map.
        qb_histogram, qb_bin_bounds, qb_histogram_mode: must be None.

    Returns:
        Weights `[..., E]` in the dtype of the logits, zero of experts that are not chosen; a map.

    Raises:
        ValueError: an argument has another value, or another shape.

    Example:
        >>> import torch
        >>> from hybridq.te.router import fused_topk_with_score_function
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> weights, chosen = fused_topk_with_score_function(
        ...     logits, 2, False, None, None, None, "softmax", None
        ... )
        >>> chosen.tolist(), round(float(weights[0, 1]), 4)
        ([[False, True, True]], 0.7311)
    """
    where = "fused_topk_with_score_function"
    quantiles = {
        "qb_histogram": qb_histogram,
        "qb_bin_bounds": qb_bin_bounds,
        "qb_histogram_mode": qb_histogram_mode,
    }
    for name, value in quantiles.items():
        if value is not None:
            raise ValueError(f"{where}: {name} must be None, got one: quantiles balance nothing")
    _check(where, logits, topk, score_function)
    count, softmax = logits.shape[-1], score_function == "softmax"
    if expert_bias is not None and (softmax or expert_bias.shape != (count,)):
        asked = "None beside softmax" if softmax else f"[{count}]"
        raise ValueError(
            f"{where}: expert_bias must be {asked}, got one of {tuple(expert_bias.shape)}"
        )
    x = _wide(logits)
    scores = x if softmax and not use_pre_softmax else _SCORES[score_function](x)
    with torch.no_grad():
        choosing = scores if expert_bias is None else scores + expert_bias
        if group_topk:
            choosing = _of_groups(where, choosing, topk, num_groups, group_topk)
        chosen = _best(choosing, topk)
    weights = scores.gather(-1, chosen)
    if softmax and not use_pre_softmax:
        weights = weights.softmax(-1)
    elif not softmax and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if scaling_factor is not None:
        weights = weights * scaling_factor
    all_weights = torch.zeros_like(x).scatter(-1, chosen, weights).to(logits.dtype)
    if topk_indices is None:
        return all_weights, _map(where, chosen, count, routing_map_format)
    if topk_indices.shape != chosen.shape:
        raise ValueError(
            f"{where}: topk_indices must be {tuple(chosen.shape)}, got {tuple(topk_indices.shape)}"
        )
    return all_weights, topk_indices.copy_(chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's best experts, and scores of all that sum to 1 where `topk` is above 1.

    Args:
        logits: `[..., E]`, floating.
        topk: how many experts a token goes to, without groups and biases.
        score_function: `"softmax"`, `"sigmoid"` or `"sqrtsoftplus"`.
        routing_map_format: a `RoutingMapFormat`, `"bytemap"` or `"bitmap_u8"`.

    Returns:
        A map, and scores `[..., E]` in FP32 (FP64 of FP64).

    Raises:
        ValueError: an argument has another value.
    """
    where = "fused_compute_score_for_moe_aux_loss"
    _check(where, logits, topk, score_function)
    scores = _SCORES[score_function](_wide(logits))
    if score_function != "softmax" and topk > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return _map(where, _best(scores.detach(), topk), logits.shape[-1], routing_map_format), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Return the loss that balances experts, a scalar in the dtype of `probs`.

    `coeff E / (topk T^2) sum_e tokens_per_expert[e] sum_t probs[t, e]`, T `total_num_tokens`.

    Args:
        probs: scores `[tokens, E]` of these tokens, floating; or of sequences one beside the other,
            `[length, sequences * E]`: then the losses of all of them are added.
        tokens_per_expert: `[E]`, or `[sequences * E]`, how many tokens go to each, of all ranks;
            any real dtype.
        total_num_tokens: of all ranks; an int, or a tensor of one number.
        num_experts: E.
        topk: how many experts a token goes to.
        coeff: of the loss.

    Raises:
        ValueError: an argument has another shape.
    """
    if probs.dim() != 2 or not probs.shape[1] or probs.shape[1] % num_experts:
        raise ValueError(
            f"fused_moe_aux_loss: probs must be [tokens, {num_experts}], or a multiple of it, got "
            f"{tuple(probs.shape)}"
        )
    if tokens_per_expert.shape != probs.shape[1:]:
        raise ValueError(
            f"fused_moe_aux_loss: tokens_per_expert must be [{probs.shape[1]}], got "
            f"{tuple(tokens_per_expert.shape)}"
        )
    x = _wide(probs)
    total = total_num_tokens
    if isinstance(total, torch.Tensor):
        total = total.to(x.device, x.dtype)
    share = num_experts * coeff / topk / total / total
    return ((x.sum(0) * tokens_per_expert.to(x.device, x.dtype)).sum() * share).to(probs.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check(where: str, logits: torch.Tensor, topk: int, score_function: str) -> None:
    if score_function not in _SCORES:
        raise ValueError(f"{where}: score_function {must_be_one_of(_SCORES, score_function)}")
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(
            f"{where}: logits must be floating [..., E], got {logits.dtype} of "
            f"{tuple(logits.shape)}"
        )
    if not 1 <= topk <= logits.shape[-1]:
        raise ValueError(f"{where}: topk must be 1 to {logits.shape[-1]}, got {topk}")


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the greatest, int64 `[..., count]`; of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _of_groups(
    where: str, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int
) -> torch.Tensor:
    """Return the scores, with minus infinity outside of each token's best groups."""
    count = scores.shape[-1]
    if not num_groups or count % num_groups:
        raise ValueError(f"{where}: num_groups must divide {count} experts, got {num_groups}")
    size = count // num_groups
    if not 1 <= group_topk <= min(topk, num_groups) or group_topk * size < topk:
        raise ValueError(
            f"{where}: group_topk must be at most topk {topk} and {num_groups} groups, of {size} "
            f"experts each, that have {topk} together, got {group_topk}"
        )
    each = topk // group_topk
    groups = scores.unflatten(-1, (num_groups, size))
    sums = groups.sort(dim=-1, descending=True).values[..., :each].sum(-1)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, _best(sums, group_topk), True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def _map(where: str, chosen: torch.Tensor, count: int, form: Any) -> torch.Tensor:
    """Return the map of the chosen experts."""
    names = {one.name.lower(): one for one in RoutingMapFormat}
    kind = names.get(form) if isinstance(form, str) else form
    if kind not in (0, 1):
        raise ValueError(f"{where}: routing_map_format {must_be_one_of(names, form)}")
    marks = torch.zeros(*chosen.shape[:-1], count, dtype=torch.bool, device=chosen.device)
    marks = marks.scatter(-1, chosen, True)
    if kind == RoutingMapFormat.BYTEMAP:
        return marks
    padded = F.pad(marks, (0, -count % 8)).unflatten(-1, (-1, 8))
    bits = torch.arange(8, dtype=torch.uint8, device=chosen.device)
    return (padded.to(torch.uint8) << bits).sum(-1, dtype=torch.uint8)
