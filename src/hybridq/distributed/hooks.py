"""What FSDP2 asks of a sharded parameter whose all-gather brings planes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from .gather import GatheredParameter

__all__ = ["GatherHooks"]

_PARAMETERS: Final = ("mesh", "outer_size", "outer_stride", "module", "mp_policy")


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
        self._tensor = tensor

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return this rank's payload, the planes' bytes of its rows, and how it was made.

        Args:
            mesh: of one dimension, over which the parameter is sharded.
            outer_size: shape of the whole parameter.
            outer_stride, module: not used.
            mp_policy: whose `param_dtype` is the dtype that the planes are made from.

        Raises:
            NotImplementedError: the parameter is sharded along another dimension than the first.
            RuntimeError: ranks differ in what they compute, on all of them.
        """
        tensor = self._tensor
        about = tensor._about
        if tensor.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                f"fsdp2: {about.name} must be sharded along dim 0, got local shape "
                f"{tuple(tensor.shape)} of {tuple(outer_size)}"
            )
        phase = about.phase()
        about.shard = weakref.ref(tensor)
        dtype = mp_policy.param_dtype or tensor.dtype
        call = about.next_call(mesh, outer_size, dtype, phase)
        plan = call.plan(*about.wanted_in(phase), about.name)
        # FSDP2 frees what is in this list, and would make room for it again before the next use.
        about.inner.clear()
        inputs, rest = about.inputs(plan, tensor.device)
        _fit_outputs(about, inputs)
        return inputs, (plan, rest)


class GatherHooks:
    """The two hooks of FSDP2, for a tensor subclass that has an `_about`."""

    _about: GatheredParameter
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    fsdp_pre_all_gather = property(_PreAllGather)

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
            metadata: how it was made, and what else of it all ranks sent.
            param_dtype: not used.
            out: the parameter that an earlier call returned, or None.
        """
        about, (plan, rest) = self._about, metadata
        call = about.last_call()
        world = call.world
        about.outputs = [part if part._base is None else part._base for part in all_gather_outputs]
        parts = [part.view(world, -1) for part in all_gather_outputs]
        if rest is not None:
            parts.append(rest)
            if rest.is_cuda:  # gathered on FSDP2's stream
                rest.record_stream(torch.cuda.current_stream())
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        storage = about.fill(plan, whole)
        quantizer = about.quantizer() if about.in_graph else None
        if out is not None:
            if call.phase != "backward":
                out.quantizer = quantizer  # type: ignore[attr-defined]
            return None
        return about.unsharded(storage, quantizer), about.inner


def _fit_outputs(about: GatheredParameter, inputs: Sequence[torch.Tensor]) -> None:
    """Give FSDP2's tensors room for a gather of other sizes than the first one had.

    Args:
        about: the parameter.
        inputs: uint8, what this rank gives to the gather.

    Raises:
        RuntimeError: they were made in inference mode.
    """
    world = about.last_call().world
    for output, part in zip(about.outputs, inputs, strict=False):
        size = part.numel()
        if output.numel() == size * world:
            continue
        if output.is_inference():  # known by views only, which do not lead to it
            raise RuntimeError(
                f"fsdp2: {about.name} was gathered in inference mode first, and FSDP2 keeps the "
                f"tensors that it made there; a gather of {size * world} bytes does not fit "
                f"into {output.numel()}; run the first forward under torch.no_grad() instead"
            )
        output.set_(output.new_empty(0).untyped_storage(), 0, (size * world,), (1,))
        output.untyped_storage().resize_(0)  # FSDP2 makes room when it needs it
