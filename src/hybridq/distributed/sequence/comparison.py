"""Ranks compare what a forward is given, before the first collective in which they could differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from ... import settings
from ..._torch_private import functional_all_gather, process_group, tree_leaves, wait_tensor
from ...recipes import Recipe
from ..agreement import Fingerprint, compare
from .exchange import HeadExchange

__all__ = ["Comparison"]

_RULE: Final = (
    "ranks that share sequences must run the same model under the same recipe, on equal parts"
)


class Comparison:
    """What ranks that share sequences have in common in each forward: inputs' shapes, the recipe.

    One collective of 16 bytes; where they differ, what does is found, and every rank raises.

    Args:
        model: what runs.
        exchange: among which ranks.
    """

    def __init__(self, model: nn.Module, exchange: HeadExchange) -> None:
        self._exchange = exchange
        self._seen: tuple[object, tuple[tuple[str, str], ...], bytes] | None = None
        self._model = model

    def _fingerprint(self) -> tuple[tuple[tuple[str, str], ...], bytes]:
        recipe = settings.current().recipe
        if self._seen is None or self._seen[0] is not recipe:
            shape = (self._exchange.world,)
            made = Fingerprint.of(self._model, cast("Recipe | None", recipe), shape)
            self._seen = (recipe, made.lines, made.digest)
        return self._seen[1:]

    @torch.compiler.disable
    def check(self, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on every rank if one of them is given something else.

        Args:
            where: who asks, for the error.
            args, kwargs: of the forward.

        Raises:
            RuntimeError: what differs, and what each rank has there.
        """
        given = [*enumerate(args), *sorted(kwargs.items())]
        shapes = {
            str(name): [(tuple(x.shape), str(x.dtype)) for x in found]
            for name, value in given
            if (found := [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)])
        }
        text = "; ".join(f"{name} {told}" for name, told in shapes.items()) or "no tensor"
        lines, digest = self._fingerprint()
        own = hashlib.blake2b(digest + text.encode(), digest_size=16).digest()
        tensors = [x for x in tree_leaves([args, dict(kwargs)]) if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else None
        world, name = self._exchange.world, self._exchange.name
        sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
        got = wait_tensor(functional_all_gather(sent, world, name)).view(world, 16).tolist()
        if all(one == got[0] for one in got):
            return
        line = ("the shapes of the inputs", text)
        compare(Fingerprint((line, *lines)), process_group(name), where, _RULE)
