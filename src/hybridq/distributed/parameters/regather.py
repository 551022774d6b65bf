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

from ..._torch_private import graph_task_id, outside_selective_checkpoint
from ...errors import warn_once
from ...nn import WeightOwner
from ...recipes import Recipe, SlotPlan
from ...tensor import is_quantized
from ..agreement import DIGEST_NBYTES, ExpectedRecipe, expected_recipe

__all__ = ["Regather"]


class Regather:
    """What a GatheredParameter does when its module computes."""

    def __init__(self) -> None:
        #: By phase and digest of the recipe in force where a gather began: what it was used for.
        self._learned: dict[tuple[str, bytes], ExpectedRecipe] = {}
        #: The digest where the last gather began.
        self.begun = b""

    def expected_under(
        self, module: WeightOwner, part: str, recipe: Recipe | None
    ) -> ExpectedRecipe:
        """Return what a module computes under a recipe.

        Args:
            module, part: that the weight belongs to; of a tied one any of them.
            recipe: any, or None.
        """
        return expected_recipe(module, part, (recipe,))

    def expected_now(self: Any, phase: str) -> ExpectedRecipe:
        """Return what a gather that begins now will be used for, as far as is known.

        Args:
            phase: of the call.
        """
        expected: ExpectedRecipe = expected_recipe(self.owner(), self.part)
        self.begun = expected.digest
        return self._learned.get((phase, expected.digest), expected)

    def use(self: Any, module: WeightOwner, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a module's forward takes under a recipe; all ranks must call it.

        Args:
            module: whose forward it is; a tied weight has several.
            name: of the parameter there.
            recipe: that it computes under, or None.
        """
        call = self.call
        if call is None:
            return
        if type(module.held(name)) is nn.Parameter:
            warn_once(
                f"fsdp2.lost:{self.name}",
                f"fsdp2: {self.name} was prepared, and then replaced by another parameter, whose "
                "values are gathered as they are",
            )
            return
        expected = self.expected_under(module, dict(module.initial_weights())[name], recipe)
        if expected.digest == call.expected.digest:
            return
        self._learned[call.phase, self.begun] = expected
        self.changed()
        self._gather_as(expected)

    def use_in_graph(self: Any, module: WeightOwner, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a compiled forward takes; all ranks must call it, in front of it.

        A weight that is not gathered yet will be under the recipe in force where it arrives, which
        is right. A recomputation has the planes of its forward.

        Args:
            module, name, recipe: as for `use`.
        """
        parameter = module.held(name)
        parameter = getattr(parameter, "_local_tensor", parameter)
        if graph_task_id() != -1 or not is_quantized(parameter):
            return
        self.use(module, name, recipe)
        parameter.quantizer = self.quantizer()
        parameter.take_class()  # which a graph is traced for

    def use_slot(self: Any, slot: SlotPlan) -> None:
        """Have the planes that a backward takes whose forward had them; all ranks must call it.

        Args:
            slot: of the forward.
        """
        if self.last_call().slot != slot:
            digest = hashlib.blake2b(repr(slot).encode(), digest_size=DIGEST_NBYTES).digest()
            self._gather_as(ExpectedRecipe(slot, digest))

    def _gather_as(self: Any, expected: ExpectedRecipe) -> None:
        call = self.last_call()
        call.expected = expected
        self.agree(call.phase, expected)
        wanted = self._settled(call, None)
        if wanted is not None:
            with torch.no_grad(), outside_selective_checkpoint():
                self.refill(wanted, self.payloads_now(wanted))
