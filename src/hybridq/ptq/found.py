"""The tensors of a checkpoint as what they mean: plain ones, and weights that are quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import CheckpointError, warn
from ..layouts import (
    COMFYUI,
    DEEPSEEK_V4,
    HYBRIDQ,
    Layout,
    Said,
    Scheme,
    StoredWeight,
    TensorInfo,
    check_inputs_are_plain,
    check_is_no_other,
    detect,
)
from .conv1d import are_transposed, is_module_of_kind, uses_conv1d
from .disk import is_there, reading
from .files import read_json
from .header import TORCH_DTYPES, Entry, dtype_name
from .model_config import says_quantized, value_dtype
from .record import Record, read_records
from .source import Shard, Source
from .views import PlaneView, Stored

__all__ = [
    "HF_QUANT_CONFIG",
    "Found",
    "Weight",
    "find",
    "hf_quant_config",
]

#: Where ModelOpt's checkpoints say how they are quantized.
HF_QUANT_CONFIG: Final = "hf_quant_config.json"
#: dtypes that quantized weights are kept in.
_CODES: Final = {"U8", "I8", "F8_E4M3", "F8_E5M2", "F4"}
#: The plane for the forward of a weight `[out, in]`, and the other.
_ROW_FIRST: Final[tuple[Direction, ...]] = (ROWWISE, COLUMNWISE)


@dataclass(frozen=True)
class Weight:
    """A weight that is quantized already.

    Args:
        entry: its name and shape, with the dtype that its values have when they are decoded.
        home: the file that has its codes.
        view: its values in FP32, and its planes.
        stored: how its layout holds it; None: it is hybridq's own.
        record: how hybridq has made it, or None.
        other: of hybridq's own, the plane that `view` does not see, if the file has one.
    """

    entry: Entry
    home: Shard
    view: PlaneView
    stored: StoredWeight | None
    record: Record | None
    other: PlaneView | None = None

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
        has_conv1d: the model keeps the weights of `conv1d` as `[in, out]`; their entries say so.
    """

    source: Source
    config: Mapping[str, Any]
    layout: Layout | None
    weights: Mapping[str, Weight]
    parts: frozenset[str]
    scalars: Mapping[str, tuple[Shard, Entry]]
    has_conv1d: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors and quantized weights, as rules of names see them."""
        items = (item for shard in self.source.shards for item in self.items(shard))
        return tuple(one.entry.name if isinstance(one, Weight) else one.name for one in items)

    @property
    def has_stacks(self) -> bool:
        """Whether any tensor is a stack of matrices."""
        items = (item for shard in self.source.shards for item in self.items(shard))
        entries = (one.entry if isinstance(one, Weight) else one for one in items)
        return any(len(one.shape) == 3 for one in entries)

    @property
    def plain(self) -> Iterator[Entry]:
        """All tensors that are not quantized, nor parts of one that is."""
        for shard in self.source.shards:
            yield from (one for one in self.items(shard) if isinstance(one, Entry))

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
                yield _marked(entry, self.has_conv1d)


def find(source: Source, layout: Layout | None = None) -> Found:
    """Return what the tensors of a checkpoint are.

    Args:
        source: the checkpoint.
        layout: that it has; None: what its configuration and its tensors' names say.

    Raises:
        CheckpointError: it is quantized in a way that no layout reads, has nothing in the layout
            that is given, or is damaged.
    """
    config, is_told = source.config, layout is not None
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
    check_inputs_are_plain(entries, config)
    records = _records(source)
    if layout is None and records:
        layout = HYBRIDQ
    elif layout is None and (says_quantized(config) or _has_codes(source)):
        if not says_quantized(config):
            check_is_no_other(infos, _metadata(source))  # names alone say less
        layout = detect(config, infos, hf_quant_config(source), _metadata(source))
        layout = DEEPSEEK_V4 if layout is None and _are_of_deepseek_v4(infos) else layout
    if not records:
        check_is_no_other(infos, _metadata(source), is_comfyui=layout is COMFYUI)
    if layout is None or (layout is HYBRIDQ and not records):
        if is_told and layout is not None:
            raise _nothing_in(source, layout)
        has_conv1d = _has_conv1d(config, entries, {})
        return Found(source, config, None, {}, frozenset(), {}, has_conv1d)
    scalars: dict[str, tuple[Shard, Entry]] = {}
    if layout is HYBRIDQ:
        parts = {one.name for record in records.values() for one in record.stored()}
        plain = {name: place for name, place in entries.items() if name not in parts}
        shapes = {record.name: record.shape for record in records.values()}
        has_conv1d = _has_conv1d(config, plain, shapes)
        made = [_of_record(one, entries, source, has_conv1d) for one in records.values()]
    else:
        marks = {
            name: bytes(shard.read(entry.begin, entry.nbytes).tolist())
            for name, (shard, entry) in entries.items()
            if layout.is_mark(name)
        }
        said = Said(tuple(entries), _headers(source), marks)
        found = layout.find(infos, said).values()
        if is_told and not found:
            raise _nothing_in(source, layout)
        if not found:
            warn(
                f"checkpoint: the configuration of {source.path} says that weights are quantized "
                f"({layout.name}), and none of its tensors is; they are taken as they are",
            )
        parts = {one.name for stored in found for one in stored.tensors}
        plain = {name: place for name, place in entries.items() if name not in parts}
        has_conv1d = _has_conv1d(config, plain, {stored.name: stored.shape for stored in found})
        out = value_dtype(config)
        made = [_of_stored(stored, entries, out, has_conv1d) for stored in found]
        scalars = _scalars(layout, found, entries)
    weights = {one.view.buffers["data"].entry.name: one for one in made}
    every = frozenset(parts | set(scalars) | set(filter(layout.is_mark, entries)))
    return Found(source, config, layout, weights, every, scalars, has_conv1d)


def _headers(source: Source) -> tuple[Mapping[str, str], ...]:
    """Return what the header of each file says."""
    return tuple(shard.header.metadata for shard in source.shards)


def _metadata(source: Source) -> dict[str, str]:
    """Return what the headers of all files say; of what several say, the last one's."""
    return Said((), _headers(source), {}).metadata


def _nothing_in(source: Source, layout: Layout) -> CheckpointError:
    return CheckpointError(
        f"checkpoint: {source.path} holds no weight in the layout {layout.name}, which it was said "
        "to have; leave that out"
    )


def _has_conv1d(
    config: Mapping[str, Any],
    plain: Mapping[str, tuple[Shard, Entry]],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Return whether a model keeps the weights of `conv1d` as `[in, out]`.

    Args:
        config: of the model.
        plain: its tensors that are not quantized.
        shapes: of its weights that are.
    """
    weights = [Entry(name, "", shape, 0, 0) for name, shape in shapes.items()]
    return are_transposed((*weights, *(entry for _, entry in plain.values())), uses_conv1d(config))


def _marked(entry: Entry, has_conv1d: bool) -> Entry:
    """Return an entry, which says whether its model keeps it as `[in, out]`."""
    return replace(entry, is_transposed=True) if has_conv1d and is_module_of_kind(entry) else entry


def _scalars(
    layout: Layout,
    found: Iterable[StoredWeight],
    entries: Mapping[str, tuple[Shard, Entry]],
) -> dict[str, tuple[Shard, Entry]]:
    """Return the scales of inputs and of KV caches, by name."""
    inputs = [
        one.scheme.input.name.format(module=one.name.removesuffix(".weight"))
        for one in found
        if one.scheme.input is not None
    ]
    ends = tuple(one.name.partition("}")[2] for kind in layout.kv.values() for one in kind)
    caches = [name for name in entries if ends and name.endswith(ends)]
    return {name: entries[name] for name in (*inputs, *caches) if name in entries}


def _has_codes(source: Source) -> bool:
    """Return whether any tensor is of a dtype that codes have."""
    return any(entry.dtype in _CODES for shard in source.shards for entry in shard.header.entries)


def _are_of_deepseek_v4(infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether codes have a scale under a name that says nothing without them."""
    for name, (dtype, _) in infos.items():
        if not f".{name}".endswith(".weight"):
            continue
        scale = infos.get(f"{name.removesuffix('weight')}scale")
        is_fp4 = dtype == torch.int8 and scale is not None and scale[0] == torch.float8_e8m0fnu
        if is_fp4 or (dtype == torch.float8_e4m3fn and scale is not None):
            return True
    return False


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
    stored: StoredWeight,
    entries: Mapping[str, tuple[Shard, Entry]],
    out: torch.dtype,
    has_conv1d: bool,
) -> Weight:
    buffers = {}
    for one in stored.tensors:
        shard, entry = entries[one.name]
        buffers[one.part.buffer] = Stored(shard, entry, one.dtype, one.part)
    view = PlaneView(
        *(stored.spec, ROWWISE, stored.shape, buffers, torch.float32),
        base_rows=stored.matrix[0],
        constants=stored.scheme.constant_buffers(stored.spec, torch.device("cpu")),
    )
    shard, codes = entries[stored.tensors[0].name]
    entry = Entry(stored.name, dtype_name(out), stored.shape, codes.begin, codes.end)
    return Weight(_marked(entry, has_conv1d), shard, view, stored, None)


def _of_record(
    record: Record,
    entries: Mapping[str, tuple[Shard, Entry]],
    source: Source,
    has_conv1d: bool,
) -> Weight:
    """Return a weight of hybridq's own: its plane for the forward, or the other if it has one."""
    for one in record.stored():
        place = entries.get(one.name)
        asked = f"{dtype_name(one.dtype)} {list(one.shape)}"
        found = "none" if place is None else f"{place[1].dtype} {list(place[1].shape)}"
        if found != asked:
            path = source.path if place is None else place[0].path
            raise CheckpointError(
                f"checkpoint: {path} must hold {one.name!r} as {asked}, got {found}"
            )
    shape = record.shape
    entry = _marked(Entry(record.name, dtype_name(record.dtype), shape, 0, 0), has_conv1d)
    ways: tuple[Direction, ...] = (COLUMNWISE, ROWWISE) if entry.is_transposed else _ROW_FIRST
    planes = {way: spec for way, spec, _ in record.plane_buffers()}
    if not planes:
        raise CheckpointError(f"checkpoint: {record.name!r} of {source.path} has no plane")
    views = []
    for direction in (way for way in ways if way in planes):
        buffers = {
            one.buffer: Stored(*entries[one.name], one.dtype)
            for one in record.stored()
            if one.direction == direction
        }
        base = record.matrix[0 if direction == ROWWISE else 1]
        spec = planes[direction]
        views.append(PlaneView(spec, direction, shape, buffers, torch.float32, base_rows=base))
    view, other = views[0], views[1] if len(views) == 2 else None
    shard, codes = entries[view.buffers["data"].entry.name]
    entry = replace(entry, begin=codes.begin, end=codes.end)
    return Weight(entry, shard, view, None, record, other)
