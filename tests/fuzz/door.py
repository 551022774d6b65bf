"""The state machine: a pool of quantized tensors, and every rule of the other modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine

from hybridq import _core

from .checkpoints import CheckpointRules
from .gemms import GemmRules
from .groups import GroupRules
from .modules import ModuleRules
from .operators import OperatorRules
from .over_ranks import RankRules
from .parts import PartRules
from .pool import HOOKS
from .quantizing import QuantizeRules
from .texts import TextRules
from .writes import WriteRules

__all__ = ["PublicDoor"]

_VARIANT, _THREADS = _core.variant(), torch.get_num_threads()


class PublicDoor(
    QuantizeRules,
    PartRules,
    WriteRules,
    GemmRules,
    GroupRules,
    ModuleRules,
    OperatorRules,
    TextRules,
    CheckpointRules,
    RankRules,
    RuleBasedStateMachine,
):
    """Everything that a user of hybridq may do, and some that nobody should."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: list[Any] = []
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        for hook in HOOKS:
            hook("")  # a new example

    def teardown(self) -> None:
        """Forget the tensors, and take back the kernels and threads that were chosen."""
        self.pool.clear()
        _core.set_variant(_VARIANT)
        torch.set_num_threads(_THREADS)
