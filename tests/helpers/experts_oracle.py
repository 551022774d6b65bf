"""Experts in FP64, expert by expert: the products that a recipe asks for, from its definition.

Every operand of a product is quantized and decoded as a tensor of its own, the columnwise plane as
the transposed matrix's rowwise one, and multiplied in FP64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import hybridq
from hybridq import CustomRecipe
from hybridq.quantizers import HybridQuantizer

SLOTS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Formats:
    """Formats (rowwise, columnwise) of the three slots."""

    input: tuple[str, str]
    weight: tuple[str, str]
    grad_output: tuple[str, str]

    def recipe(self) -> CustomRecipe:
        """Return the recipe of these formats for every module."""

        def factory(role):
            row, col = getattr(self, role.tensor_type)
            return HybridQuantizer(
                rowwise_quantizer=hybridq.quantizer(row),
                columnwise_quantizer=hybridq.quantizer(col),
            )

        factory.reads_names = False
        return CustomRecipe(factory)


MXFP8 = Formats(("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"))
#: Other formats in the two directions, amaxes of whole tensors among them.
HYBRID = Formats(("mxfp8", "nvfp4"), ("nvfp4", "fp8_e4m3"), ("fp8_1x128", "mxfp8_e5m2"))


def decoded(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Return what the rowwise plane of x, as FP32, holds, in FP64."""
    if not x.numel():
        return x.double()
    return hybridq.quantize(x.float(), fmt).dequantize().double()


class Product(torch.autograd.Function):
    """`x @ w.T` in FP64, every operand decoded from its plane."""

    @staticmethod
    def forward(ctx, x, w, formats):
        ctx.save_for_backward(x, w)
        ctx.formats = formats
        return decoded(x, formats.input[0]) @ decoded(w, formats.weight[0]).t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        one = ctx.formats
        dx = decoded(dy, one.grad_output[0]) @ decoded(w.t().contiguous(), one.weight[1]).t()
        columns = decoded(dy.t().contiguous(), one.grad_output[1])
        return dx, columns @ decoded(x.t().contiguous(), one.input[1]).t(), None


class Plain:
    """Stands for formats: nothing is quantized."""

    @staticmethod
    def apply(x, w, formats):
        """Return `x @ w.T`."""
        del formats
        return x @ w.t()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over that of `want`."""
    return float((got.double() - want.double()).norm() / want.double().norm())
