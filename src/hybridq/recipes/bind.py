"""Binding: a recipe and a module's name become a Plan, the strings that operations take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import torch

from .. import settings
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import RecipeError
from ..formats import PlaneSpec, PlaneText
from ..quantizers import IdentityQuantizer, Quantizer
from .check import problems, spec_of
from .choices import GemmPrecision, with_choices_of
from .module_types import module_type as module_type_of
from .recipe import Recipe, recipe_by_key
from .region_watch import WATCH
from .roles import LINEAR, SLOTS, QuantizerRole

__all__ = [
    "INPUTS",
    "STATIC",
    "Plan",
    "SlotPlan",
    "bind",
    "forward_plan",
    "is_same_plan",
    "plan_by_key",
]

_PLAIN: Final = PlaneSpec.parse("identity")
#: In the place of a DelayedScalingRequest's string: the statistic was given once, and stays.
STATIC: Final = "static"
#: How a module that runs forwards alone quantizes its inputs.
INPUTS: Final = ("dynamic", STATIC, "high_precision")


class SlotPlan(NamedTuple):
    """How the tensor of one slot is encoded.

    Attributes:
        row, col: the two planes.
        col_source: what the columnwise plane is made of, as `torch.ops.hybridq.encode` takes it.
        amax_group: name of the process group over which amax is max-reduced, or empty.
        row_delay, col_delay: how the plane's scale follows from earlier steps, as a
            DelayedScalingRequest's string; `STATIC`: it was given; empty where it follows from the
            tensor.
        shares_state: both do, from one history: they are of one element and made of one tensor.
        is_pair: two quantizers were put together, each with a plane of its own.
    """

    row: PlaneText
    col: PlaneText
    col_source: str
    amax_group: str
    row_delay: str = ""
    col_delay: str = ""
    shares_state: bool = False
    is_pair: bool = False

    @property
    def is_delayed(self) -> bool:
        """Whether a scale follows from earlier steps, or was given."""
        return bool(self.row_delay or self.col_delay)

    def of_original(self) -> SlotPlan:
        """Return the same, its columnwise plane made of the tensor as it is.

        No property, for torch 2.10 traces none of a NamedTuple.
        """
        source, delays = "original", (self.row_delay, self.col_delay)  # no _replace: in graphs too
        return SlotPlan(self.row, self.col, source, self.amax_group, *delays, self.shares_state)

    @property
    def takes_static(self) -> bool:
        """Whether the rowwise plane is scaled by one statistic of the tensor as it is.

        Not so of row-scaled planes, which have a statistic for each row, nor of transformed ones.
        """
        return self.row.needs_amax and not self.row.is_transformed

    @property
    def saves_row(self) -> bool:
        """Whether the columnwise plane is the decoded rowwise one, not quantized again.

        The rowwise plane is then saved, which is smaller, and decoded in the backward.
        """
        return self.col.is_plain and self.col_source != "original"

    @property
    def can_encode_late(self) -> bool:
        """Whether a backward may encode the columnwise plane of what the rowwise one holds.

        What records or reduces an amax does so in the forward; a plain plane is not encoded.
        """
        return not (self.col.is_plain or self.is_delayed or self.amax_group)


class Plan(NamedTuple):
    """All that a linear module must know of a recipe: nothing but strings, numbers and facts.

    A tuple of plain values can be a constant of a compiled graph, and compares by value.

    Attributes:
        input, weight, grad_output: the three slots.
        is_stochastic: some plane is rounded stochastically: the module draws a seed per call.
        is_plain: no slot changes anything: the module is `nn.Linear`.
        precision: of each of the three GEMMs.
        is_delayed: some slot keeps a history: the module has a `ScalingState`; or is `STATIC`.
        is_forward_only: there is no backward, and no plane for one (`forward_plan`).
    """

    input: SlotPlan
    weight: SlotPlan
    grad_output: SlotPlan
    is_stochastic: bool
    is_plain: bool
    precision: GemmPrecision = GemmPrecision()
    is_delayed: bool = False
    is_forward_only: bool = False


def is_same_plan(one: Plan, other: Plan) -> bool:
    """Return whether two plans are equal, also in compiled code.

    Dynamo of torch 2.10 compares no tuples that hold tuples: there their texts are compared.

    Args:
        one, other: what `bind` or `forward_plan` made.
    """
    if one is other:
        return True
    if not torch.compiler.is_compiling():
        return one == other
    return _text_of(one) == _text_of(other)


def _text_of(plan: Plan) -> str:
    texts = [
        f"{slot.row.spec} {slot.col.spec} {slot.col_source} {slot.amax_group} {slot.row_delay} "
        f"{slot.col_delay} {slot.shares_state} {slot.is_pair}"
        for slot in (plan.input, plan.weight, plan.grad_output)
    ]
    gemms = plan.precision
    precision = f"{gemms.fprop} {gemms.dgrad} {gemms.wgrad}"
    facts = f"{plan.is_stochastic} {plan.is_plain} {plan.is_delayed} {plan.is_forward_only}"
    return "|".join([*texts, precision, facts])


def _slot_plan(quantizer: Quantizer, read: Collection[Direction]) -> SlotPlan:
    """Return the plan of a slot: planes that nothing of the module's table reads are plain.

    Args:
        quantizer: of the slot.
        read: the directions of planes that are read.
    """
    source = quantizer.columnwise_source if COLUMNWISE in read else "original"
    made = set(read)
    if source != "original":
        made.add(ROWWISE)
    planes, delays = [], []
    given = (quantizer.rowwise_delay, quantizer.columnwise_delay)
    for direction, delay in zip((ROWWISE, COLUMNWISE), given, strict=True):
        spec = spec_of(quantizer, direction) if direction in made else None
        planes.append((_PLAIN if spec is None else spec).plain_text())  # None: nothing reads it
        delays.append("" if delay is None or direction not in made else delay.text)
    if planes[0].is_plain:
        source = "original"  # the decoded rowwise plane is the original
    row_delay, col_delay = delays
    is_one = planes[0] == planes[1] and source == "original"
    return SlotPlan(
        planes[0],
        planes[1],
        source,
        quantizer.amax_group or "",
        row_delay,
        col_delay,
        shares_state=is_one and row_delay == col_delay != "",
        is_pair=quantizer.is_pair,
    )


def bind(recipe: Recipe, name: str = "", module_type: str = LINEAR) -> Plan:
    """Return the Plan of a module under `recipe`; asks the recipe once per slot.

    Args:
        recipe: the recipe.
        name: qualified name of the module, for the roles and for errors.
        module_type: the roles' module type. Its table (`ModuleType`) says which slots there are,
            and which planes of them some GEMM reads; slots that there are not, and planes that
            nothing reads, stay as they are. So a product beside the table is an exact one.

    Raises:
        RecipeError: some GEMM of the module lacks a plane; the text lists all of them. Or a
            factory raised; the text names the slot, and the cause is what it raised.
        TypeError, ValueError: a factory returned something that is no Quantizer.
    """
    whole, recipe, kind = recipe, recipe.for_name(name), module_type_of(module_type)
    quantizers: dict[str, Quantizer] = dict.fromkeys(SLOTS, IdentityQuantizer())
    asked = {slot: recipe.ask(QuantizerRole(module_type, slot, name)) for slot in kind.slots}
    quantizers |= with_choices_of(asked, recipe.backward_override, recipe.columnwise_source)
    found = problems(quantizers, kind)
    if found:
        raise RecipeError(
            f"bind: every GEMM of a module needs both of its planes, got {len(found)} missing in "
            f"{name or 'an unnamed module'} ({module_type}) under {recipe.key}: {'; '.join(found)}"
        )
    slots = [
        _slot_plan(quantizers[slot], [of for _, one, of in kind.needs if one == slot])
        for slot in SLOTS
    ]
    is_delayed = any(slot.is_delayed for slot in slots)
    if is_delayed:
        state = settings.current()
        state.delayed_keys.add(whole.key)
        if isinstance(state.recipe, Recipe) and state.recipe.key == whole.key:
            state.delayed_recipe, state.is_delayed_last = whole, True
    return Plan(
        input=slots[0],
        weight=slots[1],
        grad_output=slots[2],
        is_stochastic=any(quantizer.is_stochastic for quantizer in quantizers.values()),
        is_plain=all(slot.row.is_plain and slot.col.is_plain for slot in slots),
        precision=GemmPrecision.of(recipe.precision),
        is_delayed=is_delayed,
    )


def forward_plan(plan: Plan, inputs: str) -> Plan:
    """Return the plan of a module that runs forwards alone: one plane of each operand.

    Args:
        plan: what `bind` made.
        inputs: one of `INPUTS`: inputs are scaled by their own statistic, by one that the module
            was given (where `takes_static`), or stay in high precision. A history is none of them.
    """
    plain = _PLAIN.plain_text()
    row = plain if inputs == "high_precision" else plan.input.row
    delay = STATIC if inputs == STATIC and plan.input.takes_static else ""
    own = SlotPlan(row, plain, "original", plan.input.amax_group, delay)
    # The columnwise plane is what the rowwise one decodes to: no other is looked for.
    weight = SlotPlan(plan.weight.row, plain, "rowwise_dequantized", plan.weight.amax_group)
    texts = [one.row.spec for one in (own, weight)]
    return plan._replace(
        input=own,
        weight=weight,
        grad_output=SlotPlan(plain, plain, "original", ""),
        is_stochastic=any(PlaneSpec.parse(text).stochastic for text in texts),
        is_plain=row.is_plain and weight.row.is_plain,
        is_delayed=delay != "",
        is_forward_only=True,
    )


def plan_by_key(key: str, name: str, module_type: str = LINEAR, inputs: str = "") -> Plan:
    """Return `bind` of the recipe whose key is `key`: `bind` for compiled code.

    Args:
        key: of a live recipe.
        name, module_type: as for `bind`.
        inputs: as for `forward_plan`, which then makes the plan; empty: the module is trained.

    Raises:
        KeyError: no recipe of that key is alive.
        RecipeError, TypeError, ValueError: as for `bind`.

    While dynamo traces a module this function runs for real and its result is a constant of the
    graph. That is right because the result depends on nothing but the strings, which dynamo
    guards: another recipe or another name is another graph.
    """
    WATCH.close(is_traced=True)
    recipe = recipe_by_key(key)
    plan = bind(recipe, name, module_type)
    if plan.is_delayed:  # an autocast that is traced sets nothing
        state = settings.current()
        state.delayed_recipe, state.is_delayed_last = recipe, True
    return forward_plan(plan, inputs) if inputs else plan


# What torch.compiler.assume_constant_result does, without importing dynamo (seconds) here.
plan_by_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
