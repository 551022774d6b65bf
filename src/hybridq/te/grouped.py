"""Parameters of all groups in one, read as Transformer Engine's GroupedTensor is read."""

from __future__ import annotations

import torch

__all__ = ["GroupedParameter", "GroupedTensor", "as_grouped"]


class GroupedParameter(torch.nn.Parameter):
    """A `single_grouped_weight` or `single_grouped_bias`: any Parameter `[groups, ...]`.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.GroupedLinear(3, 8, 4, single_grouped_weight=True)
        >>> layer.weight.rowwise_data.fill_(1.0).shape, layer.weight[2].sum().item()
        (torch.Size([96]), 32.0)
    """

    @property
    def num_tensors(self) -> int:
        """The number of groups."""
        return self.shape[0]

    @property
    def rowwise_data(self) -> torch.Tensor:
        """The values, one group's behind another's, `[numel]`: the parameter's own memory."""
        return self.detach().view(-1)

    def split_into_quantized_tensors(self) -> list[torch.Tensor]:
        """Return each group's values, views of the parameter, without a graph."""
        return list(self.detach().unbind(0))


GroupedTensor = GroupedParameter  # for isinstance


def as_grouped(module: torch.nn.Module) -> None:
    """Let parameters of all groups be GroupedParameters, but those held as planes.

    Args:
        module: a GroupedLinear.
    """
    for name in ("weight", "bias"):
        own = module._parameters.get(name)
        if type(own) is torch.nn.Parameter:
            own.__class__ = GroupedParameter  # of the same attributes
