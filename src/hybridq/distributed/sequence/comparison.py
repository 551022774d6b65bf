"""Ranks compare what a forward is given, before the first collective in which they could differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from ... import settings
from ..._torch_private import out_of_graphs, tree_leaves
from ..._torch_ranks import functional_all_gather, process_group, wait_tensor
from ...recipes import Recipe
from ..agreement import Fingerprint, compare
from .exchange import HeadExchange

__all__ = ["Comparison"]

#: Attributes of modules that say how attention computes, whatever parameters there are.
_OF_ATTENTION: Final = (
    *("num_attention_heads", "num_heads", "num_gqa_groups", "num_key_value_heads"),
    *("num_key_value_groups", "head_dim", "kv_channels", "qkv_format"),
    *("attn_mask_type", "window_size", "sliding_window", "is_causal"),
)
_RULE: Final = (
    "ranks that share sequences must run the same model under the same recipe, on equal parts"
)


def _attention_lines(model: nn.Module) -> list[tuple[str, str]]:
    """Return what each attention module of a model says of itself."""
    lines = []
    for name, module in model.named_modules():
        found = [
            f"{one}={value}"
            for one in _OF_ATTENTION
            if isinstance(value := getattr(module, one, None), int | str | tuple)
        ]
        if found:
            lines.append((f"attention of {name or type(module).__name__}", " ".join(found)))
    return lines


class Comparison:
    """What ranks that share sequences have in common in each forward.

    Inputs' shapes, their strings and bools, the recipe, how attention computes, what travels.

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
            exchange = self._exchange
            formats = (exchange.forward or "values", exchange.backward or "values")
            travels = ("what travels around attention", " and ".join(formats))
            own = Fingerprint((*made.lines, travels, *_attention_lines(self._model)))
            self._seen = (recipe, own.lines, own.digest)
        return self._seen[1:]

    @out_of_graphs
    def check(self, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on every rank if one of them is given something else.

        Args:
            where: who asks, for the error.
            args, kwargs: of the forward.

        Raises:
            RuntimeError: what differs, and what each rank has there.
        """
        given = [*enumerate(args), *sorted(kwargs.items())]
        shapes: dict[str, list[object]] = {
            str(name): [(tuple(x.shape), str(x.dtype)) for x in found]
            for name, value in given
            if (found := [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)])
        }
        shapes |= {str(name): [value] for name, value in given if isinstance(value, str | bool)}
        text = "; ".join(f"{name} {told}" for name, told in shapes.items()) or "no tensor"
        lines, digest = self._fingerprint()
        own = hashlib.blake2b(digest + text.encode(), digest_size=16).digest()
        tensors = [x for x in tree_leaves([args, dict(kwargs)]) if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else None
        world, name = self._exchange.world, self._exchange.name
        sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
        try:
            got = wait_tensor(functional_all_gather(sent, world, name)).view(world, 16).tolist()
        except RuntimeError as error:
            ranks = torch.distributed.get_process_group_ranks(process_group(name))
            raise RuntimeError(
                f"{where}: the ranks of the mesh, {ranks}, must all compare what they are about to "
                "run, got none of one of them; every one of them must be given this mesh, and run "
                f"the model as often ({error})"
            ) from error
        if all(one == got[0] for one in got):
            return
        line = ("the shapes of the inputs", text)
        compare(Fingerprint((line, *lines)), process_group(name), where, _RULE)
