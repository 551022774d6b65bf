"""Sizes of groups as callers give them, and groups whose quantizers differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ...recipes import Plan
from ...recipes.bind import is_same_plan
from ..autograd import GroupedCall, Layout, draw_seeds, grouped_linear
from ..weights import Into

__all__ = ["Group", "Splits", "group_offsets", "host_splits", "mixed_linear"]

Splits = Sequence[int] | torch.Tensor
#: Makes an exception of a kind and a text, with the module's name before it.
_Error = Callable[[type[Exception], str], Exception]


def host_splits(m_splits: object, groups: int, x: torch.Tensor, error: _Error) -> list[int] | None:
    """Return the sizes of the groups, or None where they stay on the device; raise if wrong.

    Args:
        m_splits: what the caller gave.
        groups: how many there must be.
        x: the tokens, `[T, in_features]`.
        error: makes the exceptions.

    Raises:
        TypeError: they are no ints.
        ValueError: they are not one for each group, negative, of another sum than T, or a tensor on
            another device.
    """
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dtype not in (torch.int32, torch.int64):
            raise error(TypeError, f"m_splits must be int32 or int64, got {m_splits.dtype}")
        if tuple(m_splits.shape) != (groups,):
            raise error(
                ValueError,
                f"m_splits must have one size for each of {groups} groups, got shape "
                f"{tuple(m_splits.shape)}",
            )
        if m_splits.device != x.device:
            raise error(
                ValueError,
                f"m_splits must be a list, or on the input's device {x.device}, got a tensor on "
                f"{m_splits.device}",
            )
        return None
    if not isinstance(m_splits, list | tuple):
        got = type(m_splits).__name__
        raise error(TypeError, f"m_splits must be a list or a tensor of ints, got {got}")
    for size in m_splits:
        # Code that torch compiles may hold a size as a symbol.
        if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
            raise error(TypeError, f"m_splits must hold ints, got {type(size).__name__} ({size!r})")
    sizes = list(m_splits)
    if len(sizes) != groups:
        raise error(
            ValueError, f"m_splits must have one size for each of {groups} groups, got {len(sizes)}"
        )
    if any(size < 0 for size in sizes):
        raise error(ValueError, f"m_splits must not be negative, got {sizes}")
    if sum(sizes) != x.shape[0]:
        raise error(
            ValueError,
            f"m_splits must sum to the {x.shape[0]} tokens of the input, got a sum of {sum(sizes)}",
        )
    return sizes


def group_offsets(m_splits: Any, splits: list[int] | None, x: torch.Tensor) -> torch.Tensor:
    """Return where each group ends, int32 `[G]` on x's device.

    Args:
        m_splits: the sizes as a tensor, where `splits` is None.
        splits: what `host_splits` returned.
        x: the tokens.
    """
    if splits is None:
        # Not beyond the tokens one by one, so that no sum leaves int32's range.
        return torch.cumsum(m_splits.clamp(0, x.shape[0]), 0, dtype=torch.int32)
    return torch.tensor(list(accumulate(splits)), dtype=torch.int32, device=x.device)


class Group(NamedTuple):
    """What one group of tokens is multiplied with.

    Attributes:
        plan: of its three products.
        weight: `[out, in]`.
        bias: `[out]`; None: none is added, in no group.
        scales: of its state; None where its plan has no delay.
        into: where the gradient of its weight is added; None: it is returned.
        kept: the planes of a weight that is quantized already; None: it is not.
    """

    plan: Plan
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: Any = None
    into: Into | None = None
    kept: Any = None


def mixed_linear(
    x: torch.Tensor, offsets: torch.Tensor, groups: Sequence[Group], features: tuple[int, int]
) -> torch.Tensor:
    """Return `grouped_linear` where groups have different plans: one grouped product for each.

    The tokens of the groups of one plan are moved to the front; those behind belong to no group.
    Nothing is read on the host.

    Args:
        x: `[T, in_features]`.
        offsets: int32 `[G]`, where each group ends.
        groups: what each is multiplied with.
        features: (in_features, out_features).

    Returns:
        `[T, out_features]`.
    """
    tokens, device = x.shape[0], x.device
    ends = torch.cummax(offsets.clamp(0, tokens), 0).values
    sizes = ends - nn.functional.pad(ends[:-1], (1, 0))
    group = torch.searchsorted(
        ends, torch.arange(tokens, dtype=torch.int64, device=device), right=True
    )
    # Made on the device: a list of numbers would be copied there, and waited for.
    yes = torch.ones(1, dtype=torch.bool, device=device)
    no = torch.zeros(1, dtype=torch.bool, device=device)
    out = x.new_zeros((tokens, features[1]))
    # In the order of the groups, as single layers draw.
    plans = [one.plan for one in groups]
    drawn = [g for g, plan in enumerate(plans) if plan.is_stochastic]
    seeds = draw_seeds(len(drawn), device) if drawn else None
    for plan in dict.fromkeys(plans):
        mine = [g for g, one in enumerate(plans) if is_same_plan(one, plan)]
        seed = None
        if seeds is not None and plan.is_stochastic:
            seed = _pick(seeds, [drawn.index(g) for g in mine])
        # The last is for tokens of no group.
        is_token = torch.cat([*(yes if g in mine else no for g in range(len(plans))), no])[group]
        order = torch.argsort(~is_token, stable=True)
        chosen = torch.cumsum(_pick(sizes, mine), 0, dtype=torch.int32)
        own = [groups[g] for g in mine]
        biases = [one.bias for one in own if one.bias is not None]
        layout = Layout(len(mine), False, len(biases) > 0, False, features)
        params = [*(one.weight for one in own), *biases]
        known = tuple([one.scales for one in own]) if plan.is_delayed else None
        into, kept = (_unless_none([getattr(one, what) for one in own]) for what in _PLACES)
        call = GroupedCall(layout, plan, kept, seed, known, into)
        y = grouped_linear(x[order], chosen, params, call)
        out = torch.where(is_token[:, None], y[torch.argsort(order)], out)
    return out


#: Attributes of a Group that a product is given only where some group has one.
_PLACES: Final = ("into", "kept")


def _unless_none(values: list[Any]) -> tuple[Any, ...]:
    return tuple(values) if any(one is not None for one in values) else ()


def _pick(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    return torch.cat([values.narrow(0, place, 1) for place in places])
