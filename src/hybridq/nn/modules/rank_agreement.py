"""Ranks of tensor parallelism compare what they compute, when a module begins to do so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from ...recipes import Plan
from ...shards import Facts, compare

if TYPE_CHECKING:
    from .quantized_module import QuantizedModule

__all__ = ["compare_ranks"]

#: Numbers of tokens that ranks compare, of each part under each plan; later ones are taken to be
#: the same: a comparison takes a millisecond, and lengths may be new in every step.
_MOST: Final = 4


class _Compared:
    """What the ranks have compared of a module.

    Attributes:
        known: (part, plan, tokens, dtype) of each comparison.
        last: by part, the plan of its last forward.
    """

    __slots__ = ("known", "last")

    def __init__(self) -> None:
        self.known: set[tuple[Any, ...]] = set()
        self.last: dict[str, Plan | None] = {}

    def is_new(self, key: tuple[Any, ...]) -> bool:
        """Return whether ranks must compare: another plan than the last forward's, or tokens."""
        part, plan = key[:2]
        if part not in self.last:
            return True
        last = self.last[part]
        if last is not plan and last != plan:
            return True
        return key not in self.known and sum(one[:2] == key[:2] for one in self.known) < _MOST


_compared: WeakKeyDictionary[Any, _Compared] = WeakKeyDictionary()


def compare_ranks(
    module: QuantizedModule, part: str, plan: Plan | None, group: str, x: torch.Tensor
) -> None:
    """Raise on every rank unless all of them are about to compute the same; before any collective.

    At each forward of a part under another plan than that of its last one, be it one that ranks
    have compared before: a rank that goes back to it alone is noticed. And at the first forward
    with each of the first numbers of tokens. Not in code that is compiled.

    Args:
        module: whose part it is.
        part: of the module.
        plan: under which the part computes; None: nothing is quantized.
        group: name of the ranks' group.
        x: `[..., features]`: what the part is given; a DTensor, or this rank's tensor.

    Raises:
        RuntimeError: ranks differ, or one did not come within the timeout of the group's store.
    """
    if torch.compiler.is_compiling():
        return
    compared = _compared.setdefault(module, _Compared())
    tokens = tuple(x.shape[:-1])  # features are dealt out, and may differ
    key = (part, plan, tokens, x.dtype)
    if not compared.is_new(key):
        return
    name = " ".join([type(module).__name__, *filter(None, (module.name, part))])
    compare(group, Facts(name, _formats(plan), str(x.dtype), tokens, -1, (), ()))
    compared.known.add(key)
    compared.last[part] = plan


def _formats(plan: Plan | None) -> tuple[str, ...]:
    """Return the spec of each plane of a plan, for an error; `bf16` and its like are their own."""
    if plan is None:
        return ()
    slots = (plan.input, plan.weight, plan.grad_output)
    return tuple([str(one.spec) for slot in slots for one in (slot.row, slot.col)])
