"""FSDP2: parameters of high precision that are gathered as planes.

`prepare_fsdp2(model)` makes the weights of hybridq's modules `GatheredWeight`s; then plain
`torch.distributed.fsdp.fully_shard` shards them as ever. They stay parameters of their own dtype
for the optimizer; what travels in an all-gather are the planes of the recipe, each rank having
encoded its own rows (see `shards`). A forward gathers rowwise planes, a backward columnwise ones.

The unsharded parameter that a module finds as its weight is a QuantizedTensor.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..nn import QuantizedModule
from .gather import GatheredParameter
from .weight import GatheredWeight
from .work import ShardWork, encode_shards

__all__ = ["prepare_fsdp2", "wire_nbytes"]


def prepare_fsdp2(model: nn.Module) -> nn.Module:
    """Let the weights of hybridq's modules in `model` travel as planes; return `model`.

    Called before `fully_shard`. Parameters keep their values, dtype and names; what an optimizer
    updates, and what a state_dict holds, stay tensors of high precision.

    Args:
        model: any module.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: a weight is a DTensor already: `fully_shard` came first.

    A weight that another kind of module uses as well (tied to an embedding) is left as it is.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)))
        >>> type(hybridq.distributed.prepare_fsdp2(model)[0].weight).__name__
        'GatheredWeight'
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"prepare_fsdp2: model must be an nn.Module, got {type(given).__name__}")
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append((module, name))
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for name, part in module._weights.items():
            weight = module._parameters.get(name)
            if weight is None or weight.dim() != 2 or type(weight.data) is GatheredWeight:
                continue
            if type(weight.data) is not torch.Tensor:
                raise RuntimeError(
                    f"prepare_fsdp2: {path}.{name} must be a plain parameter, got "
                    f"{type(weight.data).__name__}; call prepare_fsdp2 before fully_shard"
                )
            owners = users[id(weight)]
            if all(name in getattr(owner, "_weights", ()) for owner, name in owners):
                found.append((module, part, f"{path}.{name}", weight, owners))
    for module, part, path, parameter, owners in found:
        if isinstance(getattr(*owners[0]).data, GatheredWeight):
            continue  # tied, and done
        about = GatheredParameter(module, part, path)
        made = nn.Parameter(GatheredWeight(parameter.data, about), parameter.requires_grad)
        for owner, name in owners:
            owner._parameters[name] = made
        _alive.add(about)
    for owner in {owner for *_, owners in found for owner, _ in owners}:
        owner.register_state_dict_post_hook(_plain_state)
    _hook.install()
    return model


def _plain_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put plain tensors into a state_dict: those that the parameters hold, no copies."""
    for name in getattr(module, "_weights", ()):
        tensor = state.get(prefix + name)
        local = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(local, GatheredWeight):
            continue
        values = local.high
        if local is not tensor:
            from torch.distributed.tensor import DTensor  # not every build of torch has it

            sharded: Any = tensor
            values = DTensor.from_local(
                values,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        state[prefix + name] = values


_alive: weakref.WeakSet[GatheredParameter] = weakref.WeakSet()


class _Hook:
    """After every step of an optimizer: the maxima of all shards, by one reduction per group."""

    def __init__(self) -> None:
        self._is_installed = False

    def install(self) -> None:
        """Register with torch's optimizers; once per process."""
        if not self._is_installed:
            self._is_installed = True
            register_optimizer_step_post_hook(self._run)

    @torch.no_grad()
    def _run(self, *_: Any) -> None:
        by_group: dict[int, tuple[Any, list[ShardWork]]] = {}
        for about in sorted(_alive, key=lambda one: one.serial):
            work = about.work_ahead()
            if work is not None:
                group = about.last_call().group
                by_group.setdefault(id(group), (group, []))[1].append(work)
        for group, works in by_group.values():
            encode_shards(works, group, only_maxima=True)


_hook = _Hook()


def wire_nbytes(model: nn.Module) -> int:
    """Return how many bytes each rank has got so far in all-gathers of weights, its own included.

    Padding of uneven shards and reductions of maxima do not count.

    Args:
        model: that `prepare_fsdp2` prepared.
    """
    abouts = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            local = getattr(parameter, "_local_tensor", parameter)
            if isinstance(local, GatheredWeight):
                abouts[id(local._about)] = local._about
    return sum(about.nbytes for about in abouts.values())
