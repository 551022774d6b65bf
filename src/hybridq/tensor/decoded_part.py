"""DecodedPart: the values of a part of a QuantizedTensor that is no range of its planes' buffers.

In torch a part is a view, and a write to it reaches the whole. Values that were decoded are a copy:
a write to them would be lost, so they refuse it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .._torch_private import no_torch_function, refuse_memory, tree_map
from ..kernels.inputs import begins_at
from .table import is_quantized
from .written import is_collective, written

__all__ = ["DecodedPart", "as_parts", "as_plain", "check_writes", "ordinary"]

_aten = torch.ops.aten


class DecodedPart(torch.Tensor):
    """Decoded values of a part of a QuantizedTensor, which can be read but not written.

    What an operator makes of them is a plain tensor, except that their views are such parts too.
    They are what the tensor held when they were taken.

    Attributes:
        decoded: the values, a plain tensor.
    """

    decoded: torch.Tensor

    @staticmethod
    def make(values: torch.Tensor) -> DecodedPart:
        """Return the part that has these values.

        Args:
            values: plain, nobody else's.
        """
        made: Any = torch.Tensor._make_wrapper_subclass(
            DecodedPart,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        refuse_memory(made)
        made.decoded = values
        return made

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values as a plain tensor of their own, as of a part that is quantized.

        Args:
            dtype: of the result; None: the part's own.
        """
        return self.clone() if dtype is None else self.clone().to(dtype)

    # ---- what torch gives no operator for

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return begins_at(self.decoded)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a NumPy array of its own memory."""
        return self.clone().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the values as a DLPack capsule of its own memory.

        Args:
            options: as of `torch.Tensor.__dlpack__`.

        Raises:
            BufferError: `copy` is False.
        """
        if options.get("copy") is False:
            raise BufferError("__dlpack__: a part of a quantized tensor is given as a copy")
        return self.clone().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Return DLPack's name of the device that the copy is on."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).__dlpack_device__()

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.decoded.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.decoded.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded.clone().__reduce_ex__(protocol)  # a plain tensor in every file

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DecodedPart({self.decoded!r})"

    # ---- torch's protocols

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or is_collective(func):
            check_writes(func, args, kwargs)
        if func is _aten.as_strided.default:
            return _as_strided(*args, **kwargs)
        part = args[0] if args else None
        if not func.is_view or not isinstance(part, DecodedPart):
            return func(*as_plain(args), **as_plain(kwargs))
        with ordinary(part):
            return as_parts(func(*as_plain(args), **as_plain(kwargs)))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["decoded"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> DecodedPart:
        return DecodedPart.make(inner["decoded"])


def as_parts(result: Any) -> Any:
    """Return the result of an operator that takes a view, its plain tensors as parts."""

    def part(one: Any) -> Any:
        is_plain = isinstance(one, torch.Tensor) and not isinstance(one, DecodedPart)
        return DecodedPart.make(one) if is_plain and not is_quantized(one) else one

    return tree_map(part, result)


def as_plain(given: Any) -> Any:
    """Return the arguments of an operator with their parts as plain tensors."""
    return tree_map(lambda one: one.decoded if isinstance(one, DecodedPart) else one, given)


def ordinary(tensor: torch.Tensor) -> Any:
    """Return the context in which views of `tensor` are made.

    A view of an ordinary tensor is one in inference mode too: torch shares its version.

    Args:
        tensor: of which a view is taken.
    """
    if tensor.is_inference() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def check_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if `func` writes into a part."""
    for leaf in written(func, args, kwargs):
        if isinstance(leaf, DecodedPart):
            raise RuntimeError(
                f"{func.overloadpacket.__name__}: this part of a quantized tensor is a decoded "
                "copy, and a write to it would not reach the tensor, got shape "
                f"{tuple(leaf.shape)}; assign to the tensor by index, t[index] = values, write "
                "the tensor itself or whole blocks of it, or take a copy by .clone()"
            )


def _as_strided(part: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    same = tuple(size) == tuple(part.shape) and tuple(stride) == part.stride()
    if not same or storage_offset not in (None, part.storage_offset()):
        raise RuntimeError(
            "as_strided: a part of a quantized tensor keeps its geometry, got "
            f"{list(size)} with strides {list(stride)}; use .clone().as_strided(...)"
        )
    with ordinary(part):
        return DecodedPart.make(part.decoded)
