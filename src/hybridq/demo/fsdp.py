"""The demo's model trained by several ranks under FSDP2, and again by one process in their place.

Both train on the same micro-batches with the same seeds, hold FP32 parameters, compute in BF16 and
reduce gradients in FP32 in the order of the ranks, so that they agree bit for bit. With tensor
parallelism beside it, or ranks that share sequences, they agree within the order of sums: weight
planes are the same bits still.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..converters import convert
from ..distributed import prepare_fsdp2, sequence_loss, sequence_parallel
from ..estimate import Traffic, count_traffic
from ..nn import Linear
from ..recipes import autocast, get
from .data import Corpus, training_batches, validation_batches
from .train import BASELINE, COUNTED_STEP, Progress, TrainConfig, make_optimizer
from .variants import build_model


class RankOrderSum:
    """A reduce-scatter that adds in the order of the ranks, whatever the backend's own order is.

    It moves what a reduce-scatter moves: each rank sends each other one its part.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what FSDP2 reduces."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Put the mean over all ranks of this rank's part of `input_tensor` into the output."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        output_tensor.copy_(mean_in_order(list(parts)))


def mean_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of FP32 tensors, added one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


class _Trainer:
    """What both trainings have in common: batches, schedule, clipping, evaluation.

    Args:
        config: sizes and schedule; `batch` samples per step, of all ranks together.
        recipe: a name known to `hybridq.recipes.get`, or `"bf16"`.
        corpus: the data.
        world: number of ranks.
    """

    #: In which the modules compute.
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, config: TrainConfig, recipe: str, corpus: Corpus, world: int) -> None:
        self.config, self.corpus, self.world = config, corpus, world
        self.recipe = None if recipe == BASELINE else get(recipe)
        torch.manual_seed(config.seed)
        self.model = convert(build_model(config.model, Linear, config.modules))
        self.validation_loss: float | None = None
        #: Of one step; empty where nothing is sent.
        self.traffic = Traffic()

    def steps(self) -> Iterator[Progress]:
        """Train; one `Progress` per step. A loss that is not finite ends it."""
        config = self.config
        held_out = validation_batches(
            self.corpus, config.batch, config.model.sequence, config.eval_batches
        )
        batches = training_batches(
            self.corpus, config.batch, config.model.sequence, config.steps, config.seed
        )
        for step, (x, y) in enumerate(batches):
            is_counted = step == min(COUNTED_STEP, config.steps - 1)
            with count_traffic() if is_counted else contextlib.nullcontext(self.traffic) as found:
                loss = self._step(step, x, y)
            self.traffic = found
            validation_loss = None
            if math.isfinite(loss) and config.is_eval_step(step + 1):
                validation_loss = self._evaluate(held_out)
                self.validation_loss = validation_loss
            yield Progress(step + 1, loss, validation_loss, None)
            if not math.isfinite(loss):
                self.validation_loss = None
                return

    def _step(self, step: int, x: Tensor, y: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        micro = list(zip(x.chunk(self.world), y.chunk(self.world), strict=True))
        losses, squares = self._gradients(step, micro)
        # In FP64 and in order, so that all ranks, and one process, come to the same number.
        norm = math.sqrt(math.fsum(squares))
        if norm > self.config.clip:
            self._scale(self.config.clip / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._after_step()
        return sum(losses) / len(losses)

    def _loss(self, seed: int, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss in nats per byte; stochastic rounding draws from `seed`."""
        torch.manual_seed(seed)
        with autocast(enabled=self.recipe is not None, recipe=self.recipe):
            logits = self.model(x)
        return self._mean(logits, y)

    def _mean(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def _seed(self, step: int, rank: int) -> int:
        return ((self.config.seed << 32) + step * self.world + rank) % 2**63  # torch's most

    def _gradients(
        self, step: int, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[float], list[float]]:
        """Leave the mean gradients; return each rank's loss, and its shards' sum of squares."""
        raise NotImplementedError

    def _scale(self, factor: float) -> None:
        """Multiply the gradients."""
        raise NotImplementedError

    def _evaluate(self, held_out: list[tuple[Tensor, Tensor]]) -> float:
        """Return the mean loss of all validation batches."""
        raise NotImplementedError

    def _after_step(self) -> None:
        """Bring the compute copy of the parameters up to date, if there is one."""


def _parallel_plan(model: Any) -> dict[str, Any]:
    """Return how tensor parallelism splits the blocks of the demo's own model.

    Matrices of several projections are split as one, and what they make is gathered again.
    """
    plan: dict[str, Any] = {}
    for number in range(len(model.blocks)):
        for name in ("attention.qkv", "ffn.gate_up"):
            plan[f"blocks.{number}.{name}"] = ColwiseParallel(output_layouts=Replicate())
        for name in ("attention.out", "ffn.down"):
            plan[f"blocks.{number}.{name}"] = RowwiseParallel(input_layouts=Replicate())
    return plan


class ShardedTrainer(_Trainer):
    """One rank of a training under FSDP2.

    Args:
        config, recipe, corpus: as for `_Trainer`, whose `world` are the data-parallel ranks.
        tp: how many ranks share a micro-batch, and each have a part of every block's matrices.
        sp: how many ranks share a micro-batch, and each have a part of every sequence; tp is 1.
    """

    def __init__(
        self, config: TrainConfig, recipe: str, corpus: Corpus, tp: int = 1, sp: int = 1
    ) -> None:
        world = dist.get_world_size() // (tp * sp)
        super().__init__(config, recipe, corpus, world)
        self.rank, self._group, self._tp_group = dist.get_rank(), None, None
        self._sp_mesh: Any = None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding: dict[str, Any] = {"mp_policy": policy}
        if tp > 1:  # else all ranks are one group, which is there
            mesh = init_device_mesh("cpu", (world, tp), mesh_dim_names=("dp", "tp"))
            self.rank, self._group = mesh.get_local_rank("dp"), mesh.get_group("dp")
            self._tp_group, sharding["mesh"] = mesh.get_group("tp"), mesh["dp"]
            parallelize_module(self.model, mesh["tp"], _parallel_plan(self.model))
        if sp > 1:  # FSDP2 shards over all ranks, whose mean is the gradient
            mesh = init_device_mesh("cpu", (world, sp), mesh_dim_names=("dp", "sp"))
            self.rank, self._group = mesh.get_local_rank("dp"), mesh.get_group("dp")
            self._sp_mesh = mesh["sp"]
            sequence_parallel(self.model, self._sp_mesh)
        model: Any = prepare_fsdp2(self.model)
        for block in model.blocks:
            fully_shard(block, **sharding)
        fully_shard(model, **sharding)
        for module in model.modules():
            if hasattr(module, "set_custom_reduce_scatter"):
                module.set_custom_reduce_scatter(RankOrderSum())
        self.optimizer = make_optimizer(model, config, fused=False)

    def _gradients(
        self, step: int, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[float], list[float]]:
        seed = self._seed(step, self.rank)
        if self._sp_mesh is not None:  # each rank's own random bits
            seed += self._sp_mesh.get_local_rank() << 48
        loss = self._loss(seed, *self._own(*micro[self.rank]))
        torch.autograd.backward(loss)
        return self._gathered(loss.item()), self._gathered(self._own_square())

    def _own(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return this rank's part of sequences and of their labels, which are shifted already."""
        if self._sp_mesh is None:
            return [x, y]
        place, size = self._sp_mesh.get_local_rank(), self._sp_mesh.size()
        return [each.chunk(size, 1)[place] for each in (x, y)]

    def _mean(self, logits: Tensor, y: Tensor) -> Tensor:
        if self._sp_mesh is None:
            return super()._mean(logits, y)
        return sequence_loss(logits, y, self._sp_mesh)

    def _own_square(self) -> float:
        """Return the sum of squares of this rank's shards of gradients, of all their parts."""
        found: list[Any] = [p.grad for p in self.model.parameters() if p.grad is not None]
        whole = _square(grad.to_local() for grad in found if grad.device_mesh.ndim == 1)
        if self._sp_mesh is not None:
            total = torch.tensor([whole], dtype=torch.float64)
            dist.all_reduce(total, group=self._sp_mesh.get_group())
            return total.item()
        if self._tp_group is None:
            return whole
        parts = _square(grad.to_local() for grad in found if grad.device_mesh.ndim > 1)
        total = torch.tensor([parts], dtype=torch.float64)
        dist.all_reduce(total, group=self._tp_group)
        return whole + total.item()

    def _local_gradients(self) -> list[Tensor]:
        found: list[Any] = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [grad.to_local() for grad in found]

    def _gathered(self, value: float) -> list[float]:
        """Return every data-parallel rank's value, in their order."""
        values = torch.empty(self.world, dtype=torch.float64)
        own = torch.tensor([value], dtype=torch.float64)
        dist.all_gather_single(values, own, group=self._group)
        return values.tolist()

    def _scale(self, factor: float) -> None:
        for local in self._local_gradients():
            local.mul_(factor)

    @torch.no_grad()
    def _evaluate(self, held_out: list[tuple[Tensor, Tensor]]) -> float:
        losses: list[float] = []
        for start in range(0, len(held_out), self.world):
            # All ranks must join every gather: one without a batch takes the last once more.
            index = min(start + self.rank, len(held_out) - 1)
            losses += self._gathered(self._loss(index, *self._own(*held_out[index])).item())
        model: Any = self.model
        model.reshard()  # the root stays gathered after a forward
        return sum(losses[: len(held_out)]) / len(held_out)


class InTurnTrainer(_Trainer):
    """One process in the place of all ranks: it runs their micro-batches in turn."""

    def __init__(self, config: TrainConfig, recipe: str, corpus: Corpus, world: int) -> None:
        super().__init__(config, recipe, corpus, world)
        self._master = self.model
        self.model = copy.deepcopy(self._master).bfloat16()
        self.optimizer = make_optimizer(self._master, config, fused=False)

    def _gradients(
        self, step: int, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[float], list[float]]:
        losses, found = [], []
        for rank, batch in enumerate(micro):
            loss = self._loss(self._seed(step, rank), *batch)
            torch.autograd.backward(loss)
            losses.append(loss.item())
            found.append([p.grad.float() for p in self.model.parameters() if p.grad is not None])
            self.model.zero_grad()
        for parameter, parts in zip(
            self._master.parameters(), zip(*found, strict=True), strict=True
        ):
            parameter.grad = mean_in_order(parts)
        shards = [
            [*p.grad.chunk(self.world), *[p.grad[:0]] * self.world][: self.world]
            for p in self._master.parameters()
            if p.grad is not None
        ]
        return losses, [_square(parts) for parts in zip(*shards, strict=True)]

    def _scale(self, factor: float) -> None:
        for parameter in self._master.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def _after_step(self) -> None:
        for mine, value in zip(self.model.parameters(), self._master.parameters(), strict=True):
            mine.copy_(value)

    @torch.no_grad()
    def _evaluate(self, held_out: list[tuple[Tensor, Tensor]]) -> float:
        losses = [self._loss(index, *batch).item() for index, batch in enumerate(held_out)]
        return sum(losses) / len(losses)


def _square(parts: Any) -> float:
    """Return the sum of the squares of all values, in FP64."""
    return sum(part.double().square().sum().item() for part in parts)
