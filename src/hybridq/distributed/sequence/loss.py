"""The loss of a sequence that lies on several ranks: one sum over one number of labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..._torch_ranks import functional_all_reduce
from ...kernels.operators import StatedFunction
from .exchange import HeadExchange
from .mesh import exchange_of

__all__ = ["label_count", "over_ranks", "sequence_loss"]


class _OverRanks(StatedFunction):
    """The ranks' sum; the mean of their gradients is the gradient of this sum."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, world: int) -> torch.Tensor:
        ctx.world = world
        return functional_all_reduce(x, "sum", name).clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy * ctx.world, None, None


def over_ranks(part: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """Return the sum of the ranks' parts of a loss, the same on all of them.

    Its gradient on a rank is that of the own part times the number of ranks, so that the **mean**
    of the ranks' gradients, which DDP and FSDP2 make, is the gradient of the whole loss.

    Args:
        part: FP32 scalar.
        exchange: among which ranks.
    """
    made: torch.Tensor = _OverRanks.apply(part, exchange.name, exchange.world)
    return made


def label_count(labels: torch.Tensor, exchange: HeadExchange, ignored: int) -> torch.Tensor:
    """Return how many labels of all ranks count: int64 scalar.

    Args:
        labels: integers, this rank's.
        exchange: among which ranks.
        ignored: the label that does not count.
    """
    own = (labels != ignored).sum()
    return functional_all_reduce(own, "sum", exchange.name)


def sequence_loss(
    logits: torch.Tensor,
    shift_labels: torch.Tensor,
    mesh: Any = None,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the mean cross-entropy over the labels of all ranks; the same value on all of them.

    `sum of losses of all ranks / number of labels of all ranks` in FP32: no mean of the ranks'
    means, whose numbers of labels differ. The mean of the ranks' gradients, as DDP and FSDP2 make
    it, is the gradient of this loss; whoever sums gradients divides by the number of ranks.

    Args:
        logits: `[..., classes]` of this rank's tokens.
        shift_labels: integers `[...]`: of each token its successor, as `shard_sequence` gives them.
        mesh: a DeviceMesh of one dimension, a process group, or None: all ranks.
        ignore_index: the label that does not count.

    Returns:
        FP32 scalar; NaN where no label of any rank counts.

    Raises:
        ValueError: shapes do not fit.
        RuntimeError, TypeError: as of `sequence_parallel`.

    Source: ours; the rule is the one of a batch on one rank.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> labels = torch.tensor([[1, 2, -100]])
        >>> loss = hybridq.distributed.sequence_loss(torch.zeros(1, 3, 8), labels)
        >>> round(float(loss), 4)  # ln 8
        2.0794
        >>> dist.destroy_process_group()
    """
    exchange = exchange_of("sequence_loss", mesh)
    if logits.shape[:-1] != shift_labels.shape:
        raise ValueError(
            "sequence_loss: logits must be [..., classes] for labels [...], got "
            f"{tuple(logits.shape)} and {tuple(shift_labels.shape)}"
        )
    flat = logits.reshape(-1, logits.shape[-1]).float()
    total = F.cross_entropy(
        flat, shift_labels.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    return over_ranks(total / label_count(shift_labels, exchange, ignore_index), exchange)
