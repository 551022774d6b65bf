"""AWQ's clipping of a model's weights, each with the inputs that it has behind clipped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from ..converters import LEAST_WIDTH
from ..errors import names_in
from ..recipes import Recipe, get
from .gptq_matrix import check_spec
from .products import Product, changeable_products, parameter_users
from .stages import Plan, Stage, plan
from .stored import held_values
from .weight_clips import CLIPS, BlockHessian, check_clips, clip_matrix
from .weight_planes import Holder, holders

__all__ = ["ClippedWeight", "ClippingReport", "clip_weights"]

#: Queries and keys: what their outputs are multiplied by is not a product that is measured here.
_LEAVE: Final = ("q_*", "k_*", "query*", "key*", "*qkv*")


@dataclass(frozen=True)
class ClippedWeight:
    """What the search has done to one matrix.

    Attributes:
        name: of the product.
        spec: string of the spec that it was searched for.
        tokens: rows of inputs that were seen.
        groups, clipped: how many groups have a scale, and how many of them were clipped.
        error, plain_error: `sum ||(W_g - Q_g) X_g||^2` over the groups by that of `||W_g X_g||^2`,
            clipped and not.
    """

    name: str
    spec: str
    tokens: int
    groups: int
    clipped: int
    error: float
    plain_error: float


@dataclass(frozen=True)
class ClippingReport:
    """What the search has done to a model.

    Attributes:
        weights: in order of execution.
        left: weights that are as they were: name to why.
    """

    weights: tuple[ClippedWeight, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{one.name}: {one.spec}, {one.clipped} of {one.groups} groups clipped, error "
            f"{one.error:.3g}, {one.plain_error:.3g} unclipped, {one.tokens} tokens"
            for one in self.weights
        ]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])


def clip_weights(
    model: nn.Module,
    data: Iterable[Any],
    recipe: Recipe | str,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    clips: Sequence[float] = CLIPS,
    leave: Iterable[str] = _LEAVE,
    step: str = "block",
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> ClippingReport:
    """Clip the weights of a model by AWQ's search, in place, before they are quantized.

    Each group of a weight that has a scale in the recipe's format (a block, or the matrix) is cut
    off where `||(W_g - Q(clip(W_g))) X_g||^2` is least. The weights stay plain: quantized plainly
    they have the errors of the report. After `hybridq.calibration.awq`, as its authors do, or by
    itself. Experts in stacks are searched by their own tokens.

    Args:
        model: any module, not quantized yet.
        data: batches, as `hybridq.calibrate` takes them; an iterator is kept.
        recipe: a recipe or the name of one; its weight slots say the formats.
        filter_fn, also, least_width: as `hybridq.convert` takes them.
        clips: parts of a group's largest magnitude that are tried; 1 is tried always.
        leave: patterns of the last part of names that stay as they are; of queries and keys,
            unless you say otherwise.
        step: as `hybridq.calibration.gptq` takes it: what is observed in one run.

    Raises:
        ValueError: no product, no batch, no such step, a clip out of range, a spec that rounds
            stochastically or transforms, an input or a weight that is not finite.
        TypeError: as `hybridq.convert`; data that is a function, `leave` that is one text.

    Source: arXiv:2306.00978, section 5.1; the grid and what is left out: the authors' program.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.calibration import clip_weights
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> report = clip_weights(model, [torch.randn(32, 64)], hybridq.recipe(fprop="mxfp4"))
        >>> report.weights[0].error <= report.weights[0].plain_error
        True
    """
    check_clips("clip_weights", clips)
    chosen, patterns = get(recipe), names_in("clip_weights: leave", leave)
    of, fused = changeable_products("clip_weights", model, filter_fn, also, least_width)
    taken, left = holders(chosen, of, parameter_users(model))
    left |= fused
    kept: list[Holder] = []
    for holder in taken:
        check_spec("clip_weights", holder.spec)
        why = _against(holder, patterns)
        if why is None:
            kept.append(holder)
        else:
            left[holder.products[0].key] = why
    order = plan(model, data, [one for holder in kept for one in holder.products], step)
    made: list[ClippedWeight] = []
    with torch.no_grad():
        for stage in order.stages:
            made += _clip_stage(order, stage, kept, clips)
    done = {one.name for one in made}
    for holder in kept:
        unseen = [one.name for one in holder.products if one.name not in done]
        left.update(dict.fromkeys(unseen, "no token reached it"))
    return ClippingReport(tuple(made), left)


def _against(holder: Holder, leave: Sequence[str]) -> str | None:
    """Return why a weight is left as it is; None: it is clipped."""
    product = holder.products[0]
    parts = product.key.rpartition(".")
    if any(fnmatchcase(parts[2], pattern) for pattern in leave):
        return "its name is one of those that are left"
    if product.reads is not held_values:
        return "its module keeps its weight in few bits"
    return None


def _write(product: Product, values: torch.Tensor) -> None:
    """Write a matrix `[out, in]` where its module holds it."""
    weight = getattr(product.module, product.parameter).detach()
    held = weight if product.expert is None else weight[product.expert]
    held.copy_(values.t() if product.is_in_out else values)


def _clip_stage(
    order: Plan, stage: Stage, kept: Sequence[Holder], clips: Sequence[float]
) -> list[ClippedWeight]:
    """Clip the weights of one stage, after a run that shows their inputs."""
    holder_of = {one: holder for holder in kept for one in holder.products}
    # What is in memory for a block is no more than the weight; formats differ within a group.
    hessians: dict[Product, dict[int, BlockHessian]] = {}
    group_of = {one: group for group in stage.groups for one in group}

    def makes(product: Product) -> Any:
        own = hessians[product] = {}
        for one in group_of[product]:
            weight, width = one.weight(), _width(holder_of[one])
            own.setdefault(width, BlockHessian(weight.shape[1], width, weight.device))

        def see(rows: torch.Tensor) -> None:
            for hessian in own.values():
                hessian.add(rows)

        return see

    order.observe(stage, makes)
    made = []
    for product in stage.products:
        holder = holder_of[product]
        hessian = hessians[group_of[product][0]][_width(holder)]
        weight = product.weight()
        found = clip_matrix(weight.contiguous(), hessian, holder.spec, clips)
        whole = hessian.outputs(weight) or 1.0
        if found.clipped:
            _write(product, found.weight)
        made.append(
            ClippedWeight(
                product.name,
                holder.spec.short_text,
                hessian.tokens,
                found.groups,
                found.clipped,
                found.error / whole,
                found.plain_error / whole,
            )
        )
    return made


def _width(holder: Holder) -> int:
    """Return how many columns of a weight share a scale."""
    block = holder.spec.format.block
    return int(holder.products[0].weight().shape[1]) if block is None else block[1]
