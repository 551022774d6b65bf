"""Gradients of parameters that every rank has whole, and of which it sees its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..nn.modules.parallel_options import parameters_of_own_tokens
from .attachment import local_of

__all__ = ["reduce_sequence_parallel_gradients"]


@torch.no_grad()
def reduce_sequence_parallel_gradients(module: nn.Module, group: Any = None) -> None:
    """Sum the gradients of parameters that are marked `sequence_parallel`, in place.

    With `sequence_parallel=True` a norm, and the bias of a row parallel module, see a rank's own
    tokens only. Called after the backward, before the optimizer's step, unless the training
    framework does so itself (Megatron's does). All ranks must call it.

    Under FSDP2 over other ranks each rank sums its shards. hybridq's modules know their own
    parameters after `fully_shard`, too; what you mark yourself must be marked after it, since it
    makes parameters anew, without attributes.

    Args:
        module: whose parameters they are.
        group: the tensor-parallel process group; None: all ranks.

    Raises:
        TypeError: `module` is no module.
        ValueError: a rank has no gradient of one of them where another has: all must have seen it;
            or a gradient is a DTensor that is a sum over ranks already (`Partial`).

    Source: the attribute's name and meaning: Megatron-LM.

    Example:
        >>> import torch, hybridq
        >>> hybridq.distributed.reduce_sequence_parallel_gradients(torch.nn.LayerNorm(8))
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise TypeError(
            "reduce_sequence_parallel_gradients: module must be an nn.Module, got "
            f"{type(given).__name__}"
        )
    marked = parameters_of_own_tokens(module)
    if not marked:
        return
    import torch.distributed as dist  # not every build of torch has it

    device = marked[0].device
    has = torch.tensor(
        [float(p.grad is not None) for p in marked], dtype=torch.float32, device="cpu"
    )
    counts = has.to(device)
    dist.all_reduce(counts, group=group)
    ranks = dist.get_world_size(group)
    if bool(((counts != 0) & (counts != ranks)).any()):
        raise ValueError(
            "reduce_sequence_parallel_gradients: all ranks must have a gradient of a parameter, or "
            f"none, got {[int(count) for count in counts]} of {ranks} ranks"
        )
    for p in marked:
        how = getattr(p.grad, "placements", ())
        if any(one.is_partial() for one in how):
            raise ValueError(
                "reduce_sequence_parallel_gradients: gradients must be of each rank's own tokens, "
                f"got a DTensor {tuple(p.shape)} that is a sum over ranks, {tuple(how)}, which "
                "optimizers see to; leave its mark out"
            )
    grads = [local_of(p.grad) for p in marked if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            grad.copy_(summed.view_as(grad))
