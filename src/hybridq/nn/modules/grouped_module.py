"""What modules with weights of several groups share: each group's plan, kept planes and scales."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from ... import settings
from ...recipes import CustomRecipe, Plan, Recipe, bind
from ...recipes.bind import is_same_plan
from ...recipes.factories import high_precision_factory
from ...storage import TensorStorage
from ...tensor import is_quantized
from ...tensor.stack import is_stack
from ..autograd import (
    Activation,
    GradientPlane,
    GroupedCall,
    Layout,
    TokenRows,
    WatchedProduct,
    apply,
    draw_seeds,
    grouped_linear,
    needs_of,
    take_rows,
    tell,
    watcher,
)
from ..weights import Into, part_of, say_in_graph
from .group_sizes import Group, mixed_linear
from .quantized_module import QuantizedModule

__all__ = ["GroupedModule", "GroupedParameters", "is_shown_plain"]

#: What `role.module_type` says of the slots of such modules.
_GROUPED: Final = "grouped_linear"
#: Nothing is quantized: what runs outside `hybridq.autocast` where the splits stay on the device.
_PLAIN: Final = bind(CustomRecipe(high_precision_factory), "", _GROUPED)

#: Of tensors that are nothing but their values.
_PLAIN_TYPES: Final = frozenset((torch.Tensor, torch.nn.Parameter))


class GroupedParameters(NamedTuple):
    """What a grouped product of a module multiplies tokens with, and under which plans.

    Attributes:
        params: weights and then biases, in the tokens' dtype.
        own: the weights as the module holds them.
        layout: of both.
        plans: of the groups; None: nothing is quantized.
        is_first_microbatch: as `Linear.forward` takes it.
        into: where the gradient of each weight parameter is added; empty: they are returned.
        part: of the module.
    """

    params: list[torch.Tensor]
    own: list[torch.Tensor]
    layout: Layout
    plans: list[Plan] | None
    is_first_microbatch: bool | None
    into: tuple[Into | None, ...]
    part: str = ""


class GroupedModule(QuantizedModule):
    """Base of modules that multiply each group of tokens with a matrix of its own.

    A part of such a module (`""` if it has one only) is one grouped product. Where a part has one
    weight, that is a tensor of all its matrices. A recipe that reads
    names is asked for each of its groups, by the name `"<module>.<part>.<g>"`; any other once.
    """

    module_type = _GROUPED
    #: Number of this rank's first matrix among those of all ranks, where each has its own.
    first_matrix: int = 0
    #: How many matrices all ranks have, where each has its own; None: all are here.
    all_matrices: int | None = None
    #: Numbers of other ranks' matrices of which this rank has copies in a forward, behind its own.
    copied_matrices: tuple[int, ...] = ()

    def matrix_parts(self, part: str, count: int, recipe: Recipe | None) -> tuple[str, ...]:
        if recipe is None or not recipe.reads_names:
            return (part,)
        return tuple([_group_part(part, number) for number in self.matrix_numbers(count)])

    def matrix_numbers(self, count: int) -> list[int]:
        """Return the numbers of matrices among those of all ranks.

        Args:
            count: of this rank's own, or of them and the copies behind.
        """
        first, copied = self.first_matrix, self.copied_matrices
        if not copied:
            return list(range(first, first + count))
        own = self.own_part(getattr(self, next(iter(self.weight_parts)))).shape[0]
        return [*range(first, first + own), *(copied if count > own else ())]

    def parts_of(self, recipe: Recipe | None) -> tuple[str, ...]:
        parts = [self.matrix_parts(*one, recipe) for one in self._counts()]
        return tuple([one for own in parts for one in own])

    def scaled_weights(self) -> list[tuple[str, torch.Tensor]]:
        weights = [self.own_part(getattr(self, name)) for name in self.weight_parts]
        return [
            (_group_part(part, self.first_matrix + g), weight)
            for weight, (part, count) in zip(weights, self._counts(), strict=True)
            for g in range(count)
        ]

    def keep_own_histories(self) -> None:
        """Forget what delayed scaling remembers of matrices that other ranks have now."""
        own = dict(self.scaled_weights())
        kept = {part: state for part, state in self._scaling.items() if part in own}
        self.__dict__["_scaling"] = kept
        self._ensure_scaling()

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what this rank multiplies with: of a parameter that ranks share, its part.

        Args:
            parameter: of this module, one matrix or bias for each group.
        """
        return parameter

    def multiplied_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what this rank multiplies with: its part, and copies of other ranks' behind.

        Args:
            parameter: as for `own_part`.
        """
        return self.own_part(parameter)

    def _counts(self) -> list[tuple[str, int]]:
        """Return each part that has one weight of several matrices, and how many it has."""
        owns = (
            (part, self.own_part(getattr(self, name))) for name, part in self.weight_parts.items()
        )
        return [(part, own.shape[0]) for part, own in owns]

    # ---- for modules of other packages, whose parts have one weight of several matrices each

    def training_recipe(self) -> Recipe | None:
        """Return the recipe of a forward that begins; None: nothing is quantized.

        Called once in each forward, before anything else of this module.
        """
        recipe: Recipe | None = self._recipe()
        return recipe

    def leaves_all_plain(self, recipe: Recipe | None) -> bool:
        """Return whether a recipe changes nothing of this module, nor `main_grad` takes gradients.

        Args:
            recipe: any, or None.
        """
        if self._into_all([getattr(self, name) for name in self.weight_parts]):
            return False
        if is_shown_plain():
            return False
        if recipe is None:
            return True
        return all(self.plan_of(recipe, part).is_plain for part in self.parts_of(recipe))

    def grouped_product(
        self,
        recipe: Recipe | None,
        name: str,
        bias: str | None,
        x: torch.Tensor,
        offsets: torch.Tensor,
        rows: TokenRows | None = None,
        activation: Activation | None = None,
        arriving: GradientPlane | None = None,
    ) -> torch.Tensor:
        """Return the tokens of each group times its matrix of one weight, `[T, out_features]`.

        Args:
            recipe: of this forward.
            name: of the weight, `[G, out, in]`, or `[G, in, out]` with `holds_transposed`.
            bias: name of the biases `[G, out]`; None: none are added.
            x: `[T, in_features]`, tokens of group 0 first; taken as torch.autocast would.
            offsets: int32 `[G]`, where each group ends; tokens behind the last give zeros.
            rows: the tokens that are multiplied, in the order of their groups, taken out of x as
                they are needed; None: x.
            activation: what is multiplied is what it makes of x; not with `rows`. None: x.
            arriving: the place of the gradient's plane, where that arrives quantized.

        Raises:
            TypeError: a dtype cannot be quantized.
            RuntimeError: features, dtypes or devices do not fit.
            RecipeError: the recipe leaves a GEMM without a plane.
        """
        own = self.multiplied_part(getattr(self, name))
        part = self.weight_parts.get(name, "")
        count = own.shape[0]
        plans = None if recipe is None else self._group_plans(recipe, count, part)
        added = None if bias is None else self.multiplied_part(getattr(self, bias))
        cast: Any = self._cast(x, own, added)
        given, *params = (one for one in cast if one is not None)
        is_cast = given.dtype != x.dtype
        if activation is not None and (is_cast or is_quantized(x) or _differ(plans)):
            given = self._cast(apply(x, activation, None, None), own)[0]
            activation = None
        shape = own.shape if self.holds_transposed else (own.shape[0], *own.shape[:0:-1])
        _, into, out = shape
        width = into if activation is None else activation.columns(into)
        self._check(given, params[0], cast[2], width)
        has_bias = bias is not None
        layout = Layout(count, True, has_bias, True, (into, out), self.holds_transposed)
        known = GroupedParameters(params, [own], layout, plans, None, self._into_all([own]), part)
        if rows is not None:
            if not is_quantized(x) and not _differ(plans):
                # Not what is cast: a gradient is rounded to the tokens' own dtype row by row.
                return self._grouped_product(x, offsets, known, rows)
            given = self._cast(take_rows(x, rows), own)[0]
        return self._grouped_product(given, offsets, known, None, activation, arriving)

    def _group_plans(self, recipe: Any, count: int, part: str = "") -> list[Plan]:
        """Return the plan of each group of a part."""
        plans = [self.plan_of(recipe, one) for one in self.matrix_parts(part, count, recipe)]
        return plans * count if len(plans) < count else plans

    def _grouped_product(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        given: GroupedParameters,
        rows: TokenRows | None = None,
        activation: Activation | None = None,
        arriving: GradientPlane | None = None,
    ) -> torch.Tensor:
        """Return `grouped_linear` of a part under the plan of each group, `[T, out_features]`.

        Args:
            x: `[T, in_features]`.
            offsets: int32 `[G]`, where each group ends.
            given: of the part.
            rows, activation, arriving: as `GroupedCall` has them; only where the groups have one
                plan.
        """
        params, own, layout, plans, is_first_microbatch, into, part = given
        if plans is None:
            plans = [_PLAIN] * layout.groups
        scales = self._scales_all(own, layout, plans, is_first_microbatch, part)
        kept = self._kept_all(own, layout, params[0].dtype, plans, is_first_microbatch, part)
        if _differ(plans):
            weights, biases = _parts(params, layout)
            nothing = [None] * layout.groups
            each = (
                biases or nothing,
                scales,
                _into_parts(into, layout) or nothing,
                kept or nothing,
            )
            groups = [Group(*one) for one in zip(plans, weights, *each, strict=True)]
            y = mixed_linear(x, offsets, groups, layout.features)
            call = _Call(plans, x, offsets, params, own, layout, scales)
            return _shown(self, part, call, y)
        known = scales if plans[0].is_delayed else None
        seeds = None
        if plans[0].is_stochastic and self.all_matrices is not None:
            # Drawn for all ranks' groups, so that each group has the bits that one process draws.
            drawn = draw_seeds(self.all_matrices, x.device)
            first, copied = self.first_matrix, list(self.copied_matrices)
            seeds = drawn.narrow(0, first, layout.groups - len(copied))
            if copied:
                seeds = torch.cat([seeds, drawn[copied]])
        whole = GroupedCall(layout, plans[0], kept, seeds, known, into, rows, activation, arriving)
        y = grouped_linear(x, offsets, params, whole)
        call = _Call(plans, x, offsets, params, own, layout, scales, rows, activation)
        return _shown(self, part, call, y)

    def _scales_all(
        self,
        own: list[torch.Tensor],
        layout: Layout,
        plans: list[Plan],
        is_first_microbatch: bool | None,
        part: str,
    ) -> tuple[Any, ...]:
        """Return each group's Scales of delayed scaling; None where its plan has no delay."""
        if not any(plan.is_delayed for plan in _distinct(plans)):
            return (None,) * layout.groups
        weights = own * layout.groups if layout.is_single else own
        first = self.first_matrix
        return tuple(
            [
                self._scales(weight, plan, is_first_microbatch, _group_part(part, first + g))
                for g, (weight, plan) in enumerate(zip(weights, plans, strict=True))
            ]
        )

    def _kept_all(
        self,
        own: list[torch.Tensor],
        layout: Layout,
        dtype: torch.dtype,
        plans: list[Plan],
        is_first_microbatch: bool | None,
        part: str,
    ) -> tuple[Any, ...]:
        """Return where the planes of each group's weight are, or are kept; empty for nowhere."""
        if torch.compiler.is_compiling():
            for weight, plan in zip(own, plans, strict=False):
                if is_quantized(weight):
                    say_in_graph(self, weight, plan.weight, dtype)
            return ()
        if self.copied_matrices:
            return ()
        slot = plans[0].weight
        keeps = not (slot.col.is_plain or slot.is_delayed) and len(_distinct(plans)) == 1
        if not (is_stack(own[0]) or _is_some_quantized(own)):
            if is_first_microbatch is None:
                is_first_microbatch = settings.current().is_first_microbatch
            if not keeps or is_first_microbatch is None:
                return ()
        weights, first = own, self.first_matrix
        whole: TensorStorage | None = None
        if layout.is_single:
            with torch.no_grad():
                weights = layout.matrices(own[0])
            whole = getattr(own[0], "tensor_storage", None)
        kept = [
            self._kept(
                weight, dtype, plan, is_first_microbatch, _group_part(part, first + g), whole
            )
            if keeps or is_quantized(weight)
            else None
            for g, (weight, plan) in enumerate(zip(weights, plans, strict=True))
        ]
        return tuple(kept) if any(one is not None for one in kept) else ()

    def _into_all(
        self, own: list[torch.Tensor], is_first: bool | None = None
    ) -> tuple[Into | None, ...]:
        """Return where the gradient of each weight parameter is added; empty: nowhere."""
        if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            return ()
        into = tuple([self._into(weight, is_first) for weight in own])
        return into if any(one is not None for one in into) else ()


def is_shown_plain() -> bool:
    """Return whether something watches products that nothing quantizes."""
    see = watcher()
    return see is not None and see.sees_plain


class _Call(NamedTuple):
    """What a grouped product was given."""

    plans: list[Plan]
    x: torch.Tensor
    offsets: torch.Tensor
    params: list[torch.Tensor]
    own: list[torch.Tensor]
    layout: Layout
    scales: tuple[Any, ...]
    rows: TokenRows | None = None
    activation: Activation | None = None

    def matrix(self) -> torch.Tensor:
        """Return what is multiplied, in high precision."""
        made = self.x.detach()
        if self.rows is not None:
            made = take_rows(made, self.rows)
        elif self.activation is not None:
            made = apply(made, self.activation, None, None)
        return made.dequantize() if is_quantized(made) else made

    def held(self) -> list[TensorStorage | None]:
        """Return the planes of each group's matrix where there are some."""
        found: list[Any] = _parts(self.params, self.layout)[0]
        return [one.tensor_storage if is_quantized(one) else None for one in found]

    def weights(self) -> list[torch.Tensor]:
        """Return the matrix of each group, in high precision."""
        found = _parts(self.params, self.layout)[0]
        return [(one.dequantize() if is_quantized(one) else one).detach() for one in found]


def _shown(module: GroupedModule, part: str, call: _Call, y: torch.Tensor) -> torch.Tensor:
    """Return y, shown to what watches products, if anything does."""
    see = watcher()
    if see is not None:
        given = (call.plans, call.matrix, call.weights, y, call.scales, call.offsets, call.held)
        numbers = module.matrix_numbers(call.layout.groups)
        needs = needs_of([call.x], call.own)
        tell(see, WatchedProduct(module, part, *given, needs, numbers))
    return y


def _differ(plans: list[Plan] | None) -> bool:
    """Return whether groups have different plans."""
    if plans is None or len(_distinct(plans)) == 1:
        return False
    return len([plan for plan in plans if not is_same_plan(plan, plans[0])]) > 0


def _distinct(plans: list[Plan]) -> list[Plan]:
    """Return one plan where all are equal, as far as that is asked in one call; else all."""
    if torch.compiler.is_compiling() or plans.count(plans[0]) < len(plans):
        return plans
    return plans[:1]


def _is_some_quantized(weights: list[torch.Tensor]) -> bool:
    """Return whether some weight is held as planes, without a call for each that is plain."""
    return not _PLAIN_TYPES.issuperset(map(type, weights)) and any(map(is_quantized, weights))


def _group_part(part: str, group: int) -> str:
    return f"{part}.{group}" if part else str(group)


def _parts(
    params: list[torch.Tensor], layout: Layout
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weight `[out, in]` and the bias of each group."""
    count = 1 if layout.is_single else layout.groups
    weights, biases = params[:count], params[count:]
    if layout.is_single:
        weights = layout.matrices(weights[0])
    if biases and layout.is_single_bias:
        biases = list(biases[0].unbind(0))
    return weights, biases


def _into_parts(into: tuple[Into | None, ...], layout: Layout) -> tuple[Into | None, ...]:
    """Return where the gradient of each group's weight is added; empty: they are returned."""
    if not (into and layout.is_single):
        return into
    whole = into[0]
    if whole is None:
        return ()
    return tuple([part_of(whole, g, layout.is_transposed) for g in range(layout.groups)])
