"""Which weights an export quantizes, and in which format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, must_be_one_of
from ..formats import PlaneSpec
from ..layouts import Layout
from ..quantizers import Quantizer
from ..recipes import Recipe
from .header import Entry
from .model_word import ModelWord
from .pieces import Piece, is_expert_stack
from .select import Selection, can_quantize

__all__ = ["Choice", "choice_of"]

#: For rules of names, where no format is asked for.
_ANY = Quantizer(PlaneSpec.parse("nvfp4"), None)


@dataclass(frozen=True)
class Choice:
    """What is quantized, and how.

    Args:
        layout: that it is for.
        selection: rules of names, and the format, if `is_kept` and `scheme` do not say it.
        word: what the model says.
        scheme: name of the layout's scheme, or "".
        is_kept: weights stay in the format that they have.
    """

    layout: Layout
    selection: Selection
    word: ModelWord
    scheme: str = ""
    is_kept: bool = False

    def spec_of(self, entry: Entry, piece: Piece) -> PlaneSpec | None:
        """Return the spec of the rowwise plane of a weight, or None if it stays as it is.

        Args:
            entry: the tensor of the source.
            piece: itself, or a part of it.

        Raises:
            SpecError: a recipe gives planes that the layout cannot hold.
        """
        is_known = piece.weight is not None or is_expert_stack(entry.name, entry.shape)
        if entry.is_transposed or not self.selection.chooses(entry, is_known):
            return None
        if not self.selection.include and piece.weight is None and self.word.keeps(entry.name):
            return None
        if self.is_kept:
            return None if piece.stored is None else piece.stored.spec
        if self.scheme:
            return self.layout.scheme(self.scheme).stored_spec(piece.entry.shape[-1])
        quantizer = self.selection.quantizer_for(piece.entry)
        if quantizer is None or quantizer.rowwise is None or not quantizer.makes_rowwise:
            return None
        spec = quantizer.rowwise
        return None if spec.format.is_identity else spec

    def reason_left(self, entry: Entry) -> str | None:
        """Return why a tensor stays that looks as if it should not; None: it is as it should be.

        Args:
            entry: the tensor of the source, which is not quantized.
        """
        if self.is_kept:
            return None
        if entry.is_transposed and self.selection.chooses(entry):
            return "its model keeps it as [in, out], which readers of the layout do not expect"
        is_expert = len(entry.shape) == 3 and "expert" in entry.name and can_quantize(entry)
        if is_expert and not is_expert_stack(entry.name, entry.shape):
            return "it is a stack of experts under a name that says not how it holds them"
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as JSON has it, to tell whether two are the same."""
        made = self.selection.as_dict()
        if self.is_kept or self.scheme:
            made["quantizer"] = None
        return {**made, "scheme": self.scheme, "keeps": self.is_kept, **self.word.as_dict()}


def choice_of(
    layout: Layout,
    word: ModelWord,
    format: str | Quantizer | None,
    recipe: str | Recipe | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> Choice:
    """Return what is quantized, and how.

    Args:
        layout: that it is for.
        word: what the model says.
        format: name of a format, PlaneSpec or scheme of the layout; or a quantizer without a
            columnwise plane; or None.
        recipe: or a recipe, asked for the weights; or None.
        include, exclude: globs, as `Selection` has them.

    Raises:
        SpecError: both are given, the layout holds no columnwise planes, or the format is neither
            a scheme of the layout nor one of hybridq's.
    """
    globs = (tuple(include), tuple(exclude))
    if format is not None and recipe is not None:
        raise SpecError("export: takes a format or a recipe and not both")
    if recipe is not None:
        return Choice(layout, Selection(None, recipe, *globs), word)
    if format is None:
        return Choice(layout, Selection(_ANY, None, *globs), word, is_kept=True)
    if isinstance(format, str) and format in (one.name for one in layout.schemes):
        return Choice(layout, Selection(_ANY, None, *globs), word, scheme=format)
    quantizer = format if isinstance(format, Quantizer) else _parsed(layout, format)
    if quantizer.makes_columnwise:
        raise SpecError(
            f"export: {layout.name} holds rowwise planes alone, got {quantizer.text}; the layout "
            "hybridq holds both"
        )
    return Choice(layout, Selection(quantizer, None, *globs), word)


def _parsed(layout: Layout, text: str) -> Quantizer:
    given: object = text
    if not isinstance(given, str):
        raise TypeError(
            "export: format must be a name, a PlaneSpec's string or a Quantizer, got "
            f"{type(given).__name__}"
        )
    try:
        return Quantizer(PlaneSpec.parse(given), None)
    except SpecError as error:
        own = must_be_one_of([one.name for one in layout.schemes], given)
        raise SpecError(
            f"export: the scheme of {layout.name} {own}; and as a format of hybridq: {error}"
        ) from error
