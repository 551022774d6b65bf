"""Float8Quantizer: per-tensor FP8 with the caller's own scale and amax tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..direction import Direction
from ..errors import PlaneError, SpecError
from ..formats import Element, PlaneSpec
from ..kernels.choice import EncodeRequest, given_scale
from ..kernels.inputs import can_bypass_dispatcher
from ..kernels.operators import update_amax
from ..storage import StoragePlan, TensorStorage
from ..tensor import QuantizedTensor, is_flat, is_quantized, matrix_shape
from .checks import check_dtype, check_source
from .named import Float8CurrentScalingQuantizer
from .quantizer import Quantizer
from .writing import Quantize, check_target, overwrite_planes

__all__ = ["Float8Quantizer"]


class Float8Quantizer:
    """Quantizes to FP8 with a scale that is given, and records the amax of what it sees.

    It holds the caller's tensors and is no value: unlike `Quantizer` it is not frozen, and equal to
    itself only. What it makes carries it along: in-place operations keep the scale and record the
    amax. What comes out of a file or a compiled graph has lost both tensors: of a file it has the
    quantizer of the same planes with current scaling, of a graph none, and refuses writes, as it
    does within the graph.

    Args:
        scale: FP32 `[1]`: values are multiplied with it; positive.
        amax: FP32 `[1]`: raised in place to max|x| of every tensor that is quantized, infinity and
            NaN as they are; on the device of `scale`.
        fp8_dtype: E4M3 or E5M2, as torch dtype or name.
        rowwise, columnwise: planes to make.

    Raises:
        TypeError: `scale` or `amax` is no tensor.
        SpecError: it is not FP32 with one value, or another dtype.

    Source: Transformer Engine's Float8Quantizer.

    Example:
        >>> import torch, hybridq
        >>> scale, amax = torch.full((1,), 64.0), torch.zeros(1)
        >>> t = hybridq.Float8Quantizer(scale, amax, "e4m3")(torch.tensor([[1.0, -3.5]]))
        >>> t.dequantize(), amax
        (tensor([[ 1.0000, -3.5000]]), tensor([3.5000]))
    """

    #: Whether the caller gives the scale, and the amax is recorded: see `Quantizer`.
    has_given_scale: ClassVar[bool] = True
    #: Whether two quantizers were put together: see `Quantizer`.
    is_pair: ClassVar[bool] = False

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: str | torch.dtype | Element = torch.float8_e4m3fn,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        given: tuple[tuple[str, Any], ...] = (("scale", scale), ("amax", amax))
        for name, tensor in given:
            if not isinstance(tensor, torch.Tensor):
                got = type(tensor).__name__
                raise TypeError(f"Float8Quantizer: {name} must be a tensor, got {got}")
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise SpecError(
                    f"Float8Quantizer: {name} must be float32 with one value, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        self.scale = scale
        self.amax = amax
        #: The same planes as a value, with current scaling.
        self.quantizer: Quantizer = Float8CurrentScalingQuantizer(
            fp8_dtype, rowwise=rowwise, columnwise=columnwise
        )

    def __call__(self, tensor: torch.Tensor, **options: Any) -> QuantizedTensor:
        """Quantize `tensor`; the same as `quantize`."""
        return self.quantize(tensor, **options)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Return `tensor` quantized; the gradient passes unchanged (straight-through).

        Args:
            tensor: `(..., K)` float32, bfloat16 or float16.
            out: a QuantizedTensor of this shape to write into, or None.
            dtype: nominal dtype of the result; None: that of `tensor`.

        Raises:
            TypeError: dtype or layout of `tensor` cannot be quantized.
            PlaneError: both usages are off, or `out` has other planes.
            RuntimeError: `tensor` requires grad and is written into `out`.
            ValueError: it is on another device than scale and amax.
        """
        check_source(tensor, "quantize")
        if out is not None:
            return self.update_quantized(tensor, out)
        if is_quantized(tensor):
            tensor = tensor.dequantize()
        nominal = tensor.dtype if dtype is None else dtype
        check_dtype(nominal, "quantize")
        if torch.is_grad_enabled() and tensor.requires_grad:
            made: QuantizedTensor = Quantize.apply(tensor, self, nominal, None)
            return made
        return self._make(tensor, nominal)

    def _make(
        self, tensor: torch.Tensor, dtype: torch.dtype, seed: torch.Tensor | None = None
    ) -> QuantizedTensor:
        storage = self.encode(tensor.detach().reshape(matrix_shape(tensor.shape)))
        quantizer = None if torch.compiler.is_compiling() else self
        return QuantizedTensor.make(storage, tensor.shape, dtype, quantizer=quantizer)

    def encode(self, matrix: torch.Tensor, usages: dict[str, bool] | None = None) -> TensorStorage:
        """Return the storage of a plain matrix `[rows, cols]`, outside autograd; record its amax.

        Args:
            matrix: float32, bfloat16 or float16.
            usages: which planes; None: those of this quantizer.

        Raises:
            PlaneError: both usages are off.
            ValueError: the matrix is on another device than scale and amax.
        """
        chosen = self.quantizer if usages is None else self.quantizer.with_usage(**usages)
        if self.scale.device != matrix.device or self.amax.device != matrix.device:
            raise ValueError(
                "Float8Quantizer: tensor, scale and amax must be on one device, got "
                f"{matrix.device}, {self.scale.device} and {self.amax.device}"
            )
        plan = StoragePlan(*chosen.specs_to_encode(), matrix.dtype)
        stat = given_scale(self.scale.detach().reshape(1))
        amaxes = self.amax.detach().view(1)
        direct = can_bypass_dispatcher(matrix, stat, amaxes)
        rest = EncodeRequest(row_stat=stat, col_stat=stat)
        return plan.build(matrix, rest, direct=direct, amaxes=amaxes)

    def update_quantized(self, source: torch.Tensor, target: QuantizedTensor) -> QuantizedTensor:
        """Quantize `source` into `target`'s own buffers, all of its planes; return `target`.

        Args:
            source: of `target`'s shape.
            target: its planes must have this quantizer's specs.

        Raises:
            TypeError: `source` is no tensor to quantize, or `target` no QuantizedTensor.
            ValueError: the shapes differ.
            PlaneError: a plane of `target` has another spec, or it is a part of a tensor.
            RuntimeError: `source` requires grad, or `target` is a leaf that does, outside
                `torch.no_grad()`.
        """
        check_target(source, target)
        if target.part is not None or is_flat(target):
            raise PlaneError(
                "update_quantized: a part or a flat view of a tensor cannot be written with a "
                "scale of its own, got one; write the whole tensor"
            )
        return overwrite_planes(source, target, self.encode)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Raise `amax` to max|x| of `tensor`, and quantize nothing.

        Args:
            tensor: float32, bfloat16 or float16.
        """
        check_source(tensor, "calibrate")
        plain = tensor.dequantize() if is_quantized(tensor) else tensor
        with torch.no_grad():
            update_amax(self.amax.view(1), plain.detach())

    def get_usages(self) -> dict[str, bool]:
        """Return which planes are made."""
        return self.quantizer.get_usages()

    def with_usage(
        self, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> Float8Quantizer:
        """Return a quantizer with the same tensors and other usages.

        Args:
            rowwise, columnwise: whether that plane is made; None leaves it as it is.
        """
        other = object.__new__(Float8Quantizer)
        other.scale, other.amax = self.scale, self.amax
        other.quantizer = self.quantizer.with_usage(rowwise, columnwise)
        return other

    # ---- what a tensor asks of its quantizer

    @property
    def rowwise(self) -> PlaneSpec | None:
        """Spec of the rowwise plane."""
        return self.quantizer.rowwise

    @property
    def columnwise(self) -> PlaneSpec | None:
        """Spec of the columnwise plane."""
        return self.quantizer.columnwise

    @property
    def columnwise_source(self) -> str:
        """What the columnwise plane is made of."""
        return self.quantizer.columnwise_source

    @property
    def is_stochastic(self) -> bool:
        """Whether a plane is rounded stochastically: never."""
        return self.quantizer.is_stochastic

    @property
    def text(self) -> str:
        """Canonical string of the quantizer of the same planes with current scaling."""
        return self.quantizer.text

    def mirrored(self) -> Float8Quantizer:
        """Return the quantizer of the transposed tensor, with the same scale and amax."""
        usages = self.get_usages()
        return self.with_usage(usages["columnwise"], usages["rowwise"])

    def with_spec(self, direction: Direction, spec: PlaneSpec) -> Float8Quantizer:
        """Return a quantizer with the same tensors and another spec for one plane.

        Args:
            direction: of the plane.
            spec: of it.
        """
        other = self.with_usage()
        other.quantizer = self.quantizer.with_spec(direction, spec)
        return other

    def make_empty(self, shape: Sequence[int], **options: Any) -> QuantizedTensor:
        """Return a QuantizedTensor of `shape` with zeros; no amax is recorded.

        Args:
            shape: logical shape.
            options: dtype, device and requires_grad as for `Quantizer.make_empty`.
        """
        made = self.quantizer.make_empty(shape, **options)
        made.quantizer = self
        return made
