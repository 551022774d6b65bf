"""Results and gradients that are written into memory of the caller."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch_private import out_of_graphs

__all__ = ["gradient_into", "result_into"]


def result_into(
    name: str,
    place: torch.Tensor | None,
    values: torch.Tensor,
    splits: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """Return values in other memory, an alias of it, with their derivative.

    Args:
        name: of the argument, for errors.
        place: of the values' shape, dtype and device; None: they stay where they are.
        values: `[..., features]`, the rows of all groups.
        splits: rows of each group; of a tensor, which nobody reads on the host, the rows behind
            its sum keep what the memory holds.

    Raises:
        ValueError: the memory does not fit.
    """
    return values if place is None else _write(name, place, values, splits)


# Traced, the derivative of what becomes an alias of an argument would be lost (torch 2.13).
@out_of_graphs
def _write(
    name: str,
    place: torch.Tensor,
    values: torch.Tensor,
    splits: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    if place.shape != values.shape or (place.dtype, place.device) != (values.dtype, values.device):
        raise ValueError(
            f"te.GroupedLinear.forward: {name} must be {values.dtype} {list(values.shape)} on "
            f"{values.device}, got {place.dtype} {list(place.shape)} on {place.device}"
        )
    place = place.detach()  # of no graph, so that it serves again
    if isinstance(splits, torch.Tensor):
        lead = values.shape[:-1]
        row = torch.arange(lead.numel(), dtype=torch.int64, device=values.device).view(*lead, 1)
        values = torch.where(row < splits.sum(), values, place)
    return place.copy_(values)


def gradient_into(
    name: str,
    place: torch.Tensor | None,
    x: torch.Tensor,
    splits: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """Return a view of `x` whose gradient is written into other memory, and goes on from there.

    Args:
        name, place, splits: as for `result_into`.
        x: `[..., features]`, the rows of all groups.

    Raises:
        ValueError: the memory does not fit, in the backward.
    """
    if place is None or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    x = x.view_as(x)
    x.register_hook(lambda grad: result_into(name, place, grad, splits))
    return x
