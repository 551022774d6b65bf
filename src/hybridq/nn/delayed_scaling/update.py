"""Updates of delayed scaling: once per step, what modules recorded becomes their scales.

Who starts an update, and of which modules:

- a step of any `torch.optim.Optimizer`, by a hook after it, but not one inside a backward: of the
  modules whose weights it holds, and of those that no optimizer holds (`owner`);
- `hybridq.update_scaling`, for those who have none: of those of a model;
- a forward, as long as neither of the two was ever seen of its module: in training mode, not told
  that it is not the first microbatch, by a module of whose last forward a backward has run and
  whose weight was written since: of all such modules of the thread.

An update touches what was recorded since the last one, and nothing else. What threads share is read
and written whole, so that each may train models of its own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import settings
from ..._torch_private import copy_each, graph_task_id, has_compiled
from ...errors import PlaneError, warn_once
from ...kernels.choice import given_scale
from ...quantizers import group_amax, next_scale
from ...quantizers.delayed import epoch, no_history
from ...recipes import Plan, Recipe, bind
from ...tensor.in_graph import runs_at_once
from .findings import note_amaxes, warn_of_earlier
from .groups import agree, check_even, default_group, group_of
from .owner import is_held, is_inner_step, note_optimizers, of_this_thread, updated_by
from .places import PLACES, Place, Scales, places_of
from .state import ScalingState, live_states, states_of, take_scales

__all__ = [
    "misses_step",
    "num_updates",
    "scales_of",
    "take_step",
    "update_scaling",
    "update_states",
    "watch_steps",
]


#: Layouts of updates that are kept: one for each optimizer that steps by turns.
_MOST_LAYOUTS: Final = 16


class _Updates:
    """What one update leaves to later ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_watching = False
        #: What the batches of states were made of, and they, the newest first.
        self.layouts: tuple[tuple[Any, list[_Batch]], ...] = ()
        #: Of the states that the last update met which no optimizer names, in a run of ranks.
        self.serials: list[int] = []


_updates = _Updates()


def watch_steps() -> None:
    """Begin to update after steps of torch's optimizers; later calls do nothing."""
    with _updates.lock:
        if not _updates.is_watching:
            _updates.is_watching = True
            register_optimizer_step_post_hook(_after_step)
            note_optimizers()


def _after_step(optimizer: Any, *_: Any) -> None:
    if torch.compiler.is_compiling():
        _warn_compiled()
        return
    if graph_task_id() != -1:
        return  # one of many steps inside a backward: the next forward sees that there were some
    states = live_states()
    has_recipe = settings.current().delayed_recipe is not None
    if not (has_recipe or any(state.has_run for state in states)) or is_inner_step(optimizer):
        return
    states = _settled(lambda: updated_by(optimizer, live_states()))
    if has_recipe or any(state.has_run for state in states):
        _told(states)


def _told(states: list[ScalingState]) -> None:
    """Update these states, which need not look for steps themselves any more."""
    for state in states:
        state.owner.is_told = True
    _update(states)


def update_states(states: list[ScalingState]) -> None:
    """Update these states once, which goes on to look for steps as before.

    Args:
        states: of any modules; of the same ones on every rank that reduces amaxes with others.
    """
    _update(states)


@runs_at_once
def _warn_compiled() -> None:
    if settings.current().delayed_recipe is not None:
        warn_once(
            "scaling.compiled_step",
            "delayed scaling: a compiled optimizer step updates no scales; call "
            "hybridq.update_scaling() after it",
        )


def update_scaling(model: nn.Module | None = None) -> None:
    """Make the amaxes recorded since the last update the scales of the next step.

    For training loops without a `torch.optim.Optimizer`, whose steps do it by themselves. With a
    process group (`reduce_amax`) every rank must call it, for the same modules.

    Args:
        model: whose modules; None: all of the process, those of other threads too.

    Raises:
        TypeError: `model` is no module.

    Source: Transformer Engine does it when an autocast region ends.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(8, 8)
        >>> with hybridq.autocast(recipe="fp8_delayed"):
        ...     y = layer(torch.ones(4, 8))
        >>> hybridq.update_scaling(layer)
        >>> hybridq.state_dict_with_history(layer)["scaling.input.e4m3.scale"]
        tensor([448.])
    """
    if model is None:
        _told(_settled(live_states))
        return
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"update_scaling: model must be an nn.Module, got {type(given).__name__}")
    _told([state for module in model.modules() for state in states_of(module).values()])


def num_updates() -> int:
    """Return how many updates there were before the forward that runs, or is computed again."""
    before = settings.current().scaling_epoch
    return epoch.count if before == -1 else before


def scales_of(
    state: ScalingState | None,
    weight: torch.Tensor,
    plan: Plan,
    training: bool,
    is_first: bool | None,
) -> Scales:
    """Return the scales of a module whose forward begins, updated if nobody told of a step.

    Args:
        state: of the module.
        weight: its parameter.
        plan: that it runs under.
        training: whether it is in training mode.
        is_first: whether this is the first microbatch; None: not said.

    Raises:
        PlaneError: there is no state.
        RuntimeError: ranks may end before others, and reduce amaxes.
    """
    if state is None:
        raise PlaneError(no_history("linear"))
    if torch.compiler.is_compiling():
        return take_scales(state, training)
    scales = state.scales(plan, training)
    records = scales.forward_amaxes is state.forward_amaxes
    if records:
        check_even(plan)
    looks = not state.owner.is_told and records and torch.is_grad_enabled()
    storage = getattr(weight, "tensor_storage", None)
    if storage is not None and storage.comes_and_goes:
        looks = False  # its gather did, which knows when the shard was written
    if looks:
        written = state.owner.written(weight)
        if state.is_step_old(written) and is_first is not False:
            _update_untold()
            state.has_run = True
            state.is_step_old(written)  # from here on
        elif state.has_lost_gradient(written) and not is_held(state, live_states()):
            warn_once(
                "scaling.gradient_lost",
                f"delayed scaling: the weight of {state.name or 'an unnamed module'} lost its "
                "gradient and was not seen to be written, which is taken for no step; if it was "
                "written through .data, call hybridq.update_scaling() after each step",
            )
    return scales


def misses_step(state: ScalingState | None, stamp: object) -> bool:
    """Return whether nobody told of a step, and a weight was written.

    Args:
        state: of the weight's module.
        stamp: another one when the weight was written.
    """
    return state is not None and not state.owner.is_told and state.is_rewritten((stamp, 0))


def take_step(state: ScalingState | None, stamp: object) -> None:
    """Update the scales of a thread's modules, after a step that `misses_step` saw on some rank.

    Args:
        state: of the weight's module.
        stamp: of the weight as it is.
    """
    _update_untold()
    if state is not None:
        state.is_rewritten((stamp, 0))  # from here on


class _Batch(NamedTuple):
    """Places of one device, history length and algorithm.

    Attributes:
        places: of each, with the number of its state.
        where: int64 `[n]`: among the amaxes of all states, six a state.
        numerators: FP32 `[n]`.
        limits: FP32 `[n]`: the largest values that the elements are meant to hold; more than
            their largest finite ones where a margin below 0 asks for it.
        groups: where each process group's are among them, by its name.
    """

    places: list[tuple[int, Place]]
    where: torch.Tensor
    numerators: torch.Tensor
    limits: torch.Tensor
    groups: dict[str, torch.Tensor]


def _assumed(states: Sequence[ScalingState]) -> Recipe | None:
    """Return the recipe of those of `states` that say none: of compiled code, or of other ranks.

    None where neither the recipe of this moment nor any of the states has to do with histories.
    """
    now = settings.current()
    recipe = now.delayed_recipe
    if not isinstance(recipe, Recipe):
        return None
    is_likely = now.is_delayed_last or any(state.has_recorded for state in states)
    return recipe if is_likely else None


def _plan_of(state: ScalingState, recipe: Recipe | None) -> Plan | None:
    """Return the plan to update a state by: its own, or what `recipe` gives if it says none."""
    if state.has_run or recipe is None:
        return state.plan
    if state.assumed is None or state.assumed[0] != recipe.key:
        state.assumed = (recipe.key, bind(recipe, state.name, state.module_type))
    return state.assumed[1]


def _batches(
    device: torch.device, planned: Sequence[tuple[ScalingState, Plan]], default: str | None
) -> list[_Batch]:
    """Return the batches of states that are on one device."""
    found: dict[tuple[int, str], list[tuple[int, Place]]] = {}
    for number, (_, plan) in enumerate(planned):
        for place in places_of(plan):
            request = place.request
            key = (request.amax_history_len, request.amax_compute_algo)
            found.setdefault(key, []).append((number, place))
    made = []
    for members in found.values():
        groups: dict[str, list[int]] = {}
        for i, (number, place) in enumerate(members):
            owner = planned[number][0].owner.module
            name = group_of(owner, default, place.request.amax_reduction_group or "")
            if place.request.reduce_amax and name:
                groups.setdefault(name, []).append(i)
        numerators = [place.request.numerator(place.fmax) for _, place in members]
        limits = [max(place.fmax, place.request.numerator(place.fmax)) for _, place in members]
        where = [len(PLACES) * number + place.number for number, place in members]
        made.append(
            _Batch(
                members,
                torch.tensor(where, dtype=torch.int64, device=device),
                torch.tensor(numerators, dtype=torch.float32, device=device),
                torch.tensor(limits, dtype=torch.float32, device=device),
                {
                    name: torch.tensor(own, dtype=torch.int64, device=device)
                    for name, own in sorted(groups.items())
                },
            )
        )
    return made


def _settled(choose: Callable[[], list[ScalingState]]) -> list[ScalingState]:
    """Return the states that `choose` returns, the same on all ranks.

    When Python frees a model that nobody uses any more differs between ranks, and all of them must
    join a reduction of the same states. What an optimizer names cannot be such a model.
    """
    states = choose()
    if default_group() is None:
        return states
    serials = [state.serial for state in states if state.owner.holder is None]
    if serials == _updates.serials:
        return states
    del states  # nothing here may hold one meanwhile
    gc.collect()
    states = choose()
    _updates.serials = [state.serial for state in states if state.owner.holder is None]
    return states


def _update_untold() -> None:
    """Update the states of this thread of which nobody told when they are updated."""
    _update(_settled(lambda: of_this_thread(live_states())))


@torch.no_grad()
def _update(states: Sequence[ScalingState]) -> None:
    """Update the places of all these states that recorded something."""
    warn_of_earlier()
    by_device: dict[torch.device, list[tuple[ScalingState, Plan]]] = {}
    recipe = _assumed(states)
    for state in states:
        plan = _plan_of(state, recipe)
        if plan is not None and plan.is_delayed and state.device.type != "meta":
            by_device.setdefault(state.device, []).append((state, plan))
            if state.owner.has_holder and has_compiled():
                state.end_loading()  # of what only ever ran compiled; a forward tells of others
    batches = _layout(by_device)
    before = epoch.count
    for device, planned in by_device.items():
        own = [state for state, _ in planned]
        _update_device(own, [b for b in batches if b.where.device == device], before)
    epoch.advance()
    for state in states:
        state.note_update()


def _layout(by_device: dict[torch.device, list[tuple[ScalingState, Plan]]]) -> list[_Batch]:
    """Return the batches of these states, those of the last time if there was one."""
    default = default_group()
    key = (
        {
            d: [(s.serial, p, group_of(s.owner.module, default)) for s, p in own]
            for d, own in by_device.items()
        },
        default,
    )
    layouts = _updates.layouts
    for known, batches in layouts:
        if known == key:
            return batches
    made = [batch for d, own in by_device.items() for batch in _batches(d, own, default)]
    for own in by_device.values():
        for state, plan in own:
            state.name_elements(plan)
    _agree(by_device, made, default)
    _updates.layouts = ((key, made), *layouts[: _MOST_LAYOUTS - 1])
    return made


def _agree(
    by_device: dict[torch.device, list[tuple[ScalingState, Plan]]],
    batches: list[_Batch],
    default: str | None,
) -> None:
    """Raise on all ranks whose default group would reduce amaxes of unlike modules together."""
    for device, planned in by_device.items():
        labels = [
            (planned[number][0].name, PLACES[place.number])
            for batch in batches
            if batch.where.device == device and default in batch.groups
            for number, place in (batch.places[i] for i in batch.groups[default].tolist())
        ]
        if default is not None and labels:
            agree(labels, default, device)


def _update_device(states: list[ScalingState], batches: list[_Batch], before: int) -> None:
    """Update the states of one device.

    Args:
        states: with places in the batches.
        batches: of the device.
        before: number of updates before this one.
    """
    amax_tensors = [t.data for s in states for t in (s.forward_amaxes, s.backward_amaxes)]
    stat_tensors = [t.data for s in states for t in (s.forward_stats, s.backward_stats)]
    amaxes, stats = torch.cat(amax_tensors), torch.cat(stat_tensors)
    is_alone = not any(batch.groups for batch in batches)
    if is_alone and amaxes.device.type == "cpu" and bool((amaxes < 0.0).all()):
        return  # nothing was recorded; elsewhere, to know that would take a wait
    old = stats.clone().split(len(PLACES))
    recorded = _reduced(amaxes, batches)
    for batch, amax in zip(batches, recorded, strict=True):
        _advance(batch, states, amax, stats)
    for state, own in zip(states, old, strict=True):
        state.remember(before, own)
    sizes = [tensor.shape[0] for tensor in stat_tensors]
    copy_each(stat_tensors, list(stats.split(sizes)))
    copy_each(amax_tensors, list(torch.full_like(amaxes, -1.0).split(sizes)))


def _reduced(amaxes: torch.Tensor, batches: list[_Batch]) -> list[torch.Tensor]:
    """Return the amaxes of each batch, after one reduction per group; -1 where nothing was seen.

    A rank that recorded nothing joins with -1, which no maximum takes.
    """
    made = [amaxes.index_select(0, batch.where) for batch in batches]
    for name in sorted({name for batch in batches for name in batch.groups}):
        parts = [(i, batch.groups[name]) for i, batch in enumerate(batches) if name in batch.groups]
        own = torch.cat([made[i].index_select(0, at) for i, at in parts])
        largest = group_amax(own, name).split([at.shape[0] for _, at in parts])
        for (i, at), part in zip(parts, largest, strict=True):
            made[i] = made[i].index_copy(0, at, part)
    return made


def _advance(
    batch: _Batch, states: list[ScalingState], amax: torch.Tensor, stats: torch.Tensor
) -> None:
    """Roll the histories of a batch, and put its new statistics into `stats`."""
    request = batch.places[0][1].request
    length, algorithm = request.amax_history_len, request.amax_compute_algo
    histories = [states[number].history(place.number, length) for number, place in batch.places]
    history = torch.stack(histories)
    has_recorded = ~(amax < 0.0)  # a NaN was recorded
    filled = history.clone()
    filled[:, 0] = torch.where(has_recorded, amax, history[:, 0])
    old = stats.index_select(0, batch.where)
    is_recent = algorithm == "most_recent"
    rolled, scale = next_scale(filled, -old, batch.numerators, is_recent, algorithm)
    new = torch.where(has_recorded[:, None], rolled, history)
    copy_each(histories, list(new.unbind(0)))
    stats.index_copy_(0, batch.where, torch.where(has_recorded, given_scale(scale), old))
    labels = [(states[number].name, PLACES[place.number]) for number, place in batch.places]
    note_amaxes(amax, -old, batch.limits, labels)
