"""Sizes of groups as callers give them, and groups whose quantizers differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...recipes import Plan
from ..autograd import Layout, draw_seeds, grouped_linear
from ..weights import Into

__all__ = ["Splits", "group_offsets", "host_splits", "mixed_linear"]

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


def mixed_linear(
    x: torch.Tensor,
    offsets: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    plans: list[Plan],
    features: tuple[int, int],
    scales: Sequence[Any] = (),
    into: tuple[Into | None, ...] = (),
    kept: tuple[Any, ...] = (),
) -> torch.Tensor:
    """Return `grouped_linear` where groups have different plans: one grouped product for each.

    The tokens of the groups of one plan are moved to the front; those behind belong to no group.
    Nothing is read on the host.

    Args:
        x: `[T, in_features]`.
        offsets: int32 `[G]`, where each group ends.
        weights: one `[out, in]` for each group.
        biases: one `[out]` for each group, or none.
        plans: one for each group.
        features: (in_features, out_features).
        scales: of each group's state, None where its plan has no delay; none if none has.
        into: where the gradient of each group's weight is added; empty: they are returned.
        kept: of each group, the planes of a weight that is quantized already; empty: none is.

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
    drawn = [g for g, plan in enumerate(plans) if plan.is_stochastic]
    seeds = draw_seeds(len(drawn), device) if drawn else None
    for plan in dict.fromkeys(plans):
        mine = [g for g, one in enumerate(plans) if one == plan]
        seed = None
        if seeds is not None and plan.is_stochastic:
            seed = _pick(seeds, [drawn.index(g) for g in mine])
        # The last is for tokens of no group.
        is_token = torch.cat([*(yes if one == plan else no for one in plans), no])[group]
        order = torch.argsort(~is_token, stable=True)
        chosen = torch.cumsum(_pick(sizes, mine), 0, dtype=torch.int32)
        own = [weights[g] for g in mine] + ([biases[g] for g in mine] if biases else [])
        layout = Layout(len(mine), False, bool(biases), False, features)
        known = tuple([scales[g] for g in mine]) if plan.is_delayed else None
        theirs = tuple([into[g] for g in mine]) if into else ()
        given = tuple([kept[g] for g in mine]) if kept else ()
        y = grouped_linear(
            x[order], chosen, own, layout, plan, given, seed, scales=known, into=theirs
        )
        out = torch.where(is_token[:, None], y[torch.argsort(order)], out)
    return out


def _pick(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    return torch.cat([values.narrow(0, place, 1) for place in places])
