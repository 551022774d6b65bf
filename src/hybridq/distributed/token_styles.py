"""torch's two styles of tensor parallelism, with planes in their gathers of tokens.

Source: names, arguments and layouts: `torch.distributed.tensor.parallel`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel as _TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as _TorchRowwise

from ..nn import Linear
from ..nn.modules.split_modules import SPLIT_TOGETHER
from .part_planes import split_planes

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class ColwiseParallel(_TorchColwise):
    """torch's style; an input whose tokens are dealt out is gathered as planes.

    The module encodes its own tokens; the rowwise plane travels in the forward, the columnwise one
    in the backward. For one linear layer: several that take the same input (queries, keys and
    values) gather it once by torch's `PrepareModuleInput` and styles, or as one fused layer.
    A quantized weight is cut into parts of its planes.

    Args:
        input_layouts: the input's placement; `Shard` of a dimension other than the last one: of
            its tokens.
        output_layouts: the output's; None: `Shard(-1)`.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        NotImplementedError: the module is no `hybridq.Linear` (from `parallelize_module`).
        ValueError: the weight is quantized, and a block of it would lie on two ranks.

    Source: torch's class of this name.

    Example:
        >>> import torch, hybridq
        >>> from torch.distributed.tensor import Shard
        >>> from hybridq.distributed import ColwiseParallel, RowwiseParallel
        >>> plan = {
        ...     "up": ColwiseParallel(input_layouts=Shard(1)),
        ...     "down": RowwiseParallel(output_layouts=Shard(1)),
        ... }
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if _is_of_tokens(self.input_layouts[0]):
            layouts: Any = self.input_layouts
            self.desired_input_layouts = layouts  # the module gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        linear.gathers_tokens = _is_of_tokens(self.input_layouts[0])
        split_planes(self, linear, device_mesh, 0)
        return super()._apply(linear, device_mesh)


class RowwiseParallel(_TorchRowwise):
    """torch's style; the gradient of an output whose tokens are dealt out is gathered as planes.

    The sum over ranks is scattered in the dtype of the output, or quantized
    (`quantize_token_sums`). In the backward each rank encodes
    the gradient of its own tokens, and both planes travel together. A quantized weight is cut into
    parts of its planes.

    Args:
        input_layouts: the input's placement; None: `Shard(-1)`.
        output_layouts: the output's; `Shard` of a dimension other than the last one: of its
            tokens.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises:
        NotImplementedError: the module is no `hybridq.Linear` (from `parallelize_module`).
        ValueError: the weight is quantized, and a block of it would lie on two ranks.

    Source: torch's class of this name.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(self, module)
        placement = self.output_layouts[0]
        if isinstance(placement, Shard) and _is_of_tokens(placement):
            linear.scatters_tokens = placement.dim
        split_planes(self, linear, device_mesh, 1)
        return super()._apply(linear, device_mesh)


def _is_of_tokens(placement: Any) -> bool:
    """Return whether a placement deals out another dimension than the last one."""
    return isinstance(placement, Shard) and placement.dim != -1


def _linear(style: Any, module: nn.Module) -> Linear:
    """Return a module that the styles take.

    Raises:
        NotImplementedError: they do not take it.
    """
    if isinstance(module, Linear):
        return module
    name = type(style).__name__
    if isinstance(module, SPLIT_TOGETHER):
        raise NotImplementedError(
            f"{name}: takes a hybridq.Linear, got {type(module).__name__}, whose weights are split "
            "together; take hybridq.distributed.FusedParallel, or make it with tp_group="
        )
    raise NotImplementedError(
        f"{name}: takes a hybridq.Linear, got {type(module).__name__}; call hybridq.convert(model) "
        f"before parallelize_module, or take torch's own {name}"
    )
