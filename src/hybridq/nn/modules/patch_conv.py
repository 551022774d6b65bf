"""Convolutions whose patches do not overlap: products, of the patches and the weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from .constructor_arguments import checked
from .linear_part import run_part
from .quantized_module import QuantizedModule
from .written_options import Check, settled

__all__ = [
    "PatchConv",
    "PatchConv1d",
    "PatchConv2d",
    "PatchConv3d",
    "is_patch_conv",
    "patch_features",
    "patches",
    "reason_against_patches",
]


def is_patch_conv(module: nn.Module) -> bool:
    """Return whether a module is a convolution of torch's that is a product.

    Args:
        module: an `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` (exactly) is one if its stride is its
            kernel's size, and it has neither padding, nor dilation, nor groups.
    """
    return (
        type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and reason_against_patches(module) is None
    )


def reason_against_patches(module: Any) -> str | None:
    """Return why a convolution is no product of patches, or None.

    Args:
        module: any of torch's.
    """
    if module.stride != module.kernel_size:
        return f"stride must be kernel_size, got {module.stride} and {module.kernel_size}"
    if module.padding != "valid" and any(map(int, module.padding)):
        return f"padding must be 0, got {module.padding}"
    if any(one != 1 for one in module.dilation):
        return f"dilation must be 1, got {module.dilation}"
    return None if module.groups == 1 else f"groups must be 1, got {module.groups}"


def patches(x: torch.Tensor, kernel: tuple[int, ...]) -> torch.Tensor:
    """Return patches that do not overlap as rows `[..., *grid, channels * kernel]`.

    Within a row the order is that of the weight of a convolution, as one row for each output.

    Args:
        x: `[..., channels, *sizes]`.
        kernel: size of a patch; what is left over at the ends is left out.
    """
    dims = len(kernel)
    lead = x.shape[:-dims]  # batch and channels, or channels
    grid = [size // one for size, one in zip(x.shape[-dims:], kernel, strict=True)]
    for axis, (count, one) in enumerate(zip(grid, kernel, strict=True)):
        x = x.narrow(axis - dims, 0, count * one)
    pairs = [one for pair in zip(grid, kernel, strict=True) for one in pair]
    x = x.reshape(*lead, *pairs)
    first = len(lead)
    outer = [*range(first - 1), *range(first, first + 2 * dims, 2)]
    inner = [first - 1, *range(first + 1, first + 2 * dims, 2)]
    return x.permute(*outer, *inner).reshape(*lead[:-1], *grid, -1)


class PatchConv(QuantizedModule):
    """Base of the convolutions whose patches do not overlap: patch embeddings, and kernels of one.

    Without a recipe it is torch's convolution, bit for bit. Under one the patches are the rows of
    `input` of a linear layer with the weight `[out_channels, in_channels * kernel]`, whose three
    GEMMs run between planes. The weight keeps its shape. It stays in high precision inside
    `quantized_model_init`, and FSDP2 gathers its values: it is no matrix.

    Args:
        in_channels, out_channels, kernel_size: as of torch's convolution.
        stride: the kernel's size, as it is by default.
        padding, dilation, groups, bias, padding_mode, device, dtype: as of torch's convolution.
        name: qualified name for the roles that a recipe's factory sees. Where it is None,
            `hybridq.convert` fills in the name within the model.

    Raises:
        ValueError: patches overlap, or have gaps, padding or groups.
        TypeError: `name` is no string, a switch no bool, or a size no int.

    Example:
        >>> import torch, hybridq
        >>> stem = hybridq.nn.PatchConv2d(3, 64, 16)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = stem(torch.randn(2, 3, 224, 224))
        >>> y.shape
        torch.Size([2, 64, 14, 14])
    """

    weight: torch.Tensor
    kernel_size: tuple[int, ...]
    #: None is a matrix as it is stored.
    weight_parts: Mapping[str, str] = {}
    _written_options: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"), settled
    )

    @checked
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
    ) -> None:
        stride = kernel_size if stride is None else stride
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        reason = reason_against_patches(self)
        if reason is not None:
            raise self._error(ValueError, reason)
        self._take_name(name)

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weight, of the only part."""
        return [("", self._parameter_behind("weight"))]

    def initial_weights(self) -> Iterable[tuple[str, str]]:
        return ()

    def forward(self, input: torch.Tensor) -> Any:
        """Return the convolution of `input`.

        Args:
            input: `[batch, in_channels, *sizes]` or `[in_channels, *sizes]`.

        Returns:
            `[batch, out_channels, *(sizes // kernel)]`, or without the batch.

        Raises:
            RuntimeError: sizes, channels or dtypes do not fit, as torch has it.
            TypeError: a dtype that cannot be quantized.
        """
        recipe = self._recipe()
        if recipe is None or self.plan_of(recipe).is_plain or not self._fits(input):
            return super().forward(input)
        rows = patches(input, self.kernel_size)
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        y = run_part(self, "", recipe, rows, self.weight.flatten(1), bias).movedim(
            -1, -1 - len(self.kernel_size)
        )
        return y.contiguous() if input.is_contiguous() else y  # else channels are last in both

    def _fits(self, x: object) -> bool:
        """Return whether x has patches; of other x torch says what is wrong."""
        dims = len(self.kernel_size)
        if not isinstance(x, torch.Tensor) or x.dim() not in (dims + 1, dims + 2):
            return False
        sizes = zip(x.shape[-dims:], self.kernel_size, strict=True)
        return x.shape[-dims - 1] == self.weight.shape[1] and all(a >= k for a, k in sizes)


class PatchConv1d(PatchConv, nn.Conv1d):
    """`nn.Conv1d` whose patches do not overlap: see `PatchConv`."""


class PatchConv2d(PatchConv, nn.Conv2d):
    """`nn.Conv2d` whose patches do not overlap: see `PatchConv`."""


class PatchConv3d(PatchConv, nn.Conv3d):
    """`nn.Conv3d` whose patches do not overlap: see `PatchConv`."""


def patch_features(module: Any) -> tuple[int, int]:
    """Return the features of a convolution as a product: a patch's, and the output's.

    Args:
        module: one that is a product.
    """
    return module.in_channels * math.prod(module.kernel_size), module.out_channels
