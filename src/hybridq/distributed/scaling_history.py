"""Histories of delayed scaling in a distributed checkpoint.

Weights and optimizers need nothing of hybridq there: they are DTensors of plain tensors. Histories
are not in a model's state_dict, and a model that has just been made has none whose keys could be
asked for; so they travel as one value.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..errors import CheckpointError
from ..nn.delayed_scaling import ScalingState, states_of

__all__ = ["ScalingHistory"]

_KEY: Final = "histories"
#: What wrappers of modules put into names; DistributedDataParallel's is taken off by itself.
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module")


class ScalingHistory:
    """What delayed scaling remembers of a model, for `torch.distributed.checkpoint`.

    A Stateful: `dcp.save({"model": ..., "scaling": ScalingHistory(model)})` and `dcp.load` of the
    same call its methods. With `reduce_amax`, as it is by default, histories are the same on all
    ranks, so any number of ranks may load them.

    Args:
        model: any module; wrapped by DistributedDataParallel, compiled or sharded or not.

    Raises:
        TypeError: `model` is no module.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> model, other = hybridq.Linear(8, 8), hybridq.Linear(8, 8)
        >>> with hybridq.autocast(recipe="fp8_delayed"):
        ...     y = model(torch.ones(4, 8))
        >>> saved = hybridq.distributed.ScalingHistory(model).state_dict()
        >>> hybridq.distributed.ScalingHistory(other).load_state_dict(saved)
    """

    def __init__(self, model: nn.Module) -> None:
        given: object = model
        if not isinstance(given, nn.Module):
            raise TypeError(
                f"ScalingHistory: model must be an nn.Module, got {type(given).__name__}"
            )
        self._model = model

    def _states(self) -> dict[str, ScalingState]:
        model = self._model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        found = {}
        for path, module in model.named_modules(remove_duplicate=False):
            name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            for part, state in states_of(module).items():
                found[f"{name}:{part}"] = state
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the histories and scales of all places that have recorded something, as bytes."""
        made = {
            name: {key: tensor.cpu() for key, tensor in state.exported().items()}
            for name, state in self._states().items()
        }
        file = io.BytesIO()
        torch.save({name: tensors for name, tensors in made.items() if tensors}, file)
        return {_KEY: file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned; places that it does not name keep what they have.

        Args:
            state_dict: of a model with modules of the same names.

        Raises:
            CheckpointError: it is of another kind, or names modules that the model does not have.
        """
        given = state_dict.get(_KEY)
        if not isinstance(given, bytes):
            raise CheckpointError(
                f"ScalingHistory.load_state_dict: {_KEY!r} must be bytes that state_dict() made, "
                f"got {type(given).__name__}"
            )
        loaded = torch.load(io.BytesIO(given), weights_only=True)
        states = self._states()
        wrong = [f"no module {name.split(':')[0]!r}" for name in loaded if name not in states]
        for name, tensors in loaded.items():
            if name in states:
                wrong += [f"{name}: {line}" for line in states[name].problems(tensors)]
        if not wrong:
            for name, tensors in loaded.items():
                states[name].load(tensors)
        if wrong:
            raise CheckpointError(
                "ScalingHistory.load_state_dict: the model must be the one that was saved, got "
                + "; ".join(wrong)
            )
