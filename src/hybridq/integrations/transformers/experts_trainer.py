"""ExpertsTrainer: transformers' Trainer for models whose experts lie over ranks."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer

__all__ = ["ExpertsTrainer"]

#: What one process has: written by the first rank, and read by all.
_WHOLE: Final = StateDictOptions(
    full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True
)
#: What each rank has of it.
_FLAT: Final = StateDictOptions(flatten_optimizer_state_dict=True)


class ExpertsTrainer(Trainer):
    """Trains a model after `hybridq.moe.parallelize_experts` over all ranks, as Trainer does.

    Checkpoints have one set of files, which the first rank writes: weights under the hub's names,
    whole moments. Any number of ranks goes on with them. The optimizer's groups are of one mesh
    each, so that its fused and `foreach` steps take them.

    Args:
        as those of Trainer, by place and by name. The model is the one that was dealt out; other
            parameters are kept alike by DistributedDataParallel, which Trainer sees to.

    Source: ours; transformers 5.23, trainer.py.

    Example:
        >>> from hybridq.integrations.transformers import ExpertsTrainer
        >>> def train(model, arguments, rows):  # on each rank, the model dealt out
        ...     ExpertsTrainer(model, arguments, train_dataset=rows).train()
    """

    # For type checkers: one is put in its place while states are written and read.
    optimizer: Any

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return Trainer's optimizer, each of its groups split by the meshes of its parameters.

        Args:
            model: as Trainer takes it.
        """
        had = self.optimizer is not None
        optimizer: Any = super().create_optimizer(*(() if model is None else (model,)))
        if had:
            return optimizer
        split = []
        for group in optimizer.param_groups:
            found: dict[Any, list[Any]] = {}
            for parameter in group["params"]:
                found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            split += [{**group, "params": own} for own in found.values()]
        optimizer.param_groups[:] = split
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:  # of all ranks, which all come here
            state_dict = get_model_state_dict(self.model, options=_WHOLE)
        super()._save(output_dir, state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        own: Any = self.model if model is None else model
        # By the reader that knows the hub's names for each expert.
        read = type(own).from_pretrained(resume_from_checkpoint, dtype=own.dtype)
        set_model_state_dict(own, read.state_dict(), options=_WHOLE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own: Any = self.optimizer
        self.optimizer = _WholeState(self.model, own)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = own

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        own: Any = self.optimizer
        self.optimizer = _WholeState(self.model, own, is_read=True)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.optimizer = own


class _WholeState:
    """In the place of an optimizer: its state as one process has it."""

    def __init__(self, model: Any, optimizer: Any, is_read: bool = False) -> None:
        self._model, self._optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self._known: Any = None
        if not is_read:  # of all ranks; only the first one asks
            self._known = get_optimizer_state_dict(model, self._optimizer, options=_WHOLE)

    def state_dict(self) -> Any:
        return self._known

    def load_state_dict(self, state: Any) -> None:
        # torch reads flat states of shards, and whole ones that are not flat.
        own = get_optimizer_state_dict(self._model, self._optimizer, options=_FLAT)
        parts = {name: _part(value, own.get(name)) for name, value in state.items()}
        set_optimizer_state_dict(self._model, self._optimizer, parts, options=_FLAT)


def _part(whole: Any, like: Any) -> Any:
    """Return a value as this rank holds it: of a DTensor its shard."""
    if not isinstance(like, DTensor):
        return whole
    given = (whole.to(like.device), like.device_mesh, like.placements)
    return distribute_tensor(*given, src_data_rank=None)
