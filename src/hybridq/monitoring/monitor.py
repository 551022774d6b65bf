"""`hybridq.monitor`: sampled statistics of a training, and alarms."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._eager import running_eagerly
from .._log import LOGGER, log_once
from .._torch_private import out_of_graphs
from ..direction import DIRECTIONS
from ..errors import warn
from ..nn.autograd import watch_products
from .alarms import Alarm, Alarms, Watch
from .over_ranks import Sample, gathered
from .record import MonitorRecord, SlotSample
from .sampler import Sampler, names_of
from .sinks import sinks_of

__all__ = ["Monitor", "monitor"]


class Monitor:
    """What `hybridq.monitor` returns: counts steps, and samples some of them.

    Nothing is attached to the model. In a sampled step the thread's settings hold a watcher, which
    hybridq's modules show their products; in any other step nothing is different.

    Args:
        names: of the model's modules, by identity.
        every: of how many steps one is sampled.
        sinks: that take records.
        limits: of alarms.
        size: rows of a matrix, and layers, that are quantized again; None: all layers.
        group: whose ranks are added up, or None.
        start: number of the first step.
    """

    def __init__(
        self,
        names: dict[int, str],
        every: int,
        sinks: list[Any],
        limits: Alarms,
        size: tuple[int, int | None],
        group: Any,
        start: int = 0,
    ) -> None:
        self._names, self._every, self._sinks, self._group = names, every, sinks, group
        self._watch = Watch(limits)
        self._rows, self._layers = size
        self._start = self._steps = start
        self._turn = -(-start // every)  # samples before it
        self._known = 0
        self._sampler: Sampler | None = None
        self._stack = ExitStack()
        # One that nobody closes ends before Python takes modules apart.
        self._end_at_exit = weakref.finalize(self, self._stack.close)
        self._hook: Any = None
        self._is_closed = False
        #: All alarms so far.
        self.alarms: list[Alarm] = []
        self._begin()

    @property
    def steps(self) -> int:
        """Number of the step that runs now: `start`, and one more for each that was counted."""
        return self._steps

    def step(self) -> MonitorRecord | None:
        """Count a step; call it once after each of the optimizer's.

        Returns:
            What was seen, if the step was sampled; else None.

        Raises:
            RuntimeError: the monitor is closed; ranks are at different steps.
        """
        if self._is_closed:
            raise RuntimeError("monitor: step() needs an open monitor, got a closed one")
        try:
            return None if self._sampler is None else self._end(self._sampler)
        finally:  # what a writer raises costs no step
            self._steps += 1
            if not self._is_closed:  # a writer may close it
                self._begin()

    def close(self) -> None:
        """End the monitor: files are closed, hooks are gone. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._steps == self._start:
            warn(
                "monitor: no step was counted, so nothing was recorded; give optimizer=, or call "
                "step() on the monitor after each of the optimizer's steps",
            )
        self._sampler = None
        self._end_at_exit()
        if self._hook is not None:
            self._hook.remove()
        with ExitStack() as rest:  # what one raises leaves none of the others open
            for sink in reversed(self._sinks):
                rest.callback(sink.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Watch the step that begins, if it is one of those that are sampled."""
        if self._steps % self._every:
            return
        count, layers = max(self._known, 1), self._layers
        first = 0 if layers is None else self._turn * layers % count

        def takes(number: int) -> bool:
            return layers is None or (number - first) % count < layers

        self._sampler = Sampler(self._names, self._rows, self._turn, takes)
        self._turn += 1
        self._stack.enter_context(watch_products(self._sampler))
        self._stack.enter_context(running_eagerly())

    def _end(self, sampler: Sampler) -> MonitorRecord:
        self._stack.close()
        self._sampler = None
        self._known = sampler.layers
        if not sampler.amaxes:
            log_once(
                "monitor",
                f"monitor: step {self._steps} was sampled, and no module of the model computed in "
                "training under a recipe; call hybridq.convert(model), train inside of "
                "hybridq.autocast, and call step() after each of the optimizer's steps",
            )
        sample = gathered(sampler.sample(self._steps), self._group)
        slots = _slots(sample)
        experts = {layer: dict(sorted(one.items())) for layer, one in sample.experts.items()}
        alarms = self._watch.look(self._steps, slots, experts)
        record = MonitorRecord(self._steps, slots, experts, alarms, sample.ranks)
        self.alarms += alarms
        for alarm in alarms:
            LOGGER.warning("monitor: %s", alarm)
        with ExitStack() as rest:  # what one raises costs the others no record
            for sink in reversed(self._sinks):
                rest.callback(sink.write, record)
        return record


# A compiled loop, or step of the optimizer, would have the hook in it: what it does is no graph's.
@out_of_graphs
def _count(made: Monitor) -> None:
    made.step()


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer within a wrapper, as accelerate's, which has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    return _own(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _slots(sample: Sample) -> tuple[SlotSample, ...]:
    found = []
    for (layer, slot), amax in sample.amaxes.items():
        found.append(SlotSample(layer, slot, amax))
        for direction in DIRECTIONS:
            own = sample.planes.get((layer, slot, direction))
            if own is not None:
                numbers = (own.underflow_share, own.saturation_share, own.snr_db)
                found.append(SlotSample(layer, slot, own.amax, direction, *numbers))
    return tuple(found)


def _check_kinds(alarms: object, optimizer: object, group: object) -> None:
    """Raise TypeError for what could only fail in a step of the training."""
    if alarms is not None and not isinstance(alarms, Alarms):
        raise TypeError(
            f"monitor: alarms must be a hybridq.monitoring.Alarms or None, got {alarms!r}"
        )
    if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(
            f"monitor: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"monitor: group must be a process group, got {type(group).__name__}")


def monitor(
    model: nn.Module,
    every: int = 50,
    to: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    alarms: Alarms | None = None,
    rows: int = 128,
    layers: int | None = 4,
    group: Any = None,
    start: int = 0,
) -> Monitor:
    """Return a monitor that samples every so many steps of a training.

    Of each input, weight and gradient that hybridq's modules multiply in a sampled step it takes
    the largest magnitude, and of some layers, others each time, what both planes lose: underflow,
    saturation and SNR. Of experts it counts tokens. What goes beyond a threshold is an alarm: in
    the record, in `Monitor.alarms`, and a warning of the logger `hybridq`.

    The values of the training stay the same, in every bit, where it runs eagerly. What is compiled
    runs eagerly in a sampled step, and its graph is used as it is in all others. Recomputations of
    checkpoints are not counted again.

    Args:
        model: with modules of hybridq, under a recipe.
        every: of how many steps one is sampled: those whose number it divides.
        to: where records go: a path (a file of JSON lines, which grows), `"tensorboard"` or
            `"tensorboard:FOLDER"`, `"wandb"` (the run of `wandb.init`), a SummaryWriter, a run of
            W&B, a function that is given each `MonitorRecord`, or a list of these; None: nowhere.
            Over ranks the first one of the group writes.
        optimizer: whose steps are counted; None: the caller calls `Monitor.step`.
        alarms: thresholds; None: `Alarms()`.
        rows: of each matrix at most so many rows are quantized again, among them the one with the
            largest value; at least 1.
        layers: how many layers are quantized again in a sampled step; None: all of them.
        group: a process group whose ranks are added up, by one collective in each sampled step;
            None: each rank sees its own.
        start: number of the first step: that at which a run goes on, so that files and curves do.

    Returns:
        The monitor, a context manager; `close()` ends it, and leaves the model as it was.

    Raises:
        ValueError: a number is out of its range, or a file cannot be written.
        TypeError: the model is no module, or another argument of another kind.
        ImportError: TensorBoard or W&B is asked for and missing.
        RuntimeError: `"wandb"` without a run.

    Source: ours.

    Example:
        >>> import torch, hybridq
        >>> model = hybridq.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> with hybridq.monitor(model, every=2) as watch:
        ...     for step in range(4):
        ...         with hybridq.autocast(recipe="mxfp8"):
        ...             loss = model(torch.ones(32, 64)).sum()
        ...         loss.backward()
        ...         record = watch.step()
        ...         if record is not None:
        ...             print(record.step, record.slots[0].place, record.slots[0].amax)
        0 0/input 1.0
        2 0/input 1.0
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"monitor: model must be a Module, got {type(given).__name__}")
    counts = {"every": every, "rows": rows, **({} if layers is None else {"layers": layers})}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"monitor: {name} must be an integer of at least 1, got {value!r}")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"monitor: start must be an integer of at least 0, got {start!r}")
    _check_kinds(alarms, optimizer, group)
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) == 0
    sinks = sinks_of(to) if is_first else []
    size = (rows, layers)
    made = Monitor(names_of(model), every, sinks, alarms or Alarms(), size, group, start)
    if optimizer is not None:
        made._hook = _own(optimizer).register_step_post_hook(lambda *_: _count(made))
    return made
