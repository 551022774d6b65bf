"""Cross-entropy of logits whose classes lie on several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._torch_ranks import functional_all_reduce
from ...kernels.inputs import check_tensor
from ...kernels.operators import StatedFunction
from ...nn.autograd.double_backward import without_derivative
from ...shards import agree, refuse
from .groups import name_of, place

__all__ = ["parallel_cross_entropy"]

_WHERE = "parallel_cross_entropy"


class _Loss(NamedTuple):
    """What a call is told beside tensors.

    Attributes:
        name: of the group; empty: one rank has all classes.
        first: number of this rank's first class.
        classes: of all ranks.
        smoothing: as the caller says.
        ignored: the label that does not count.
    """

    name: str
    first: int
    classes: int
    smoothing: float
    ignored: int


def _over_ranks(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
    return functional_all_reduce(x, op, name) if name else x


def _own_labels(target: torch.Tensor, loss: _Loss, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each label's place among this rank's classes, and whether it is one of them."""
    at = target - loss.first
    is_own = (at >= 0) & (at < own) & (target != loss.ignored)
    return torch.where(is_own, at, 0), is_own


class _CrossEntropy(StatedFunction):
    """Losses `[tokens]` of logits `[tokens, own classes]`."""

    second = "refused"

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, loss: _Loss) -> torch.Tensor:
        wide = logits.float()
        largest = _over_ranks(wide.amax(-1), "max", loss.name)
        at, is_own = _own_labels(target, loss, wide.shape[-1])
        shifted = wide - largest[:, None]
        chosen = torch.where(is_own, shifted.gather(-1, at[:, None])[:, 0], 0.0)
        parts = [shifted.exp().sum(-1), chosen]
        if loss.smoothing:
            parts.append(shifted.sum(-1))
        sums = _over_ranks(torch.stack(parts), "sum", loss.name)
        log_sum = sums[0].log()
        made = log_sum - (1.0 - loss.smoothing) * sums[1]
        if loss.smoothing:
            made = made - loss.smoothing / loss.classes * sums[2]
        counts = target != loss.ignored
        is_class = (target >= 0) & (target < loss.classes)
        ctx.save_for_backward(logits, target, largest + log_sum)
        ctx.loss = loss
        return torch.where(counts, torch.where(is_class, made, torch.nan), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        logits, target, log_sum = ctx.saved_tensors
        with torch.no_grad():
            made = _gradient(logits, target, log_sum, dy, ctx.loss)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            (made,) = without_derivative(
                "distributed.parallel_cross_entropy", (dy, logits), (made,), "a loss over ranks"
            )
        return made, None, None


def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sum: torch.Tensor,
    dy: torch.Tensor,
    loss: _Loss,
) -> torch.Tensor | None:
    """Return the gradient of this rank's logits: their softmax, less the label's share."""
    grad = (logits.float() - log_sum[:, None]).exp_()
    at, is_own = _own_labels(target, loss, grad.shape[-1])
    own = torch.where(is_own, loss.smoothing - 1.0, 0.0)
    grad.scatter_add_(-1, at[:, None], own[:, None])
    if loss.smoothing:
        grad.sub_(loss.smoothing / loss.classes)
    grad.mul_(torch.where(target == loss.ignored, 0.0, dy)[:, None])
    return grad.to(logits.dtype)


def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    group: Any = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the cross-entropy of logits whose classes lie on several ranks, in parts.

    As `torch.nn.functional.cross_entropy` of the whole logits. Two messages: the largest logit of
    each token, and two or three sums. The gradient is that of the rank's own logits, where every
    rank goes on from the same loss.

    Args:
        logits: float32, bfloat16 or float16 `[..., classes / ranks]`: rank r has the r-th part of
            the classes, all parts of one size.
        target: integers `[...]`, the same on all ranks.
        label_smoothing: share of the weight that all classes get alike, in [0, 1].
        reduce_loss: the mean over the labels that count is returned.
        group: the tensor-parallel process group, its name, a DeviceMesh of one dimension; None: one
            rank has all classes.
        ignore_index: the label that does not count.

    Returns:
        FP32 `[...]`, zero where the label does not count; or the mean, FP32 scalar, NaN where none
        counts. NaN for a label that is no class.

    Raises:
        ValueError: shapes do not fit, or the smoothing is out of range.
        TypeError: a dtype is another.
        RuntimeError: ranks differ in shapes or options; on every rank, at the first such call.

    Source: names and meanings of most arguments: Transformer Engine's function of that name; sums
        over ranks: Shoeybi et al. (arXiv:1909.08053).

    Example:
        >>> import torch, hybridq
        >>> logits, target = torch.randn(2, 3, 10), torch.tensor([[1, 2, -100], [0, 9, 3]])
        >>> loss = hybridq.distributed.parallel_cross_entropy(logits, target, reduce_loss=True)
        >>> same = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        >>> torch.allclose(loss, same)
        True
    """
    name, rank, world = "", 0, 1
    if group is not None:
        name = name_of(_WHERE, group)
        rank, world = place(_WHERE, name)
    options = (float(label_smoothing), bool(reduce_loss), int(ignore_index))
    try:
        _check(logits, target, options[0])
    except (TypeError, ValueError) as error:
        if name and not torch.compiler.is_compiling():
            refuse(name, _WHERE, error)
        raise
    if name:
        shape = () if torch.compiler.is_compiling() else tuple(logits.shape)
        texts = tuple([str(one) for one in options])
        agree(name, (_WHERE, (), str(logits.dtype), shape, -1, (), texts))
    own = logits.shape[-1]
    loss = _Loss(name if world > 1 else "", rank * own, world * own, options[0], options[2])
    flat = target.reshape(-1).to(torch.int64)
    made: torch.Tensor = _CrossEntropy.apply(logits.reshape(flat.shape[0], own), flat, loss)
    if reduce_loss:
        return made.sum() / (flat != options[2]).sum()
    return made.view(target.shape)


def _check(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> None:
    """Raise unless the arguments fit."""
    if not torch.compiler.is_compiling():  # a trace has no sparse tensor
        check_tensor(logits, _WHERE, "logits")
        check_tensor(target, _WHERE, "target")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{_WHERE}: logits must be float32, bfloat16 or float16, got {logits.dtype}"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"{_WHERE}: target must be integers, got {target.dtype}")
    if logits.dim() < 1 or logits.shape[-1] < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{_WHERE}: logits must be [..., classes] for a target [...], got "
            f"{tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{_WHERE}: label_smoothing must be in [0, 1], got {smoothing}")
