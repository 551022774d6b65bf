"""SmoothQuant and AWQ of a model: channels of inputs scaled, in the layers before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..converters import LEAST_WIDTH
from ..formats import PlaneSpec
from ..recipes import Recipe, get
from ..storage import build_storage
from .channel_scales import (
    GRID,
    ChosenScales,
    awq_scales,
    check_alpha,
    check_grid,
    nearest_powers,
    smooth_scales,
)
from .gptq_matrix import check_spec
from .places import Place
from .products import Product, changeable_products
from .scaling_search import Channels, Search
from .weight_planes import weight_spec

__all__ = ["ScaledInput", "ScalingReport", "awq", "smooth"]


@dataclass(frozen=True)
class ScaledInput:
    """An input whose channels were scaled.

    Attributes:
        names: of the products that multiply it; of several experts the name of their stack.
        alpha: exponent of the formula.
        is_folded: the scales went into the layer before; else the products scale their input.
        largest, smallest: of the scales.
        error, plain_error: AWQ: `||(W - Q) X||^2` with the scales and without; else None.
    """

    names: tuple[str, ...]
    alpha: float
    is_folded: bool
    largest: float
    smallest: float
    error: float | None = None
    plain_error: float | None = None


@dataclass(frozen=True)
class ScalingReport:
    """What was scaled in a model, and what could not be.

    Attributes:
        inputs: that were scaled.
        left: products whose inputs are as they were: name to why; of experts all of one stack, or
            one that no token reached.
    """

    inputs: tuple[ScaledInput, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{', '.join(one.names)}: scales {one.smallest:.3g} to {one.largest:.3g} "
            f"(alpha {one.alpha:g}), {'folded' if one.is_folded else 'in front'}"
            for one in self.inputs
        ]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])


def smooth(
    model: nn.Module,
    data: Iterable[Any],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    alpha: float = 0.5,
    in_front: bool = False,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> ScalingReport:
    """Scale channels by SmoothQuant's formula, in place, before a model is quantized.

    `s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)`: outliers of inputs move into the weights. Each
    scale is divided out in the layer that makes the input, where `hybridq.calibration.folds_of` the
    block's class knows it, and the model computes in exact arithmetic what it did. The weights stay
    plain; quantize them afterwards. Hidden values of experts in stacks are scaled in the rows of up
    of each; scales that a router's columns take as well are powers of two.

    Args:
        model: any module, not quantized yet.
        data: batches, as `hybridq.calibrate` takes them; an iterator is kept.
        filter_fn, also, least_width: which products are to be quantized, as `hybridq.convert` takes
            them.
        alpha: from 0, which equalizes the weights alone, to 1, which equalizes the inputs.
        in_front: inputs that no layer before can scale are multiplied in the forward of those who
            read them, by their buffer `pre_quant_scale`. Else they are left, and listed.

    Raises:
        ValueError: alpha, no product, no batch, an input or a weight that is not finite.
        TypeError: as `hybridq.convert`; data that is a function.

    Source: arXiv:2211.10438, equation 4.

    Example:
        >>> import torch
        >>> from hybridq.calibration import smooth
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> print(smooth(model, [torch.eye(16)]))
        0: left, no layer before it is known that makes its input for it alone
        >>> smooth(model, [torch.eye(16)], in_front=True).inputs[0].is_folded
        False
    """
    check_alpha("smooth", alpha)
    of, fused = changeable_products("smooth", model, filter_fn, also, least_width)
    search = Search.of(model, data, of, "model", in_front, with_hessian=False)
    made = []
    for place, seen in search.stages():
        columns = torch.stack([one.weight().abs().amax(0) for one in place.consumers]).amax(0)
        inputs = torch.stack([one.amax for one in seen.values()]).amax(0)
        amaxes = place.gathered(inputs, True), place.gathered(columns, True)
        scales = smooth_scales(*amaxes, alpha)
        scales = nearest_powers(scales) if place.powers_of_two else scales
        place.apply(scales)
        made.append(_result(place, scales, alpha))
    return ScalingReport(tuple(made), {**search.left, **fused})


def awq(
    model: nn.Module,
    data: Iterable[Any],
    recipe: Recipe | str,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    grid: int = GRID,
    in_front: bool = False,
    step: str = "block",
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> ScalingReport:
    """Scale channels by AWQ's search, in place, before a model's weights are quantized.

    `s = mean|x|^alpha`, alpha of a grid, chosen for the smallest error of the outputs under the
    recipe's weight format. Folded as `smooth` does; the weights stay plain.

    Args:
        model: any module, not quantized yet.
        data: batches, as `hybridq.calibrate` takes them; an iterator is kept.
        recipe: a recipe or the name of one; its weight slots say the formats.
        filter_fn, also, least_width: as `hybridq.convert` takes them.
        grid: number of steps of alpha from 0 to 1.
        in_front: as `smooth` takes it.
        step: as `hybridq.calibration.gptq` takes it: what is in memory at a time.

    Raises:
        ValueError: grid, no product, no batch, no such step, a spec that rounds stochastically or
            transforms, an input or a weight that is not finite.
        TypeError: as `hybridq.convert`; data that is a function.

    Source: arXiv:2306.00978, equations 4 and 5. Its clipping of weights is `clip_weights`.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.calibration import awq
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> recipe = hybridq.recipe(fprop="nvfp4")
        >>> found = awq(model, [torch.randn(32, 16)], recipe, in_front=True).inputs[0]
        >>> found.error <= found.plain_error
        True
    """
    check_grid("awq", grid)
    chosen = get(recipe)
    every, fused = changeable_products("awq", model, filter_fn, also, least_width)
    of = tuple(one for one in every if weight_spec(chosen, one) is not None)
    for product in of:
        spec = weight_spec(chosen, product)
        if spec is not None:
            check_spec("awq", spec)
    search = Search.of(model, data, of, step, in_front, with_hessian=True)
    made = []
    for place, seen in search.stages():
        best = _best(place, seen, chosen, of, grid)
        place.apply(best.scales)
        made.append(_result(place, best.scales, best.alpha, best.error, best.plain_error))
    return ScalingReport(tuple(made), {**search.left, **fused})


def _best(
    place: Place,
    seen: Mapping[Product, Channels],
    recipe: Recipe,
    of: Iterable[Product],
    grid: int,
) -> ChosenScales:
    """Return the best scales of a place; each product's error is of the rows that it is given."""
    # What stays in high precision has no error by rounding.
    specs = {one: weight_spec(recipe, one) for one in seen if one in of}
    rounding = [_rounding(spec) for spec in specs.values() if spec is not None]
    inputs = list({id(one): one for one in seen.values()}.values())  # of several products, once
    total = torch.stack([one.total for one in inputs]).sum(0)
    mean = place.gathered(total / sum(one.tokens for one in inputs), False)
    hessians: Any = [seen[one].hessian for one in specs]
    return awq_scales(
        [one.weight() for one in specs],
        mean,
        [one.matrix for one in hessians],
        rounding,
        grid=grid,
        of_columns=place.spread,
        powers_of_two=place.powers_of_two,
    )


def _rounding(spec: PlaneSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that rounds a matrix plainly."""
    return lambda matrix: build_storage(matrix, spec, None).first.dequantize()


def _result(place: Place, scales: torch.Tensor, alpha: float, *errors: float) -> ScaledInput:
    largest, smallest = float(scales.max()), float(scales.min())
    return ScaledInput(place.names, alpha, place.source is not None, largest, smallest, *errors)
