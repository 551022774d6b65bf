"""Bytes that a training step holds: quantized weights, and activations saved for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..nn import Linear
from ..recipes import QuantizerRole, get


def saved_nbytes(forward: Callable[[], Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps alive after ``forward`` for its backward.

    Args:
        forward: runs one forward and returns its loss.
        exclude: tensors that do not count (the parameters: they are there anyway).

    Returns:
        The sum over distinct storages. A view counts with its whole storage, since that is what
        it keeps in memory; a tensor that several operations save counts once.
    """
    excluded = {_key(part) for tensor in exclude for part in _parts(tensor)}
    # Storages are held until the sum is made: an address must not be used twice.
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in _parts(tensor):
            if _key(part) not in excluded:
                storages[_key(part)] = part.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    total = sum(storage.nbytes() for storage in storages.values())
    del loss  # alive until here, and with it the graph
    return total


def activation_nbytes(
    forward: Callable[[int], Tensor], batch: int, exclude: Iterable[Tensor] = ()
) -> int:
    """Bytes saved for the backward that belong to the ``batch`` samples.

    It is the difference between a forward of ``2 * batch`` and one of ``batch`` samples, so what
    does not grow with the batch (weights cast or quantized for the backward, rotary tables)
    drops out, in whatever form a recipe keeps it.

    Args:
        forward: ``forward(n)`` runs ``n`` samples and returns the loss.
        batch: samples per training step.
        exclude: as for ``saved_nbytes``.
    """
    held = list(exclude)
    return saved_nbytes(lambda: forward(2 * batch), held) - saved_nbytes(
        lambda: forward(batch), held
    )


def weight_nbytes(model: nn.Module, recipe: str) -> int:
    """Bytes of the projections' weights in the form that the GEMMs of a training step read.

    That is one BF16 copy without a recipe, and the rowwise plane for the forward with the
    columnwise plane for the backward under one; buffers that both planes share count once.

    Args:
        model: its ``hybridq.Linear`` modules count (with recipe ``"bf16"`` the same ones).
        recipe: a name known to ``hybridq.recipes.get``.
    """
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        weight = module.weight.detach().bfloat16()
        if recipe == "bf16":
            total += weight.untyped_storage().nbytes()
            continue
        role = QuantizerRole("linear", "weight", name)
        quantized = get(recipe).quantizer(role)(weight)
        total += sum({_key(p): p.untyped_storage().nbytes() for p in _parts(quantized)}.values())
    return total


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that ``tensor`` is made of (itself, unless it is a wrapper)."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
