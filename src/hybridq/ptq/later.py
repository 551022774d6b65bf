"""Tensors that are not there yet: what is done to them is done when their values are asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._torch_private import no_torch_function, tree_map

__all__ = ["Later", "now"]


class Later(torch.Tensor):
    """A tensor that has a shape and a dtype, and whose values are made when `now` is called.

    Operations on it give tensors of the same kind, so that it may be renamed, split and put
    together with others before any of its values is in memory. No operation may read its values.

    Args:
        like: shape, strides and dtype.
        make: returns the values.

    Example:
        >>> import torch
        >>> from hybridq.ptq.later import Later, now
        >>> later = Later(torch.empty(4, 2, device="meta"), lambda: torch.ones(4, 2))
        >>> now(torch.cat(later.chunk(2)[::-1], dim=1)).shape
        torch.Size([2, 4])
    """

    make: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, make: Callable[[], torch.Tensor]) -> Later:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.make = make
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(f"export: {func} would write to a tensor that is not there yet")
        like_args, like_kwargs = tree_map(_like, (args, kwargs))
        if "device" in like_kwargs:
            like_kwargs["device"] = torch.device("meta")
        like = func(*like_args, **like_kwargs)

        def make() -> Any:
            now_args, now_kwargs = tree_map(now, (args, kwargs))
            return func(*now_args, **now_kwargs)

        if isinstance(like, torch.Tensor):
            return Later(like, make)
        if isinstance(like, (list, tuple)):
            many = [Later(one, partial(_item, make, i)) for i, one in enumerate(like)]
            return type(like)(many)
        raise TypeError(f"export: {func} reads a tensor that is not there yet")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Later({list(self.shape)}, {self.dtype})"


def now(value: Any) -> Any:
    """Return the values of a tensor that was not there yet; all else as it is.

    Args:
        value: anything.
    """
    return value.make() if isinstance(value, Later) else value


def _item(make: Callable[[], Any], index: int) -> torch.Tensor:
    made: torch.Tensor = make()[index]
    return made


def _like(value: Any) -> Any:
    """Return a tensor of the same kind on the meta device; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
