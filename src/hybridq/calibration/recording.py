"""What a pass records: an observer for each tensor, and how many rows there were."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from ..formats import PlaneSpec, PlaneText
from .calibration import Calibration
from .observers import Observer, Running
from .products import Product
from .ranks import Ranks
from .reduction import Entry
from .watching import MatrixObserver

__all__ = ["CACHED", "Recording"]

#: Slots of KV caches.
CACHED: Final = ("k", "v")


class Recording:
    """The observers of a pass over a model.

    All experts of a layer share the observers of their projections.

    Args:
        of: products of the model.
        observers: of each slot; slots that are not in it are not recorded.
        caches: names of the modules that write keys and values into a cache.
        planes: by a product's key and the slot, in what the recipe encodes the tensor.
        per_expert: record inputs of each expert by itself, too.
    """

    def __init__(
        self,
        of: Iterable[Product],
        observers: Mapping[str, Observer],
        planes: Mapping[str, Mapping[str, PlaneText]],
        caches: Collection[str] = (),
        per_expert: bool = False,
    ) -> None:
        self.products = tuple(of)
        self.observers = {k: one for k, one in observers.items() if caches or k not in CACHED}
        self.per_expert = per_expert
        self.caches = caches
        self._planes = planes
        self._running: dict[tuple[str, str], Running] = {}
        self._rows = dict.fromkeys((product.name for product in self.products), 0)
        #: Of a second pass, who sees it.
        self._again: set[Running] | None = None

    def _plane(self, product: Product, slot: str) -> PlaneText | None:
        return self._planes.get(product.key, {}).get(slot)

    def _start(self, slot: str, product: Product | None, name: str) -> list[Running]:
        """Return the observer of a tensor, unless it sees nothing in this pass."""
        key, read = (slot, name), "input" if slot == "expert_input" else slot
        if key not in self._running and self._again is None:
            plane = None if product is None else self._plane(product, read)
            features = None if product is None else self._features(read, product)
            self._running[key] = self.observers[read].start(plane, features)
        one = self._running[key]
        return [one] if self._again is None or one in self._again else []

    def begins_again(self) -> bool:
        """Return whether something must see all batches once more, and prepare for that.

        Nothing else is recorded then, rows are not counted again.
        """
        self._again = {one for one in self._running.values() if one.begins_again()}
        return bool(self._again)

    def _has_own(self, product: Product) -> bool:
        return self.per_expert and (product.expert is not None or "*" in product.projection)

    def agree(self, ranks: Ranks) -> None:
        """Let observers that read data twice have the same on all ranks.

        Args:
            ranks: all of them.

        Raises:
            ValueError: they observe other things.
        """
        found = {key: one.shared() for key, one in sorted(self._running.items())}
        shared = {key: one for key, one in found.items() if one is not None}
        if not shared or ranks.count == 1:
            return
        lines = [f"{name} {slot} {how}" for (slot, name), (how, _) in shared.items()]
        ranks.same_lines(lines, "observers that read data twice")
        for how in ("max", "sum"):
            keys = [key for key, one in shared.items() if one[0] == how]
            mine = [shared[key][1] for key in keys]
            if mine:
                whole = ranks.reduced(torch.cat(mine), how)
                sizes = [len(one) for one in mine]
                for key, values in zip(keys, whole.split(sizes), strict=True):
                    self._running[key].take_shared(values)

    def entries(self) -> list[Entry]:
        """Return all that may be recorded, whether or not anything was seen."""
        made = []
        stacks: dict[str, list[Product]] = {}
        for product in self.products:
            stacks.setdefault(product.key, []).append(product)
        for key, own in stacks.items():
            is_stack = own[0].expert is not None
            experts = (len(own),) if is_stack else ()
            for slot in (one for one in self.observers if one not in CACHED):
                shape = self._shape(slot, own[0])
                is_own = slot == "weight"
                made.append(
                    Entry(key, slot, (*experts, *shape) if is_own else shape, is_own and is_stack)
                )
                if slot == "input" and self._has_own(own[0]):
                    made.append(Entry(key, "expert_input", (*experts, *shape), is_stack))
            made.append(Entry(key, "tokens", experts, is_stack))
        cached = [slot for slot in CACHED if slot in self.observers]
        return [*made, *(Entry(name, slot, ()) for name in self.caches for slot in cached)]

    def _features(self, slot: str, product: Product) -> int | None:
        """Return the features of what an observer sees; None: its amax does not depend on them."""
        if not self.observers[slot].shape(1):
            return None
        out, into = product.weight().shape
        return out if slot == "output" else into

    def _shape(self, slot: str, product: Product) -> tuple[int, ...]:
        observer = self.observers[slot]
        if not observer.shape(1):
            return ()
        out, into = product.weight().shape
        return observer.shape(out if slot == "output" else into, out if slot == "weight" else 1)

    def inputs(self, product: Product) -> MatrixObserver | None:
        """Return what sees the input of a product; None: nothing does.

        Args:
            product: one of them.
        """
        name = product.name
        sees: list[Running] = []
        if "input" in self.observers:
            sees += self._start("input", product, product.projection)
            if self._has_own(product):
                sees += self._start("expert_input", product, name)
        counts = self._again is None
        if not (sees or counts):
            return None

        def see(rows: torch.Tensor, /) -> None:
            self._rows[name] += rows.shape[0] if counts else 0
            for one in sees:
                one(rows)

        return see

    def outputs(self, product: Product) -> MatrixObserver | None:
        """Return what sees the output of a product, if anything does.

        Args:
            product: one of them.
        """
        if "output" not in self.observers:
            return None
        return next(iter(self._start("output", product, product.projection)), None)

    def cached(self, name: str, slot: str) -> MatrixObserver | None:
        """Return what sees the keys or values of an attention module, if anything does.

        Args:
            name: of the module.
            slot: `"k"` or `"v"`.
        """
        if slot not in self.observers:
            return None
        return next(iter(self._start(slot, None, name)), None)

    def result(self, batches: int) -> Calibration:
        """Return what was recorded, weights included.

        Args:
            batches: how many there were.

        Raises:
            ValueError: some value was NaN or infinite.
        """
        amaxes: dict[str, dict[str, torch.Tensor]] = {}
        tokens: dict[str, torch.Tensor] = {}
        stacks: dict[str, list[Product]] = {}
        for product in self.products:
            stacks.setdefault(product.key, []).append(product)
        for key, own in stacks.items():
            is_stack = own[0].expert is not None
            found = {}
            for slot in ("input", "output"):
                value = self._value(slot, own[0].projection)
                if value is not None:
                    found[slot] = value
            if any(("expert_input", one.name) in self._running for one in own):
                found["expert_input"] = _stacked(
                    [self._value("expert_input", one.name) for one in own], is_stack
                )
            if "weight" in self.observers:
                found["weight"] = _stacked([self._weight(one) for one in own], is_stack)
            amaxes[key] = found
            rows = [self._rows[one.name] for one in own]
            tokens[key] = torch.tensor(
                rows if is_stack else rows[0], dtype=torch.int64, device="cpu"
            )
        for name in self.caches:
            values = {slot: self._value(slot, name) for slot in CACHED}
            seen = {slot: one for slot, one in values.items() if one is not None}
            if seen:
                amaxes[name] = {**amaxes.get(name, {}), **seen}
        texts = {slot: one.text for slot, one in self.observers.items()}
        if self.per_expert and "input" in texts:
            texts["expert_input"] = texts["input"]
        formats = {
            key: {slot: PlaneSpec.parse(one.spec).short_text for slot, one in planes.items()}
            for key, planes in self._planes.items()
        }
        return Calibration(amaxes, tokens, texts, formats, batches)

    def _value(self, slot: str, name: str) -> torch.Tensor | None:
        running = self._running.get((slot, name))
        value = None if running is None else running.amax()
        return None if value is None else _finite(value, name, slot)

    def _weight(self, product: Product) -> torch.Tensor:
        matrix = product.weight()
        running = self.observers["weight"].start(self._plane(product, "weight"), matrix.shape[1])
        if matrix.is_meta:
            raise ValueError(
                f"calibrate: weights must be in memory, got {product.name} on the meta device; "
                "load the model without offloading"
            )
        running(matrix)
        if running.begins_again():
            running(matrix)
        value = running.amax()
        if value is None:
            raise ValueError(f"calibrate: {product.name} must have a weight with elements")
        return _finite(value, product.name, "weight")


def _finite(value: torch.Tensor, name: str, slot: str) -> torch.Tensor:
    value = value.detach().float().cpu()
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"calibrate: values must be finite, got {value.max().item()} in the {slot} of {name}; "
            "look for the batch, or the weights, that make it"
        )
    return value


def _stacked(values: list[torch.Tensor | None], is_stack: bool) -> torch.Tensor:
    """Return the values of all experts, -inf where there is none."""
    known = next(
        (one for one in values if one is not None),
        torch.zeros((), dtype=torch.float32, device="cpu"),
    )
    nothing = torch.full_like(known, -torch.inf)
    made = [nothing if one is None else one for one in values]
    return torch.stack(made) if is_stack else made[0]
