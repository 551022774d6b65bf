"""Parameters of all groups in one, read as Transformer Engine's GroupedTensor is read."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import is_quantized

__all__ = ["GroupedParameter", "GroupedTensor", "Regroups", "as_grouped"]


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


class Regroups:
    """Loads parameters of all groups in one where a module has one for each, and the reverse."""

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        kinds = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias}
        for what, is_single in kinds.items():
            whole = f"{prefix}{what}"
            each = [f"{whole}{g}" for g in range(self.num_gemms)]
            if is_single and whole not in state_dict and all(key in state_dict for key in each):
                values = [state_dict.pop(key) for key in each]
                state_dict[whole] = torch.stack([_decoded(one) for one in values])
            elif not is_single and _shape(state_dict.get(whole))[:1] == (len(each),):
                state_dict.update(zip(each, state_dict.pop(whole).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _decoded(value: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = value.dequantize() if is_quantized(value) else value
    return made.detach()


def as_grouped(module: torch.nn.Module) -> None:
    """Let parameters of all groups be GroupedParameters, but those held as planes.

    Args:
        module: a GroupedLinear.
    """
    for name in ("weight", "bias"):
        own = module._parameters.get(name)
        if type(own) is torch.nn.Parameter:
            own.__class__ = GroupedParameter  # of the same attributes
