"""What FSDP2 asks of a sharded parameter whose all-gather brings planes."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .gather import GatheredParameter

__all__ = ["GatherHooks"]


class GatherHooks:
    """The two hooks of FSDP2, for a tensor subclass that has an `_about`."""

    _about: GatheredParameter
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def fsdp_pre_all_gather(
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
        about = self._about
        if self.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                f"fsdp2: {about.name} must be sharded along dim 0, got local shape "
                f"{tuple(self.shape)} of {tuple(outer_size)}"
            )
        dtype, group = mp_policy.param_dtype or self.dtype, mesh.get_group()
        phase = about.phase()
        about.shard = weakref.ref(self)
        call = about.next_call(group, outer_size, dtype, phase, about.mesh())
        plan = call.plan(*about.wanted_in(phase), about.name)
        # FSDP2 frees what is in this list, and would make room for it again before the next use.
        about.inner.clear()
        inputs, rest = about.inputs(plan, self.device)
        about.fit_outputs([part.numel() for part in inputs])
        return inputs, (plan, rest)

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
        about.outputs = [part if part._base is None else part._base for part in all_gather_outputs]
        parts = [part.view(torch.uint8).view(call.world, -1) for part in all_gather_outputs]
        if rest is not None:
            parts.append(rest)
            if rest.is_cuda:  # gathered on FSDP2's stream
                rest.record_stream(torch.cuda.current_stream())
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        storage = about.fill(plan, whole)
        quantizer = about.quantizer()
        if out is not None:
            if call.phase != "backward":
                out.quantizer = quantizer  # type: ignore[attr-defined]
            return None
        return about.unsharded(storage, quantizer), about.inner
