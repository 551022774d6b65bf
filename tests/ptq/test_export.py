"""Checkpoints written in other programs' layouts: the very planes, in whole runs and in tiles."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import INDEX, digests
from export_tools import EXPORTS, IDS, assert_same, expected, run, small_tiles, source, stored

__all__ = ["small_tiles", "source"]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("layout", "fmt", "spec"), EXPORTS, ids=IDS)
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_the_planes_bit_for_bit(layout, fmt, spec, size, source, tmp_path, request):
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    before = digests(source)
    notes = run(source, tmp_path / "out", layout=layout, format=fmt)
    assert_same(stored(tmp_path / "out"), expected(layout, fmt, spec))
    assert len(notes.outcome.tensors) == 12 and notes.outcome.num_copied == 4
    assert all(0 < one.worst < 0.2 for one in notes.outcome.tensors.values())
    assert digests(source) == before
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    found = {
        name: path.name
        for path in (tmp_path / "out").glob("*.safetensors")
        for name in load_file(path)
    }
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == notes.outcome.target_nbytes


def test_a_recipe_is_asked_for_each_weight(source, tmp_path):
    """A recipe's weights are in blocks of 16x16, which readers have as 1x16 of one scale."""
    spec = (
        hybridq.recipes.get("nvfp4")
        .quantizer(hybridq.QuantizerRole("linear", "weight", "model.layers.0.up_proj"))
        .rowwise
    )
    run(source, tmp_path / "out", layout="modelopt", recipe="nvfp4")
    assert_same(stored(tmp_path / "out"), expected("modelopt", "nvfp4", spec.text))
    with pytest.raises(hybridq.SpecError, match="a format or a recipe and not both"):
        run(source, tmp_path / "both", layout="modelopt", recipe="nvfp4", format="nvfp4")
    with pytest.raises(hybridq.SpecError, match="holds rowwise planes alone"):
        both = hybridq.quantizer("nvfp4", "mxfp8")
        run(source, tmp_path / "both", layout="modelopt", format=both)


@pytest.mark.parametrize(
    ("layout", "fmt", "text"),
    [
        ("modelopt", "fp8_rows", "scheme of modelopt must be one of nvfp4, fp8_tensor, mxfp8, "),
        ("fine-grained-fp8", "fp8_blok", "did you mean 'fp8_block'?; and as a format of hybridq"),
        ("modelopt", "nvfp4;4o7=mse", "4o7"),
    ],
)
def test_a_format_that_is_none_names_the_schemes_of_the_layout(layout, fmt, text, source, tmp_path):
    with pytest.raises(hybridq.SpecError) as caught:
        run(source, tmp_path / "out", layout=layout, format=fmt)
    assert text in str(caught.value) and not (tmp_path / "out").exists()


def test_what_a_layout_cannot_hold_stays_and_is_said(tmp_path):
    tensors = {"a.weight": torch.randn(32, 64), "b.weight": torch.randn(32, 72)}
    save_file(tensors, tmp_path / "in.safetensors")
    options = {"layout": "modelopt", "format": "nvfp4"}
    notes = run(tmp_path / "in.safetensors", tmp_path / "out.safetensors", **options)
    assert [text for text in notes.warnings if text.startswith("b.weight stays as it is")]
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["b.weight"], tensors["b.weight"]) and "a.weight_scale" in found


def test_what_it_did_prints_in_a_line(source, tmp_path):
    done = run(source, tmp_path / "out", layout="modelopt", format="nvfp4").outcome
    text = repr(done)
    assert "\n" not in text and len(text) < 600
    assert "12 tensors quantized, 4 copied" in text and done.worst[0] in text
