"""The scheme of `export`: weights in a layout that other programs read."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..direction import ROWWISE
from ..errors import CheckpointError
from ..formats import PlaneSpec
from ..layouts import Fault, Scheme, StoredWeight, faults_of, sibling_groups
from ..quantizers import Quantizer
from .choice import Choice
from .decoding import decoded, plain_piece
from .draft import CheckpointScheme, Draft, Output, copied, fixed
from .exact import can_be_exact
from .found import HF_QUANT_CONFIG, Found, Weight
from .header import Entry, dtype_name
from .model_config import without_quantization
from .pieces import Piece, bias_pieces, expert_pieces, is_expert_stack, piece_of
from .record import Record, without_records
from .scales import Scales
from .select import EMBEDDINGS
from .source import CONFIG, Shard
from .training import RECORD
from .views import View

__all__ = ["ExportScheme"]

_SUFFIX: Final = ".weight"


@dataclass(frozen=True)
class _Target:
    """A weight of the new checkpoint.

    Args:
        piece: of the source.
        record: how it is quantized.
        stored: the tensors that it becomes.
        is_kept: its planes are in the source as they are wanted.
        is_exact: they may become what is wanted by their scales alone.
    """

    piece: Piece
    record: Record
    stored: StoredWeight
    is_kept: bool
    is_exact: bool

    @property
    def module(self) -> str:
        """Name of the linear."""
        return self.record.name.removesuffix(_SUFFIX)


class ExportScheme(CheckpointScheme):
    """What `export` makes of a checkpoint.

    Args:
        found: the source.
        choice: what is quantized, and how.
        scales: of inputs and KV caches.
        kv_cache: what KV caches are held in; None: what the source says.

    Attributes:
        notes: what the user should know.

    Raises:
        CheckpointError: nothing is chosen, or not what the layout needs is there.
        SpecError: the layout cannot hold what is chosen.
    """

    def __init__(
        self, found: Found, choice: Choice, scales: Scales, kv_cache: str | None = None
    ) -> None:
        self._found = found
        self._choice = choice
        self._layout = choice.layout
        self._scales = scales
        self._kv_cache = kv_cache
        self.notes: list[str] = []
        self._schemes: dict[str, Scheme] = {}
        self._kept: dict[str, None] = {}
        self._left: dict[str, str] = {}
        self._faults: dict[Fault, str] = {}
        self._bare: dict[str, None] = {}
        self._has_scales = True
        self._scaled: dict[str, None] = {}
        self._unscaled: dict[str, None] = {}
        self._groups: dict[str, str] = {}
        self._exact: set[str] = set()
        self._members: dict[str, list[tuple[Record, View]]] = {}
        self._survey()
        schemes = self._schemes.values()
        self._inputs = scales.way(self._layout, schemes, self._has_scales)
        if self._scaled and self._inputs != "static" and not scales.is_calibrated:
            why = f"{self._layout.name} says no static inputs with these formats"
            if all("static" in scheme.inputs for scheme in schemes):
                why = f"the source has none for {next(iter(self._unscaled))}, and all need one; a "
                why += "calibration gives them"
            self.notes.append(
                f"{len(self._scaled)} scales of inputs ({next(iter(self._scaled))}, ...) are not "
                f"carried over, since {why}"
            )
        if scales.is_calibrated and self._inputs != "static" and kv_cache is None:
            names = " and ".join(dict.fromkeys(scheme.name for scheme in schemes))
            self.notes.append(
                f"the calibration has no effect: {self._layout.name} says no static scales of "
                f"inputs with {names}"
            )

    # ---- what becomes of the weights

    def _survey(self) -> None:
        """Look at all weights once: configurations and groups of siblings need all names."""
        sharing: dict[str, _Target] = {}
        attentions: dict[str, str] = {}
        for shard in self._found.source.shards:
            for item in self._found.items(shard):
                targets = self._targets(shard, item)
                for one in targets:
                    self._schemes[one.module] = one.stored.scheme
                    for fault in faults_of(self._layout.name, one.stored, one.record.dtype):
                        self._faults.setdefault(fault, one.module)
                    if not one.record.name.endswith(_SUFFIX) and one.record.name != _SUFFIX[1:]:
                        self._bare[one.record.name] = None
                    has_scale = self._scales.has(one.piece.weight)
                    self._has_scales &= has_scale
                    (self._scaled if has_scale else self._unscaled)[one.module] = None
                    if one.stored.scheme.shares_scale:
                        sharing[one.record.name] = one
                entry = item.entry if isinstance(item, Weight) else item
                if (
                    not targets
                    and _is_linear(entry)
                    and entry.name.removesuffix(_SUFFIX) not in (self._choice.word.others)
                ):
                    self._kept[entry.name.removesuffix(_SUFFIX)] = None
                parent, _, last = entry.name.removesuffix(_SUFFIX).rpartition(".")
                if last in ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj"):
                    attentions.setdefault(parent, shard.name)
        if not self._schemes:
            raise self._nothing()
        for group in sibling_groups(sharing):
            self._share([sharing[name] for name in group])
        word = self._choice.word
        self._kept |= dict.fromkeys(word.kept if word.reason is None else ("lm_head",))
        self._kept = {name: None for name in sorted(self._kept) if name not in self._schemes}
        found = self._scales.caches(self._layout, self._kv_cache, attentions)
        self._kv_cache, self._caches = found
        self.notes += self._scales.notes
        # Weights of linears have the suffix, stacks of experts have none.
        names = [f"{name}{_SUFFIX}" for name in self._schemes if not word.has_place(name)]
        strange = word.tell_of_strangers(names)
        self.notes += [] if strange is None else [strange]
        self.notes += [f"{fault} (as of {name})" for fault, name in self._faults.items()]
        self.notes += self._of_names()
        if self._left:
            name, reason = next(iter(self._left.items()))
            self.notes.append(
                f"{len(self._left)} weights stay as they are, since {self._layout.name} cannot "
                f"hold them: {name} and others: {reason}"
                if len(self._left) > 1
                else f"{name} stays as it is: {reason}"
            )

    def _of_names(self) -> Iterator[str]:
        """Yield what the new checkpoint says under other names, or in place of something else."""
        if not self._layout.holds_stacks and self._bare:
            name = next(iter(self._bare))
            yield (
                f"readers of {self._layout.name} look for names that end in {_SUFFIX}: {name!r}"
                f"{f' and {len(self._bare) - 1} others' if len(self._bare) > 1 else ''} is written "
                f"as the weight of a module of that name"
            )
        plain = without_quantization(self._found.config)
        for key in self._layout.config_keys:
            if key in plain:
                yield (
                    f"{key!r} of {CONFIG}, which says nothing of weights that are quantized, is "
                    f"replaced: readers of {self._layout.name} look there"
                )

    def _share(self, own: list[_Target]) -> None:
        """Give weights that readers multiply with at once one second-level scale."""
        names = [one.record.name for one in own]
        kept = [one for one in own if one.is_kept]
        is_exact = all(one.is_exact for one in own)
        if len(kept) < len(own) and (len(own) > 1 or is_exact):
            self._members[names[0]] = [(one.record, one.piece.view) for one in own]
            self._groups |= dict.fromkeys(names, names[0])
            self._exact.update(names if is_exact else ())
        scales = {one.piece.stored.tensor_scale() for one in kept if one.piece.stored is not None}
        if len(own) > 1 and kept and (len(scales) > 1 or len(kept) < len(own)):
            self.notes.append(
                f"{' and '.join(names)} have scales of their own for the tensor, since they stay "
                "as the source has them; servers that multiply with them at once take one of these"
            )

    def _nothing(self) -> CheckpointError:
        path = self._found.source.path
        if self._left:
            name, reason = next(iter(self._left.items()))
            return CheckpointError(f"export: {self._layout.name} cannot hold {name}: {reason}")
        if self._choice.is_kept:
            return CheckpointError(
                f"export: {path} holds nothing quantized, so a format or a recipe is needed"
            )
        return CheckpointError(
            f"checkpoint: no tensor of {path} is chosen; chosen are matrices in FP32, BF16 or FP16 "
            "whose name ends in .weight, experts, what is quantized already, or what include "
            "patterns name"
        )

    def _targets(self, shard: Shard, item: Entry | Weight) -> list[_Target]:
        """Return the weights that a tensor becomes; none: it stays in high precision."""
        entry = item.entry if isinstance(item, Weight) else item
        if len(entry.shape) not in (2, 3):
            return []
        if is_expert_stack(entry.name, entry.shape):
            pieces = expert_pieces(shard, item, self._found.config, self._layout)
        else:
            pieces = [piece_of(shard, item)]
        made = []
        for piece in pieces:
            spec = self._choice.spec_of(entry, piece)
            if spec is None:
                reason = self._choice.reason_left(entry)
                if reason is not None:
                    self._left[entry.name] = reason
                return []
            reason = self._layout.reason_against(spec, piece.entry.shape)
            if reason is not None:
                self._left[entry.name] = reason
                return []
            made.append(self._target(piece, spec))
        return made

    def _target(self, piece: Piece, spec: PlaneSpec) -> _Target:
        shape, name = piece.entry.shape, piece.entry.name
        stored = self._layout.stored(name, spec, shape)
        own = piece.stored
        is_kept = (
            own is not None
            and own.direction == ROWWISE
            and stored.scheme.reason_against(own.spec, shape) is None
        )
        if own is not None and is_kept:
            spec = own.spec
        is_exact = (
            own is not None
            and own.direction == ROWWISE
            and can_be_exact(own.spec, stored.spec)
            and shape[-1] % 32 == 0
        )
        record = Record(name, Quantizer(spec, None), shape, piece.view.dtype)
        return _Target(piece, record, stored, is_kept, is_exact)

    def drafts(self, shard: Shard) -> list[Draft]:
        """Return what becomes of the tensors of a file.

        Args:
            shard: the file.
        """
        made = [draft for item in self._found.items(shard) for draft in self._drafts(shard, item)]
        caches = self._caches.get(shard.name, {})
        return made + [fixed(name, value) for name, value in caches.items()]

    def _drafts(self, shard: Shard, item: Entry | Weight) -> Iterator[Draft]:
        targets = self._targets(shard, item)
        if not targets:
            biases = bias_pieces(shard, item, self._found.config) if isinstance(item, Entry) else []
            if biases and all(_module(one) in self._schemes for one in biases):
                yield from (plain_piece(one) for one in biases)
            else:
                yield copied(item) if isinstance(item, Entry) else decoded(item)
            return
        entry = item.entry if isinstance(item, Weight) else item
        left = sum(one.nbytes for _, one in targets[0].piece.view.entries)
        for number, one in enumerate(targets):
            share = left // (len(targets) - number)
            left -= share
            yield self._draft(replace(entry, name=one.record.name), one, share)
            marks = one.stored.marks(self._inputs)
            yield from (fixed(name, value) for name, value in marks.items())
            yield from self._input_scale(one)

    def _draft(self, entry: Entry, target: _Target, nbytes: int) -> Draft:
        scheme = target.stored.scheme
        outputs = []
        for one in target.stored.tensors:
            key = (ROWWISE, one.part.buffer)
            dtype = dtype_name(one.dtype)
            part = one.part
            outputs.append(
                Output(one.name, dtype, one.shape, one.nbytes, key, part.write, order=part.order)
            )
        return Draft(
            entry,
            tuple(outputs),
            target.piece.view,
            target.record,
            target.is_kept,
            "" if target.is_kept else self._groups.get(target.record.name, ""),
            nbytes,
            scheme.as_stored,
            target.record.name in self._exact,
            units=scheme.units(target.record.shape[-1]),
        )

    def _input_scale(self, target: _Target) -> Iterator[Draft]:
        part = target.stored.scheme.input
        if self._inputs == "static" and part is not None:
            yield self._scales.input_draft(target.module, target.piece.weight, part)

    # ---- what the engine asks

    def beside(self, drafts: Sequence[Draft]) -> Sequence[Shard]:
        """Return the files in which siblings of these stand.

        Args:
            drafts: of one file.
        """
        groups = {draft.group for draft in drafts} - {""}
        found = {
            shard.name: shard
            for group in groups
            for _, view in self._members[group]
            for shard, _ in view.entries
        }
        return tuple(found.values())

    def members(self, group: str) -> Sequence[tuple[Record, View]]:
        """Return the weights that share an amax.

        Args:
            group: its name.
        """
        return self._members[group]

    def metadata(self, shard: Shard, drafts: Sequence[Draft]) -> Mapping[str, str]:
        """Return the source's metadata without what said how it was quantized.

        Args:
            shard: the source's file.
            drafts: what becomes of it.
        """
        del drafts
        return {
            "format": "pt",
            **without_records(shard.header.metadata),
        }  # transformers reads no file without it

    def identity(self) -> Mapping[str, Any]:
        """Return what tells this export from another one."""
        return {
            "layout": self._layout.name,
            **self._choice.as_dict(),
            "inputs": self._inputs,
            "kv_cache": self._kv_cache,
            "calibration": self._scales.digest(),
        }

    def _described(self) -> dict[str, Any]:
        return {"inputs": self._inputs, "kv_cache": self._kv_cache}

    def config(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the model's configuration with what is said of quantization.

        Args:
            config: what `config.json` holds.
        """
        said = self._layout.quantization_config(self._schemes, self._kept, **self._described())
        plain = without_quantization(config)
        return {**plain, **dict.fromkeys(self._layout.config_keys, said)} if said else plain

    def names(self) -> Sequence[str]:
        """Return the names of configurations beside `config.json`."""
        return () if self._layout.hf_quant_config is None else (HF_QUANT_CONFIG,)

    def replaces(self) -> Sequence[str]:
        """Return the names of configurations that say how the source is quantized."""
        return (HF_QUANT_CONFIG, RECORD)

    def documents(self, tensors: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the configurations beside `config.json`.

        Args:
            tensors: the record of each tensor.
        """
        del tensors
        made = self._layout.hf_quant_json(self._schemes, self._kept, **self._described())
        return {} if made is None else {HF_QUANT_CONFIG: made}


def _module(bias: Piece) -> str:
    return bias.entry.name.removesuffix(".bias")


def _is_linear(entry: Entry) -> bool:
    """Return whether a tensor may be a linear layer's weight, by its name."""
    is_table = any(fnmatch.fnmatchcase(entry.name, glob) for glob in EMBEDDINGS)
    return len(entry.shape) == 2 and entry.name.endswith(_SUFFIX) and not is_table
