"""Operations on lists of tensors under Transformer Engine's names: norms and products.

Source: names, order of arguments and meanings: Transformer Engine's `multi_tensor_apply`, which has
them of Apex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .._torch_private import norm_each

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
]


class MultiTensorApply:
    """Calls an operation with the number of elements that one block of threads would take.

    Args:
        chunk_size: that number; no result depends on it here.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor | None,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        """Return `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


#: What scripts call: `multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args)`.
multi_tensor_applier: Final = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Euclidean norm of all tensors of a list together, and of each.

    Args:
        chunk_size: not used.
        noop_flag: not used: a norm that is not finite is returned as it is.
        tensor_lists: one list of floating tensors of any shapes.
        per_tensor: whether the norm of each is asked for.

    Returns:
        FP32 `[1]`, and FP32 `[tensors]` or `[0]`.

    Raises:
        ValueError: not one list.

    Example:
        >>> import torch
        >>> from hybridq.te.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm
        >>> gradients = [torch.full((2, 2), 1.5), torch.full((4,), 2.0)]
        >>> multi_tensor_applier(multi_tensor_l2norm, None, [gradients], True)
        (tensor([5.]), tensor([3., 4.]))
    """
    del chunk_size, noop_flag
    (tensors,) = _lists("multi_tensor_l2norm", tensor_lists, 1)
    if not tensors:
        none = torch.zeros(1, dtype=torch.float32, device=torch.get_default_device())
        return none, none[:0]
    norms = torch.stack(norm_each(list(tensors), 2, torch.float32))
    return norms.norm().view(1), norms if per_tensor else norms[:0]


def multi_tensor_scale(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    scale: float | torch.Tensor,
) -> None:
    """Write the products of the first list's tensors and a number into the second list's.

    Args:
        chunk_size: not used.
        noop_flag: an integer `[1]`, set to 1 where a value of the first list is not finite; or
            None.
        tensor_lists: two lists of floating tensors, of the same shapes; they may be the same.
        scale: the number. Products are FP32, rounded once.

    Raises:
        ValueError: not two lists of the same shapes.
    """
    del chunk_size
    sources, results = _lists("multi_tensor_scale", tensor_lists, 2)
    if [one.shape for one in sources] != [one.shape for one in results]:
        raise ValueError(
            "multi_tensor_scale: tensor_lists must have the same shapes, got "
            f"{[tuple(one.shape) for one in sources]} and {[tuple(one.shape) for one in results]}"
        )
    with torch.no_grad():
        for source, result in zip(sources, results, strict=True):
            if noop_flag is not None:
                noop_flag.logical_or_(source.isfinite().all().logical_not().to(noop_flag.device))
            result.copy_(source.float() * scale)


def _lists(
    where: str, tensor_lists: Sequence[Sequence[torch.Tensor]], count: int
) -> Sequence[Sequence[torch.Tensor]]:
    if len(tensor_lists) != count:
        raise ValueError(f"{where}: tensor_lists must be {count}, got {len(tensor_lists)}")
    return tensor_lists
