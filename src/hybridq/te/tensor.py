"""Transformer Engine's classes of tensors: what `isinstance` sees, and what makes one of buffers.

Their instances are hybridq's tensors, which get the attributes that scripts read: views where the
layouts agree, else copies. `get_metadata()` has every buffer in Transformer Engine's layout, as
its constructors take them. Two names are hybridq's own and stay: `_rowwise_data` and
`_columnwise_data` are matrices, and MXFP8's columnwise one is stored transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from .. import quantizers as ours
from .. import tensor as tensors
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneSpec
from ..storage import Plane, TensorStorage
from ..tensor import QuantizedTensor
from .buffers import dtype_of, plane_of, shape_of
from .constants import DType, element_of
from .hybrid import HybridQuantizer
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .utils import (  # noqa: F401, as scripts import them
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    prepare_for_saving,
    quantize_master_weights,
    replace_raw_data,
    restore_from_saved,
)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
]

_SIDES: Final[tuple[tuple[Direction, str], ...]] = (
    (ROWWISE, "rowwise"),
    (COLUMNWISE, "columnwise"),
)


def is_of_two(tensor: QuantizedTensor) -> bool:
    """Whether a HybridQuantizer made it, also where its formats are one, or one plane is left.

    Args:
        tensor: without a quantizer it is told by its planes.
    """
    own = tensor.own_quantizer
    if own is None:
        specs = [plane.spec for plane in (tensor.rowwise, tensor.columnwise) if plane is not None]
        return len({spec.format for spec in specs}) == 2
    formats = {spec.format for spec in (own.rowwise, own.columnwise) if spec is not None}
    return len(formats) == 2 or own.is_pair or own.columnwise_source != "original"


class _Kind(type):
    """A class whose instances are those of a class of hybridq, and whose call makes one."""

    kind: type
    is_storage: bool
    build: Callable[..., Any]

    def __init__(cls, name: str, bases: Any, body: Any, is_storage: bool = False) -> None:
        super().__init__(name, bases, body)
        cls.is_storage = is_storage

    def __new__(mcs, name: str, bases: Any, body: Any, is_storage: bool = False) -> Any:
        return super().__new__(mcs, name, bases, body)

    @property
    def is_users(cls) -> bool:
        """Whether it is a class of a user, who derived it from one here."""
        return cls.__module__ != __name__

    def __instancecheck__(cls, value: object) -> bool:
        if cls.is_users or type.__instancecheck__(cls, value):
            return type.__instancecheck__(cls, value)
        if not isinstance(value, QuantizedTensor) or (
            not cls.is_storage and getattr(value, "is_internal", False)
        ):
            return False
        if cls.kind is QuantizedTensor:
            return True
        is_hybrid = cls.kind is tensors.HybridQuantizedTensor
        return is_hybrid if is_of_two(value) else isinstance(value, cls.kind)

    def __subclasscheck__(cls, other: type) -> bool:
        if cls.is_users:
            return type.__subclasscheck__(cls, other)
        return issubclass(other, cls.kind) or type.__subclasscheck__(cls, other)

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if cls.is_users:
            return super().__call__(*args, **given)
        return cls._tensor(*args, **given)

    def make_like(cls, tensor: QuantizedTensor) -> QuantizedTensor:
        """Return another tensor of the same planes, apart from autograd.

        Args:
            tensor: any quantized one.
        """
        return tensor.detach()  # type: ignore[return-value]

    def _tensor(
        cls, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, **given: Any
    ) -> Any:
        parent = getattr(given.get("quantizer"), "rowwise_quantizer", None)
        if cls.kind is tensors.HybridQuantizedTensor and parent is None:
            raise TypeError(f"{cls.__name__}: requires a parent HybridQuantizer, got none")
        if shape is None and cls.is_storage:  # their constructors take buffers alone
            shape = shape_of(cls.__name__, given)
            dtype = dtype or given.get("fake_dtype") or dtype_of(given)
        if shape is None or dtype is None:
            raise TypeError(f"{cls.__name__}: needs shape and dtype, got {shape} and {dtype}")
        requires_grad = given.pop("requires_grad", False)
        for name in ("device", "fake_dtype", "with_gemm_swizzled_scales", "stride"):
            if given.pop(name, None) is True:
                raise NotImplementedError(f"{cls.__name__}: {name} must be False, got True")
        quantizer = given.pop("quantizer", None)
        storage, own = cls.build(tuple(shape), quantizer, **given)
        own = own if quantizer is None else getattr(quantizer, "frozen", quantizer)
        return QuantizedTensor.make(
            storage, tuple(shape), dtype, quantizer=own, requires_grad=requires_grad
        )


def _stored(
    frozen: Any, shape: Sequence[int], given: Mapping[str, tuple[torch.Tensor | None, ...]]
) -> tuple[TensorStorage, Any]:
    """Return the storage of the planes whose data is given, and their quantizer."""
    planes: dict[str, Plane | None] = {}
    for direction, name in _SIDES:
        spec: PlaneSpec | None = getattr(frozen, direction)
        has = given[name][0] is not None and spec is not None
        planes[name] = plane_of(spec, direction, shape, given[name]) if has else None  # type: ignore[arg-type]
    if not any(planes.values()):
        raise ValueError("tensor: needs the data of a rowwise or a columnwise plane, got none")
    return TensorStorage(planes["rowwise"], planes["columnwise"]), frozen


def _value(quantizer: Any, default: Any) -> Any:
    """Return the frozen quantizer that describes the planes; `default` where none was given."""
    frozen = default if quantizer is None else getattr(quantizer, "frozen", quantizer)
    return frozen


class Float8Tensor(metaclass=_Kind):
    """FP8 with one scale per tensor.

    `Float8Tensor(shape, dtype, data=, fp8_scale_inv=, fp8_dtype=, data_transpose=None,
    quantizer=None, requires_grad=False)` makes one of its buffers: uint8 codes of `shape` and
    of its transpose, FP32 `[1]`.

    Example:
        >>> import torch, hybridq.te as te
        >>> q = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
        >>> t = q(torch.tensor([[1.0, -3.5]]))
        >>> isinstance(t, te.Float8Tensor), t._fp8_dtype.name, t._data.dtype
        (True, 'kFloat8E4M3', torch.uint8)
        >>> torch.equal(te.Float8Tensor(t.shape, t.dtype, **t.get_metadata()).float(), t.float())
        True
    """

    kind = tensors.Float8Tensor

    @staticmethod
    def build(
        shape: Sequence[int],
        quantizer: Any,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        data_transpose: torch.Tensor | None = None,
    ) -> Any:
        """Return the storage of the buffers, and the quantizer of current scaling.

        Args:
            shape, quantizer, data, fp8_scale_inv, fp8_dtype, data_transpose: of the tensor.
        """
        known = ours.Float8CurrentScalingQuantizer(element_of(fp8_dtype))
        sides = {
            "rowwise": (data, fp8_scale_inv, None),
            "columnwise": (data_transpose, fp8_scale_inv, None),
        }
        return _stored(_value(quantizer, known), shape, sides)


def _sides(given: dict[str, Any]) -> dict[str, tuple[torch.Tensor | None, ...]]:
    return {
        side: (
            given.pop(f"{side}_data", None),
            given.pop(f"{side}_scale_inv", None),
            given.pop(f"amax_{side}", None),
        )
        for _, side in _SIDES
    }


class _OfBlocks(metaclass=_Kind):
    kind = QuantizedTensor

    @classmethod
    def build(cls, shape: Sequence[int], quantizer: Any, **given: Any) -> Any:
        """Return the storage of the buffers, and the quantizer that describes them.

        Args:
            shape, quantizer: of the tensor.
            given: `rowwise_data`, `rowwise_scale_inv`, `columnwise_data`, `columnwise_scale_inv`,
                `amax_rowwise`, `amax_columnwise`, and what says how they are encoded.

        Raises:
            TypeError: there is no such argument.
        """
        sides = _sides(given)
        known = cls.described(given)
        if given:
            raise TypeError(f"{cls.__name__}: unknown arguments, got {sorted(given)}")
        return _stored(_value(quantizer, known), shape, sides)

    @staticmethod
    def described(given: dict[str, Any]) -> Any:
        """Return the quantizer of hybridq that such planes are of.

        Args:
            given: what is taken out of it says how they are encoded.
        """
        raise NotImplementedError("described: must be overridden")


class Float8BlockwiseQTensor(_OfBlocks):
    """FP8 with one FP32 scale per 1x128 or 128x128 block, of its buffers (see `get_metadata`)."""

    kind = tensors.Float8BlockwiseQTensor

    @staticmethod
    def described(given: dict[str, Any]) -> Any:
        dim = 2 if given.pop("is_2D_scaled", True) else 1
        element = element_of(given.pop("fp8_dtype", DType.kFloat8E4M3))
        return ours.Float8BlockQuantizer(element, block_scaling_dim=dim)


class MXFP8Tensor(_OfBlocks):
    """FP8 with one E8M0 scale per 32 values, of its buffers (see `get_metadata`)."""

    kind = tensors.MXFP8Tensor

    @staticmethod
    def described(given: dict[str, Any]) -> Any:
        return ours.MXFP8Quantizer(element_of(given.pop("fp8_dtype", DType.kFloat8E4M3)))


class NVFP4Tensor(_OfBlocks):
    """E2M1 with one E4M3 scale per 16 values and FP32 amaxes, of its buffers (`get_metadata`)."""

    kind = tensors.NVFP4Tensor

    @staticmethod
    def described(given: dict[str, Any]) -> Any:
        given.pop("fp4_dtype", None)
        is_row_scaled = bool(given.pop("row_scaled_nvfp4", False))
        over = bool(given.pop("nvfp4_use_4over6", False))
        bound = given.pop("nvfp4_e4m3_max", 448)
        options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": bound} if over else {}
        return ours.NVFP4Quantizer(row_scaled_nvfp4=is_row_scaled, **options)


class IdentityTensor(metaclass=_Kind):
    """Values kept in high precision, of one buffer `hp_data`."""

    kind = tensors.IdentityTensor

    @staticmethod
    def build(shape: Sequence[int], quantizer: Any, *, hp_data: torch.Tensor) -> Any:
        """Return the storage of the values, and their quantizer.

        Args:
            shape, quantizer, hp_data: of the tensor.
        """
        frozen = _value(quantizer, ours.IdentityQuantizer())
        made: Any = frozen.quantize(hp_data.detach().reshape(tuple(shape)))
        return made.tensor_storage, frozen


class HybridQuantizedTensor(metaclass=_Kind):
    """Planes of two formats, of two tensors: `rowwise_storage` and `columnwise_storage`."""

    kind = tensors.HybridQuantizedTensor

    @staticmethod
    def build(
        shape: Sequence[int],
        quantizer: Any,
        *,
        rowwise_storage: Any = None,
        columnwise_storage: Any = None,
    ) -> Any:
        """Return the storage of the two planes.

        Args:
            shape: of the tensor.
            quantizer: a HybridQuantizer.
            rowwise_storage, columnwise_storage: a tensor with that plane, or None.
        """
        row = None if rowwise_storage is None else rowwise_storage.rowwise
        col = None if columnwise_storage is None else columnwise_storage.columnwise
        return TensorStorage(row, col), quantizer.frozen


class QuantizedTensorStorage(metaclass=_Kind, is_storage=True):
    """Any quantized tensor: there are no bare storages."""

    kind = QuantizedTensor

    @staticmethod
    def build(shape: Sequence[int], quantizer: Any, **given: Any) -> Any:
        """Raise: each format has a class of its own.

        Args:
            shape, quantizer, given: of the tensor.

        Raises:
            TypeError: always.
        """
        raise TypeError("QuantizedTensorStorage: must be of one format, as MXFP8Tensor")


class Float8TensorStorage(Float8Tensor, is_storage=True):
    """The same of tensors that are internal, too."""


class Float8BlockwiseQTensorStorage(Float8BlockwiseQTensor, is_storage=True):
    """The same of tensors that are internal, too."""


class MXFP8TensorStorage(MXFP8Tensor, is_storage=True):
    """The same of tensors that are internal, too."""


class NVFP4TensorStorage(NVFP4Tensor, is_storage=True):
    """The same of tensors that are internal, too."""


class IdentityTensorStorage(IdentityTensor, is_storage=True):
    """The same of tensors that are internal, too."""


class HybridQuantizedTensorStorage(HybridQuantizedTensor, is_storage=True):
    """The same of tensors that are internal, too."""
