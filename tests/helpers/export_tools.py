"""Checkpoints in other programs' layouts, and what they must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import INDEX, Notes, write_sharded
from hybridq import layouts
from hybridq.ptq import ConvertOptions
from hybridq.ptq.budget import Budget

#: Layout and format, and the spec that its planes are encoded by.
EXPORTS = [
    ("compressed-tensors", "nvfp4", "nvfp4"),
    ("compressed-tensors", "nvfp4_16x16;4o6=mse", "nvfp4_16x16;4o6=mse"),
    ("compressed-tensors", "mxfp8", "mxfp8"),
    ("compressed-tensors", "mxfp4", "mxfp4"),
    ("compressed-tensors", "fp8_tensor", "fp8_e4m3"),
    ("compressed-tensors", "fp8_channel", "e4m3/1x256/fp32/amax/float8_block"),
    ("compressed-tensors", "fp8_block", "e4m3/128x128/fp32/amax/float8_block"),
    ("modelopt", "nvfp4", "nvfp4"),
    ("modelopt", "mxfp8", "mxfp8"),
    ("fine-grained-fp8", "fp8_block", "e4m3/128x128/fp32/amax/float8_block"),
    ("fine-grained-fp8", "mxfp8", "mxfp8"),
]
IDS = [f"{layout}-{fmt}" for layout, fmt, _ in EXPORTS]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
HEIGHTS = (64, 32, 32, 48, 160, 160)
#: Linears that readers multiply with at once.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tensors are read in tiles of at most 600 values, or the smallest that cut no block."""
    monkeypatch.setattr(Budget, "most_values", lambda self, record: 600)


def run(source: Path, target: Path, **options: Any) -> Notes:
    """Export, and return what the observer was told."""
    notes = Notes()
    known = {key: options.pop(key) for key in ("memory", "measure", "strict") if key in options}
    options["options"] = ConvertOptions(**known, overwrite=options.pop("overwrite", False))
    notes.outcome = hybridq.export(source, target, observer=notes, **options)
    assert notes.done == notes.total
    return notes


def model(layers: int = 2) -> list[dict[str, torch.Tensor]]:
    """Siblings of a layer stand in different shards, and differ in size."""
    torch.manual_seed(5)
    shards: list[dict[str, torch.Tensor]] = [{"model.embed_tokens.weight": torch.randn(40, 256)}]
    for i in range(layers):
        own = {
            f"model.layers.{i}.{name}.weight": torch.randn(rows, 256) * (1 + number)
            for number, (name, rows) in enumerate(zip(LINEARS, HEIGHTS, strict=True))
        }
        own[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(256)
        half = dict(list(own.items())[: 2 + i])
        shards[-1] |= half
        shards.append({name: value for name, value in own.items() if name not in half})
    shards[-1]["lm_head.weight"] = torch.randn(40, 256)
    return [{name: value.bfloat16() for name, value in one.items()} for one in shards]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_sharded(tmp_path / "in", model())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def shuffled(folder: Path) -> Path:
    """Put every tensor of a folder into another shard than its neighbours', names in order."""
    tensors = stored(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    weight_map = {}
    for number, file in enumerate(files):
        own = {name: tensors[name] for name in sorted(tensors)[number :: len(files)]}
        save_file(own, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected(
    layout: str, fmt: str, spec: str, values: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """What the layout makes of planes that are encoded in one piece, siblings with one amax.

    Args:
        layout, fmt, spec: one of `EXPORTS`.
        values: of the checkpoint; None: those of `model`.
    """
    del fmt
    tensors = dict(values or {name: value for shard in model() for name, value in shard.items()})
    own, plane = layouts.get(layout), hybridq.PlaneSpec.parse(spec)
    made = {}
    for i in range(2):
        for group in SIBLINGS:
            names = [f"model.layers.{i}.{one}.weight" for one in group]
            amax = torch.stack([tensors[name].float().abs().max() for name in names]).max()
            for name in names:
                x = tensors.pop(name)
                scheme = own.stored(name, plane, x.shape)
                shares = scheme.scheme.shares_scale and plane.needs_tensor_amax
                stat = amax.reshape(1) if shares else None
                buffers = torch.ops.hybridq.encode(x, plane.text, "", stat)
                named = zip((b.name for b in plane.buffers(1, 1)), buffers, strict=True)
                encoded = hybridq.Plane(plane, "rowwise", *x.shape, named)
                made |= scheme.encode([encoded])
    return made | tensors


def assert_same(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], within: str = " "
) -> None:
    """Names, dtypes, shapes and bytes are the same.

    Args:
        got, want: tensors by name.
        within: end of the names of second-level scales that may differ by two ulp: a factor says
            less of an amax than its last bit.
    """
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        if name.endswith(within):
            assert torch.allclose(got[name], value, rtol=2.0**-22, atol=0.0), name
            continue
        same = got[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
