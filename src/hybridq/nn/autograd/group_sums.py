"""Collectives between the parts of a tensor-parallel layer, each the gradient of another.

By name of the group and as torch's functional collectives, so that compiled code has them in its
graph. Gradients have the dtype that arrives.

Source: the pairs of operations around a layer: arXiv:1909.08053 (sums), arXiv:2205.05198 (parts of
the sequence).
"""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_ranks import functional_all_gather, functional_all_reduce, wait_tensor
from ...kernels.operators import StatedFunction
from ...shards import send_sum

__all__ = ["gather_tokens", "scatter_tokens", "share", "sum_over"]


class _Share(StatedFunction):
    """x as it is; the gradient is summed over the group."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return sum_over(dy, ctx.group), None


class _Sum(StatedFunction):
    """The sum over the group; the gradient as it is."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return functional_all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return share(dy, ctx.group), None


class _Gather(StatedFunction):
    """The tokens of all ranks; of the gradient the sum of each rank's own."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, size: int, sums: str) -> torch.Tensor:
        ctx.place = (group, size, sums)
        return wait_tensor(functional_all_gather(x.contiguous(), size, group))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return scatter_tokens(dy, *ctx.place), None, None, None


class _Scatter(StatedFunction):
    """The sum over the group of a rank's own tokens; of the gradient those of all ranks."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, size: int, sums: str) -> torch.Tensor:
        ctx.place = (group, size, sums)
        own = send_sum(x.reshape(-1, x.shape[-1]), size, group, sums).wait()
        return own.view(x.shape[0] // size, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return gather_tokens(dy, *ctx.place), None, None, None


def share(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return x, which every rank takes whole; its gradient is the sum of theirs.

    Args:
        x: the same on all ranks.
        group: the process group's name.
    """
    made: torch.Tensor = _Share.apply(x, group)
    return made


def sum_over(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of all ranks' x, which all of them get.

    Args:
        x: this rank's term.
        group: the process group's name.
    """
    made: torch.Tensor = _Sum.apply(x, group)
    return made


def gather_tokens(x: torch.Tensor, group: str, size: int, sums: str = "") -> torch.Tensor:
    """Return all ranks' x, one behind the other along the first dimension.

    Args:
        x: `[tokens / size, ...]`, as many on each rank.
        group: the process group's name.
        size: its number of ranks.
        sums: spec string of the gradient's terms, as `send_sum` takes it; empty: values.
    """
    made: torch.Tensor = _Gather.apply(x, group, size, sums)
    return made


def scatter_tokens(x: torch.Tensor, group: str, size: int, sums: str = "") -> torch.Tensor:
    """Return this rank's part, along the first dimension, of the sum of all ranks' x.

    Args:
        x: `[tokens, ...]`, this rank's term; the ranks divide its tokens.
        group: the process group's name.
        size: its number of ranks.
        sums: spec string of the terms, as `send_sum` takes it; empty: values.

    Raises:
        ValueError: they do not.
    """
    if x.shape[0] % size:
        raise ValueError(
            f"sequence_parallel: {size} ranks must divide the first dimension of the input, got "
            f"{x.shape[0]}; pad the sequence"
        )
    made: torch.Tensor = _Scatter.apply(x, group, size, sums)
    return made
