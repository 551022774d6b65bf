"""Planes that a method has chosen, as the weights of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..direction import ROWWISE
from ..formats import PlaneSpec
from ..recipes import QuantizerRole, Recipe
from ..storage import Plane, PlaneStack, TensorStorage
from ..tensor import QuantizedTensor, is_quantized
from .products import SHARED, Product

__all__ = ["Holder", "holders", "set_planes", "weight_spec"]


@dataclass(frozen=True)
class Holder:
    """A parameter whose matrices are quantized together.

    Args:
        products: one, or those of all experts of a stack in order.
        spec: of their planes.
    """

    products: tuple[Product, ...]
    spec: PlaneSpec

    @property
    def parameter(self) -> torch.Tensor:
        """The weight, or the stack."""
        found: torch.Tensor = getattr(self.products[0].module, self.products[0].parameter)
        return found


def weight_spec(recipe: Recipe, product: Product) -> PlaneSpec | None:
    """Return the spec of a weight's rowwise plane; None: the recipe leaves it in high precision.

    Args:
        recipe: of the forward.
        product: whose weight it is.
    """
    role = QuantizerRole(product.module_type, "weight", product.key)
    made = recipe.ask(role).rowwise
    return None if made is None or made.format.is_identity else made


def holders(
    recipe: Recipe, of: Sequence[Product], users: Mapping[int, int]
) -> tuple[list[Holder], dict[str, str]]:
    """Return the parameters of these products that take planes; and the others, by name, with why.

    Args:
        recipe: of the forward.
        of: products of a model, all experts of a stack among them.
        users: of each parameter, by its id, how many modules hold it: those of two take none.
    """
    stacks: dict[tuple[int, str], list[Product]] = {}
    for product in of:
        stacks.setdefault((id(product.module), product.parameter), []).append(product)
    made, left = [], {}
    for own in stacks.values():
        spec, why = weight_spec(recipe, own[0]), None
        weight = getattr(own[0].module, own[0].parameter)
        if spec is None:
            why = "the recipe leaves its weight in high precision"
        elif own[0].is_part:
            why = "its weight is on several ranks; choose planes before it is dealt out"
        elif is_quantized(weight):
            why = "its weight is quantized already"
        elif users[id(weight)] > 1:
            why = SHARED
        elif weight.dtype == torch.float64:
            why = "its weight is torch.float64, which is not quantized"
        elif weight.dim() != (2 if own[0].expert is None else 3):
            why = f"its weight is no matrix, but {list(weight.shape)}"
        if why is not None or spec is None:
            left[own[0].key] = why or ""
        else:
            made.append(Holder(tuple(own), spec))
    return made, left


def set_planes(holder: Holder, planes: Mapping[Product, Plane]) -> None:
    """Make a module's weight a QuantizedTensor of these rowwise planes `[out, in]`.

    It takes the place of the parameter, is not trained, and has no quantizer: nothing encodes it
    again. A stack of experts is one tensor of a plane for each.

    Args:
        holder: which weight.
        planes: of each of its products.
    """
    product, weight = holder.products[0], holder.parameter
    own = [planes[one] for one in holder.products]
    matrix = own[0].matrix
    if product.expert is None:
        made: torch.Tensor = QuantizedTensor.make(TensorStorage(own[0], None), matrix, weight.dtype)
    else:
        made = _stacked(own, torch.Size([len(own), *matrix]), weight.dtype)
    shown = made.mT if product.is_in_out else made
    product.module._parameters[product.parameter] = nn.Parameter(shown, requires_grad=False)


def _stacked(own: list[Plane], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return one tensor `[E, out, in]` of the planes of all experts."""
    first = own[0]
    buffers = {name: torch.stack([one.buffers[name] for one in own]) for name in first.buffers}
    rows = first.rows * len(own)
    plane = PlaneStack(first.spec, ROWWISE, rows, first.cols, buffers, len(own))
    return QuantizedTensor.make(TensorStorage(plane, None), shape, dtype)
