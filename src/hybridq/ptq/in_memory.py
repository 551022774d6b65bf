"""A model in memory as a checkpoint: what `export` reads where there are no files.

Tensors have the names that transformers would save them under, where the model is one of its own.
Quantized ones are their planes' buffers, as in a checkpoint of hybridq's own, so nothing is encoded
that is there already. No tensor is copied before its turn comes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..errors import CheckpointError
from ..quantizers import Quantizer
from ..tensor import QuantizedTensor, is_quantized
from .files import as_bytes
from .header import Entry, Header, dtype_name
from .later import Later, now
from .model_config import without_quantization
from .model_word import class_name
from .record import METADATA_KEY, Record, records_text
from .source import CONFIG, SINGLE, Opened, Shard, Source

__all__ = ["source_of", "tied_without_telling"]

#: Bytes of the tensors of one file.
_SHARD_NBYTES: Final = 5 * 10**9
#: Rows of quantized tensors are followed through transformers' converters as numbers from here on.
_FIRST_TAG: Final = 1 << 40


class _Memory(Opened):
    """Tensors in memory, read as a file that has one after the other."""

    def __init__(
        self,
        entries: tuple[Entry, ...],
        tensors: Mapping[str, torch.Tensor],
        digests: dict[str, str],
    ) -> None:
        self._entries = entries
        self._tensors = tensors
        self._digests = digests
        self._begins = [entry.begin for entry in entries]
        self._last: tuple[str, memoryview] | None = None

    def read(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on, which are of one tensor."""
        if not len(out):
            return
        entry = self._entries[bisect_right(self._begins, offset) - 1]
        if self._last is None or self._last[0] != entry.name:
            self._last = None
            own = as_bytes(now(self._tensors[entry.name]).detach().cpu().contiguous())
            if entry.name not in self._digests:
                self._digests[entry.name] = hashlib.sha256(own).hexdigest()
            self._last = entry.name, own
        at = offset - entry.begin
        out[:] = self._last[1][at : at + len(out)]

    def will_need(self, offset: int, count: int) -> None:
        """Do nothing: it is in memory."""


@dataclass(frozen=True)
class MemoryShard(Shard):
    """Some tensors of a model.

    Args:
        tensors: by name.
        digests: SHA-256 of the bytes of those that were read, by name.
    """

    tensors: Mapping[str, torch.Tensor]
    digests: dict[str, str] = field(default_factory=dict, compare=False)

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """Give the tensors."""
        yield _Memory(self.header.entries, self.tensors, self.digests)

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"the model's {self.name}"

    def identity(self) -> dict[str, Any]:
        """Return what tells the tensors that were read from changed ones."""
        return {"header": self.header.digest, "tensors": dict(self.digests)}

    def is_same(self, found: object) -> bool:
        """Return whether the tensors that were read then still are what they were.

        Args:
            found: what `identity` returned then.
        """
        before = found.get("tensors") if isinstance(found, dict) else None
        if not isinstance(before, dict):
            return False
        if found != {"header": self.header.digest, "tensors": before}:
            return False
        with self.opened() as file:
            for entry in self.header.entries:
                if entry.name in before:
                    file.read(memoryview(bytearray(min(entry.nbytes, 1))), entry.begin)
        return before == {name: self.digests.get(name) for name in before}

    def check_unchanged(self) -> None:
        """Do nothing: who changes a model meanwhile does so in this process."""


def source_of(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Source:
    """Return the checkpoint of a model.

    Args:
        model: in memory, converted or not, its weights quantized or not.
        state: its tensors by name; some may be `Later`.

    Raises:
        CheckpointError: a tensor is on the meta device.
    """
    tensors: dict[str, torch.Tensor] = {}
    records: dict[str, Record] = {}
    for name, value in _on_disk(model, state).items():
        if value.is_meta:
            raise CheckpointError(f"export: {name} is on the meta device, so it has no values")
        if not isinstance(value, QuantizedTensor):
            tensors[name] = value
            continue
        record, buffers = _planes_of(name, value)
        records[name] = record
        tensors |= buffers
    shards = tuple(_shards(tensors, records))
    index: dict[str, Any] | None = {"metadata": {}} if len(shards) > 1 else None
    path = Path(f"<{class_name(model)}>")
    return Source(path, shards, index, (), (), _files(model))


def _files(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Return the configurations that transformers would save beside a model."""
    made: dict[str, Mapping[str, Any]] = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        own: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
        own.setdefault("architectures", [class_name(model)])
        dtype = getattr(model, "dtype", None)
        if isinstance(dtype, torch.dtype):
            own["dtype"] = str(dtype).removeprefix("torch.")
        made[CONFIG] = without_quantization(own)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        made["generation_config.json"] = json.loads(generation.to_json_string(use_diff=True))
    return made


def _planes_of(name: str, value: QuantizedTensor) -> tuple[Record, dict[str, torch.Tensor]]:
    """Return the record of a quantized tensor, and the buffers that it stands in."""
    storage = value.tensor_storage
    row, col = (
        None if plane is None else replace(plane.spec, stochastic=False)
        for plane in (storage.rowwise, storage.columnwise)
    )
    record = Record(name, Quantizer(row, col), tuple(value.shape), value.dtype)
    planes = {plane.direction: plane for plane in storage.planes}
    stored = record.stored()
    return record, {one.name: planes[one.direction].buffers[one.buffer] for one in stored}


def _shards(
    tensors: Mapping[str, torch.Tensor], records: Mapping[str, Record]
) -> Iterator[MemoryShard]:
    """Yield the tensors in files of at most so many bytes; a weight's own stay together."""
    owner = {one.name: name for name, record in records.items() for one in record.stored()}
    groups: list[dict[str, torch.Tensor]] = [{}]
    size, last = 0, ""
    for name, value in tensors.items():
        own = owner.get(name, name)
        if groups[-1] and size + value.nbytes > _SHARD_NBYTES and own != last:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size, last = size + value.nbytes, own
    count = len(groups)
    for number, group in enumerate(groups):
        file = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        begin, entries = 0, []
        for name, value in group.items():
            dtype, shape = dtype_name(value.dtype), tuple(value.shape)
            entries.append(Entry(name, dtype, shape, begin, begin + value.nbytes))
            begin += max(value.nbytes, 1)  # so that each begins at a place of its own
        names = dict.fromkeys(owner[one] for one in group if one in owner)
        metadata = {METADATA_KEY: records_text(records[one] for one in names)} if names else {}
        said = repr(([(one.name, one.dtype, one.shape) for one in entries], metadata))
        digest = hashlib.sha256(said.encode()).hexdigest()
        yield MemoryShard(Path(file), Header(tuple(entries), metadata, digest), begin, 0, group)


# ---- names


def _on_disk(model: nn.Module, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors by the names that they have in a file, tied ones once."""
    state = _without_tied(model, given)
    if not hasattr(model, "_weight_conversions") and not _is_of_transformers(model):
        return state
    loading: Any = import_module("transformers.core_model_loading")
    tags: dict[str, torch.Tensor] = {}
    sources: list[tuple[int, str]] = []
    first = _FIRST_TAG
    for name, value in state.items():
        if is_quantized(value):
            rows = value.shape[:-1]
            count = rows.numel()
            tags[name] = torch.arange(
                first, first + count, dtype=torch.int64, device="cpu"
            ).reshape(*rows, 1)
            sources.append((first, name))
            first += count
    made = loading.revert_weight_conversion(model, {**state, **tags})
    return {name: _tagged(value, state, sources) for name, value in made.items()}


def _is_of_transformers(model: nn.Module) -> bool:
    if importlib.util.find_spec("transformers") is None or not hasattr(model, "config"):
        return False
    modeling: Any = import_module("transformers.modeling_utils")
    return isinstance(model, modeling.PreTrainedModel)


def _without_tied(model: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state without the second names of tensors that have two."""
    known = getattr(model, "all_tied_weights_keys", None) or {}
    made: dict[str, torch.Tensor] = {}
    seen: dict[Any, str] = {}
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in sorted(state.items(), key=lambda pair: pair[0] in known):
        key = id(own[name]) if name in own else name
        if seen.setdefault(key, name) == name:
            made[name] = value
    return {name: made[name] for name in state if name in made}


def tied_without_telling(model: nn.Module) -> dict[str, str]:
    """Return names of parameters that are not written, and the name that each is written under.

    Those that transformers knows are left out: its models tie them when they are loaded.

    Args:
        model: in memory.
    """
    known = getattr(model, "all_tied_weights_keys", None) or {}
    seen: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(value), name)
        if first != name and name not in known and first not in known:
            found[name] = first
    return found


def _tagged(
    value: torch.Tensor, state: Mapping[str, torch.Tensor], sources: list[tuple[int, str]]
) -> torch.Tensor:
    """Return what transformers' converters made of a tensor, or of the tags of a quantized one."""
    if value.dtype != torch.int64 or isinstance(value, Later) or not value.numel():
        return value
    if int(value.min()) < _FIRST_TAG:
        return value
    at = bisect_right(sources, (int(value.min()), "\uffff")) - 1
    first, name = sources[at]
    whole = state[name]
    rows = value.flatten() - first
    if int(rows.max()) >= whole.shape[:-1].numel():
        raise CheckpointError(f"export: transformers puts {name} together with other weights")
    if whole.dim() == 2 and torch.equal(
        rows, torch.arange(len(whole), dtype=torch.int64, device="cpu")
    ):
        return whole
    matrix: torch.Tensor = whole
    if whole.dim() == 3:
        height = whole.shape[1]
        number = int(rows[0]) // height
        if value.dim() == 3 and len(rows) == whole.shape[0] * height:
            return whole
        matrix = whole[number]
        rows = rows - number * height
    begin, end = int(rows[0]), int(rows[0]) + len(rows)
    if end <= len(matrix) and torch.equal(
        rows, torch.arange(begin, end, dtype=torch.int64, device="cpu")
    ):
        return matrix if end - begin == len(matrix) else matrix[begin:end]
    return matrix.dequantize()[rows] if is_quantized(matrix) else matrix[rows]
