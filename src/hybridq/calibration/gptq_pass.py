"""GPTQ of a model: every weight rounded with the inputs that it has behind those rounded before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..converters import LEAST_WIDTH
from ..errors import warn
from ..formats import PlaneSpec
from ..layouts import sibling_groups
from ..nn.weights import saves_decoded
from ..recipes import Recipe, get
from ..reference import tensor_amax
from ..storage import Plane, build_storage
from .gptq_matrix import (
    DAMPING,
    Hessian,
    check_damping,
    check_spec,
    error_in_output,
    gptq_plane,
)
from .products import Product, changeable_products, parameter_users
from .stages import Plan, Stage, plan
from .weight_planes import Holder, holders, set_planes

__all__ = ["GPTQReport", "RoundedWeight", "gptq"]


@dataclass(frozen=True)
class RoundedWeight:
    """What GPTQ has done to one matrix.

    Attributes:
        name: of the product.
        spec: string of the plane's spec.
        tokens: rows of inputs that its Hessian is of; 0: it was rounded plainly.
        error: `||(W - Q) X||^2 / ||W X||^2` of these inputs; 0 without any.
        plain_error: the same of plain rounding.
    """

    name: str
    spec: str
    tokens: int
    error: float
    plain_error: float


@dataclass(frozen=True)
class GPTQReport:
    """What GPTQ has done to a model.

    Attributes:
        weights: in order of execution.
        left: weights that are as they were: name to why.
    """

    weights: tuple[RoundedWeight, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def without_tokens(self) -> tuple[str, ...]:
        """Names of the matrices that were rounded plainly, since no token reached them."""
        return tuple(one.name for one in self.weights if not one.tokens)

    def __str__(self) -> str:
        lines = [
            f"{one.name}: {one.spec}, "
            + (
                f"error {one.error:.3g}, {one.plain_error:.3g} by plain rounding, "
                f"{one.tokens} tokens"
                if one.tokens
                else "rounded plainly: no token reached it"
            )
            for one in self.weights
        ]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])


def gptq(
    model: nn.Module,
    data: Iterable[Any],
    recipe: Recipe | str,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
    step: str = "block",
    damping: float = DAMPING,
) -> GPTQReport:
    """Round the weights of a model by GPTQ, in place; return what was done.

    Each becomes a frozen parameter that is a QuantizedTensor of one rowwise plane, of the recipe's
    weight slot. The model runs in evaluation mode and as it is, without a recipe unless its own
    forward enters one; weights that were rounded before are decoded. Parts of the model come in
    order of execution, and the inputs of a part come from rounded parts before it.

    Weights that readers of files multiply as one (`hybridq.layouts.siblings`: q, k, v; gate, up)
    share a scale of the whole tensor, or NVFP4's second level. A weight that two modules hold stays
    as it is, and is listed: its planes would be of the inputs of one, and of one alone.

    Experts have a Hessian each, of the tokens that the router sent them. One that got none is
    rounded plainly, and a HybridQWarning says how many.

    Args:
        model: any module; converted by `hybridq.convert` or not.
        data: batches, as `hybridq.calibrate` takes them; an iterator is kept. They run once for
            each part, up to it, and once before.
        recipe: a recipe or the name of one; its weight slots say the formats.
        filter_fn, also, least_width: which modules, as `hybridq.convert` takes them.
        step: how much is rounded from one run: `"block"` (a decoder layer), as the paper's
            experiments; `"input"`: the weights of one input, so that one Hessian is in memory at a
            time; `"model"`: all from one run, so with the inputs of the model as it was.
        damping: share of the mean of a Hessian's diagonal that is added to it.

    Raises:
        ValueError: no product, no batch, no such step, a spec that GPTQ cannot make (stochastic,
            transformed), a weight or an input that is not finite, a damping that is negative, or
            too small for the inputs of a weight: weights before this one are rounded then.
        TypeError: as `hybridq.convert`; data that is a function.

    Source: arXiv:2210.17323, section 4 for the order of the parts.

    Example:
        >>> import torch
        >>> from hybridq.calibration import gptq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> report = gptq(model, [torch.randn(32, 64)], "mxfp8")
        >>> [(one.name, one.tokens) for one in report.weights]
        [('0', 32), ('1', 32)]
        >>> type(model[0].weight).__name__
        'MXFP8Tensor'
    """
    check_damping("gptq", damping)
    chosen = get(recipe)
    of, fused = changeable_products("gptq", model, filter_fn, also, least_width)
    taken, left = holders(chosen, of, parameter_users(model))
    left |= fused
    for holder in taken:
        check_spec("gptq", holder.spec)
    order = plan(model, data, [one for holder in taken for one in holder.products], step)
    made: list[RoundedWeight] = []
    for kind in {type(one) for one in model.modules()}:
        saves_decoded(kind)
    with torch.no_grad():
        for stage in order.stages:
            made += _round_stage(order, stage, taken, damping)
        done = {one.name for one in made}
        rest = [holder for holder in taken if holder.products[0].name not in done]
        made += _round(rest, {}, damping)
    report = GPTQReport(tuple(made), left)
    if report.without_tokens:
        some = ", ".join(report.without_tokens[:4])
        warn(
            f"gptq: no token reached {len(report.without_tokens)} of {len(made)} weights, which "
            f"were rounded plainly: {some}{', ...' if len(report.without_tokens) > 4 else ''}; "
            "give more data",
        )
    return report


def _round_stage(
    order: Plan, stage: Stage, taken: Sequence[Holder], damping: float
) -> list[RoundedWeight]:
    """Round the weights of one stage, after a run that shows their inputs."""
    hessians: dict[Product, Hessian] = {}

    def makes(product: Product) -> Any:
        weight = product.weight()
        hessians[product] = Hessian(weight.shape[1], weight.device)
        return hessians[product].add

    order.observe(stage, makes)
    of_product = {one: hessians[group[0]] for group in stage.groups for one in group}
    own = set(stage.products)
    here = [holder for holder in taken if own.intersection(holder.products)]
    return _round(here, of_product, damping)


def _round(
    here: Sequence[Holder],
    hessians: Mapping[Product, Hessian],
    damping: float,
) -> list[RoundedWeight]:
    """Round weights, given the Hessians of those products that have seen tokens."""
    made = []
    amaxes = _amaxes(here)
    for holder in here:
        planes = {}
        for product in holder.products:
            weight, amax = product.weight(), amaxes[product]
            hessian = hessians.get(product)
            try:
                planes[product] = _plane(weight, hessian, holder.spec, amax, damping)
            except ValueError as error:
                raise ValueError(f"gptq: the weight of {product.name}: {error}") from error
            made.append(_result(product, holder.spec, weight, planes[product], amax, hessian))
        set_planes(holder, planes)
    return made


def _plane(
    weight: torch.Tensor,
    hessian: Hessian | None,
    spec: PlaneSpec,
    amax: torch.Tensor | None,
    damping: float,
) -> Plane:
    amax = None if amax is None else amax.clone()
    if hessian is not None:
        return gptq_plane(weight, hessian.matrix, spec, amax=amax, damping=damping)
    return build_storage(weight.contiguous(), spec, None, row_stat=amax).first


def _amaxes(here: Sequence[Holder]) -> dict[Product, torch.Tensor | None]:
    """Return the amax that each matrix is scaled by; None: its rows have one each, or nothing has.

    Siblings, which readers of files multiply as one, share theirs; experts each with their own.
    """
    made: dict[Product, torch.Tensor | None] = {}
    shared: dict[Any, list[Product]] = {}
    groups = sibling_groups(holder.products[0].key for holder in here)
    group_of = {key: group for group in groups for key in group}
    for holder in here:
        for product in holder.products:
            made[product] = None
            if holder.spec.needs_tensor_amax:
                made[product] = tensor_amax(product.weight(), holder.spec)
                place = (group_of[product.key], product.expert, str(holder.spec))
                shared.setdefault(place, []).append(product)
    for together in shared.values():
        amaxes = [amax for one in together if (amax := made[one]) is not None]
        made.update(dict.fromkeys(together, torch.stack(amaxes).amax(0)))
    return made


def _result(
    product: Product,
    spec: PlaneSpec,
    weight: torch.Tensor,
    plane: Plane,
    amax: torch.Tensor | None,
    hessian: Hessian | None,
) -> RoundedWeight:
    if hessian is None or not hessian.tokens:
        return RoundedWeight(product.name, spec.short_text, 0, 0.0, 0.0)
    plain = _plane(weight, None, spec, amax, 0.0).dequantize()
    whole = float(error_in_output(weight, torch.zeros_like(weight), hessian.matrix)) or 1.0
    error = float(error_in_output(weight, plane.dequantize(), hessian.matrix))
    plain_error = float(error_in_output(weight, plain, hessian.matrix))
    name, text = product.name, spec.short_text
    return RoundedWeight(name, text, hessian.tokens, error / whole, plain_error / whole)
