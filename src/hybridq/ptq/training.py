"""The scheme of `convert_checkpoint`: planes of any format under names of hybridq's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .._version import __version__
from ..direction import ROWWISE, Direction
from ..errors import CheckpointError
from ..formats import PlaneSpec
from ..quantizers import Quantizer
from .decoding import decoded
from .draft import CheckpointScheme, Draft, copied, encoded
from .exact import can_be_exact
from .found import HF_QUANT_CONFIG, Found, Weight
from .header import TORCH_DTYPES, Entry
from .model_config import with_quantization, without_quantization
from .model_word import ModelWord
from .record import METADATA_KEY, VERSION, Record, StoredBuffer, records_text, without_records
from .select import Selection
from .source import Shard
from .views import PlainView, View

__all__ = ["RECORD", "TrainingScheme"]

#: The file in which a converted folder says what was quantized, and how.
RECORD: Final = "hybridq.json"


class TrainingScheme(CheckpointScheme):
    """What `convert_checkpoint` makes of a checkpoint.

    Args:
        selection: what is quantized.
        found: the source; what is quantized in it is decoded first.
        word: what its model says.
        refuses_own: a source in hybridq's own layout is refused.
    """

    def __init__(
        self, selection: Selection, found: Found, word: ModelWord, refuses_own: bool = False
    ) -> None:
        self._selection = selection
        self._found = found
        self._word = word
        self._refuses_own = refuses_own
        self._specs: dict[str, PlaneSpec | None] = {}
        #: MXFP4 planes that may be NVFP4's, by name.
        self._exact: dict[str, tuple[Record, View]] = {}

    def drafts(self, shard: Shard) -> list[Draft]:
        """Return what becomes of the tensors of a file.

        Args:
            shard: the file.

        Raises:
            CheckpointError: it holds quantized tensors already.
            SpecError: a recipe gives a quantizer that a checkpoint cannot have.
        """
        if METADATA_KEY in shard.header.metadata and self._refuses_own:
            raise CheckpointError(f"checkpoint: {shard.path} holds quantized tensors already")
        made = []
        for item in self._found.items(shard):
            entry = item.entry if isinstance(item, Weight) else item
            quantizer = self._quantizer(entry, isinstance(item, Weight))
            if quantizer is None:
                made.append(decoded(item) if isinstance(item, Weight) else copied(item))
                continue
            record = Record(entry.name, quantizer, entry.shape, TORCH_DTYPES[entry.dtype])
            if isinstance(item, Weight):
                made += self._of_weight(item, record)
            else:
                view = PlainView.of(shard, entry)
                made.append(encoded(entry, view, record, record.stored()))
        return made

    def _quantizer(self, entry: Entry, is_quantized: bool) -> Quantizer | None:
        """Return what quantizes a tensor; None: it is copied, or decoded."""
        if not self._selection.chooses(entry, is_quantized):
            return None
        if not self._selection.include and not is_quantized and self._word.keeps(entry.name):
            return None
        return self._selection.quantizer_for(entry)

    def _of_weight(self, weight: Weight, record: Record) -> list[Draft]:
        """Return what becomes of a weight that is quantized in the source.

        Args:
            weight: of the source.
            record: of what is wanted.
        """
        entry, view, own = weight.entry, weight.view, weight.record
        if own is not None and weight.other is not None and _has_both(own, record):
            record = replace(own, dtype=record.dtype)
            return [
                encoded(entry, one, record, _of_plane(record, one.direction), is_kept=True)
                for one in (view, weight.other)
            ]
        kept = self._kept(weight, record)
        if kept is not None:
            others: dict[str, Any] = {"is_kept": True, "beside": _beside(weight, kept)}
            return [encoded(entry, view, kept, kept.stored(), **others)]
        if not _may_be_exact(weight, record):
            return [encoded(entry, view, record, record.stored())]
        row = replace(record, quantizer=Quantizer(record.row, None))
        self._exact[entry.name] = (row, view)
        others = {"is_exact": True, "group": entry.name, "beside": _beside(weight, record)}
        return [encoded(entry, view, record, record.stored(), **others)]

    def members(self, group: str) -> Sequence[tuple[Record, View]]:
        """Return the one weight of a group: whether its scales can be another format's is asked.

        Args:
            group: its name.
        """
        return (self._exact[group],)

    def _kept(self, weight: Weight, record: Record) -> Record | None:
        """Return the record of the planes of a weight that has one of those that are wanted.

        The other is made of what it decodes to; None: both are.
        """
        is_rowwise, own = weight.view.direction == ROWWISE, weight.view.spec
        wanted, other = (record.row, record.col) if is_rowwise else (record.col, record.row)
        source = record.quantizer.columnwise_source
        if wanted is None or (other is not None and not is_rowwise and source != "original"):
            return None
        if not _is_like(wanted, own):
            return None
        if weight.entry.name not in self._specs:
            self._specs[weight.entry.name] = weight.view.exact_spec()
        spec = self._specs[weight.entry.name]
        if spec is None:
            return None
        if record.is_derived:
            return replace(record, quantizer=Quantizer(spec, spec))
        kept = Quantizer(spec, other, source if other else "original")
        return replace(record, quantizer=kept if is_rowwise else Quantizer(other, spec))

    def metadata(self, shard: Shard, drafts: Sequence[Draft]) -> Mapping[str, str]:
        """Return the source's metadata, with the records of what is quantized.

        Args:
            shard: the source's file.
            drafts: what becomes of it.
        """
        every = [draft.record for draft in drafts if draft.record is not None]
        records = [one for one in every if not one.quantizer.is_identity]
        made = without_records(shard.header.metadata)
        return made | {METADATA_KEY: records_text(records)} if records else made

    def identity(self) -> Mapping[str, Any]:
        """Return the selection, and what the model keeps as it is."""
        return {**self._selection.as_dict(), **self._word.as_dict()}

    def config(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the model's configuration with what is said of quantization.

        Args:
            config: what `config.json` holds.
        """
        plain = without_quantization(config)
        if self._found.layout is None:  # whatever it says, it is none that is known
            plain = dict(config)
        made = with_quantization(plain, self._selection)
        return made if made is not None or plain == config else plain

    def names(self) -> Sequence[str]:
        """Return the name of the record."""
        return (RECORD,)

    def replaces(self) -> Sequence[str]:
        """Return the names of configurations that say how the source is quantized."""
        return () if self._found.layout is None else (HF_QUANT_CONFIG,)

    def documents(self, tensors: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the record of the folder.

        Args:
            tensors: the record of each tensor, and its file.
        """
        return {RECORD: {"version": VERSION, "hybridq": __version__, "tensors": tensors}}


def _is_like(a: PlaneSpec, b: PlaneSpec) -> bool:
    """Return whether planes of both hold codes and scales of one kind."""
    return all(
        getattr(a.format, part) == getattr(b.format, part) for part in ("element", "block", "scale")
    )


def _has_both(own: Record, wanted: Record) -> bool:
    """Return whether the planes of a weight are those that are wanted, transforms included."""
    pairs = ((own.row, wanted.row), (own.col, wanted.col))
    return all(
        a is not None and b is not None and _is_like(a, b) and a.signs == b.signs for a, b in pairs
    )


def _of_plane(record: Record, direction: Direction) -> list[StoredBuffer]:
    """Return the tensors that hold one plane of a record."""
    return [one for one in record.stored() if one.direction == direction]


def _may_be_exact(weight: Weight, record: Record) -> bool:
    """Return whether a weight in MXFP4 may become NVFP4 by other scales for its codes."""
    view, row = weight.view, record.row
    return (
        view.direction == ROWWISE
        and row == PlaneSpec.parse("nvfp4")
        and can_be_exact(view.spec, row)
        and record.shape[-1] % 32 == 0
    )


def _beside(weight: Weight, kept: Record) -> Record | None:
    """Return how the plane that a weight lacks is made of its values; None: it lacks none.

    Args:
        weight: of the source.
        kept: record of both planes, of which one is its own, or of its numbers.
    """
    is_rowwise = weight.view.direction == ROWWISE
    other = kept.col if is_rowwise else kept.row
    if other is None or kept.is_derived:
        return None
    return replace(kept, quantizer=Quantizer(None, other) if is_rowwise else Quantizer(other, None))
