"""Gathering a parameter again that was gathered for another recipe than its module computes under.

A gather may begin long before its module's forward: where another module prefetches it, or a caller
unshards it early. The recipe in force then is not the module's own. It is seen when the module
computes; then all ranks, which run the same program, gather what that recipe wants, and take the
next gathers that begin so for gathers of that recipe.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ..errors import warn_once
from ..nn import QuantizedModule
from ..recipes import Recipe, SlotPlan
from .agreement import Wish, current_wish
from .fingerprint import DIGEST_NBYTES

__all__ = ["Regather"]


class Regather:
    """What a GatheredParameter does when its module computes."""

    def __init__(self) -> None:
        #: By phase and digest of the recipe in force where a gather began: what it was used for.
        self._learned: dict[tuple[str, bytes], Wish] = {}
        #: The digest where the last gather began.
        self._begun = b""

    def wish_under(self, module: QuantizedModule, part: str, recipe: Recipe | None) -> Wish:
        """Return what a module computes under a recipe.

        Args:
            module, part: that the weight belongs to; of a tied one any of them.
            recipe: any, or None.
        """
        return current_wish(module, part, (recipe,))

    def wish_now(self: Any, phase: str) -> Wish:
        """Return what a gather that begins now will be used for, as far as is known.

        Args:
            phase: of the call.
        """
        wish: Wish = current_wish(self._module(), self._part)
        self._begun = wish.digest
        return self._learned.get((phase, wish.digest), wish)

    def use(self: Any, module: QuantizedModule, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a module's forward takes under a recipe; all ranks must call it.

        Args:
            module: whose forward it is; a tied weight has several.
            name: of the parameter there.
            recipe: that it computes under, or None.
        """
        call = self.call
        if call is None or self.in_graph:
            return
        if type(module._parameters[name]) is nn.Parameter:
            warn_once(
                f"fsdp2.lost:{self.name}",
                f"fsdp2: {self.name} was prepared, and then replaced by another parameter, whose "
                "values are gathered as they are",
            )
            return
        wish = self.wish_under(module, module._weights[name], recipe)
        if wish.digest == call.wish.digest:
            return
        self._learned[call.phase, self._begun] = wish
        self._gather_as(wish)

    def use_slot(self: Any, slot: SlotPlan) -> None:
        """Have the planes that a backward takes whose forward had them; all ranks must call it.

        Args:
            slot: of the forward.
        """
        if self.last_call().slot != slot:
            digest = hashlib.blake2b(repr(slot).encode(), digest_size=DIGEST_NBYTES).digest()
            self._gather_as(Wish(slot, digest))

    def _gather_as(self: Any, wish: Wish) -> None:
        call = self.last_call()
        call.wish = wish
        self.agree(call.phase, wish)
        wanted = self._settled(call, None)
        if wanted is not None:
            with torch.no_grad():
                self.refill(wanted, self.payloads_now(wanted))
