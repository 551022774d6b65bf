"""ByGemm: a recipe of three quantizers, which prints as the formats of its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..formats import PlaneSpec
from ..quantizers import Quantizer
from .gemm_words import gemm_formats
from .recipe import ChoosingRecipe
from .roles import GRAD_OUTPUT, SLOTS, WEIGHT, QuantizerRole

__all__ = ["ByGemm", "source_of"]

_SOURCE: Final = "columnwise_source"
_DECODED: Final = "rowwise_dequantized"


@dataclass(frozen=True, repr=False)
class ByGemm(ChoosingRecipe):
    """A recipe of three quantizers, one for each slot of a linear module, whatever its name.

    `hybridq.recipe` makes one of formats per GEMM. It prints as the call that makes it.

    Args:
        input, weight, grad_output: the slots' quantizers.
        precision, backward_override, columnwise_source: as in `Recipe`; by keyword only.

    A slot at a module's boundary has the quantizer of its kind: a gradient's or an input's.

    Raises:
        TypeError: a slot is no Quantizer.
        ValueError: unknown choices.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer

    def __post_init__(self) -> None:
        for slot in SLOTS:
            given: object = getattr(self, slot)
            if not isinstance(given, Quantizer):
                raise TypeError(
                    f"ByGemm: {slot} must be a Quantizer, got {type(given).__name__}; "
                    "hybridq.recipe takes names of formats"
                )
        super().__post_init__()

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Return the quantizer of the role's slot."""
        if role.tensor_type == WEIGHT:
            return self.weight
        return self.grad_output if role.is_gradient else self.input

    def arguments(self) -> dict[str, Any]:
        """Return the keywords by which `hybridq.recipe` makes this recipe, choices apart."""
        quantizers = {slot: getattr(self, slot) for slot in SLOTS}
        gemms = gemm_formats(quantizers)
        is_partial = None in gemms.values()  # some quantizer lacks a plane
        found: dict[str, Any] = {} if is_partial else dict(gemms)
        for slot, one in quantizers.items():
            if is_partial or not _is_named(one):
                found[slot] = one
            elif one.columnwise_source != source_of(slot, one.rowwise, one.columnwise):
                found[slot] = {_SOURCE: one.columnwise_source}
        return found

    def _call(self) -> str:
        given = {**self.arguments(), **dict(self._chosen())}
        return f"recipe({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _table(self) -> dict[str, Any]:
        found = self.arguments()
        for slot in SLOTS:
            if isinstance(found.get(slot), Quantizer):
                raise ValueError(
                    f"to_toml: a file says formats, got for {slot!r} a quantizer with more: "
                    f"{found[slot]!r}"
                )
        return {**found, **self._chosen_table()}

    def _key_text(self) -> str:
        slots = ", ".join(f"{slot}={getattr(self, slot).text!r}" for slot in SLOTS)
        chosen = "".join(f", {name}={value!r}" for name, value in self._chosen())
        return f"ByGemm({slots}{chosen})"


def _is_named(quantizer: Quantizer) -> bool:
    """Whether the formats of its planes, and what the columnwise one is made of, say it all."""
    row, col = quantizer.rowwise, quantizer.columnwise
    return quantizer == Quantizer(row, col, quantizer.columnwise_source) and None not in (row, col)


def source_of(slot: str, row: PlaneSpec | None, col: PlaneSpec | None) -> str:
    """Return what the columnwise plane of a slot is made of where nobody says it.

    Args:
        slot: of a linear module.
        row, col: specs of its two planes.

    A forward operand whose backward format is another one is encoded from the decoded rowwise
    plane: the backward then differentiates the function that the forward computed. Gradients, and
    what passes the Hadamard transform, are encoded from the original.
    """
    if slot == GRAD_OUTPUT or row is None or col is None or row.format.is_identity:
        return "original"
    return "original" if col.signs is not None or col.format == row.format else _DECODED
