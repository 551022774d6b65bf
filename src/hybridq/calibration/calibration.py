"""Calibration: the amaxes of a model's products as a value, which is merged, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from ..errors import must_be_one_of

__all__ = ["SLOTS", "Calibration", "joined"]

#: What amaxes are of. `expert_input` is that of each expert of a layer by itself.
SLOTS: Final = ("input", "weight", "output", "k", "v", "expert_input")


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Statistics of a model's products and KV caches by name; made by `hybridq.calibrate`.

    A product has the name of its module; a stack of experts that of its parameter,
    `"<module>.<parameter>"`.

    Args:
        amaxes: of each name and slot the amax, FP32 on the CPU: `[]`, or of a granularity
            `[features]` or `[blocks]`. Stacks of experts have `"weight"` and `"expert_input"` of
            each, `[E, ...]`; what an expert never saw is -inf.
        tokens: of each product how many rows it was given, int64 `[]`; of a stack `[E]`.
        observers: of each slot how its amaxes were made.
        formats: of each product, by slot, the format under the recipe; empty without one.
        batches: how many there were.

    Example:
        >>> import torch, hybridq
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
        >>> found = hybridq.calibrate(model, [torch.full((3, 8), -2.0)])
        >>> found.amax("0", "input"), int(found.tokens["0"])
        (tensor(2.), 3)
    """

    amaxes: Mapping[str, Mapping[str, torch.Tensor]]
    tokens: Mapping[str, torch.Tensor]
    observers: Mapping[str, str]
    formats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    batches: int = 0

    def amax(self, name: str, slot: str) -> torch.Tensor | None:
        """Return an amax, FP32 on the CPU; None: nothing was seen.

        Args:
            name: of a product; of one expert of a stack `"<module>.<parameter>.<expert>"`. Its
                input has the amax of the whole layer, unless `calibrate` was asked for each
                expert's own and the expert saw a token.
            slot: `"input"`, `"weight"`, `"output"`, `"k"` or `"v"` of a cache, or
                `"expert_input"`.

        Raises:
            ValueError: there is no such slot.
        """
        if slot not in SLOTS:
            raise ValueError(f"amax: slot {must_be_one_of(SLOTS, slot)}")
        if name in self.amaxes:
            found = self.amaxes[name]
            is_module = name in self.tokens and not self.tokens[name].dim()
            mine = found.get("expert_input") if slot == "input" and is_module else None
            return found.get(slot) if mine is None or _is_unseen(mine) else mine
        stack, _, number = name.rpartition(".")
        if not number.isdecimal() or stack not in self.tokens or not self.tokens[stack].dim():
            return None
        found = self.amaxes.get(stack, {})
        own = "expert_input" if slot == "input" and "expert_input" in found else slot
        values, e = found.get(own), int(number)
        if values is None or own in ("input", "output"):
            return values
        if e >= len(values):
            raise ValueError(
                f"amax: {stack} has {len(values)} experts, got the name of number {number}"
            )
        if _is_unseen(values[e]):
            return found.get("input") if own == "expert_input" and slot == "input" else None
        return values[e]

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield name, slot and amax of everything, sorted by name."""
        for name in sorted(self.amaxes):
            for slot in SLOTS:
                if slot in self.amaxes[name]:
                    yield name, slot, self.amaxes[name][slot]

    def merge(self, *others: Calibration) -> Calibration:
        """Return the calibration of all batches of several: of each amax the largest.

        Tokens and batches are added up. Names that only one of them has are taken as they are.

        Args:
            others: of the same model.

        Raises:
            TypeError: another is no Calibration.
            ValueError: they were made by other observers, under other formats, or differ in the
                number of experts or channels.
        """
        made = self
        for other in others:
            given: object = other
            if not isinstance(given, Calibration):
                raise TypeError(f"merge: others must be Calibrations, got {type(given).__name__}")
            made = _merged(made, other)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: all of it, or nothing.

        Every process that calls it writes; of several ranks, `calibrate(path=...)` lets one write.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            ImportError: safetensors is not installed.
            OSError: it cannot be written; what was there is as it was.
        """
        from .file import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Return the calibration of a file.

        Args:
            path: of the file.

        Raises:
            ImportError: safetensors is not installed.
            CheckpointError: it cannot be read, is damaged, or no calibration.
        """
        from .file import load

        return load(path)

    def __repr__(self) -> str:
        seen = sum(1 for name in self.tokens if bool((self.tokens[name] > 0).any()))
        how = ", ".join(f"{slot} {text}" for slot, text in self.observers.items())
        return (
            f"<Calibration: {seen} of {len(self.tokens)} products seen in {self.batches} "
            f"batches; {how}>"
        )


def _is_unseen(value: torch.Tensor) -> bool:
    return bool(torch.isneginf(value).any())


def _merged(one: Calibration, other: Calibration) -> Calibration:
    observers = joined(one.observers, other.observers, "observers")
    amaxes: dict[str, dict[str, torch.Tensor]] = {}
    for made in (one, other):
        for name, slot, value in made.entries():
            mine = amaxes.setdefault(name, {})
            mine[slot] = torch.maximum(_fitting(mine.get(slot, value), value, name, slot), value)
    tokens = dict(one.tokens)
    for name, count in other.tokens.items():
        tokens[name] = _fitting(tokens.get(name, torch.zeros_like(count)), count, name) + count
    formats = {
        name: joined(one.formats.get(name, {}), other.formats.get(name, {}), f"formats of {name}")
        for name in {**one.formats, **other.formats}
    }
    return Calibration(amaxes, tokens, observers, formats, one.batches + other.batches)


def _fitting(
    mine: torch.Tensor, other: torch.Tensor, name: str, slot: str = "tokens"
) -> torch.Tensor:
    if mine.shape != other.shape:
        raise ValueError(
            f"merge: {name} must have as many experts and channels in all of them, got "
            f"{list(mine.shape)} and {list(other.shape)} for {slot}"
        )
    return mine


def joined(mine: Mapping[str, str], other: Mapping[str, str], what: str) -> dict[str, str]:
    """Return two tables as one.

    Args:
        mine, other: the tables.
        what: they are of.

    Raises:
        ValueError: they disagree.
    """
    for slot in mine.keys() & other.keys():
        if mine[slot] != other[slot]:
            raise ValueError(
                f"merge: {what} must be the same, got {mine[slot]!r} and {other[slot]!r} for {slot}"
            )
    return {**mine, **other}
