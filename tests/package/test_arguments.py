"""Wrong arguments at the public door are named, before anything is changed or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hybridq


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def export(**changed: Any) -> Any:
    given: dict[str, Any] = {"source": net(), "target": "out", "layout": "compressed-tensors"}
    return hybridq.export(**given | {"format": "mxfp8"} | changed)


def convert_checkpoint(**changed: Any) -> Any:
    given: dict[str, Any] = {"source": "in.safetensors", "target": "out.safetensors"}
    return hybridq.convert_checkpoint(**given | {"selection": "mxfp8"} | changed)


CASES: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "convert: also": (lambda bad: hybridq.convert(net(), also=bad), (None, 3, "heads")),
    "convert: fuse": (lambda bad: hybridq.convert(net(), fuse=bad), (None, "no", 1)),
    "conversion: model": (hybridq.conversion, (None, "x", nn.Linear)),
    "conversion: filter_fn": (lambda bad: hybridq.conversion(net(), bad), ("x", [])),
    "quantize_model: activations": (
        lambda bad: hybridq.quantize_model(net(), "mxfp8", activations=bad),
        ([], {}, None),
    ),
    "dequantized_state_dict: module": (hybridq.dequantized_state_dict, (None, {})),
    "RecipeSchedule: phases": (hybridq.RecipeSchedule, (None, 3, "mxfp8")),
    "export: source": (lambda bad: export(source=bad), (None, 3, "", [])),
    "export: target": (lambda bad: export(target=bad), (None, 3, "", b"out")),
    "export: options": (lambda bad: export(options=bad), ("", {}, 3)),
    "export: observer": (lambda bad: export(observer=bad), ("", [], print)),
    "export: kv_cache": (lambda bad: export(kv_cache=bad), ([], {})),
    "calibration: path": (lambda bad: export(calibration=bad), ([], 3, "")),
    "layouts: a layout": (lambda bad: export(layout=bad), ([], None)),
    "convert_checkpoint: source": (lambda bad: convert_checkpoint(source=bad), (None, "")),
    "convert_checkpoint: target": (lambda bad: convert_checkpoint(target=bad), (None, "")),
    "convert_checkpoint: options": (lambda bad: convert_checkpoint(options=bad), ({}, 0)),
    "checkpoint: the source": (hybridq.load_checkpoint, (None, "", 3)),
}


@pytest.mark.parametrize(
    ("named", "call", "bad"),
    [(named, call, bad) for named, (call, every) in CASES.items() for bad in every],
)
def test_the_argument_is_named_and_nothing_is_written(
    named: str, call: Callable[[Any], Any], bad: Any, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.ones(32, 32)}, "in.safetensors")
    with pytest.raises((TypeError, ValueError)) as error:
        call(bad)
    assert named in str(error.value).splitlines()[0]
    assert [one.name for one in tmp_path.iterdir()] == ["in.safetensors"]
