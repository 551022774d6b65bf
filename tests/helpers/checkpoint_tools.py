"""Checkpoints for tests: whole, sharded and broken ones, and comparisons of what they become."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hybridq.ptq import Checkpoint, ConvertOptions, Observer, Selection, convert_checkpoint
from hybridq.quantizers import Quantizer

INDEX = "model.safetensors.index.json"


class Notes(Observer):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.shards: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    def begin(self, nbytes: int) -> None:
        self.total = nbytes

    def shard(self, name: str, what: str) -> None:
        self.shards.append((name, what))

    def advance(self, nbytes: int) -> None:
        self.done += nbytes

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def convert(source: Path, target: Path, selection: Selection | Quantizer, **options: Any) -> Notes:
    """Convert, and return what the observer was told."""
    chosen = selection if isinstance(selection, Selection) else Selection(selection)
    notes = Notes()
    notes.outcome = convert_checkpoint(source, target, chosen, ConvertOptions(**options), notes)
    return notes


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    """Write a file with this header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_sharded(folder: Path, shards: list[dict[str, torch.Tensor]], **metadata: Any) -> Path:
    """Write a folder in Hugging Face's layout, with a configuration beside the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards):
        name = shard_name(number, len(shards))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text('{"hidden_size": 32}')
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))
    return folder


def assert_same_planes(got: Any, want: Any) -> None:
    """Both tensors have the same planes bit for bit, and share the same buffers."""
    assert (got.shape, got.dtype, type(got)) == (want.shape, want.dtype, type(want))
    ours, theirs = got.tensor_storage, want.tensor_storage
    assert len(ours.planes) == len(theirs.planes) > 0
    for plane, other in zip(ours.planes, theirs.planes, strict=True):
        assert (plane.spec, plane.direction) == (other.spec, other.direction)
        assert (plane.rows, plane.cols) == (other.rows, other.cols)
        assert list(plane.buffers) == list(other.buffers)
        for name, buffer in plane.buffers.items():
            expected = other.buffers[name]
            assert (buffer.shape, buffer.dtype) == (expected.shape, expected.dtype)
            same = buffer.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
            assert torch.equal(*same), (plane.direction, name)
    names = [[name for name, _ in storage.named_buffers()] for storage in (ours, theirs)]
    assert names[0] == names[1]


def assert_planes_of(checkpoint: Checkpoint, name: str, source: torch.Tensor, q: Quantizer) -> None:
    """A tensor of the checkpoint has the planes that the quantizer makes of `source`."""
    got = checkpoint[name]
    if source.dim() == 2:
        assert_same_planes(got, q(source))
        return
    assert len(got) == source.shape[0]
    for own, matrix in zip(got, source, strict=True):
        assert_same_planes(own, q(matrix))


def digests(folder: Path) -> dict[str, str]:
    """Return path to SHA-256 of every file below `folder`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def relative_error(decoded: torch.Tensor, source: torch.Tensor) -> float:
    """Return the relative RMS error in FP64."""
    x = source.double()
    return math.sqrt(float((decoded.double() - x).square().sum() / x.square().sum()))
