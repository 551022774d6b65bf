"""The search for formats: of each product the best option, then back until the loss fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .options import PLAIN, Option

__all__ = ["Chosen", "chosen_first", "fitted"]

#: The option of each product, by layer and GEMM.
Chosen = dict[tuple[str, str], Option]

_NOTHING: Final = 1e-12


def chosen_first(options: Sequence[Option], prefer: str) -> Chosen:
    """Return the best option of each product that loses no more than it may.

    Args:
        options: of all products.
        prefer: `"speed"`: the fastest, and BF16 unless one is faster; `"memory"`: the smallest
            planes.
    """
    by_product: dict[tuple[str, str], list[Option]] = {}
    for one in options:
        by_product.setdefault((one.layer, one.gemm), []).append(one)
    found: Chosen = {}
    for key, own in by_product.items():
        taken = [one for one in own if not one.reason]
        found[key] = min(taken, key=lambda one: _cost(one, prefer))
    return found


def _cost(option: Option, prefer: str) -> tuple[float, float]:
    """Return what is to be small: of what is equal, the smaller error."""
    value = option.seconds if prefer == "speed" else float(option.nbytes)
    return math.inf if value is None else value, option.added or 0.0


def fitted(
    first: Chosen,
    plain: Mapping[tuple[str, str], Option],
    fits: Callable[[Chosen], bool],
    harm: Callable[[Option], float],
    prefer: str,
) -> tuple[Chosen, int]:
    """Return the choices with as few products back in BF16 as the loss needs, and how many.

    Products go back in the order of their harm for what they save, the most harmful first; how
    many must is found by halving, so that a model of n products is run log2(n) times.

    Args:
        first: choices.
        plain: the option of each product that quantizes nothing.
        fits: runs the model, and says whether its loss is within the budget.
        harm: of a product's option.
        prefer: as for `chosen_first`.
    """
    quantized = [one for one in first.values() if one.name != PLAIN]

    def worth(one: Option) -> float:
        saved = _cost(plain[one.layer, one.gemm], prefer)[0] - _cost(one, prefer)[0]
        return -harm(one) / max(saved, _NOTHING)

    order = sorted(quantized, key=worth)

    def without(count: int) -> Chosen:
        back = {(one.layer, one.gemm): plain[one.layer, one.gemm] for one in order[:count]}
        return {**first, **back}

    if not order or fits(first):
        return first, 0
    low, high = 0, len(order)  # `low` does not fit; all of them back is BF16 itself
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(without(middle)) else (middle, high)
    return without(high), high
