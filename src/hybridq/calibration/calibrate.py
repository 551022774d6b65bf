"""calibrate: the amaxes of a model's products, from batches that run through it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from torch import nn

from .._files import import_safetensors
from ..converters import LEAST_WIDTH, check_made
from ..errors import must_be_one_of, warn
from ..formats import PlaneText
from ..recipes import Recipe, bind, get
from .batches import Data, run, unwrapped
from .caches import attentions, watch_caches
from .calibration import Calibration
from .file import check_target
from .named import observer_of
from .observers import Max, Observer
from .products import Product, check_in_memory, fused_products, products, unobserved
from .ranks import ranks_of
from .recording import CACHED, Recording
from .reduction import reduced
from .watching import watch

__all__ = ["calibrate"]

#: What may be recorded.
_SLOTS: Final = ("input", "weight", "output", *CACHED)
#: What is, unless the caller says otherwise.
_DEFAULT: Final = ("input", "weight", *CACHED)


def calibrate(
    model: nn.Module,
    data: Data,
    recipe: Recipe | str | None = None,
    *,
    observer: Observer | str | Mapping[str, Observer | str] = "max",
    slots: Iterable[str] | None = None,
    all_experts: bool = False,
    per_expert: bool = False,
    resume: Calibration | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    group: Any = None,
    expert_parallel: int = 1,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    also: Iterable[str] = (),
    least_width: int = LEAST_WIDTH,
) -> Calibration:
    """Return the amaxes of the products that `hybridq.convert` quantizes, over batches of data.

    And those of `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear` in the model: the norms'
    results, what the activation makes, the tokens of each group; of their outputs none.

    The model stays as it is: it runs in evaluation mode and without gradients, with hooks that are
    removed at the end, after an error too. It may be converted or not. Weights are measured as
    they are, those of experts that saw no token included; quantized ones as they decode.

    Args:
        model: any module; of a compiled one, or one of DistributedDataParallel, the model inside.
        data: batches: a mapping is `model(**batch)`, a tuple or a list `model(*batch)`, a tensor
            `model(batch)`; or a function that is called with the model, once.
        recipe: whose formats are recorded with the amaxes; None: none are.
        observer: what makes an amax of values, for inputs and outputs: an Observer (`Max`,
            `Percentile`, `MSE`), or `"max"`, `"percentile"`, `"mse"`; or one by slot. Weights are
            measured by their largest magnitude, unless it says otherwise.
        slots: which amaxes are recorded, of `"input"`, `"weight"`, `"output"`, and `"k"` and
            `"v"`: keys and values as models of transformers put them into their caches, by the
            name of the attention module. None: all but outputs.
        all_experts: each expert in a stack is shown every token; the model's results stay those
            of the router's choice. Takes longer.
        per_expert: record inputs of each expert by itself, too, beside the largest of a layer.
        resume: a calibration, or the path of one, that this one continues: amaxes are the larger
            ones, tokens are added. `data` are the batches that it has not seen.
        path: where the result is saved, once, by global rank 0; None: nowhere.
        group: the ranks that calibrate together, each with batches of its own, and return the same
            result: a process group, of which every rank must call this; None: all ranks, where
            torch.distributed is initialized; `"alone"`: this rank by itself.
        expert_parallel: over how many ranks, in their order, each stack of experts is split: rank
            r has part `r % expert_parallel`.
        filter_fn, also, least_width: which products, as `hybridq.convert` takes them.

    Raises:
        TypeError: an argument or a batch is of another kind.
        ValueError: an argument has no such value, there is no batch or no product, or values are
            not finite.
        RuntimeError: another rank failed, or is gone; nothing was written.
        CheckpointError: the file of `resume` cannot be read.
        OSError: `path` is no place for a file; said before anything runs.
        ImportError: safetensors is not installed, for `path` or `resume`; said then, too.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        >>> found = hybridq.calibrate(model, [torch.ones(2, 16)] * 3, "nvfp4")
        >>> found.amax("0", "input"), int(found.tokens["1"])
        (tensor(1.), 6)
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"calibrate: model must be an nn.Module, got {type(given).__name__}")
    if not isinstance(expert_parallel, int) or expert_parallel < 1:
        raise ValueError(f"calibrate: expert_parallel must be at least 1, got {expert_parallel!r}")
    model = unwrapped(model)
    observers = _observers(observer, slots)
    ranks = ranks_of(group)
    with ranks.step():
        before = Calibration.load(resume) if isinstance(resume, str | os.PathLike) else resume
        if path is not None and ranks.writes:
            import_safetensors("calibration")  # before hours of work
            check_target("calibrate", path)
        of = _products(model, filter_fn, also, least_width)
        if "weight" in observers:  # else modules may be given their weights when they are called
            check_in_memory("calibrate", of)
        _check_data(data, observers)
        planes = {} if recipe is None else _planes(of, get(recipe))
        caches = attentions(model)
        recording = Recording(of, observers, planes, caches, per_expert)
        seen = (recording.inputs, recording.outputs)
        cached = (caches.items(), recording.cached)
        with watch(of, *seen, all_experts=all_experts), watch_caches(*cached):
            batches = run(model, data)
    recording.agree(ranks)
    if recording.begins_again():
        watching = watch(of, *seen, all_experts=all_experts)
        with ranks.step(), watching, watch_caches(*cached):
            run(model, data)
        recording.agree(ranks)
    with ranks.step():
        found, entries = recording.result(batches), recording.entries()
    found = reduced(found, entries, ranks, expert_parallel)
    with ranks.step():
        if ranks.writes:
            _warn(model, found, slots is not None and bool({*slots} & {*CACHED}))
            _warn_of_outputs(of, observers)
        if before is not None:
            found = before.merge(found)
        if path is not None and ranks.writes:
            found.save(path)
    return found


def _products(model: nn.Module, *arguments: Any) -> tuple[Product, ...]:
    """Return the products of a model; there are some."""
    filter_fn, also, least_width = arguments
    check_made("calibrate", model)
    of = products(model, filter_fn, also=also, least_width=least_width)
    of += fused_products(model, filter_fn, also=also)
    if not of:
        raise ValueError(
            "calibrate: the model must have products that hybridq.convert quantizes, got none; "
            "hybridq.conversion(model) says why"
        )
    return of


def _observers(given: Any, slots: Iterable[str] | None) -> dict[str, Observer]:
    """Return the observer of each slot that is recorded."""
    slots = _DEFAULT if slots is None else slots
    if isinstance(slots, str):
        raise TypeError(f"calibrate: slots must be a collection of names, got {slots!r}")
    wanted = tuple(slots)
    if not wanted:
        raise ValueError(f"calibrate: slots must be some of {', '.join(_SLOTS)}, got none")
    by_slot = given if isinstance(given, Mapping) else {"input": given, "output": given}
    for slot in (*wanted, *by_slot):
        if slot not in _SLOTS:
            raise ValueError(f"calibrate: a slot {must_be_one_of(_SLOTS, slot)}")
    made: dict[str, Observer] = {
        slot: observer_of(by_slot.get(slot, Max())) for slot in _SLOTS if slot in wanted
    }
    for slot, one in made.items():
        if slot != "weight" and one.is_by_row:
            raise ValueError(
                f"calibrate: only rows of weights have an amax each, those of others are tokens, "
                f"got the observer {one.text!r} for {slot!r}; take granularity='channel' or 'token'"
            )
    for slot in CACHED:
        if slot in made and made[slot].shape(1):
            raise ValueError(
                f"calibrate: keys and values have one amax for the tensor, got the observer "
                f"{made[slot].text!r} for {slot!r}"
            )
    return made


def _check_data(data: object, observers: Mapping[str, Observer]) -> None:
    """Raise where batches are read twice that can be read once."""
    is_gone = isinstance(data, Iterator)
    twice = [slot for slot, one in observers.items() if slot != "weight" and one.reads_twice]
    if is_gone and twice:
        raise ValueError(
            f"calibrate: the observer of {twice[0]} reads data twice, so that they must be a list, "
            f"a DataLoader or the like, got {type(data).__name__}, which is empty after once"
        )


def _planes(of: tuple[Product, ...], recipe: Recipe) -> dict[str, dict[str, PlaneText]]:
    """Return what the forward encodes in, by product; of a stack, what the first expert's is."""
    made: dict[str, dict[str, PlaneText]] = {}
    for product in of:
        if product.key not in made:
            plan = bind(recipe, product.name, product.module_type)
            made[product.key] = {"input": plan.input.row, "weight": plan.weight.row}
    return made


def _warn_of_outputs(of: tuple[Product, ...], observers: Mapping[str, Observer]) -> None:
    """Say whose outputs are not recorded, if outputs are."""
    names = dict.fromkeys(one.key for one in of if one.is_fused)
    if "output" in observers and names:
        first = ", ".join([*names][:4])
        text = f"calibrate: outputs of fused modules are not observed, got {first}"
        warn(text)


def _warn(model: nn.Module, found: Calibration, wants_caches: bool) -> None:
    """Say what was not seen; an expert that got no token is no such."""
    never = [name for name, count in found.tokens.items() if not count.dim() and not int(count)]
    never = [name for name in never if "input" not in found.amaxes[name]]
    hidden = unobserved(model)
    cached = {name for name, one in found.amaxes.items() if one.keys() & {*CACHED}}
    missed = [name for name in attentions(model) if name not in cached]
    if wants_caches and not (missed or cached):
        missed = [type(model).__name__]
    texts = [
        (missed if wants_caches else [], "put nothing into a KV cache; let the model use one"),
        (never, "were not called, so that their inputs have no amax"),
        ([f"{name} ({kind})" for name, kind in hidden.items()], "are not observed"),
    ]
    for names, what in texts:
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            text = f"calibrate: {', '.join(names[:4])}{more} {what}"
            warn(text)
