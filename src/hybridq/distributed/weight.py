"""GatheredWeight: a parameter of high precision whose all-gather by FSDP2 brings planes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch

from .gather import GatheredParameter
from .hooks import GatherHooks

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


class GatheredWeight(GatherHooks, torch.Tensor):
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
        # A view of an ordinary tensor is one in inference mode too: torch shares its version.
        with nullcontext() if values.is_inference() else torch.inference_mode(False):
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
