"""Checkpoints that are quantized already: decoded exactly, renamed, or encoded anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from checkpoint_tools import INDEX, convert
from export_tools import (
    EXPORTS,
    IDS,
    assert_same,
    expected,
    run,
    shuffled,
    small_tiles,
    source,
    stored,
)
from hybridq import layouts

__all__ = ["small_tiles", "source"]


def quantized(source: Path, folder: Path, layout: str, fmt: str) -> Path:
    """The source in a layout, with a configuration that says so, its tensors in any shard."""
    (source / "config.json").write_text('{"model_type": "none", "dtype": "bfloat16"}')
    run(source, folder, layout=layout, format=fmt)
    return shuffled(folder)


def decoded(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """The FP32 values of all weights that are quantized, and all others as they are."""
    tensors = stored(folder)
    found = layouts.get(layout).find({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    made = {}
    for name, weight in found.items():
        (plane,) = weight.decode(tensors)
        made[name] = plane.dequantize()
        for one in weight.tensors:
            del tensors[one.name]
    return made | tensors


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("layout", "fmt", "spec"), EXPORTS, ids=IDS)
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_decoded_exactly(layout, fmt, spec, size, source, tmp_path, request):
    q = quantized(source, tmp_path / "q", layout, fmt)
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    notes = run(q, tmp_path / "plain", layout="bf16")
    want = {name: value.bfloat16() for name, value in decoded(q, layout).items()}
    assert_same(stored(tmp_path / "plain"), want)
    assert len(want) == 16 and not notes.warnings
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {
        "model_type": "none",
        "dtype": "bfloat16",
    }
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("layout", "fmt", "other"),
    [
        ("modelopt", "nvfp4", "compressed-tensors"),
        ("modelopt", "mxfp8", "fine-grained-fp8"),
        ("fine-grained-fp8", "fp8_block", "compressed-tensors"),
        ("compressed-tensors", "mxfp8", "modelopt"),
        ("compressed-tensors", "nvfp4", "hybridq"),
    ],
)
def test_codes_stay_where_the_format_is_the_same(layout, fmt, other, source, tmp_path):
    q = quantized(source, tmp_path / "q", layout, fmt)
    if other == "hybridq":
        run(q, tmp_path / "other", layout=other, format=fmt)
        before, after = decoded(q, layout), hybridq.load_checkpoint(tmp_path / "other")
        for name, value in before.items():
            own, is_plain = after[name], after.record(name) is None
            assert torch.equal(own if is_plain else own.dequantize(dtype=torch.float32), value)
        return
    for number, options in enumerate(({}, {"format": fmt})):
        run(q, tmp_path / f"other{number}", layout=other, **options)
        spec = next(spec for name, own, spec in EXPORTS if (name, own) == (other, fmt))
        want = expected(other, fmt, spec)
        assert_same(stored(tmp_path / f"other{number}"), want, within="weight_global_scale")


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("layout", "fmt", "other", "wanted"),
    [
        ("fine-grained-fp8", "fp8_block", "compressed-tensors", "nvfp4"),
        ("fine-grained-fp8", "fp8_block", "modelopt", "mxfp8"),
        ("compressed-tensors", "fp8_channel", "modelopt", "nvfp4"),
        ("modelopt", "nvfp4", "fine-grained-fp8", "fp8_block"),
    ],
)
@pytest.mark.parametrize("size", ["whole", "tiles"])
def test_encoded_anew_from_exact_values(
    layout, fmt, other, wanted, size, source, tmp_path, request
):
    q = quantized(source, tmp_path / "q", layout, fmt)
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    run(q, tmp_path / "other", layout=other, format=wanted)
    spec = next(spec for name, own, spec in EXPORTS if (name, own) == (other, wanted))
    want = expected(other, wanted, spec, decoded(q, layout))
    assert_same(stored(tmp_path / "other"), want)


@pytest.mark.parametrize(
    ("layout", "fmt", "row", "col"),
    [
        ("modelopt", "nvfp4", "nvfp4", "mxfp8"),
        ("modelopt", "mxfp8", "mxfp8", "nvfp4"),
        ("compressed-tensors", "mxfp8", "mxfp8", "fp8_e5m2"),
        ("fine-grained-fp8", "fp8_block", "fp8_128x128", "fp8_128x128"),
        ("fine-grained-fp8", "fp8_block", "fp8_128x128", "fp8_1x128"),
    ],
)
@pytest.mark.parametrize("size", ["whole", "tiles"])
@pytest.mark.thinned(1)
def test_the_plane_that_is_there_stays_and_the_other_is_made_of_its_values(
    layout, fmt, row, col, size, source, tmp_path, request
):
    """By the readers' own decoding, and the library's encode of each matrix in one piece."""
    q = quantized(source, tmp_path / "q", layout, fmt)
    if size == "tiles":
        request.getfixturevalue("small_tiles")
    quantizer = hybridq.quantizer(row, col)
    notes = run(q, tmp_path / "both", layout="hybridq", format=quantizer)
    before, values = hybridq.load_checkpoint(q), decoded(q, layout)
    after = hybridq.load_checkpoint(tmp_path / "both")
    names = notes.outcome.named("kept")
    assert set(names) == {name for name in values if after.record(name) is not None} != set()
    for name in names:
        made, own = after[name], before[name]
        assert torch.equal(made.rowwise.data, own.rowwise.data)
        assert torch.equal(made.dequantize(dtype=torch.float32), values[name])
        assert ((name + ".columnwise.data") in stored(tmp_path / "both")) == (row != col)
        if row == col:  # squares: one plane is the other transposed
            assert torch.equal(made.columnwise.data, own.rowwise.data.t())
            assert torch.equal(made.columnwise.scale, own.rowwise.scale.t())
            continue
        want = quantizer(values[name]).columnwise
        for buffer in want.buffers:
            got = made.columnwise.buffers[buffer]
            assert torch.equal(got.view(torch.uint8), want.buffers[buffer].view(torch.uint8)), (
                buffer
            )
        assert made.columnwise.spec == want.spec


def test_a_model_goes_on_training_from_planes_of_another_program(source, tmp_path):
    """A plane that is kept beside one that is made: the module's forward and gradient take them."""
    q = quantized(source, tmp_path / "q", "modelopt", "nvfp4")
    quantizer = hybridq.quantizer("nvfp4", "mxfp8", columnwise_source="rowwise_dequantized")
    run(q, tmp_path / "both", layout="hybridq", format=quantizer)
    made = hybridq.load_checkpoint(tmp_path / "both")["model.layers.1.q_proj.weight"]
    values = decoded(q, "modelopt")["model.layers.1.q_proj.weight"]
    assert torch.equal(made.dequantize(dtype=torch.float32), values)
    back = made.columnwise.dequantize()
    want = hybridq.quantize(values, None, columnwise="mxfp8").columnwise.dequantize()
    assert torch.equal(back, want)


def test_convert_checkpoint_decodes_first(source, tmp_path):
    q = quantized(source, tmp_path / "q", "fine-grained-fp8", "fp8_block")
    quantizer = hybridq.quantizer("nvfp4", "mxfp8")
    convert(q, tmp_path / "out", quantizer)
    checkpoint, values = hybridq.load_checkpoint(tmp_path / "out"), decoded(q, "fine-grained-fp8")
    name = "model.layers.1.q_proj.weight"
    want = quantizer(values[name])
    assert torch.equal(checkpoint[name].rowwise.data, want.rowwise.data)
    assert torch.equal(checkpoint[name].columnwise.scale, want.columnwise.scale)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "hybridq"
    # What is not chosen of it is written as it decodes.
    convert(q, tmp_path / "part", hybridq.ptq.Selection(quantizer, include=("*.0.*",)))
    plain = hybridq.load_checkpoint(tmp_path / "part")[name]
    assert torch.equal(plain, values[name].bfloat16())


def test_a_method_that_no_layout_reads_is_refused(source, tmp_path):
    config = {"model_type": "none", "quantization_config": {"quant_method": "awq"}}
    (source / "config.json").write_text(json.dumps(config))
    for call in (
        lambda: convert(source, tmp_path / "out", hybridq.quantizer("mxfp8")),
        lambda: run(source, tmp_path / "out", layout="modelopt", format="nvfp4"),
    ):
        with pytest.raises(hybridq.CheckpointError, match=r"quant_method .*'awq'; no layout"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_configuration_of_several_parts(source, tmp_path):
    q = quantized(source, tmp_path / "q", "modelopt", "nvfp4")
    config = json.loads((q / "config.json").read_text())
    said = config.pop("quantization_config")
    parts = {"model_type": "none", "text_config": {**config, "quantization_config": said}}
    (q / "config.json").write_text(json.dumps(parts))
    (q / "hf_quant_config.json").unlink()
    run(q, tmp_path / "plain", layout="bf16")
    found = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert found == {"model_type": "none", "text_config": config}
    awq = {"model_type": "none", "text_config": {"quantization_config": {"quant_method": "awq"}}}
    (source / "config.json").write_text(json.dumps(awq))
    with pytest.raises(hybridq.CheckpointError, match="'awq'"):
        run(source, tmp_path / "out", layout="modelopt", format="nvfp4")


def test_a_scale_that_is_missing_is_refused(source, tmp_path):
    q = quantized(source, tmp_path / "q", "fine-grained-fp8", "fp8_block")
    (path,) = [
        one
        for one in q.glob("*.safetensors")
        if "model.layers.0.up_proj.weight_scale_inv" in load_file(one)
    ]
    tensors = load_file(path)
    del tensors["model.layers.0.up_proj.weight_scale_inv"]
    save_file(tensors, path)
    index = json.loads((q / INDEX).read_text())
    del index["weight_map"]["model.layers.0.up_proj.weight_scale_inv"]
    (q / INDEX).write_text(json.dumps(index))
    with pytest.raises(hybridq.CheckpointError, match=r"model\.layers\.0\.up_proj"):
        run(q, tmp_path / "out", layout="bf16")


def test_hybridqs_own_checkpoints_are_read(source, tmp_path):
    """A columnwise plane alone, too, and planes in both directions."""
    (source / "config.json").write_text('{"model_type": "none"}')
    convert(source, tmp_path / "q", hybridq.quantizer("nvfp4", "mxfp8"))
    run(tmp_path / "q", tmp_path / "plain", layout="fp32")
    checkpoint = hybridq.load_checkpoint(tmp_path / "q")
    found = stored(tmp_path / "plain")
    assert found.keys() == set(checkpoint)
    for name, value in found.items():
        own = checkpoint[name]
        if checkpoint.record(name) is not None:
            own = own.dequantize(dtype=torch.float32)
        assert torch.equal(value, own), name
    notes = run(tmp_path / "q", tmp_path / "ct", layout="modelopt", include=("*proj.weight",))
    told = [text for text in notes.warnings if "scales of their own" in text]
    assert len(told) == 4 and "layers.0.q_proj" in told[0] and "layers.0.k_proj" in told[0]
    name = "model.layers.0.up_proj"
    assert torch.equal(
        stored(tmp_path / "ct")[f"{name}.weight"], checkpoint[f"{name}.weight"].rowwise.data
    )
    convert(source, tmp_path / "c", hybridq.quantizer(None, "mxfp8"))
    run(tmp_path / "c", tmp_path / "cp", layout="fp32")
    own = hybridq.load_checkpoint(tmp_path / "c")[f"{name}.weight"]
    assert torch.equal(stored(tmp_path / "cp")[f"{name}.weight"], own.columnwise.dequantize())


@pytest.mark.parametrize(("layout", "fmt", "spec"), EXPORTS, ids=IDS)
def test_read_as_quantized_tensors(layout, fmt, spec, source, tmp_path):
    q = quantized(source, tmp_path / "q", layout, fmt)
    checkpoint, values = hybridq.load_checkpoint(q), decoded(q, layout)
    assert checkpoint.keys() == values.keys()
    found = {name for name in checkpoint if checkpoint.record(name) is not None}
    assert len(found) == 12
    for name, value in values.items():
        own = checkpoint[name]
        if name in found:
            assert own.dtype == torch.bfloat16 and own.columnwise is None
            own = own.dequantize(dtype=torch.float32)
        assert torch.equal(own, value)
    x = torch.randn(3, 256).bfloat16()
    weight = checkpoint["model.layers.0.up_proj.weight"]
    assert torch.nn.functional.linear(x, weight).shape == (3, 160)


def test_a_file_whose_names_do_not_say_it(tmp_path):
    plane = hybridq.quantize(torch.randn(32, 64), "mxfp8").rowwise
    made = layouts.get("modelopt").stored("a.weight", plane.spec, (32, 64)).encode([plane])
    a, b, c = (tmp_path / f"{one}.safetensors" for one in "abc")
    save_file(made, a)
    with pytest.raises(hybridq.CheckpointError, match="name the layout"):
        hybridq.load_checkpoint(a)
    checkpoint = hybridq.load_checkpoint(a, "modelopt")
    assert torch.equal(checkpoint["a.weight"].rowwise.data, plane.data)
    run(a, b, layout="bf16", source_layout="modelopt")
    assert torch.equal(load_file(b)["a.weight"], plane.dequantize(torch.bfloat16))
    # Names alone are no codes.
    save_file({"a.weight": torch.ones(32, 32), "a.weight_scale": torch.ones(1)}, c)
    assert len(hybridq.load_checkpoint(c)) == 2
