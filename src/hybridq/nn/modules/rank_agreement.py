"""Ranks of tensor parallelism compare what they compute, when a module first does so."""

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
#: By module: (part, plan, tokens, dtype) that ranks have compared.
_compared: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


def compare_ranks(
    module: QuantizedModule, part: str, plan: Plan | None, group: str, x: torch.Tensor
) -> None:
    """Raise on every rank unless all of them are about to compute the same; before any collective.

    At the first forward of a part under a plan, and of each of the first numbers of tokens. Not in
    code that is compiled.

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
    known = _compared.setdefault(module, set())
    tokens = tuple(x.shape[:-1])  # features are dealt out, and may differ
    key = (part, plan, tokens, x.dtype)
    if key in known or sum(one[:2] == key[:2] for one in known) >= _MOST:
        return
    name = " ".join([type(module).__name__, *filter(None, (module.name, part))])
    compare(group, Facts(name, _formats(plan), str(x.dtype), tokens, -1, (), ()))
    known.add(key)


def _formats(plan: Plan | None) -> tuple[str, ...]:
    """Return the spec of each plane of a plan, for an error; `bf16` and its like are their own."""
    if plan is None:
        return ()
    slots = (plan.input, plan.weight, plan.grad_output)
    return tuple([str(one.spec) for slot in slots for one in (slot.row, slot.col)])
