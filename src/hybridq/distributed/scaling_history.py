"""Histories of delayed scaling in a distributed checkpoint.

Weights and optimizers need nothing of hybridq there: they are DTensors of plain tensors. Histories
are not in a model's state_dict, and a model that has just been made has none whose keys could be
asked for; so they travel as one value, and those of each expert as one more, since an expert may
lie on any rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from ..errors import CheckpointError
from ..moe import Experts
from ..nn.delayed_scaling import ScalingState, states_of

__all__ = ["ScalingHistory", "plain_named_modules"]

_KEY: Final = "histories"
#: What wrappers of modules put into names, beside DistributedDataParallel's `module`.
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ScalingHistory:
    """What delayed scaling remembers of a model, for `torch.distributed.checkpoint`.

    A Stateful: `dcp.save({"model": ..., "scaling": ScalingHistory(model)})` and `dcp.load` of the
    same call its methods. With `reduce_amax`, as it is by default, histories are the same on all
    ranks, so any number of ranks may load them; experts that lie over ranks (`parallelize_experts`)
    may lie over any other number, or on one.

    Args:
        model: any module; it, or modules in it, wrapped by DistributedDataParallel and compiled, in
            any order, or sharded, or not.

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
        return {
            f"{name}:{part}": state
            for name, module in plain_named_modules(self._model)
            for part, state in states_of(module).items()
        }

    def _own_experts(self) -> dict[str, str]:
        """Return of each place of an expert the key of that expert: ranks may have others."""
        found = {}
        for path, module in plain_named_modules(self._model):
            if isinstance(module, Experts):
                for part in states_of(module):
                    found[f"{path}:{part}"] = f"{path}:{part.rpartition('.')[2]}"
        return found

    def state_dict(self) -> dict[str, bytes]:
        """Return the histories and scales of all places that have recorded something, as bytes.

        Those of experts have a key for each expert, so that any number of ranks may load them: a
        rank asks for those that it has.
        """
        experts = self._own_experts()
        made: dict[str, dict[str, Any]] = {_KEY: {}, **{key: {} for key in experts.values()}}
        for name, state in self._states().items():
            tensors = {key: tensor.cpu() for key, tensor in state.exported().items()}
            if tensors:
                made[experts.get(name, _KEY)][name] = tensors
        return {key: _written(value) for key, value in made.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned; places that it does not name keep what they have.

        Args:
            state_dict: of a model with modules of the same names; of experts that other ranks
                have, nothing is taken.

        Raises:
            CheckpointError: it is of another kind, or names modules that the model does not have.
        """
        loaded = {}
        for key in {_KEY: None, **state_dict}:
            given = state_dict.get(key)
            if not isinstance(given, bytes):
                raise CheckpointError(
                    f"ScalingHistory.load_state_dict: {key!r} must be bytes that state_dict() "
                    f"made, got {type(given).__name__}"
                )
            loaded.update(torch.load(io.BytesIO(given), weights_only=True))
        states, others = self._states(), self._others()
        loaded = {name: one for name, one in loaded.items() if name not in others}
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

    def _others(self) -> set[str]:
        """Return the places of experts that other ranks have."""
        found: set[str] = set()
        for path, module in plain_named_modules(self._model):
            if isinstance(module, Experts) and module.all_matrices is not None:
                own = states_of(module)
                for part in module.weight_parts.values():
                    names = (f"{part}.{number}" for number in range(module.all_matrices))
                    found.update(f"{path}:{name}" for name in names if name not in own)
        return found


def plain_named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Give each module of a model by its name, without what wrappers put into it.

    Args:
        model: any; it or modules in it wrapped by DistributedDataParallel, compiled, or both.
    """
    parallel = nn.parallel.DistributedDataParallel
    found = dict(model.named_modules(remove_duplicate=False))
    wrapped = {path for path, module in found.items() if isinstance(module, parallel)}
    for path, module in found.items():
        parts = path.split(".")
        kept = [
            part
            for at, part in enumerate(parts)
            if part not in _WRAPPERS and not (part == "module" and ".".join(parts[:at]) in wrapped)
        ]
        yield ".".join(kept), module


def _written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
