"""How many tokens each expert is chosen for, and routers that are balanced by it without a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch_private import graph_task_id
from .._torch_ranks import process_group
from ..distributed.collectives.groups import name_of
from ..moe import Experts
from ..moe.experts import chosen

__all__ = ["BIAS", "ExpertLoads", "balance_biases_", "blocks_of_experts"]

#: How routers name what they add to scores for the choice of experts alone.
BIAS = "e_score_correction_bias"


def blocks_of_experts(model: nn.Module) -> Iterator[tuple[str, Experts, nn.Module]]:
    """Give each module of experts: its name, itself, and the block that has it.

    Args:
        model: of any kind.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, Experts):
            yield name, module, modules[name.rpartition(".")[0]]


def _found(where: str, model: nn.Module) -> list[tuple[str, Experts, nn.Module]]:
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"{where}: model must be an nn.Module, got {type(given).__name__}")
    found = list(blocks_of_experts(model))
    if not found:
        raise ValueError(
            f"{where}: the model must have converted experts, got {type(model).__name__} without "
            "any; call hybridq.convert or parallelize_experts before"
        )
    return found


class ExpertLoads:
    """Counts the rows that each expert of a model is chosen for; nothing waits for a device.

    Recomputed forwards are not counted again. `close` ends the counting.

    Args:
        model: with converted experts, on one rank or over many.
        training_only: leave out forwards of modules in evaluation mode.

    Attributes:
        counts: by the name of a module of experts, this rank's rows for each of all experts, int64
            `[E]`.

    Raises:
        TypeError: `model` is no module.
        ValueError: it has no converted experts, or a router that gives each as many.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.moe import ExpertLoads, ExpertsLayout, convert_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32))
        >>> layout = ExpertsLayout("up", "down", has_gate=False)
        >>> model = torch.nn.ModuleDict({"experts": convert_experts(Own(), layout)})
        >>> loads = ExpertLoads(model)
        >>> x, chosen, shares = torch.randn(3, 16), torch.tensor([[0], [3], [3]]), torch.ones(3, 1)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     _ = model["experts"](x, chosen, shares)
        >>> loads.counts["experts"].tolist(), loads.imbalance()["experts"]
        ([1, 0, 0, 2], 2.6666666666666665)
    """

    def __init__(self, model: nn.Module, *, training_only: bool = True) -> None:
        self.counts: dict[str, torch.Tensor] = {}
        self._training_only = training_only
        self._handles = []
        for name, module, _ in _found("ExpertLoads", model):
            if module.experts_layout.takes == "batches":
                self.close()
                raise ValueError(
                    f"ExpertLoads: {name} must choose experts, got a module whose experts take as "
                    "many tokens each"
                )
            own: torch.Tensor = getattr(module, module.experts_layout.down)
            self.counts[name] = torch.zeros(own.shape[0], dtype=torch.int64, device=own.device)
            hook = _Hook(self, name)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def add(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward.

        Args:
            name: of the module.
            module: of experts.
            args, kwargs: of the forward.
        """
        is_backward = not torch.compiler.is_compiling() and graph_task_id() != -1
        if is_backward or (self._training_only and not module.training):
            return
        own = chosen(module, args, kwargs)
        if own is not None:
            self.counts[name] += own.to(self.counts[name].device)

    def total(self, group: Any = None) -> dict[str, torch.Tensor]:
        """Return the counts of all ranks, by one reduction; all ranks must call it.

        Args:
            group: a ProcessGroup, its name, a 1-D DeviceMesh, `(mesh, dimension)`; None: all ranks,
                or this one where torch.distributed is not initialized.
        """
        names = list(self.counts)
        every = torch.cat([self.counts[name] for name in names])
        if group is not None or (dist.is_available() and dist.is_initialized()):
            dist.all_reduce(every, group=process_group(name_of("ExpertLoads", group)))
        return dict(
            zip(names, every.split([self.counts[name].numel() for name in names]), strict=True)
        )

    def imbalance(self, totals: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """Return the load of the fullest expert over the mean, of each module; 1: all are alike.

        Args:
            totals: what `total` returned; None: the counts of this rank.
        """
        of = self.counts if totals is None else totals
        return {
            name: int(one.max()) * one.numel() / max(int(one.sum()), 1) for name, one in of.items()
        }

    def reset(self) -> None:
        """Begin to count anew."""
        for one in self.counts.values():
            one.zero_()

    def close(self) -> None:
        """End the counting; the counts stay."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    def __init__(self, loads: ExpertLoads, name: str) -> None:
        self.loads, self.name = loads, name

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.loads.add(self.name, module, args, kwargs)


@torch.no_grad()
def balance_biases_(
    model: nn.Module,
    loads: ExpertLoads,
    rate: float = 1e-3,
    *,
    group: Any = None,
    biases: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """Move routers' biases towards equal loads, as counted since the last call; count anew.

    `bias += rate * sign(mean load - load)`: an expert that is chosen too often loses in the next
    choices. The bias takes part in the choice of experts alone, so no gradient is disturbed, and no
    auxiliary loss is needed. Call it once after each step of the optimizer, on all ranks.

    Args:
        model: whose routers add a bias `e_score_correction_bias` to their scores, as those of
            DeepSeek-V3, GLM-4.5, dots1, Ernie 4.5 and Nemotron-H do.
        loads: of this model.
        rate: that a bias moves by.
        group: of the ranks whose tokens count, as `ExpertLoads.total` takes it.
        biases: float32 `[E]` by the name of a module of experts, for routers that name it
            otherwise; None: found by name.

    Returns:
        The imbalance of each module, before the biases moved.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a module of experts has no bias, or one of another size or dtype.

    Source: Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.

    Example:
        >>> import torch
        >>> from hybridq.moe import ExpertLoads, ExpertsLayout, balance_biases_, convert_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(2, 32, 16))
        ...         self.down = torch.nn.Parameter(torch.randn(2, 16, 32))
        ...     def forward(self, x, indices, weights):
        ...         return x
        >>> layout = ExpertsLayout("up", "down", has_gate=False)
        >>> model = torch.nn.ModuleDict({"experts": convert_experts(Own(), layout)})
        >>> loads, bias = ExpertLoads(model), torch.zeros(2)
        >>> x, chosen, shares = torch.randn(3, 16), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
        >>> _ = model["experts"](x, chosen, shares)
        >>> balance_biases_(model, loads, biases={"experts": bias})
        {'experts': 1.3333333333333333}
        >>> bias
        tensor([ 0.0010, -0.0010])
    """
    where = "balance_biases_"
    kind: object = loads
    if not isinstance(kind, ExpertLoads):
        raise TypeError(f"{where}: loads must be ExpertLoads, got {type(kind).__name__}")
    if not isinstance(rate, (int, float)) or not rate > 0:
        raise ValueError(f"{where}: rate must be above 0, got {rate!r}")
    found = {}
    for name, _, block in _found(where, model):
        if name not in loads.counts:
            raise ValueError(f"{where}: loads must be of this model, got none of {name}")
        found[name] = _bias_of(where, name, block, loads.counts[name].numel(), biases)
    totals = loads.total(group)
    for name, bias in found.items():
        total = totals[name].float()
        step = rate * torch.sign(total.mean() - total)
        bias += step.to(bias.device).view(bias.shape)
    told = loads.imbalance(totals)
    loads.reset()
    return told


def _bias_of(
    where: str,
    name: str,
    block: nn.Module,
    count: int,
    biases: Mapping[str, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the bias of the router beside a module of experts."""
    if biases is not None and name in biases:
        made = [biases[name]]
    else:
        every = (*block.named_parameters(), *block.named_buffers())
        made = [one for own, one in every if own.rpartition(".")[2] == BIAS]
    if len(made) != 1:
        raise ValueError(
            f"{where}: the block of {name} must have one {BIAS}, got {len(made)}; give the bias "
            "of its router, biases={name: tensor}"
        )
    bias = made[0]
    is_fit = isinstance(bias, torch.Tensor) and bias.numel() == count
    if not is_fit or bias.dtype != torch.float32 or type(bias.data) is not torch.Tensor:
        got = f"{bias.dtype} {list(bias.shape)}" if isinstance(bias, torch.Tensor) else repr(bias)
        raise ValueError(
            f"{where}: the bias of {name} must be a plain float32 tensor of {count} experts, since "
            f"steps of the rate are lost in fewer bits, got {got}"
        )
    return bias
