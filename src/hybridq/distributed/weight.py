"""GatheredWeight: a parameter of high precision whose all-gather by FSDP2 brings planes."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from ..tensor import QuantizedTensor
from .gather import Call, GatheredParameter, GatheredStorage

__all__ = ["GatheredWeight"]

_aten = torch.ops.aten
#: What FSDP2 makes shards by, and torch moves tensors by: of such a parameter it is one again.
_KEEPS_CLASS: Final = {
    _aten._pin_memory.default,
    _aten._to_copy.default,
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}


class GatheredWeight(torch.Tensor):
    """A parameter of high precision whose all-gather by FSDP2 brings planes.

    Made by `prepare_fsdp2`. For everything but FSDP2 it is the tensor that it holds.

    Args:
        values: plain tensor.
        about: shared by all tensors of the parameter.
    """

    high: torch.Tensor
    _about: GatheredParameter

    @staticmethod
    def __new__(cls, values: torch.Tensor, about: GatheredParameter) -> GatheredWeight:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=values.device,
            pin_memory=values.is_pinned(),
            requires_grad=values.requires_grad,
        )
        return made

    def __init__(self, values: torch.Tensor, about: GatheredParameter) -> None:
        self.high, self._about = values.detach(), about

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        abouts: list[GatheredParameter] = []

        def plain(value: Any) -> Any:
            if isinstance(value, GatheredWeight):
                abouts.append(value._about)
                return value.high
            return value

        def again(value: Any) -> Any:
            return GatheredWeight(value, abouts[0]) if isinstance(value, torch.Tensor) else value

        inner_args, inner_kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            for about in abouts:
                about.num_writes += 1  # every write comes here; versions are counted further up
        if func in _KEEPS_CLASS and isinstance(args[0], GatheredWeight):
            return torch.utils._pytree.tree_map(again, result)
        if func._schema.is_mutable and args and isinstance(args[0], GatheredWeight):
            return args[0] if isinstance(result, torch.Tensor) else result
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.high!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high"], self._about

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], about: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["high"], about)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.high.__reduce_ex__(protocol)  # a plain tensor in every file

    # ---- the hooks of FSDP2

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
        """
        about, values = self._about, self.high
        if values.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                f"fsdp2: {about.name} must be sharded along dim 0, got local shape "
                f"{tuple(values.shape)} of {tuple(outer_size)}"
            )
        dtype, group = mp_policy.param_dtype or values.dtype, mesh.get_group()
        call = Call(group, group.rank(), group.size(), outer_size, dtype, about.slot())
        about.call, about.shard = call, weakref.ref(self)
        in_backward = torch._C._current_graph_task_id() != -1
        row, col = about.wanted["backward" if in_backward else "forward"]
        if not (torch.is_grad_enabled() or in_backward):
            row, col = True, False
        plan = call.plan(row, col, about.name)
        payload = about.payload(plan)
        # FSDP2 frees what is in this list, and would make room for it again before the next use.
        about.inner.clear()
        inputs = call.inputs(payload)
        about.fit_outputs([part.numel() for part in inputs])
        return inputs, plan

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
            metadata: how it was made.
            param_dtype: not used.
            out: the parameter that an earlier call returned, or None.
        """
        about, plan = self._about, metadata
        call = about.last_call()
        about.outputs = [part if part._base is None else part._base for part in all_gather_outputs]
        parts = [part.view(torch.uint8).view(call.world, -1) for part in all_gather_outputs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        storage = about.storage
        if storage is None:
            storage = about.storage = GatheredStorage(about)
        storage.fill(plan, whole[:, : plan.payload])
        if out is not None:
            return None
        return QuantizedTensor.make(storage, tuple(call.shape), call.dtype), about.inner
