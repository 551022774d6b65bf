"""The products of a model in the order in which they are computed, and runs that end after some.

A method that changes weights one part of the model after the other needs the inputs of the next
part from the changed ones before it: the model runs again for every part, and stops behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..errors import must_be_one_of
from .batches import run
from .products import Product
from .watching import Makes, watch

__all__ = ["STEPS", "Plan", "Stage", "plan"]

#: What is observed in one run: a block of the model, the products of one input, or everything.
STEPS: Final = ("block", "input", "model")


class _Stopped(Exception):
    """All that a run was wanted for has been seen."""


@dataclass(frozen=True)
class Stage:
    """Products that are observed in one run.

    Args:
        groups: products that multiply the very same inputs stand together.
        stop: a module that is called only after the last of them; None: nothing is known.
    """

    groups: tuple[tuple[Product, ...], ...]
    stop: nn.Module | None

    @property
    def products(self) -> tuple[Product, ...]:
        """All of them."""
        return tuple(product for group in self.groups for product in group)


@dataclass(frozen=True)
class Plan:
    """The stages of a model in order of execution.

    Args:
        model: any module.
        batches: as `hybridq.calibrate` takes them.
        of: all products; those that no batch reached are in no stage.
        stages: in order.
    """

    model: nn.Module
    batches: tuple[Any, ...]
    of: tuple[Product, ...]
    stages: tuple[Stage, ...]

    def observe(self, stage: Stage, makes: Makes) -> None:
        """Run all batches, and show the inputs of each group to an observer of its own.

        Args:
            stage: one of the stages.
            makes: called with the first product of each group; what it returns sees the inputs.
        """
        first = {group[0] for group in stage.groups}
        modules = {id(product.module) for product in first}
        of = [product for product in self.of if id(product.module) in modules]
        with (
            watch(of, lambda one: makes(one) if one in first else None),
            _stopping(stage.stop),
        ):
            for batch in self.batches:
                try:
                    run(self.model, [batch])
                except _Stopped:
                    continue


@contextmanager
def _stopping(module: nn.Module | None) -> Iterator[None]:
    """End a run where a module is called."""
    if module is None:
        yield
        return

    def stop(module: nn.Module, args: Any) -> None:
        raise _Stopped

    handle = module.register_forward_pre_hook(stop, prepend=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class _Order:
    """What one run of a model shows: who was called when, and with the input of whom."""

    calls: dict[Product, list[tuple[int, int]]]
    inputs: dict[Product, list[int]]
    batch: int = 0
    count: int = 0
    serial: int = 0
    squares: bool = True
    last: torch.Tensor | None = None
    version: int = 0

    def observer(self, product: Product) -> Any:
        """Return what notes the calls of a product."""

        def see(rows: torch.Tensor) -> None:
            if not self._is_last(rows):
                _check_inputs(rows, product, self.batch, self.squares)
                # Kept until the next one comes, so that no other tensor can have its memory.
                self.last, self.version = rows, rows._version
                self.serial += 1
            self.count += 1
            self.calls.setdefault(product, []).append((self.batch, self.count))
            self.inputs.setdefault(product, []).append(self.serial)

        return see

    def _is_last(self, rows: torch.Tensor) -> bool:
        last = self.last
        return last is not None and last.is_set_to(rows) and self.version == rows._version


def _check_inputs(rows: torch.Tensor, product: Product, batch: int, squares: bool) -> None:
    """Raise where an input of a product is not finite, or the sums of its squares are not."""
    if rows.isfinite().all() and not (
        squares and not rows.to(torch.float32).square().sum(0).isfinite().all()
    ):
        return
    bad = rows[~rows.isfinite()]
    value = float(bad[0]) if bad.numel() else float(rows.abs().max())
    raise ValueError(
        f"calibration: inputs must be finite, and so must the sums of their squares, got {value:g} "
        f"in the input of {product.name} in batch {batch}; look for the batch, or the weights, "
        "that make it"
    )


def _check_weights(of: Iterable[Product]) -> None:
    """Raise where a weight is not finite."""
    for product in of:
        if product.is_part:  # no method replaces those, and ranks would have to read them together
            continue
        weight = product.weight()
        bad = weight[~weight.isfinite()]
        if bad.numel():
            raise ValueError(
                f"calibration: weights must be finite, got {bad.numel()} values that are not in "
                f"the weight of {product.name}, the first of them {float(bad[0]):g}"
            )


def plan(
    model: nn.Module,
    data: Iterable[Any],
    of: Sequence[Product],
    step: str,
    *,
    squares: bool = True,
) -> Plan:
    """Return in which order and together with which others products are observed; one run.

    Whatever makes the methods raise is looked for here, before any weight is changed.

    Args:
        model: any module.
        data: batches; an iterator is read through and kept.
        of: products of the model.
        step: `"block"`: those below one element of the outermost `nn.ModuleList` (or
            `nn.Sequential`) that they are in, a decoder layer, say, are observed in one run, and
            what is in none as under `"input"`;
            `"input"`: those that multiply the same input, so that the memory of one is enough, and
            each has its inputs from changed weights alone; `"model"`: all in one run.
        squares: products of inputs are added up, in FP32 for each batch: these must be finite, too.

    Raises:
        ValueError: no such step, no batch, or an input or a weight that is not finite.
        TypeError: data is a function of the model, which cannot be run in parts.
    """
    if step not in STEPS:
        raise ValueError(f"calibration: step {must_be_one_of(STEPS, step)}")
    given: object = data
    if callable(given) or not isinstance(given, Iterable):
        raise TypeError(
            "calibration: data must be an iterable of batches here, since the model runs again for "
            f"every part of it, got {type(given).__name__}"
        )
    batches = tuple(data)
    if not batches:
        raise ValueError(
            "calibration: data must hold at least one batch, got none; a generator is empty when "
            "it has been run through"
        )
    _check_weights(of)
    order = _Order({}, {}, squares=squares)
    with watch(of, order.observer):
        for order.batch, batch in enumerate(batches):
            run(model, [batch])
    order.last = None
    seen = sorted((p for p in of if p in order.calls), key=lambda p: order.calls[p][0])
    parts: dict[str, list[Product]] = {}
    for product in seen:
        parts.setdefault(_part(model, product, step, order), []).append(product)
    stages = list(parts.values())
    made = []
    for number, own in enumerate(stages):
        groups: dict[tuple[int, ...], list[Product]] = {}
        for product in own:
            groups.setdefault(tuple(order.inputs[product]), []).append(product)
        after = stages[number + 1] if number + 1 < len(stages) else []
        made.append(Stage(tuple(map(tuple, groups.values())), _stop(own, after, order)))
    return Plan(model, batches, tuple(of), tuple(made))


def _part(model: nn.Module, product: Product, step: str, order: _Order) -> str:
    """Return the key of the stage that a product belongs to."""
    if step == "model":
        return ""
    parts = product.name.split(".")
    inside: Any = model
    for number, part in enumerate(parts if step == "block" else ()):
        if isinstance(inside, nn.ModuleList | nn.Sequential) and len(inside) > 1:
            return ".".join(parts[: number + 1])
        inside = getattr(inside, part, None)
    # Experts of one layer have inputs of their own, but the same place in the model.
    is_expert = product.projection != product.name
    return product.projection if is_expert else str(order.inputs[product])


def _stop(own: Sequence[Product], after: Sequence[Product], order: _Order) -> nn.Module | None:
    """Return a module that no batch calls before the last call of these; None: there is none."""
    modules = {id(product.module) for product in own}
    last: dict[int, int] = {}
    for product in own:
        for batch, count in order.calls[product]:
            last[batch] = max(last.get(batch, 0), count)
    for product in after:
        is_after = all(count > last.get(batch, 0) for batch, count in order.calls[product])
        if is_after and product.expert is None and id(product.module) not in modules:
            return product.module
    return None
