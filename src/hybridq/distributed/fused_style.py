"""A style of tensor parallelism for modules whose weights are split together.

Source: ours; a `ParallelStyle` as `torch.distributed.tensor.parallel` has them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..nn.modules.parallel_options import ParallelOptions
from ..nn.modules.split_modules import SPLIT_TOGETHER, split_module

__all__ = ["FusedParallel"]


class FusedParallel(ParallelStyle):
    """Deals out a whole fused module over the ranks of a mesh, for `parallelize_module`.

    Of a `LayerNormLinear` each rank has rows of the weight; of a `LayerNormMLP` rows of fc1 and
    columns of fc2; of a `MultiheadAttention` as many heads; of a `TransformerLayer` all of these.
    Where rows are several matrices one behind the other (queries, keys, values; both halves of a
    gated activation) a rank has its part of each. The module then computes what its arguments
    `tp_group` and `set_parallel_mode` would have made it compute, with the values that it had.

    Parameters become DTensors on the mesh. One with several matrices becomes one for each:
    `query_weight`, `key_weight` and `value_weight` of a projection, `fc1_gate_weight` and
    `fc1_up_weight` of a gated activation, and their biases.

    Input and output are plain tensors, or the input a DTensor over the mesh: of all tokens; of a
    `LayerNormLinear`'s output a rank has its columns. With `sequence_parallel` the input, and the
    output of the other modules, are this rank's tokens, along the first dimension, planes of them
    travel, and the gradients of norms and biases that every rank has whole are summed over ranks in
    the backward.

    Args:
        sequence_parallel: outside of the module each rank has a part of the tokens.

    Raises:
        TypeError: `sequence_parallel` is no bool.
        NotImplementedError: the module is another one (from `parallelize_module`).
        ValueError: the ranks do not divide heads or features, a parameter is quantized or dealt
            out already, the mesh has several dimensions, `sequence_parallel` meets
            `qkv_format="bshd"`, or the module has `fuse_wgrad_accumulation` or
            `delay_wgrad_compute`.

    Source: ours; the ways to split: arXiv:1909.08053, arXiv:2205.05198.

    Example:
        >>> import torch, hybridq
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from hybridq.distributed import FusedParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> layers = torch.nn.ModuleList([hybridq.TransformerLayer(64, 128, 4) for _ in range(2)])
        >>> layers = parallelize_module(layers, mesh, {"*": FusedParallel(sequence_parallel=True)})
        >>> layers[0](torch.randn(16, 2, 64)).shape  # this rank's tokens
        torch.Size([16, 2, 64])
        >>> dist.destroy_process_group()
    """

    #: The rank of the mesh whose values are dealt out; None: each rank's own. `parallelize_module`
    #: sets it.
    src_data_rank: int | None = 0

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        given: object = sequence_parallel
        if not isinstance(given, bool):
            raise TypeError(
                f"FusedParallel: sequence_parallel must be a bool, got {type(given).__name__}"
            )
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, SPLIT_TOGETHER):
            names = " or ".join(kind.__name__ for kind in SPLIT_TOGETHER)
            raise NotImplementedError(
                f"FusedParallel: takes {names}, got {type(module).__name__}; take "
                "ColwiseParallel or RowwiseParallel of hybridq.distributed for a hybridq.Linear"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"FusedParallel: the mesh must have one dimension, got {device_mesh.ndim}; take "
                "mesh['tp']"
            )
        group, source = device_mesh.get_group(), self.src_data_rank

        def share(values: torch.Tensor) -> None:
            if source is not None and values.device.type != "meta":
                dist.broadcast(values, group=group, group_src=source)

        options = ParallelOptions(group, sequence_parallel=self.sequence_parallel)
        split_module("FusedParallel", module, options, device_mesh, share)
        placement = Shard(0) if self.sequence_parallel else Replicate()

        def take_local(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            made = tuple([_local(one, device_mesh, placement) for one in args])
            return made, {name: _local(one, device_mesh, placement) for name, one in kwargs.items()}

        module.register_forward_pre_hook(take_local, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"FusedParallel(sequence_parallel={self.sequence_parallel})"


def _local(given: Any, mesh: DeviceMesh, placement: Any) -> Any:
    """Return this rank's tokens of a DTensor, or all of them; anything else as it is."""
    if not isinstance(given, DTensor):
        return given
    local: Any = given.redistribute(mesh, [placement]).to_local(grad_placements=[placement])
    return local
