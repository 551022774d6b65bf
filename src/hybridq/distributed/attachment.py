"""What keeps a parameter prepared, whatever tensor its module is given for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..nn import QuantizedModule
from ..recipes import Recipe
from .parameters import GatheredParameter
from .tensors import GatheredWeight, QuantizedWeight, late_parallel

__all__ = ["Attachment", "is_prepared", "local_of"]


def local_of(parameter: Any) -> Any:
    """Return a parameter's tensor on this rank: of a DTensor its shard.

    Args:
        parameter: any tensor, or None.
    """
    return getattr(parameter, "_local_tensor", parameter)


def is_prepared(parameter: Any) -> bool:
    """Return whether a parameter, or its shard, is one that `prepare_fsdp2` made.

    Args:
        parameter: any tensor, or None.
    """
    return isinstance(local_of(parameter), (GatheredWeight, QuantizedWeight))


class Attachment:
    """What a module remembers of one prepared parameter.

    Args:
        about: the parameter.
    """

    def __init__(self, about: GatheredParameter) -> None:
        self.about = about

    @property
    def is_held(self) -> bool:
        """Whether its shards are quantized."""
        return self.about.is_held

    def use(self, module: QuantizedModule, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a forward takes; every rank must call it.

        Args:
            module: whose forward it is.
            name: of the parameter there.
            recipe: that the module computes under, or None.

        Raises:
            RuntimeError: tensor parallelism replaced the parameter after `prepare_fsdp2`.
        """
        if self.about.call is None and self.about.mesh_part is None:  # it was never gathered
            held = module.held(name)
            if local_of(held) is not held and not is_prepared(held):
                raise late_parallel(self.about.name, local_of(held).shape)
        self.about.use(module, name, recipe)

    def use_in_graph(self, module: QuantizedModule, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a compiled forward takes, in front of it; every rank must call it.

        Args:
            module, name, recipe: as for `use`.
        """
        self.about.use_in_graph(module, name, recipe)

    def keep_initial(self, parameter: Any, values: Any) -> None:
        """Keep what quantized shards were made of, if initial values are kept.

        Args:
            parameter: whose local tensor was quantized just now.
            values: what it was quantized from, a DTensor as well.
        """
        about: Any = self.about
        if about.is_held and about.keeps_initial:
            local_of(parameter).held.initial = local_of(values).detach().cpu().clone()

    def attach(self, module: nn.Module, name: str) -> None:
        """Prepare the parameter again if the module holds a plain one now; every rank must call it.

        Args:
            module: that owns the parameter.
            name: of it there.

        Raises:
            RuntimeError: it is to be quantized with its other shards, and is none yet.
        """
        parameter: Any = module._parameters.get(name)
        local = local_of(parameter)
        if local is None or type(local) not in (torch.Tensor, nn.Parameter) or local.is_meta:
            return
        values = local.detach()
        about: Any = self.about
        made: Any
        if about.is_held:
            where = (values.shape, values.dtype, values.device)
            made = QuantizedWeight(about.none(), about, *where)
        else:
            made = GatheredWeight(values, self.about)
        if parameter is local:
            module._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        else:
            parameter._local_tensor = made
        if isinstance(made, QuantizedWeight):
            made.quantize_(values)
