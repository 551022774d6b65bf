"""Losses of tokens under Transformer Engine's names of arguments."""

from __future__ import annotations

from typing import Any

import torch

from .. import distributed

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each token: `hybridq.distributed.parallel_cross_entropy`.

    Args:
        inp: logits `[..., V]`, of this rank's part of the vocabulary where there is a group.
        target, label_smoothing, reduce_loss: as there.
        dist_process_group, ignore_idx: as `group` and `ignore_index` there.
        is_cg_capturable: has no effect.
    """
    return distributed.parallel_cross_entropy(
        inp, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx
    )
