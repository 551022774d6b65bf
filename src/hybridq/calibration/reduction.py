"""The calibrations of several ranks as one: one vector, and one reduction of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch

from .calibration import Calibration
from .products import projection_of
from .ranks import Ranks

__all__ = ["Entry", "reduced"]

#: Slots in which all experts of a layer have one amax.
_OF_LAYERS: Final = ("input", "output", "k", "v")
_TOKENS: Final = "tokens"


class Entry(NamedTuple):
    """What a calibration has of a name, whether or not anything was seen.

    Attributes:
        name: of a product, a projection or a cache.
        slot: of it, or `"tokens"`.
        shape: of the amax or the count.
        is_stack: the first axis is the experts that this rank has.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    is_stack: bool = False


def reduced(
    found: Calibration, entries: Iterable[Entry], ranks: Ranks, expert_parallel: int = 1
) -> Calibration:
    """Return the calibration of all ranks, on every rank.

    One vector has the amax of each projection, the largest over all experts and ranks, and of each
    product what it has by itself; -inf where nothing was seen. Its names are compared first.

    Args:
        found: of this rank.
        entries: all that it may have, seen or not.
        ranks: all of them.
        expert_parallel: over how many ranks, in their order, each stack of experts is split.

    Raises:
        ValueError: ranks have other products, or were asked for other things.
        RuntimeError: a rank is gone.
    """
    if ranks.count == 1:
        return found
    mine = sorted(set(entries))
    layers = sorted({_of_layer(one) for one in mine if one.slot in _OF_LAYERS})
    how = [f"{slot} by {text}" for slot, text in sorted(found.observers.items())]
    lines = [f"{name} {slot} {list(shape)}" for name, slot, shape, _ in layers]
    split = f"experts split over {expert_parallel}"
    ranks.same_lines([split, *how, *lines], "products, observers and options")
    own = _of_all([one for one in mine if one.slot not in _OF_LAYERS], ranks)
    part = (ranks.me % expert_parallel, expert_parallel)
    counted = [one for one in own if one.slot == _TOKENS]
    own = [one for one in own if one.slot != _TOKENS]
    values = [_of_projection(found, one) for one in layers]
    values += [_placed(found.amaxes.get(one.name, {}).get(one.slot), one, part) for one in own]
    counts = [_placed(found.tokens.get(one.name), one, part) for one in counted]
    most = ranks.reduced(_joined(values), "max")
    sums = ranks.reduced(
        _joined([*counts, torch.tensor([found.batches], dtype=torch.int64, device="cpu")]), "sum"
    )
    tokens = dict(zip((one.name for one in counted), _parted(sums, counts), strict=True))
    amaxes: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tokens}
    for one, value in zip([*layers, *own], _parted(most, values), strict=True):
        if bool(value.isneginf().all()):
            continue  # nobody saw anything
        names = [name for name in tokens if projection_of(name) == one.name]
        for name in names if one.slot in _OF_LAYERS and names else [one.name]:
            amaxes.setdefault(name, {})[one.slot] = value
    known = {projection_of(name): one for name, one in found.formats.items()}
    formats = {name: known[key] for name in amaxes if (key := projection_of(name)) in known}
    return Calibration(amaxes, tokens, found.observers, formats, int(sums[-1]))


def _of_layer(one: Entry) -> Entry:
    """Return the entry of all experts of a layer."""
    return one._replace(name=projection_of(one.name), is_stack=False)


def _of_all(mine: list[Entry], ranks: Ranks) -> list[Entry]:
    """Return the entries of products by themselves that any rank has, in one order.

    Experts that are modules may have other numbers on other ranks.
    """
    texts = ranks.texts(json.dumps(mine))
    found: dict[tuple[str, str], Entry] = {}
    for text in dict.fromkeys(texts):
        for name, slot, shape, is_stack in json.loads(text):
            one = Entry(name, slot, tuple(shape), is_stack)
            known = found.setdefault((name, slot), one)
            if known != one:
                raise ValueError(
                    f"calibrate: every rank must have as many experts and channels, got "
                    f"{list(known.shape)} and {list(one.shape)} in the {slot} of {name}"
                )
    return [found[key] for key in sorted(found)]


def _of_projection(found: Calibration, one: Entry) -> torch.Tensor:
    """Return the amax of all experts of a layer that this rank has."""
    for name, slots in found.amaxes.items():
        if one.slot in slots and projection_of(name) == one.name:
            return slots[one.slot]
    return torch.full(one.shape, -math.inf, dtype=torch.float32, device="cpu")


def _placed(value: torch.Tensor | None, one: Entry, part: tuple[int, int]) -> torch.Tensor:
    """Return a value among those of all ranks' experts: -inf, or no token, for what is not here."""
    place, parts = part
    is_count = one.slot == _TOKENS
    shape = (one.shape[0] * parts, *one.shape[1:]) if one.is_stack else one.shape
    dtype, nothing = (torch.int64, 0) if is_count else (torch.float32, -math.inf)
    made = torch.full(shape, nothing, dtype=dtype, device="cpu")
    if value is None:
        return made
    if not one.is_stack:
        return value
    made[place * one.shape[0] : (place + 1) * one.shape[0]] = value
    return made


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in values])


def _parted(vector: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a vector in the shapes of what it was made of; more behind is left."""
    made, at = [], 0
    for one in like:
        made.append(vector[at : at + one.numel()].reshape(one.shape))
        at += one.numel()
    return made
