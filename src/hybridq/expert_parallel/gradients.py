"""Gradients of models whose experts are on several ranks: groups for optimizers, and clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["clip_grad_norm_", "parameter_groups"]


def _mesh(tensor: Any) -> Any:
    """Return the mesh that a tensor lies on; None: it is a plain one."""
    return getattr(tensor, "device_mesh", None)


def parameter_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return groups of a model's parameters, for an optimizer: those of one mesh together.

    torch's optimizers update many tensors by one operation on GPUs, and wherever `foreach` asks for
    it, which takes DTensors of one mesh or plain tensors, and not both.

    Args:
        model: after `parallelize_experts`, and after `fully_shard` if it is called.
        options: of every group, such as `weight_decay`.

    Source: ours.

    Example:
        >>> import torch
        >>> from hybridq.moe import parameter_groups
        >>> groups = parameter_groups(torch.nn.Linear(4, 4), lr=1e-3)
        >>> optimizer = torch.optim.AdamW(groups)
    """
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        found.setdefault(_mesh(parameter), []).append(parameter)
    return [{"params": own, **options} for own in found.values()]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients so that their norm is `max_norm` at most; return the norm before.

    The norm is that of the whole model: of experts on all ranks, each once, and of what every rank
    has, once. All ranks must call it.

    Args:
        parameters: with gradients or without, plain tensors and DTensors of any meshes; or one.
            Plain ones must be the same on all ranks, and so their gradients.
        max_norm: of the gradients together.
        norm_type: of the norm; `inf`: the largest absolute value.

    Returns:
        FP32 `[]`, the same on all ranks.

    Source: ours; names: `torch.nn.utils.clip_grad_norm_`.

    Example:
        >>> import torch
        >>> from hybridq.moe import clip_grad_norm_
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> layer(torch.full((1, 4), 3.0)).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), 1.0), layer.weight.grad.norm()
        (tensor(6.), tensor(1.0000))
    """
    found: dict[Any, list[torch.Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            found.setdefault(_mesh(parameter.grad), []).append(parameter.grad)
    norms = []
    for grads in found.values():
        own: Any = torch.nn.utils.get_total_norm(grads, norm_type)
        norms.append(own.full_tensor() if _mesh(own) is not None else own)
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device=torch.get_default_device())
    total = torch.linalg.vector_norm(torch.stack([one.float() for one in norms]), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in found.values():
        for grad in grads:
            local: torch.Tensor = getattr(grad, "_local_tensor", grad)
            local.mul_(factor.to(local.dtype))
    return total
