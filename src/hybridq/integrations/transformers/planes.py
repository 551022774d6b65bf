"""Planes in a checkpoint of transformers: put together as they are read, taken apart for saving.

transformers gives each tensor of a file a target by its key: first renamings, then at most one
converter, which may merge several tensors (the experts of a layer) or split one. A quantized weight
`NAME` is several tensors, `NAME.rowwise.data` and so on, whose keys would lead nowhere. So the keys
of planes are looked up in a table that says where `NAME` goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from ..._log import log_once
from ...direction import DIRECTIONS
from ...formats import BUFFER_NAMES
from ...ptq import Record
from ...tensor import QuantizedTensor, is_quantized
from .held import TAGS, Held, joined
from .merged_planes import leaves_alone, merged, puts_together

__all__ = [
    "LoadsPlanes",
    "Planes",
    "SavesPlanes",
    "beside_planes",
    "buffers_of",
    "conversions",
    "record_of",
    "targets",
]

#: What a tensor is collected under that is no plane, and goes past the model's converters.
_PLAIN = "#plain"
#: What stands behind the name of a weight in the names of its planes' buffers.
SUFFIXES = tuple(f".{direction}.{buffer}" for direction in DIRECTIONS for buffer in BUFFER_NAMES)


def record_of(name: str, tensor: QuantizedTensor) -> Record:
    """Return how a quantized parameter stands in a file.

    Args:
        name: of the parameter.
        tensor: a matrix.
    """
    storage, quantizer = tensor.tensor_storage, tensor.quantizer
    for direction, makes in quantizer.get_usages().items():
        if makes and getattr(storage, direction) is None:  # a plane that was dropped
            quantizer = quantizer.with_usage(**{direction: False})
    return Record(name, quantizer, tuple(tensor.shape), tensor.dtype)


def buffers_of(record: Record, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that hold a quantized parameter, by name.

    Args:
        record: `record_of` of the parameter.
        tensor: the parameter.
    """
    planes = {plane.direction: plane for plane in tensor.tensor_storage.planes}
    return {one.name: planes[one.direction].buffers[one.buffer].detach() for one in record.stored()}


class _Shared(dict[str, Any]):
    """A table that copies of its holder share: transformers copies a converter for each target."""

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class Planes(WeightConverter):
    """The buffers of each quantized weight become one parameter.

    It stands before the model's own converters, whose patterns would match the keys of planes.
    """

    __slots__ = ("records", "table")

    def __init__(self) -> None:
        self.table = _Shared()
        self.records = _Shared()
        super().__init__([*TAGS, _PLAIN], "", [JoinPlanes(self.records)])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return where a buffer goes, and the pattern that it is collected under."""
        return self.table.get(source_key, (source_key, None))

    def each(self) -> Iterator[tuple[str, Held]]:
        """Yield each quantized weight of the files, with the parameter that it goes to."""
        for name, by_pattern in self.records.items():
            for own in by_pattern.values():
                for held in own:
                    yield name, held

    def was_used(self) -> bool:
        """Return False: what saves planes is `SavesPlanes`."""
        return False


class SavesPlanes(WeightConverter):
    """Keeps the buffers of planes as they are when a model is saved.

    It stands behind the model's own converters, so that its reverse is asked before theirs, whose
    patterns match the keys of planes too. On the way in it takes nothing.
    """

    __slots__ = ("plain",)

    def __init__(self) -> None:
        super().__init__(["(no key)"], "", [_KeepPlanes()])
        #: Names of plain parameters that stay as they are too, since planes are beside them.
        self.plain: frozenset[str] = frozenset()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the key as it is."""
        return source_key, None

    def was_used(self) -> bool:
        """Return True: what is quantized on the way in is saved by its reverse as well."""
        return True

    def reverse_transform(self) -> WeightConverter:
        """Return what keeps buffers as they are, and the model's converters from them."""
        return _SavedPlanes(self.plain)


class _SavedPlanes(WeightConverter):
    __slots__ = ("plain",)

    def __init__(self, plain: frozenset[str]) -> None:
        super().__init__([*SUFFIXES, _PLAIN], "", [_KeepPlanes()])
        self.plain = plain

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.plain:
            return source_key, _PLAIN
        suffix = next((one for one in SUFFIXES if source_key.endswith(one)), None)
        return (source_key, None) if suffix is None else (source_key.removesuffix(suffix), suffix)


class DecodesFirst(WeightConverter):
    """A converter of the model that may be given planes.

    Those of experts are merged as they are where that can be. Else they are decoded before it
    works, since it could not cut blocks, and what it makes is in high precision.

    Args:
        own: the model's converter.
        records: as `Planes` has them.
    """

    __slots__ = ("own",)

    def __init__(self, own: Any, records: _Shared) -> None:
        patterns = [pattern + tag for pattern in own.source_patterns for tag in TAGS]
        super().__init__(
            [*own.source_patterns, *patterns],
            list(own._original_target_patterns),
            [MergePlanes(records, own)],
            force_cpu=own.force_cpu,
        )
        self.own = own

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return what the model's converter does."""
        return self.own.rename_source_key(source_key)

    def was_used(self) -> bool:
        """Return True: some planes are its."""
        return True

    def reverse_transform(self) -> Any:
        """Return the reverse of the model's converter: what it made was saved as plain tensors."""
        return self.own.reverse_transform()


class JoinPlanes(ConversionOps):
    """Makes a quantized parameter of the buffers of its planes.

    Args:
        records: by target and pattern, the records in the order of their tensors.
    """

    supports_many_to_many = True
    #: That transformers leaves the tensors' dtypes alone: scales are FP32 in a BF16 model.
    hf_quantizer = True

    def __init__(self, records: _Shared) -> None:
        self.records = records

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, **_: Any
    ) -> dict[str, Any]:
        """Return the parameter under its name."""
        own = model.get_parameter_or_buffer(full_layer_name)
        if _PLAIN in input_dict:
            plain = input_dict[_PLAIN][0].to(own.dtype)
            return {full_layer_name: nn.Parameter(plain, own.requires_grad)}
        (held,) = self.records[full_layer_name][""]
        found = dict(zip(held.tensors, (input_dict[tag][0] for tag in TAGS), strict=False))
        value: torch.Tensor = held.join(found, own)
        if len(held.shape) == 3 and not is_quantized(own):  # no module that computes with planes
            value = value.dequantize()
        return {full_layer_name: nn.Parameter(value.to(own.dtype), own.requires_grad)}


class MergePlanes(JoinPlanes):
    """Does with planes, or with what they decode to, what a converter of the model does.

    Args:
        records: as `JoinPlanes` takes them.
        own: the converter.
    """

    def __init__(self, records: _Shared, own: Any) -> None:
        super().__init__(records)
        self.own = own

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, **others: Any
    ) -> dict[str, Any]:
        """Return what the converter makes: one quantized parameter, or plain tensors.

        Raises:
            ValueError: of tensors that belong together some are quantized and some are not.
        """
        own = model.get_parameter_or_buffer(full_layer_name)
        parts = self._parts(input_dict, full_layer_name, own)
        if is_quantized(own) and not input_dict:
            whole, why = self._whole(parts, own)
            if whole is not None:
                return {full_layer_name: nn.Parameter(whole.to(own.dtype), own.requires_grad)}
            log_once(
                f"from_pretrained: {full_layer_name}",
                f"from_pretrained: {full_layer_name} {list(own.shape)} is in high precision: {why}",
            )
        made: dict[str, Any] = {
            pattern: [one.dequantize().to(own.dtype) for one in tensors]
            for pattern, tensors in parts.items()
        }
        for pattern, tensors in input_dict.items():
            made[pattern] = [one.to(own.dtype) for one in tensors]
        for operation in self.own.operations:
            about = {"full_layer_name": full_layer_name, "model": model, **others}
            made = operation.convert(made, **about)
        return made

    def _whole(
        self, parts: dict[str, list[QuantizedTensor]], own: Any
    ) -> tuple[QuantizedTensor | None, str]:
        """Return the parameter's planes, made of those of the file; or None, and why not."""
        operations = self.own.operations
        if puts_together(operations) and own.tensor_storage.count is not None:
            in_order = sorted(parts, key=self.own.source_patterns.index)
            why = "the planes of its matrices in the file cannot stand beside each other, since "
            why += "their second-level scales or blocks differ"
            return merged([parts[pattern] for pattern in in_order]), why
        found = [one for tensors in parts.values() for one in tensors]
        if len(found) == 1 and leaves_alone(operations) and found[0].shape == own.shape:
            return found[0], ""
        names = ", ".join(type(one).__name__ for one in operations)
        return None, f"the planes in the file are of another form of it, before {names}"

    def _parts(
        self, input_dict: dict[str, Any], full_layer_name: str, like: Any
    ) -> dict[str, list[QuantizedTensor]]:
        """Return the quantized tensors by pattern, and take their buffers out."""
        behind = self.records.get(full_layer_name, {})
        made: dict[str, list[QuantizedTensor]] = {}
        for pattern, records in behind.items():
            if pattern in input_dict:
                raise ValueError(
                    f"from_pretrained: the tensors that make {full_layer_name} must be quantized "
                    f"all or none, got {len(records)} quantized and {len(input_dict[pattern])} not"
                )
            tags = [tag for tag in TAGS if pattern + tag in input_dict]
            found = {tag: iter(input_dict.pop(pattern + tag)) for tag in tags}
            made[pattern] = []
            for held in records:  # of each tensor the next one: a list has them in this order
                own = {
                    name: next(found[tag]) for name, tag in zip(held.tensors, TAGS, strict=False)
                }
                is_it = leaves_alone(self.own.operations) and held.fits(like)
                made[pattern].append(held.join(own, like if is_it else None))
        return made


class _KeepPlanes(ConversionOps):
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, **_: Any
    ) -> dict[str, torch.Tensor]:
        return {
            full_layer_name + suffix.removeprefix(_PLAIN): tensors[0]
            for suffix, tensors in input_dict.items()
        }


class LoadsPlanes:
    """A hook before `load_state_dict` that makes quantized weights of the buffers of their planes.

    So that who reads the files of a saved model with `load_state_dict`, as Trainer does when it
    resumes, loads all of it. Buffers of one weight may come in several calls, one for each shard.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[str, torch.Tensor]] = {}

    def __call__(
        self, model: nn.Module, state: dict[str, Any], prefix: str, *others: object
    ) -> None:
        """Replace the buffers of planes in a state_dict.

        Args:
            model: that it is for.
            state: the state_dict.
            prefix: of the model's keys.
            others: torch's own.
        """
        for name, value in model.named_parameters():
            if not is_quantized(value) or prefix + name in state:
                continue
            record = record_of(prefix + name, value)  # type: ignore[arg-type]
            names = [one.name for one in record.stored()]
            found = self._found.setdefault(name, {})
            found.update({one: state.pop(one) for one in names if one in state})
            if all(one in found for one in names):
                state[prefix + name] = joined(record, self._found.pop(name), value)


def conversions(
    known: Sequence[Any], model: Any, held: Iterable[Held], checks_shapes: bool = True
) -> list[Any]:
    """Return a model's weight conversions, with those of planes before them.

    Args:
        known: the model's own.
        model: whose names and shapes are compared.
        held: the quantized weights in the files.
        checks_shapes: the model is converted, and shapes are compared.

    Raises:
        ValueError: a weight has another shape than the parameter that it is for.
    """
    renamings = [deepcopy(one) for one in known if isinstance(one, WeightRenaming)]
    own = [one for one in known if isinstance(one, WeightConverter)]
    planes, decoding = Planes(), dict[int, DecodesFirst]()
    in_order = sorted(held, key=lambda one: dot_natural_key(one.name))
    for one in in_order:
        target, pattern = apply_converters(apply_renamings(one.name, renamings), deepcopy(own))
        for name, tag in zip(one.tensors, TAGS, strict=False):
            planes.table[apply_renamings(name, renamings)] = (target, (pattern or "") + tag)
        if pattern is not None:
            first = next(converter for converter in own if pattern in converter.source_patterns)
            decoding.setdefault(id(first), DecodesFirst(first, planes.records))
    made = [planes, *(decoding.get(id(one), one) for one in known), SavesPlanes()]
    state, wrong = model.state_dict(keep_vars=True), []
    prefix = f"{model.base_model_prefix}."
    names = {*state, *(prefix + one for one in state), *(one.removeprefix(prefix) for one in state)}
    of_planes = {apply_renamings(one.name, renamings) for one in in_order}
    for name in beside_planes(own, of_planes, names):
        planes.table[name] = (name, _PLAIN)
    for one in in_order:
        name, pattern = rename_source_key(
            one.tensors[0], renamings, [planes], model.base_model_prefix, state
        )
        base = pattern.removesuffix(TAGS[0])
        planes.records.setdefault(name, {}).setdefault(base, []).append(one)
        if checks_shapes and not base and name in state and not one.fits(state[name]):
            wrong.append(f"{name} {tuple(state[name].shape)} of {one.name} {one.shape}")
    if wrong:
        raise ValueError(
            "from_pretrained: a quantized weight must have its parameter's shape, got "
            f"{'; '.join(wrong[:8])}{f' and {len(wrong) - 8} more' if len(wrong) > 8 else ''}"
        )
    return made


def beside_planes(known: Iterable[Any], of_planes: set[str], names: Iterable[str]) -> set[str]:
    """Return the names of plain tensors that a file of planes has under the model's own names.

    A converter that splits a tensor of the file would put it together again of what is left of its
    parts, where some of them are planes.

    Args:
        known: the model's weight conversions.
        of_planes: names of quantized weights, those of the model.
        names: of its parameters.
    """
    found: set[str] = set()
    for one in known:
        if not isinstance(one, WeightConverter) or len(one.target_patterns) < 2:
            continue
        try:
            back = one.reverse_transform()
        except NotImplementedError:  # of one direction alone
            continue
        whole = {back.rename_source_key(name)[0] for name in of_planes} - of_planes
        renamed = {name: back.rename_source_key(name) for name in names if name not in of_planes}
        found |= {name for name, (to, pattern) in renamed.items() if pattern and to in whole}
    return found


def targets(made: Sequence[Any]) -> set[str]:
    """Return the names of the parameters that quantized weights of the files go to.

    Args:
        made: what `conversions` returned.
    """
    return {name for one in made if isinstance(one, Planes) for name in one.records}
