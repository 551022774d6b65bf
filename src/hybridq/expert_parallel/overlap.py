"""Shared experts that run while tokens travel to the routed ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._log import log_once
from ..moe import Experts

__all__ = ["overlap_shared_experts"]

_WHERE = "overlap_shared_experts"
#: Names that blocks of transformers have for experts which take every token.
_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


def overlap_shared_experts(model: nn.Module, names: Iterable[str] = _NAMES) -> list[str]:
    """Let shared experts run while tokens travel to the routed experts of the same block.

    Where a block calls its routed experts first and hands its own input to the shared ones, as
    most families of transformers do, the shared ones run once the tokens were sent, before those
    that arrive are waited for; the block's own call then takes what they gave. In the backward
    gradients travel while the shared experts have theirs. Values are the same to the bit.

    Where a block does otherwise it runs as it is written, and the log says why, once.

    Args:
        model: after `parallelize_experts`, before `fully_shard`.
        names: of the shared experts in their block, beside the routed ones.

    Returns:
        Names of the shared experts that were found.

    Raises:
        TypeError: `model` is no module.
        ValueError: it has no experts over ranks, or none of their blocks has shared ones.

    Source: ours; shared experts: DeepSeekMoE (Dai et al., arXiv:2401.06066).

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from hybridq.moe import ExpertsLayout, overlap_shared_experts, parallelize_experts
        >>> class Own(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 32, 16) / 4)
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32) / 4)
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.experts = torch.nn.Linear(16, 4), Own()
        ...         self.shared_experts = torch.nn.Linear(16, 16)
        ...     def forward(self, x):
        ...         top = self.gate(x).softmax(-1).topk(2)
        ...         return self.experts(x, top.indices, top.values) + self.shared_experts(x)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = ExpertsLayout("up", "down", has_gate=False)
        >>> block = parallelize_experts(Block(), plan={"experts": layout})
        >>> overlap_shared_experts(block)
        ['shared_experts']
        >>> block(torch.randn(10, 16)).shape
        torch.Size([10, 16])
        >>> dist.destroy_process_group()
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"{_WHERE}: model must be an nn.Module, got {type(given).__name__}")
    wanted, found, routed = tuple(names), [], 0
    for path, block in model.named_modules():
        children: dict[str, nn.Module] = dict(block.named_children())
        experts = [
            one
            for one in children.values()
            if isinstance(one, Experts) and one.exchange is not None
        ]
        routed += len(experts)
        shared = [name for name in wanted if name in children]
        if len(experts) != 1 or len(shared) != 1:
            continue
        name = f"{path}.{shared[0]}".lstrip(".")
        if experts[0].meanwhile is None:
            _Overlap(name, block, experts[0], children[shared[0]])
        found.append(name)
    if not found:
        told = (
            "no experts over ranks; call parallelize_experts before"
            if not routed
            else (
                f"{routed} modules of experts, and beside none of them one called "
                f"{' or '.join(wanted)}; give names="
            )
        )
        raise ValueError(f"{_WHERE}: a block must have routed and shared experts, got {told}")
    return found


class _Overlap:
    """One block: its input, and what its shared experts made of it.

    Args:
        name: of the shared experts.
        block: that has both.
        experts: the routed ones.
        shared: the others.
    """

    def __init__(self, name: str, block: nn.Module, experts: Any, shared: Any) -> None:
        self.name, self.shared, self.own = name, shared, shared.forward
        self.x: torch.Tensor | None = None  # while it may be run before it is called
        self.version = 0
        self.made: Any = None
        self.is_off = False
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end, always_call=True)
        shared.forward = self._called
        experts.meanwhile = self._meanwhile

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.x = self.made = None
        if self.is_off or torch.compiler.is_compiling():
            return
        self.x = next(
            (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None
        )
        self.version = 0 if self.x is None else self.x._version

    def _meanwhile(self) -> None:
        """Run the shared experts: tokens are under way to the routed ones."""
        if self.x is None:
            return
        if self.shared._forward_pre_hooks or self.shared._forward_hooks:
            self._stop("they have hooks, which run where the block calls them")
        elif self.x._version != self.version:
            self._stop("the block writes to its input")
        else:
            self.made = self.own(self.x)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the shared experts make of their input: what is there, if it is the same."""
        x, made = self.x, self.made
        self.x = self.made = None
        if x is None:
            return self.own(*args, **kwargs)
        given: Any = args[0] if args else next(iter(kwargs.values()), None)
        if made is None:
            self._stop("the block calls them before its routed experts, or routes nothing")
        elif len(args) + len(kwargs) > 1 or x._version != self.version or not _is_all(given, x):
            self._stop("the block calls them with something else than its input")
        else:
            return made.view(*given.shape[:-1], made.shape[-1])
        return self.own(*args, **kwargs)

    def _end(self, *given: Any) -> None:
        if self.made is not None:
            self._stop("the block does not call them")
        self.x = self.made = None

    def _stop(self, reason: str) -> None:
        self.is_off, self.x, self.made = True, None, None
        key = f"{_WHERE} {self.name} {reason}"
        log_once(key, f"{_WHERE}: {self.name} does not run while tokens travel: {reason}")


def _is_all(given: object, x: torch.Tensor) -> bool:
    """Return whether a tensor is x, or a view of all of it with the same last dimension."""
    if not isinstance(given, torch.Tensor) or given.dtype != x.dtype:
        return False
    if given is x:
        return True
    is_same = given.numel() == x.numel() and given.shape[-1:] == x.shape[-1:]
    return is_same and x.is_contiguous() and given.is_set_to(x.view(given.shape))
