"""What an optimizer writes where a module finds its weight: it, or what it is computed of.

A weight that is computed (a parametrization, `torch.nn.utils.weight_norm`) is another tensor in
each forward, though no step has written anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.inputs import begins_at, is_plain

__all__ = ["sources_of", "stamp_of"]


def sources_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the leaves that a weight is computed of; of one that is a leaf, itself.

    Left out are parts of the flat parameters of torch's FullyShardedDataParallel, which are written
    by every gather.

    Args:
        weight: as a module finds it in a forward.
    """
    leaves = [weight] if weight.grad_fn is None else _leaves(weight.grad_fn)
    return tuple([leaf for leaf in leaves if not _is_flat(leaf)])


def stamp_of(sources: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return what is another one when one of some tensors was written, or lies elsewhere.

    Args:
        sources: leaves.
    """
    stamps = []
    for source in sources:
        own: Any = getattr(source, "_local_tensor", source)  # of a DTensor, written by itself too
        address = begins_at(own) if is_plain(own) else 0
        stamps.append((source._version, own._version, address))
    return tuple(stamps)


def _leaves(node: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _is_flat(leaf: torch.Tensor) -> bool:
    whole = leaf if leaf._base is None else leaf._base
    return bool(getattr(whole, "_is_flat_param", False))
