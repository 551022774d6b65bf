"""Whom a state of delayed scaling belongs to: a module, and the optimizer that steps its weight.

A step of an optimizer updates the states whose weights it holds, and no others
(`docs/adr/0055-a-step-updates-the-modules-of-its-optimizer.md`):

- The weight of a part decides. If no optimizer holds it, the first parameter of the module that one
  holds does.
- Where no optimizer holds any (a frozen module; a model whose optimizer holds FP32 copies), every
  step in the thread that the module ran in last, or was made in, updates it.
- A step that an optimizer makes inside its own, with parameters that are among its own, is a part
  of that step.

An optimizer that has not stepped yet holds what it holds all the same: it is known from its making
on, if that came after the first module of hybridq, and else from its first step on.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..._torch_ranks import sharded_of
from .sources import sources_of

if TYPE_CHECKING:
    from .state import ScalingState

__all__ = ["Owner", "is_held", "is_inner_step", "note_optimizers", "of_this_thread", "updated_by"]

#: What torch wraps every `step` in: all of them have this code.
_STEP_CODE = Optimizer.profile_hook_step(lambda optimizer: None).__code__
_lock = threading.Lock()
#: Of the process, those that are known. A plain dict: a thread may add while another one reads.
_optimizers: dict[int, weakref.ref[Optimizer]] = {}
_serials = itertools.count()
#: That have stepped.
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def note_optimizers() -> None:
    """Begin to note each optimizer that is made; to be called once.

    Python's collector could list them, but must not be asked while other threads run: whoever holds
    a tuple that is in the making breaks it.
    """
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _note(self)

    Optimizer.__init__ = init  # type: ignore[method-assign]


def _note(optimizer: Optimizer) -> None:
    serial = next(_serials)
    _optimizers[serial] = weakref.ref(optimizer, lambda _: _optimizers.pop(serial, None))


class Owner:
    """Whom a state belongs to. A copy belongs to nobody yet.

    Attributes:
        part: of the module.
        thread: that the module ran in last, not compiled, or was made in.
        is_known: it was asked which optimizer holds the module.
        is_told: a step or a call told of an update: forwards no longer look for steps.
    """

    __slots__ = ("_holder", "_module", "_sharded", "is_known", "is_told", "part", "thread")

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._holder: weakref.ref[Optimizer] | None = None
        self._sharded: weakref.ref[Any] | None = None
        self.part = ""
        self.thread = threading.get_ident()
        self.is_known = False
        self.is_told = False

    @property
    def module(self) -> Any:
        """The module; None: it is gone, or has not said that the state is its own."""
        return None if self._module is None else self._module()

    @property
    def holder(self) -> Optimizer | None:
        """The optimizer that decides; None: none does, or it is gone."""
        return None if self._holder is None else self._holder()

    @property
    def has_holder(self) -> bool:
        """Whether an optimizer decides; also one that is gone since."""
        return self._holder is not None

    def belong_to(self, module: Any, part: str) -> None:
        """Take the module that the state is of, unless it has one.

        Args:
            module: that holds the state.
            part: that it is of.
        """
        if self.module is None:
            self._module, self.part = weakref.ref(module), part

    def written(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what a step writes of a weight: its shard, where FSDP2 has gathered the weight.

        A gather is no write, though it makes or fills what the module finds; nor is a computation
        of the weight (`sources_of`).

        Args:
            weight: as the module finds it in a forward.
        """
        if not getattr(self.module, "_is_fsdp_managed_module", False):
            return sources_of(weight)
        found = None if self._sharded is None else self._sharded()
        if found is None or found._unsharded_param is not weight:
            found = sharded_of(weight)
            self._sharded = None if found is None else weakref.ref(found)
        return sources_of(weight) if found is None else (found.sharded_param,)

    def be_held_by(self, optimizer: Optimizer | None) -> None:
        """Note which optimizer decides.

        Args:
            optimizer: it; None: none holds a parameter of the module.
        """
        self._holder = None if optimizer is None else weakref.ref(optimizer)
        self.is_known = True

    def __reduce__(self) -> Any:
        return (Owner, ())


def _parameters(optimizer: Optimizer) -> set[int]:
    """Return the identities of all parameters that an optimizer holds."""
    groups = getattr(optimizer, "param_groups", None) or ()  # it may be in the making
    return {id(parameter) for group in groups for parameter in group["params"]}


def _weights(states: Iterable[ScalingState]) -> list[tuple[ScalingState, torch.Tensor | None]]:
    """Return each state with its weight; left out are those whose modules are gone."""
    by_module: dict[int, dict[str, torch.Tensor]] = {}
    found = []
    for state in states:
        module = state.owner.module
        if module is None:
            continue
        if id(module) not in by_module:
            weights = getattr(module, "scaled_weights", tuple)  # unless it was converted back
            by_module[id(module)] = dict(weights())
        found.append((state, by_module[id(module)].get(state.owner.part)))
    return found


def _sort(states: Sequence[tuple[ScalingState, torch.Tensor | None]]) -> None:
    """Find out which optimizer decides about each of these states."""
    found = _holders(states)
    if any(holder is not None for holder in found):
        # What is garbage holds nothing, whenever Python frees it: ranks must find the same.
        found = []
        gc.collect()
        found = _holders(states)
    for (state, _), holder in zip(states, found, strict=True):
        state.owner.be_held_by(holder)


def _holders(
    states: Sequence[tuple[ScalingState, torch.Tensor | None]],
) -> list[Optimizer | None]:
    """Return which optimizer decides about each of these states, garbage included."""
    holders: dict[int, Optimizer] = {}
    for optimizer in [reference() for reference in list(_optimizers.values())]:
        if optimizer is None:
            continue
        holders.update((key, optimizer) for key in _parameters(optimizer) if key not in holders)
    made = []
    for state, weight in states:
        module = state.owner.module
        own = [] if module is None else list(module.parameters(recurse=False))
        computed = getattr(module, "parametrizations", None)
        own += [] if computed is None else list(computed.parameters())
        found = (holders.get(id(tensor)) for tensor in (weight, *own))
        made.append(next((holder for holder in found if holder is not None), None))
    return made


def updated_by(optimizer: Optimizer, states: Iterable[ScalingState]) -> list[ScalingState]:
    """Return which of `states` a step of `optimizer` updates.

    Args:
        optimizer: that has stepped, in this thread.
        states: of all modules.
    """
    held = _parameters(optimizer)
    found = _weights(states)
    with _lock:
        is_new = optimizer not in _stepped
        _stepped.add(optimizer)
    if is_new and all(known() is not optimizer for known in list(_optimizers.values())):
        _note(optimizer)
    others = []
    for state, weight in found:
        if id(weight) in held:
            state.owner.be_held_by(optimizer)
        elif is_new or not state.owner.is_known:
            others.append((state, weight))
    if others:
        _sort(others)
    here = threading.get_ident()
    chosen = []
    for state, weight in found:
        owner = state.owner
        is_free = not owner.has_holder and owner.thread == here
        if id(weight) in held or owner.holder is optimizer or is_free:
            chosen.append(state)
    return chosen


def is_held(state: ScalingState, states: Iterable[ScalingState]) -> bool:
    """Return whether an optimizer holds the module of a state, which need not have stepped.

    Args:
        state: of the module.
        states: of all modules, which are asked about at once.
    """
    if not state.owner.is_known:
        _sort([entry for entry in _weights(states) if not entry[0].owner.is_known])
    return state.owner.has_holder


def of_this_thread(states: Iterable[ScalingState]) -> list[ScalingState]:
    """Return those of `states` that ran here last, or were made here, and nobody told of steps.

    Args:
        states: of all modules.
    """
    here = threading.get_ident()
    return [s for s in states if s.owner.thread == here and not s.owner.is_told]


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether the step of `optimizer` that ends is a part of another one's.

    So it is with optimizers that step others inside (`ZeroRedundancyOptimizer`, whose inner one
    holds this rank's share only) and with a `step` that calls that of its base class.

    Args:
        optimizer: whose hooks run.
    """
    frame = inspect.currentframe()
    outer: list[Any] = []
    while frame is not None:
        if frame.f_code is _STEP_CODE:
            outer.append(frame.f_locals.get("self"))
        frame = frame.f_back
    own = _parameters(optimizer)
    around = [one for one in outer[1:] if isinstance(one, Optimizer)]
    return any(one is optimizer or own <= _parameters(one) for one in around)
