"""Binding: a recipe and a module's name become a Plan, the texts that operations take."""

from __future__ import annotations

from typing import NamedTuple

from .. import settings
from ..direction import COLUMNWISE, ROWWISE
from ..errors import RecipeError
from ..formats import PlaneText
from ..quantizers import Quantizer
from .check import problems, spec_of
from .choices import GemmPrecision, with_choices_of
from .recipe import Recipe, recipe_by_key
from .roles import LINEAR, SLOTS, QuantizerRole

__all__ = ["Plan", "SlotPlan", "bind", "plan_by_key"]


class SlotPlan(NamedTuple):
    """How the tensor of one slot is encoded.

    Attributes:
        row, col: the two planes.
        col_source: what the columnwise plane is made of, as `torch.ops.hybridq.encode` takes it.
        amax_group: name of the process group over which amax is max-reduced, or empty.
        row_delay, col_delay: how the plane's scale follows from earlier steps, as a
            DelayedScalingRequest's text; empty where it does not.
        shares_state: both do, from one history: they are of one element and made of one tensor.
    """

    row: PlaneText
    col: PlaneText
    col_source: str
    amax_group: str
    row_delay: str = ""
    col_delay: str = ""
    shares_state: bool = False

    @property
    def is_delayed(self) -> bool:
        """Whether a scale follows from earlier steps."""
        return bool(self.row_delay or self.col_delay)

    @property
    def saves_row(self) -> bool:
        """Whether the columnwise plane is the decoded rowwise one, not quantized again.

        The rowwise plane is then saved, which is smaller, and decoded in the backward.
        """
        return self.col.is_plain and self.col_source != "original"


class Plan(NamedTuple):
    """All that a linear module must know of a recipe: nothing but texts, numbers and facts.

    A tuple of plain values can be a constant of a compiled graph, and compares by value.

    Attributes:
        input, weight, grad_output: the three slots.
        is_stochastic: some plane is rounded stochastically: the module draws a seed per call.
        is_plain: no slot changes anything: the module is `nn.Linear`.
        precision: of each of the three GEMMs.
        is_delayed: some slot keeps a history: the module has a `ScalingState`.
    """

    input: SlotPlan
    weight: SlotPlan
    grad_output: SlotPlan
    is_stochastic: bool
    is_plain: bool
    precision: GemmPrecision = GemmPrecision()
    is_delayed: bool = False


def _slot_plan(quantizer: Quantizer) -> SlotPlan:
    planes = []
    for direction in (ROWWISE, COLUMNWISE):
        spec = spec_of(quantizer, direction)
        if spec is None:
            raise RuntimeError(f"bind: the {direction} plane of {quantizer!r} was not checked")
        planes.append(spec.plain_text())
    source = quantizer.columnwise_source
    if planes[0].is_plain:
        source = "original"  # the decoded rowwise plane is the original
    row_delay, col_delay = (
        "" if delay is None else delay.text
        for delay in (quantizer.rowwise_delay, quantizer.columnwise_delay)
    )
    is_one = planes[0] == planes[1] and source == "original"
    return SlotPlan(
        planes[0],
        planes[1],
        source,
        quantizer.amax_group or "",
        row_delay,
        col_delay,
        shares_state=is_one and row_delay == col_delay != "",
    )


def bind(recipe: Recipe, name: str = "", module_type: str = LINEAR) -> Plan:
    """Return the Plan of a module under `recipe`; asks the recipe once per slot.

    Args:
        recipe: the recipe.
        name: qualified name of the module, for the roles and for errors.
        module_type: the roles' module type.

    Raises:
        RecipeError: some GEMM of the module lacks a plane; the text lists all of them.
        TypeError, ValueError: a factory returned something that is no Quantizer.
    """
    whole, recipe = recipe, recipe.for_name(name)
    quantizers = with_choices_of(
        {slot: recipe.quantizer(QuantizerRole(module_type, slot, name)) for slot in SLOTS},
        recipe.backward_override,
        recipe.columnwise_source,
    )
    found = problems(quantizers)
    if found:
        raise RecipeError(
            f"bind: every GEMM of a module needs both of its planes, got {len(found)} missing in "
            f"{name or 'an unnamed module'} ({module_type}) under {recipe.key}: {'; '.join(found)}"
        )
    slots = [_slot_plan(quantizers[slot]) for slot in SLOTS]
    is_delayed = any(slot.is_delayed for slot in slots)
    if is_delayed:
        state = settings.current()
        state.delayed_keys.add(whole.key)
        state.delayed_recipe = whole
    return Plan(
        input=slots[0],
        weight=slots[1],
        grad_output=slots[2],
        is_stochastic=any(quantizer.is_stochastic for quantizer in quantizers.values()),
        is_plain=all(slot.row.is_plain and slot.col.is_plain for slot in slots),
        precision=GemmPrecision.of(recipe.precision),
        is_delayed=is_delayed,
    )


def plan_by_key(key: str, name: str, module_type: str = LINEAR) -> Plan:
    """Return `bind` of the recipe whose key is `key`: `bind` for compiled code.

    Args:
        key: of a live recipe.
        name, module_type: as for `bind`.

    Raises:
        KeyError: no recipe of that key is alive.
        RecipeError, TypeError, ValueError: as for `bind`.

    While dynamo traces a module this function runs for real and its result is a constant of the
    graph. That is right because the result depends on nothing but the texts, which dynamo
    guards: another recipe or another name is another graph.
    """
    return bind(recipe_by_key(key), name, module_type)


# What torch.compiler.assume_constant_result does, without importing dynamo (seconds) here.
plan_by_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
