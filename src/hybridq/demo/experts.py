"""A mixture of experts of transformers trained with its experts on several ranks, or on one.

Ranks train on micro-batches of their own, hold FP32 parameters and compute in BF16. An expert has
the tokens of all ranks, as in one process that is given the whole batch: both come to the same
losses within the order of sums.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..moe import parallelize_experts, parameter_groups
from ..report import summary
from .data import Corpus
from .fsdp import _square, _Trainer, mean_in_order
from .hf_moe import HfMoe
from .train import TrainConfig

__all__ = ["ExpertsTrainer", "quantized_share"]


class ExpertsTrainer(_Trainer):
    """One rank of a training whose experts are dealt out over all ranks.

    Args:
        config, recipe, corpus: as for `_Trainer`; the model is transformers' Qwen3-MoE.
        dispatch: the format in which tokens travel, to experts and back; None: values.
    """

    def __init__(
        self, config: TrainConfig, recipe: str, corpus: Corpus, dispatch: str | None
    ) -> None:
        super().__init__(config, recipe, corpus, dist.get_world_size())
        self.rank = dist.get_rank()
        options = {"dispatch": dispatch, "combine": dispatch}
        self._master = parallelize_experts(self.model, **options)
        self.model = copy.deepcopy(self._master).bfloat16()
        groups = parameter_groups(self._master, weight_decay=config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))

    def _gradients(
        self, step: int, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[float], list[float]]:
        self.model.zero_grad()
        loss = self._loss(self._seed(step, 0), *micro[self.rank])
        torch.autograd.backward(loss)
        pairs = list(zip(self._master.parameters(), self.model.parameters(), strict=True))
        trained = [(mine, value.grad) for mine, value in pairs if value.grad is not None]
        shared = [(mine, grad) for mine, grad in trained if not _is_dealt_out(mine)]
        mean = mean_in_order(self._all(torch.cat([grad.float().flatten() for _, grad in shared])))
        sizes = [mine.numel() for mine, _ in shared]
        for (mine, _), part in zip(shared, mean.split(sizes), strict=True):
            mine.grad = part.view_as(mine)
        dealt = [(mine, grad) for mine, grad in trained if _is_dealt_out(mine)]
        for mine, grad in dealt:
            mine.grad = grad.float()
        own = _square(_local(mine.grad) for mine, _ in dealt)
        told = self._all(torch.tensor([loss.item(), own], dtype=torch.float64))
        return [float(one[0]) for one in told], [*(float(one[1]) for one in told), _square([mean])]

    def _all(self, own: Tensor) -> Sequence[Tensor]:
        """Return every rank's tensor, in their order."""
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own)
        return found

    def _scale(self, factor: float) -> None:
        for mine in self._master.parameters():
            if mine.grad is not None:
                _local(mine.grad).mul_(factor)

    @torch.no_grad()
    def _after_step(self) -> None:
        for mine, value in zip(self.model.parameters(), self._master.parameters(), strict=True):
            _local(mine).copy_(_local(value))

    @torch.no_grad()
    def _evaluate(self, held_out: list[tuple[Tensor, Tensor]]) -> float:
        losses = []
        for index, (x, y) in enumerate(held_out):
            own = [each.chunk(self.world)[self.rank] for each in (x, y)]
            loss = self._loss(index, *own)
            losses.append(float(mean_in_order(self._all(loss.view(1)))))
        return sum(losses) / len(losses)


def _is_dealt_out(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if _is_dealt_out(tensor) else tensor
    return local


def quantized_share(config: TrainConfig, recipe: str) -> float:
    """Return the share of the linear FLOPs of a forward that is quantized.

    Args:
        config: of the training.
        recipe: the name of one.
    """
    model: nn.Module = HfMoe(config.model)
    tokens = torch.zeros(1, config.model.sequence, dtype=torch.int64)
    return summary(model, recipe, tokens).share_of_linear_flops
