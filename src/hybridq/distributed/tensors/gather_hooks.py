"""What FSDP2 asks of a sharded parameter whose all-gather brings planes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import torch

from ..._torch_private import (
    in_selective_checkpoint,
    num_dispatch_modes,
    outside_selective_checkpoint,
)
from ...tensor import Unflattened
from ..parameters import GatheredParameter
from ..units import unit_of

__all__ = ["GatherHooks", "late_parallel"]

_PARAMETERS: Final = ("mesh", "outer_size", "outer_stride", "module", "mp_policy")


def late_parallel(name: str, shape: Sequence[int]) -> RuntimeError:
    """Return the error that says that tensor parallelism came after `prepare_fsdp2`.

    Args:
        name: of the weight.
        shape: of what was found of it.
    """
    return RuntimeError(
        f"fsdp2: {name} must be split by tensor parallelism before prepare_fsdp2, got "
        f"parallelize_module after it (a part {tuple(shape)}); call parallelize_module, then "
        "prepare_fsdp2, then fully_shard"
    )


def _is_part(parameter: Any) -> bool:
    """Return whether a parameter is sharded over more ranks than those that gather it."""
    placements = getattr(parameter, "placements", ())
    return sum(placement.is_shard() for placement in placements) > 1


class _PreAllGather:
    """The hook `fsdp_pre_all_gather` of one tensor.

    Args:
        tensor: whose hook it is.
    """

    __slots__ = ("_tensor",)

    #: FSDP2 asks for it in each gather; that of a method is found out anew each time.
    __signature__: Final = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _PARAMETERS]
    )

    def __init__(self, tensor: GatherHooks) -> None:
        self._tensor = weakref.ref(tensor)  # which keeps this object

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what this rank gives to the all-gather, and None.

        Args:
            mesh: of one dimension, over which the parameter is sharded.
            outer_size: shape of the whole parameter.
            outer_stride, module: not used.
            mp_policy: whose `param_dtype` is the dtype that the planes are made from.

        Raises:
            NotImplementedError: the parameter is sharded along another dimension than the first.
            RuntimeError: ranks differ in what they compute, on all of them.
        """
        tensor = self._tensor()
        if tensor is None:
            raise RuntimeError("fsdp2: the shard whose all-gather begins is gone")
        about = tensor._about
        if tensor.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                f"fsdp2: {about.name} must be sharded along dim 0, got local shape "
                f"{tuple(tensor.shape)} of {tuple(outer_size)}"
            )
        if about.unit is None:
            if not about.knows_parts and _is_part(about.parameter):
                raise late_parallel(about.name, outer_size)
            unit_of(about, mesh)
        unit: Any = about.unit
        # The number first: it costs the host nothing.
        if num_dispatch_modes() and in_selective_checkpoint():
            with outside_selective_checkpoint():
                return unit.inputs(tensor, mesh, mp_policy), None
        return unit.inputs(tensor, mesh, mp_policy), None


class GatherHooks(Unflattened):
    """The two hooks of FSDP2, for a tensor subclass that has an `_about`."""

    _about: GatheredParameter
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    fsdp_pre_all_gather = cached_property(_PreAllGather)  # FSDP2 asks for it four times

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the whole parameter as planes, and their buffers; or put them into `out`.

        Args:
            all_gather_outputs: what all ranks sent, for each tensor of the payload.
            metadata: not used.
            param_dtype: not used.
            out: the parameter that an earlier call returned, or None.
        """
        if num_dispatch_modes() and in_selective_checkpoint():
            with outside_selective_checkpoint():
                return self.fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)
        about = self._about
        unit: Any = about.unit
        if unit.first is about:
            unit.receive(all_gather_outputs)
        about.inner[:] = about.filled
        if out is not None and (unit.is_refilled or not unit.in_graphs):
            return None
        quantizer = about.quantizer() if about.in_graph else None
        if out is None:
            return about.unsharded(quantizer), about.inner
        if about.last_call().phase != "backward":
            whole: Any = getattr(out, "_local_tensor", out)
            whole.quantizer = quantizer
            whole.take_class()
        return None
