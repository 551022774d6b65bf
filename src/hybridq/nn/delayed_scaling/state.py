"""The state of delayed scaling that a module keeps beside its parameters.

A module has six places: the rowwise and the columnwise plane of each slot; where both planes of a
slot ask for the same, the rowwise place serves both. Of each there are a statistic as encode takes
it (the scale negated), the amax recorded since the last update (-1: none), and the
history. The first two stand in four small tensors that are there from the module's construction on:
a compiled graph takes them as inputs, whichever module it runs for, and never makes any. The
history is only touched by updates (`update`).

None of them is a parameter or buffer: `state_dict`, optimizers, DDP's broadcast and `.bfloat16()`
leave them alone.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ... import settings
from ..._torch_private import graph_task_id
from ...errors import warn_once
from ...kernels.choice import given_scale
from ...kernels.inputs import can_bypass_dispatcher
from ...recipes import Plan
from .owner import Owner
from .places import NUM_FORWARD, PLACES, UNKNOWN, Notes, Scales, places_of, tensor_problems
from .sources import stamp_of

__all__ = ["ScalingState", "live_states", "states_of", "take_scales"]

#: Updates that may come between a forward and the backward that computes it again.
_MOST_PAST: Final = 8

#: Of all modules of the process. A plain dict: what one thread does to it, no other sees half done.
_states: dict[int, weakref.ref[ScalingState]] = {}
_serials = itertools.count()


def live_states() -> list[ScalingState]:
    """Return the states of all modules of the process, in the order in which they were made."""
    found = [reference() for reference in list(_states.values())]
    return [state for state in found if state is not None]


def states_of(module: Any) -> Mapping[str, ScalingState]:
    """Return the states of a module by its parts; none of a module that is not hybridq's."""
    states = module.__dict__.get("_scaling")
    is_ours = isinstance(states, dict) and all(
        isinstance(state, ScalingState) for state in states.values()
    )
    return states if is_ours else {}


class _Past(NamedTuple):
    """What an update ended.

    Attributes:
        end: how many updates the process had seen before that one.
        age: `num_changes` of the state until then.
        stats: FP32 `[4]`, of the forward's places.
    """

    end: int
    age: int
    stats: torch.Tensor


class ScalingState:
    """Scales, recorded amaxes and histories of one module.

    Args:
        device: of the module's weight.
        module_type: of the module's roles.

    Attributes:
        plan: the last plan that the module ran under, not compiled; None before.
        assumed: key of a recipe and the plan that it gives; for updates of what ran compiled.
        histories: FP32 `[length]` by place, slot 0 the newest; made by the first update.
        elements: name of the element that the scale of a place is for; empty: none yet.
        name: of the module, for warnings and for factories.
        has_run: it has recorded a forward, not compiled, since the last update.
        owner: whom it belongs to.
    """

    _has_recorded = False  # of tensors that others have taken the place of

    def __init__(self, device: torch.device, module_type: str) -> None:
        self.module_type = module_type
        self.plan: Plan | None = None
        self.assumed: tuple[str, Plan] | None = None
        self.histories: dict[int, torch.Tensor] = {}
        self.elements = [""] * len(PLACES)
        self.name = ""
        self.has_run = False
        #: How often a scale may have become another one.
        self.num_changes = 0
        self._notes = Notes()
        self._seen: tuple[object, int] = (-1, -1)
        self._past: tuple[_Past, ...] = ()
        #: What was loaded since the last forward: "weights", without histories, or "history".
        self._loaded = ""
        self._fill(device)
        self._register()

    def _register(self) -> None:
        self.owner = Owner()
        self.serial = serial = next(_serials)
        _states[serial] = weakref.ref(self, lambda _: _states.pop(serial, None))

    def _fill(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            # FP32 whatever torch's default is: kernels read and raise them by address.
            numbers = [
                torch.full((n,), -1.0, dtype=torch.float32, device=device)
                for n in (NUM_FORWARD, 2, NUM_FORWARD, 2)
            ]
        self.forward_stats, self.backward_stats, self.forward_amaxes, self.backward_amaxes = numbers
        self._cache()

    def _cache(self) -> None:
        """Make what eager forwards are given: recording both ways, only the backward, neither."""
        f, g, b, c = (
            self.forward_stats,
            self.forward_amaxes,
            self.backward_stats,
            self.backward_amaxes,
        )
        with torch.inference_mode(False):
            nowhere = torch.empty_like(g)
        self._recording = Scales(f, g, b, c, self._notes)
        self._replaying = Scales(f, None, b, c, self._notes)
        #: Selective recomputation wants the operators of the forward again, the record among them.
        self._watched = Scales(f, nowhere, b, c, self._notes)
        self._silent = Scales(f, None, b, None, self._notes)
        self._num_writes = self._count_writes()  # a copy's begin at another number

    def _count_writes(self) -> int:
        own = (self.forward_amaxes, self.backward_amaxes)
        return sum([0 if amaxes.is_inference() else amaxes._version for amaxes in own])

    @property
    def has_recorded(self) -> bool:
        """Whether a call ever recorded something: an eager one a plan, a compiled one an amax."""
        if self._has_recorded or (self.plan is not None and self.plan.is_delayed):
            return True
        return self._count_writes() > self._num_writes

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.forward_stats.device

    def move(self, device: torch.device) -> None:
        """Go to where the module's weight is; what comes from the meta device begins anew.

        Args:
            device: of the weight.
        """
        if device == self.device:
            return
        if "meta" in (device.type, self.device.type):
            self.histories = {}
            self.elements = [""] * len(PLACES)
            self._fill(device)
            return
        self._has_recorded = self.has_recorded
        for name in ("forward_stats", "backward_stats", "forward_amaxes", "backward_amaxes"):
            setattr(self, name, getattr(self, name).to(device))
        self._past = ()
        self.histories = {i: history.to(device) for i, history in self.histories.items()}
        self._cache()

    def restorer(self) -> Callable[[], None]:
        """Return a function that gives the state the values again that it has now."""
        names = ("plan", "assumed", "has_run", "num_changes", "_seen", "_past", "_loaded")
        plain = {name: getattr(self, name) for name in names}
        notes = (self._notes.num_backwards, self._notes.has_weight_grad)
        elements, histories = list(self.elements), _copies(self.histories)
        numbers = [one for one in self._recording[:4] if one is not None]
        values = [number.clone() for number in numbers]

        def restore() -> None:
            for number, value in zip(numbers, values, strict=True):
                number.data.copy_(value)
            for name, one in plain.items():
                setattr(self, name, one)
            self.elements, self.histories = list(elements), _copies(histories)
            self._notes.num_backwards, self._notes.has_weight_grad = notes

        return restore

    # ---- in a forward

    def take_name(self, name: str) -> None:
        """Take the module's name, with that of the part.

        Args:
            name: qualified.
        """
        if name != self.name:
            self.name, self.assumed = name, None

    def scales(self, plan: Plan, training: bool) -> Scales:
        """Return what a forward that is not compiled takes.

        In a backward, where a forward is computed again, it records nothing: the first time did;
        and it takes the scales of that time, if they are known.

        Args:
            plan: that the module runs under.
            training: whether the module is in training mode; else nothing is recorded.
        """
        if plan is not self.plan:
            self._bind(plan)
        if self._loaded:
            self.end_loading()
        if not training:
            return self._silent
        if graph_task_id() != -1:
            old = self._at(settings.current().scaling_epoch)
            own = self._replaying if can_bypass_dispatcher() else self._watched
            return own if old is None else own._replace(forward_stats=old.stats)
        self.has_run = True
        self.owner.thread = threading.get_ident()
        return self._recording

    def _bind(self, plan: Plan) -> None:
        """Take a plan; a place keeps its state as long as its element stays."""
        self.plan = plan
        for place in places_of(plan):
            old = self.elements[place.number]
            if old and old != place.element:
                self.forget(place.number)
                if self._loaded == "history":
                    place.tell_loaded(self.name, old)
        self.name_elements(plan)

    def name_elements(self, plan: Plan) -> None:
        """Note for what elements the scales are.

        Args:
            plan: that they were made for.
        """
        for place in places_of(plan):
            self.elements[place.number] = place.element

    def is_step_old(self, written: Sequence[torch.Tensor]) -> bool:
        """Return whether the weight was written since the first forward after the last update.

        If a backward has run meanwhile, an optimizer has stepped that no hook told of: the weight's
        version or memory is another. A gradient that was taken away is no step: it may have gone
        to where microbatches are added up.

        Args:
            written: what a step writes of the weight.
        """
        return self.is_rewritten((stamp_of(written), 0))

    def has_lost_gradient(self, written: Sequence[torch.Tensor]) -> bool:
        """Return whether a backward made a gradient of the weight that is not there any more.

        Args:
            written: what a step writes of the weight.
        """
        notes = self._notes
        if not (notes.num_backwards and notes.has_weight_grad and written):
            return False
        return all(one.grad is None and not hasattr(one, "main_grad") for one in written)

    def is_rewritten(self, now: tuple[object, int]) -> bool:
        """Return whether a backward has run since the last update, and `now` is not what it was.

        Args:
            now: what is another one when the weight was written.
        """
        if not self._notes.num_backwards:
            self._seen = now
            return False
        return now != self._seen

    def weight_statistics(self, plan: Plan | None) -> torch.Tensor:
        """Return a copy of the weight's statistics, FP32 `[2]`, rowwise and columnwise.

        Args:
            plan: that the module runs under; None: the last one.
        """
        if plan is not None and plan is not self.plan:
            self._bind(plan)
        return self.forward_stats.data[2:NUM_FORWARD].clone()

    def remember(self, count: int, stats: torch.Tensor) -> None:
        """Keep the statistics that an update ends, for forwards that are computed again.

        Args:
            count: of updates before that one.
            stats: FP32 `[6]`, of all places.
        """
        past = _Past(count, self.num_changes, stats[:NUM_FORWARD])
        self._past = (*self._past, past)[-_MOST_PAST:]
        self.num_changes += 1

    def _at(self, count: int) -> _Past | None:
        """Return what held after so many updates of the process; None where it still does."""
        if count == -1:
            return None
        # Of the updates since then, the first that changed this state ended it.
        return next((past for past in self._past if past.end >= count), None)

    def age(self, count: int) -> int:
        """Return another number for other scales than those that held after so many updates.

        Args:
            count: of updates of the process; -1: now.
        """
        past = self._at(count)
        return self.num_changes if past is None else past.age

    def note_weights(self) -> None:
        """Note that weights were loaded, and no histories with them."""
        self._loaded = self._loaded or "weights"

    def end_loading(self) -> None:
        """Warn once if the weights that a forward now takes were loaded without histories."""
        if self._loaded == "weights":
            begins = "go on from what they were" if self.histories else "begin at 1"
            where = f"module {self.name!r}" if self.name else "an unnamed module"
            warn_once(
                "scaling.no_history_loaded",
                f"delayed scaling: weights of {where} were loaded "
                f"without histories, and its scales {begins}; to go on with a run, save "
                "hybridq.state_dict_with_history(model) instead of model.state_dict(), or "
                "hybridq.distributed.ScalingHistory(model) beside it, and load that",
            )
        self._loaded = ""

    def note_update(self) -> None:
        """Note that what was recorded has become a scale."""
        self.has_run = False
        self._notes.clear()

    # ---- places

    def _of_place(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the statistic and the amax of a place, as views `[1]`."""
        if index < NUM_FORWARD:
            stats, amaxes, at = self.forward_stats, self.forward_amaxes, index
        else:
            stats, amaxes, at = self.backward_stats, self.backward_amaxes, index - NUM_FORWARD
        return stats.data.narrow(0, at, 1), amaxes.data.narrow(0, at, 1)

    def forget(self, index: int) -> None:
        """Let a place begin anew: scale 1 and no history.

        Args:
            index: of `PLACES`.
        """
        self.num_changes += 1
        for tensor in self._of_place(index):
            tensor.fill_(-1.0)
        self.histories.pop(index, None)
        self.elements[index] = ""

    def history(self, index: int, length: int) -> torch.Tensor:
        """Return the history of a place, FP32 `[length]`; of another length it keeps the newest.

        Args:
            index: of `PLACES`.
            length: number of steps.
        """
        known = self.histories.get(index)
        if known is not None and known.shape[0] == length:
            return known
        made = torch.zeros(length, dtype=torch.float32, device=self.device)
        if known is not None:
            count = min(length, known.shape[0]) - 1
            made[0] = known[0]
            made[length - count :] = known[known.shape[0] - count :]
        self.histories[index] = made
        return made

    # ---- as tensors of a checkpoint

    def exported(self) -> dict[str, torch.Tensor]:
        """Return `"<place>.<element>.history"` and `".scale"` of every place that has recorded.

        What was recorded since the last update stands in slot 0 of the history.
        """
        made = {}
        places = [(*self._of_place(i), self.histories.get(i)) for i in range(len(PLACES))]
        facts = [
            torch.cat((~(amax < 0.0), stat != -1.0, amax < amax if h is None else h.any()[None]))
            for stat, amax, h in places
        ]
        known = torch.stack(facts).tolist()  # all that is read of the device
        for index, (stat, amax, history) in enumerate(places):
            if not any(known[index]):
                continue
            own = amax.new_zeros(1) if history is None else history.clone()
            own[0] = amax[0] if known[index][0] else 0.0
            key = f"{PLACES[index]}.{self.elements[index] or UNKNOWN}"
            made[f"{key}.history"], made[f"{key}.scale"] = own, -stat
        return made

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Take what `exported` gave; return what is wrong with it, one line each.

        Args:
            tensors: by name. A place that is not named keeps what it has.
        """
        wrong = self.problems(tensors)
        if wrong:
            return wrong
        for key in tensors:
            place, element_name, kind = key.split(".")
            if kind == "history":
                history, scale = tensors[key], tensors[f"{place}.{element_name}.scale"]
                self._take(PLACES.index(place), element_name, history.detach(), scale.detach())
        self.num_changes += 1
        self._loaded = "history"
        return []

    def problems(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return why `load` would not take them, one line each.

        Args:
            tensors: by name.
        """
        wrong, places = [], set()
        for key in tensors:
            parts = key.split(".")
            kinds = {"history", "scale"}
            if len(parts) != 3 or parts[0] not in PLACES or parts[2] not in kinds:
                wrong.append(f"unknown key {key!r}")
                continue
            place, name, kind = parts
            other = f"{place}.{name}.{(kinds - {kind}).pop()}"
            if other not in tensors:
                wrong.append(f"{key!r} must stand beside {other!r}")
            if kind == "history":
                if place in places:
                    wrong.append(f"{place!r} must have one element, got {name!r} too")
                places.add(place)
            wrong += tensor_problems(key, name, kind, tensors[key])
        return wrong

    def _take(
        self, index: int, element_name: str, history: torch.Tensor, scale: torch.Tensor
    ) -> None:
        stat, amax = self._of_place(index)
        stat.copy_(given_scale(scale.reshape(1)))
        own = history.to(device=self.device, dtype=torch.float32, copy=True)
        amax.copy_(torch.where(own[:1] == 0.0, -1.0, own[:1]))
        own[0] = 0.0
        self.histories[index] = own
        self.elements[index] = "" if element_name == UNKNOWN else element_name

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        given = ("_recording", "_replaying", "_watched", "_silent")
        for name in (*given, "_notes", "_past", "serial", "owner"):
            state.pop(name)
        state["assumed"] = None  # keys number factories within one process
        state["_has_recorded"] = self.has_recorded
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._notes, self._past = Notes(), ()
        self._cache()
        self._register()


def take_scales(state: ScalingState, training: bool) -> Scales:
    """Return what a compiled forward takes; dynamo traces it.

    Args:
        state: of the module.
        training: whether the module is in training mode; else nothing is recorded.
    """
    return Scales(
        state.forward_stats,
        state.forward_amaxes if training else None,
        state.backward_stats,
        state.backward_amaxes if training else None,
        None,
    )


def _copies(histories: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {place: history.clone() for place, history in histories.items()}
