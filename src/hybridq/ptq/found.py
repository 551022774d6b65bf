"""The tensors of a checkpoint as what they mean: plain ones, and weights that are quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import CheckpointError
from ..layouts import (
    HYBRIDQ,
    Layout,
    Scheme,
    StoredWeight,
    TensorInfo,
    check_inputs_are_plain,
    detect,
)
from .disk import is_there, reading
from .files import read_json
from .header import TORCH_DTYPES, Entry, dtype_name
from .model_config import FILE_ENTRY, REFUSAL
from .record import Record, read_records
from .source import Shard, Source
from .views import PlaneView, Stored

__all__ = [
    "HF_QUANT_CONFIG",
    "QUANTIZATION",
    "Found",
    "Weight",
    "find",
    "hf_quant_config",
    "says_quantized",
    "value_dtype",
    "without_quantization",
]

#: Where ModelOpt's checkpoints say how they are quantized.
HF_QUANT_CONFIG: Final = "hf_quant_config.json"
#: The entry of `config.json` that says it in all others.
QUANTIZATION: Final = "quantization_config"
#: The part of a configuration of several models that is of the one for text.
_TEXT: Final = "text_config"
#: dtypes that quantized weights are kept in.
_CODES: Final = {"U8", "I8", "F8_E4M3", "F8_E5M2", "F4"}
#: What a configuration calls its tensors' dtype.
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Weight:
    """A weight that is quantized already.

    Args:
        entry: its name and shape, with the dtype that its values have when they are decoded.
        home: the file that has its codes.
        view: its values in FP32, and its planes.
        stored: how its layout holds it; None: it is hybridq's own.
        record: how hybridq has made it, or None.
    """

    entry: Entry
    home: Shard
    view: PlaneView
    stored: StoredWeight | None
    record: Record | None

    @property
    def scheme(self) -> Scheme | None:
        """How its layout holds its format; None: it is hybridq's own."""
        return None if self.stored is None else self.stored.scheme

    @property
    def dtype(self) -> torch.dtype:
        """Of its values when they are decoded for good."""
        return TORCH_DTYPES[self.entry.dtype]


@dataclass(frozen=True)
class Found:
    """What the tensors of a checkpoint are.

    Args:
        source: the checkpoint.
        config: of its model; empty if there is none.
        layout: of what is quantized in it; None: nothing is.
        weights: what is quantized, by the name of the tensor that holds its codes.
        parts: names of all tensors that a weight, or a scale of activations, stands in.
        scalars: scales of activations, by name.
    """

    source: Source
    config: Mapping[str, Any]
    layout: Layout | None
    weights: Mapping[str, Weight]
    parts: frozenset[str]
    scalars: Mapping[str, tuple[Shard, Entry]]

    def items(self, shard: Shard) -> Iterator[Entry | Weight]:
        """Yield the tensors and weights of a file in their order.

        Args:
            shard: of the source.
        """
        for entry in shard.header.entries:
            weight = self.weights.get(entry.name)
            if weight is not None:
                yield weight
            elif entry.name not in self.parts:
                yield entry


def find(source: Source, layout: Layout | None = None) -> Found:
    """Return what the tensors of a checkpoint are.

    Args:
        source: the checkpoint.
        layout: that it has; None: what its configuration and its tensors' names say.

    Raises:
        CheckpointError: it is quantized in a way that no layout reads, or damaged.
    """
    config = source.config
    entries: dict[str, tuple[Shard, Entry]] = {}
    infos: dict[str, TensorInfo] = {}
    for shard in source.shards:
        for entry in shard.header.entries:
            if entry.name in entries:
                raise CheckpointError(
                    f"checkpoint: {entry.name!r} is in {entries[entry.name][0].name} and in "
                    f"{shard.name}"
                )
            entries[entry.name] = (shard, entry)
            if entry.dtype in TORCH_DTYPES:
                infos[entry.name] = TORCH_DTYPES[entry.dtype], entry.shape
    check_inputs_are_plain(entries)
    records = _records(source)
    if layout is None and records:
        layout = HYBRIDQ
    elif layout is None and (says_quantized(config) or _has_codes(source)):
        layout = detect(config, infos, hf_quant_config(source))
    if layout is None or (layout is HYBRIDQ and not records):
        return Found(source, config, None, {}, frozenset(), {})
    out = value_dtype(config)
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    scalars: dict[str, tuple[Shard, Entry]] = {}
    if layout is HYBRIDQ:
        for record in records.values():
            own = _of_record(record, entries, source)
            weights[_codes(own)] = own
            parts.update(entry.name for _, entry in own.view.entries)
            parts.update(one.name for one in record.stored())
    else:
        for stored in layout.find(infos).values():
            own = _of_stored(stored, entries, out)
            weights[_codes(own)] = own
            parts.update(one.name for one in stored.tensors)
            module = stored.name.removesuffix(".weight")
            for scalar in () if stored.scheme.input is None else (stored.scheme.input,):
                name = scalar.name.format(module=module)
                if name in entries:
                    scalars[name] = entries[name]
        ends = {one.name.partition("}")[2] for kind in layout.kv.values() for one in kind}
        scalars |= {
            name: place for name, place in entries.items() if name.endswith(tuple(ends)) and ends
        }
    return Found(source, config, layout, weights, frozenset(parts | set(scalars)), scalars)


def value_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a model's weights have when they are not quantized.

    Args:
        config: of the model; BF16 where it says nothing.
    """
    for own in (config, config.get(_TEXT)):
        if isinstance(own, Mapping):
            said = own.get("dtype", own.get("torch_dtype"))
            if said in _DTYPES:
                return _DTYPES[said]
    return torch.bfloat16


def says_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration, or that of the text in it, says how it is quantized.

    Args:
        config: what `config.json` holds.
    """
    text = config.get(_TEXT)
    return QUANTIZATION in config or (isinstance(text, Mapping) and QUANTIZATION in text)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration without what is said of quantization.

    Args:
        config: what `config.json` holds.
    """
    made = {key: value for key, value in config.items() if key != QUANTIZATION}
    text = made.get(_TEXT)
    if isinstance(text, Mapping):
        made[_TEXT] = {key: value for key, value in text.items() if key != QUANTIZATION}
    if made.get(FILE_ENTRY) == REFUSAL:
        del made[FILE_ENTRY]
    return made


def _has_codes(source: Source) -> bool:
    """Return whether any tensor is of a dtype that codes have."""
    return any(entry.dtype in _CODES for shard in source.shards for entry in shard.header.entries)


def _codes(weight: Weight) -> str:
    return weight.view.buffers["data"].entry.name


def hf_quant_config(source: Source) -> Mapping[str, Any] | None:
    """Return what `hf_quant_config.json` of a checkpoint holds, or None if there is no such file.

    Args:
        source: the checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = source.path / HF_QUANT_CONFIG
    if not source.path.is_dir() or not is_there(path):
        return None
    with reading(path) as file:
        return read_json(file, path, "configuration")


def _records(source: Source) -> dict[str, Record]:
    made: dict[str, Record] = {}
    for shard in source.shards:
        for name, record in read_records(shard.header.metadata, shard.path).items():
            if made.setdefault(name, record) != record:
                raise CheckpointError(
                    f"checkpoint: two files of {source.path} say how {name!r} was quantized, and "
                    f"differ, got {made[name].quantizer.text} and {record.quantizer.text}"
                )
    return made


def _of_stored(
    stored: StoredWeight, entries: Mapping[str, tuple[Shard, Entry]], out: torch.dtype
) -> Weight:
    buffers = {}
    for one in stored.tensors:
        shard, entry = entries[one.name]
        buffers[one.part.buffer] = Stored(shard, entry, one.dtype, one.part)
    view = PlaneView(
        stored.spec, ROWWISE, stored.shape, buffers, torch.float32, base_rows=stored.matrix[0]
    )
    shard, codes = entries[stored.tensors[0].name]
    entry = Entry(stored.name, dtype_name(out), stored.shape, codes.begin, codes.end)
    return Weight(entry, shard, view, stored, None)


def _of_record(
    record: Record, entries: Mapping[str, tuple[Shard, Entry]], source: Source
) -> Weight:
    """Return a weight of hybridq's own: its rowwise plane, or the other where there is no such."""
    for one in record.stored():
        place = entries.get(one.name)
        asked = f"{dtype_name(one.dtype)} {list(one.shape)}"
        found = "none" if place is None else f"{place[1].dtype} {list(place[1].shape)}"
        if found != asked:
            path = source.path if place is None else place[0].path
            raise CheckpointError(
                f"checkpoint: {path} must hold {one.name!r} as {asked}, got {found}"
            )
    direction: Direction = ROWWISE if record.row is not None else COLUMNWISE
    spec = record.row if record.row is not None else record.col
    if spec is None:
        raise CheckpointError(f"checkpoint: {record.name!r} of {source.path} has no plane")
    buffers = {
        one.buffer: Stored(*entries[one.name], one.dtype)
        for one in record.stored()
        if one.direction == direction
    }
    rows, cols = record.matrix
    base = rows if direction == ROWWISE else cols
    view = PlaneView(spec, direction, record.shape, buffers, torch.float32, base_rows=base)
    shard, codes = entries[buffers["data"].entry.name]
    dtype = dtype_name(record.dtype)
    entry = Entry(record.name, dtype, record.shape, codes.begin, codes.end)
    return Weight(entry, shard, view, None, record)
