"""The state of delayed scaling that a module keeps beside its parameters.

A module has six places: the rowwise and the columnwise plane of each slot; where both planes of a
slot ask for the same, the rowwise place serves both. Of each there are a statistic as encode takes
it (the scale with its sign turned), the amax recorded since the last update (-1: none), and the
history. The first two stand in four small tensors that are there from the module's construction on:
a compiled graph takes them as inputs, whichever module it runs for, and never makes any. The
history is only touched by updates (`scaling_update`).

None of them is a parameter or buffer: `state_dict`, optimizers, DDP's broadcast and `.bfloat16()`
leave them alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from .. import settings
from ..errors import warn_once
from ..formats import PlaneSpec
from ..kernels.memory import begins_at
from ..kernels.watch import is_plain, nothing_watches
from ..quantizers import DelayedScalingRequest
from ..recipes import Plan

__all__ = [
    "PLACES",
    "Notes",
    "Place",
    "Scales",
    "ScalingState",
    "live_states",
    "places_of",
    "states_of",
    "take_scales",
]

#: The places, in order: the forward's four, then the backward's two.
PLACES: Final = (
    "input",
    "input_columnwise",
    "weight",
    "weight_columnwise",
    "grad_output",
    "grad_output_columnwise",
)
_FORWARD: Final = 4
#: Updates that may come between a forward and the backward that computes it again.
_MOST_PAST: Final = 8
#: Backwards without an update, of which nobody accumulates as many.
_SUSPICIOUS: Final = 1000

_states: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()
_serials = itertools.count()


def live_states() -> list[ScalingState]:
    """Return the states of all modules of the process, in the order in which they were made."""
    return list(_states.values())


def states_of(module: Any) -> Mapping[str, ScalingState]:
    """Return the states of a module by its parts; none of a module that is not hybridq's."""
    states = module.__dict__.get("_scaling")
    is_ours = isinstance(states, dict) and all(
        isinstance(state, ScalingState) for state in states.values()
    )
    return states if is_ours else {}


class Place(NamedTuple):
    """What a plan asks of one place.

    Attributes:
        number: of `PLACES`.
        request: how its scale follows from its history.
        element: name of the element that the scale is for.
        fmax: its largest finite value.
    """

    number: int
    request: DelayedScalingRequest
    element: str
    fmax: float


@lru_cache(maxsize=1024)
def places_of(plan: Plan) -> tuple[Place, ...]:
    """Return the places that modules under `plan` have a history for."""
    found = []
    for number, slot in enumerate((plan.input, plan.weight, plan.grad_output)):
        col_delay = "" if slot.shares_state else slot.col_delay
        for offset, (delay, plane) in enumerate(
            ((slot.row_delay, slot.row), (col_delay, slot.col))
        ):
            element = PlaneSpec.parse(plane.spec).format.element
            if delay and element is not None:
                request = DelayedScalingRequest.parse(delay)
                found.append(Place(2 * number + offset, request, element.name, element.max))
    return tuple(found)


class Notes:
    """What backwards tell a state; apart from it, so that a graph does not keep the module alive.

    Attributes:
        num_backwards: how many have recorded since the last update.
        has_weight_grad: one made a gradient of the weight.
    """

    __slots__ = ("has_weight_grad", "num_backwards")

    def __init__(self) -> None:
        self.num_backwards = 0
        self.has_weight_grad = False

    def tell(self, has_weight_grad: bool) -> None:
        """Note that a backward has recorded.

        Args:
            has_weight_grad: it made a gradient of the weight.
        """
        self.num_backwards += 1
        self.has_weight_grad = self.has_weight_grad or has_weight_grad
        if self.num_backwards == _SUSPICIOUS:
            warn_once(
                "scaling.no_update",
                f"delayed scaling: {_SUSPICIOUS} backwards of a module without an update of its "
                "scales; without an optimizer of torch call hybridq.update_scaling() once per step",
            )

    def clear(self) -> None:
        """Begin anew, after an update."""
        self.num_backwards = 0
        self.has_weight_grad = False


class Scales(NamedTuple):
    """What one forward and its backward take of a state.

    Attributes:
        forward_stats: FP32 `[4]`: of the forward's places.
        forward_amaxes: FP32 `[4]`, raised by the forward; None: it records nothing.
        backward_stats, backward_amaxes: `[2]`, the same of the backward's.
        notes: of the state, in code that is not compiled.
    """

    forward_stats: torch.Tensor
    forward_amaxes: torch.Tensor | None
    backward_stats: torch.Tensor
    backward_amaxes: torch.Tensor | None
    notes: Notes | None


class ScalingState:
    """Scales, recorded amaxima and histories of one module.

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
    """

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
        #: Statistics of the forward's places, by the number of updates that had been.
        self._past: dict[int, torch.Tensor] = {}
        self._fill(device)
        self._register()

    def _register(self) -> None:
        self.serial = next(_serials)
        _states[self.serial] = self

    def _fill(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            # FP32 whatever torch's default is: kernels read and raise them by address.
            numbers = [
                torch.full((n,), -1.0, dtype=torch.float32, device=device)
                for n in (_FORWARD, 2, _FORWARD, 2)
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
        for name in ("forward_stats", "backward_stats", "forward_amaxes", "backward_amaxes"):
            setattr(self, name, getattr(self, name).to(device))
        self._past = {}
        self.histories = {i: history.to(device) for i, history in self.histories.items()}
        self._cache()

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
        if not training:
            return self._silent
        if torch._C._current_graph_task_id() != -1:
            old = self._stats_at(settings.current().scaling_epoch)
            own = self._replaying if nothing_watches() else self._watched
            return own if old is None else own._replace(forward_stats=old)
        self.has_run = True
        return self._recording

    def _bind(self, plan: Plan) -> None:
        """Take a plan; a place keeps its state as long as its element stays."""
        self.plan = plan
        for place in places_of(plan):
            old = self.elements[place.number]
            if old and old != place.element:
                self.forget(place.number)
        self.name_elements(plan)

    def name_elements(self, plan: Plan) -> None:
        """Note for what elements the scales are.

        Args:
            plan: that they were made for.
        """
        for place in places_of(plan):
            self.elements[place.number] = place.element

    def is_step_old(self, weight: torch.Tensor) -> bool:
        """Return whether the weight was written since the first forward after the last update.

        If a backward has run meanwhile, an optimizer has stepped that no hook told of: the weight's
        version or memory is another, or its gradient was taken away.

        Args:
            weight: the module's parameter.
        """
        address = begins_at(weight) if is_plain(weight) else 0
        if self.is_rewritten((weight._version, address)):
            return True
        notes = self._notes
        return bool(notes.num_backwards) and notes.has_weight_grad and weight.grad is None

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
        return self.forward_stats.data[2:_FORWARD].clone()

    def remember(self, count: int, stats: torch.Tensor) -> None:
        """Keep the statistics that an update ends, for forwards that are computed again.

        Args:
            count: of updates before that one.
            stats: FP32 `[6]`, of all places.
        """
        self.num_changes += 1
        self._past[count] = stats[:_FORWARD]
        while len(self._past) > _MOST_PAST:
            del self._past[next(iter(self._past))]

    def _stats_at(self, count: int) -> torch.Tensor | None:
        """Return the forward's statistics as of so many updates; None where they still hold."""
        if count == -1:
            return None
        # Of the updates since then, the first that changed this state ended them.
        return next((stats for end, stats in self._past.items() if end >= count), None)

    def note_update(self) -> None:
        """Note that what was recorded has become a scale."""
        self.has_run = False
        self._notes.clear()

    # ---- places

    def _of_place(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the statistic and the amax of a place, as views `[1]`."""
        if index < _FORWARD:
            stats, amaxes, at = self.forward_stats, self.forward_amaxes, index
        else:
            stats, amaxes, at = self.backward_stats, self.backward_amaxes, index - _FORWARD
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
        for index, name in enumerate(PLACES):
            stat, amax = self._of_place(index)
            recorded = not bool(amax < 0.0)
            history = self.histories.get(index)
            is_empty = history is None or not bool(history.any())
            if is_empty and not recorded and bool(stat == -1.0):
                continue
            own = amax.new_zeros(1) if history is None else history.clone()
            own[0] = amax[0] if recorded else 0.0
            key = f"{name}.{self.elements[index] or 'unknown'}"
            made[f"{key}.history"], made[f"{key}.scale"] = own, -stat
        return made

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Take what `exported` gave; return what is wrong with it, one line each.

        Args:
            tensors: by name. A place that is not named keeps what it has.
        """
        wrong = []
        for key, history in tensors.items():
            parts = key.split(".")
            if len(parts) != 3 or parts[0] not in PLACES or parts[2] not in ("history", "scale"):
                wrong.append(f"unknown key {key!r}")
                continue
            if parts[2] == "scale":
                continue
            scale = tensors.get(f"{parts[0]}.{parts[1]}.scale")
            if scale is None or scale.numel() != 1 or history.dim() != 1 or not history.numel():
                wrong.append(f"{key!r} must be [length], with a scale [1] beside it")
                continue
            index = PLACES.index(parts[0])
            self.num_changes += 1
            stat, amax = self._of_place(index)
            stat.copy_(-scale.detach().reshape(1))
            own = history.detach().to(device=self.device, dtype=torch.float32, copy=True)
            amax.copy_(torch.where(own[:1] == 0.0, -1.0, own[:1]))
            own[0] = 0.0
            self.histories[index] = own
            self.elements[index] = "" if parts[1] == "unknown" else parts[1]
        return wrong

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        given = ("_recording", "_replaying", "_watched", "_silent")
        for name in (*given, "_notes", "_past", "serial"):
            state.pop(name)
        state["assumed"] = None  # keys number factories within one process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._notes, self._past = Notes(), {}
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
