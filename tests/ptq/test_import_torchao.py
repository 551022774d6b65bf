"""Checkpoints of torchao are read: made by hand here, by torchao itself in tests/layouts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

import hybridq
from checkpoint_tools import Notes
from hybridq import layouts
from hybridq.errors import CheckpointError, SpecError
from hybridq.ptq.budget import Budget
from layout_cases import plane_of, values
from torchao_files import KINDS, SWIZZLED, metadata_of, torchao_weight, write_torchao

CASES = [*((kind, False) for kind in KINDS), *((kind, True) for kind in SWIZZLED)]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(Budget, "most_values", lambda self, record: 600)


def close(made, want, kind) -> bool:
    """Equal; NVFP4's blocks alone are compared with values that were divided by a factor."""
    made = made.double()
    if kind == "nvfp4_single":
        return torch.allclose(made, want, rtol=2.0**-22, atol=0.0)
    return torch.equal(made, want)


@pytest.mark.parametrize(
    ("kind", "is_swizzled", "shape"),
    [
        (*one, shape)
        for one in CASES
        for shape in ((200, 192), (130, 64), (1, 64), (256, 384))
        if one[0] != "fp8_block" or shape == (256, 384)  # torchao has whole blocks alone
    ],
)
def test_values(kind, is_swizzled, shape, tmp_path) -> None:
    source = tmp_path / "in"
    weight = values(shape) if shape[0] > 3 else torch.randn(shape).bfloat16()
    want = write_torchao(source, {UP: (kind, is_swizzled, weight)})
    for path in (source, source / "model.safetensors"):
        read = hybridq.load_checkpoint(path)
        assert set(read) == {UP, "model.norm.weight"}
        assert close(read[UP].rowwise.dequantize(torch.float32), want[UP], kind)
        assert read[UP].dtype == torch.bfloat16 and tuple(read[UP].shape) == shape
    assert torch.equal(read["model.norm.weight"], torch.linspace(0.0, 1.0, 8))


@pytest.mark.parametrize(("kind", "is_swizzled"), CASES)
def test_tiles_have_the_values_of_the_whole(kind, is_swizzled, tmp_path, small_tiles) -> None:
    """Tiles of a swizzled matrix of scales are 128 rows by 4 blocks."""
    shape = (300, 320) if kind != "fp8_block" else (384, 256)
    want = write_torchao(tmp_path / "in", {UP: (kind, is_swizzled, values(shape))})
    notes = Notes()
    hybridq.export(tmp_path / "in", tmp_path / "out", layout="fp32", observer=notes)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert close(made[UP], want[UP], kind)
    assert notes.done == notes.total


STACKS = [one for one in CASES if not one[0].startswith("nvfp4")]


@pytest.mark.parametrize(("kind", "is_swizzled"), STACKS)
@pytest.mark.parametrize("rows", [256, 384])
def test_stacks_of_experts(kind, is_swizzled, rows, tmp_path, small_tiles) -> None:
    """Halves of 192 rows cut tiles and blocks of 128: up is encoded anew then, from its values."""
    weight = values((3, rows, 256))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"model_type": "qwen3_moe", "hidden_size": 256, "torch_dtype": "float32"}
    want = write_torchao(tmp_path / "in", {name: (kind, is_swizzled, weight)}, config)[name]
    read = hybridq.load_checkpoint(tmp_path / "in")[name]
    assert [tuple(one.shape) for one in read] == [(rows, 256)] * 3
    for one, value in zip(read, want, strict=True):
        assert torch.equal(one.rowwise.dequantize(torch.float32).double(), value)
    hybridq.export(tmp_path / "in", tmp_path / "plain", layout="fp32", observer=Notes())
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")[name].double(), want)
    if kind == "fp8_group":
        return
    is_cut = rows == 384 and (is_swizzled or kind == "fp8_block")
    said = {"layout": "compressed-tensors", "format": kind if is_cut else None}
    hybridq.export(tmp_path / "in", tmp_path / "out", **said, observer=Notes())
    made = hybridq.load_checkpoint(tmp_path / "out")
    for index, value in enumerate(want):
        for half, own in enumerate(("gate_proj", "up_proj")):
            one = made[f"model.layers.0.mlp.experts.{index}.{own}.weight"].rowwise
            part = value[rows // 2 * half : rows // 2 * (half + 1)]
            if is_cut and own == "up_proj":
                part = plane_of(KINDS[kind][0], part.float()).dequantize(torch.float32).double()
            assert torch.equal(one.dequantize(torch.float32).double(), part)


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4_text"])
def test_stacks_whose_scales_lie_along_outputs_are_decoded_alone(model_type, tmp_path) -> None:
    """Their models keep them as `[E, in, out]`."""
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"model_type": model_type, "torch_dtype": "float32"}
    given = {name: ("mxfp8", False, values((2, 64, 64)))}
    want = write_torchao(tmp_path / "in", given, config)[name]
    match = r"must be \[experts, out, in\], got .*down_proj' as \[experts, in, out\], with scales"
    with pytest.raises(CheckpointError, match=match):
        hybridq.export(tmp_path / "in", tmp_path / "out", layout="compressed-tensors")
    hybridq.export(tmp_path / "in", tmp_path / "plain", layout="fp32", observer=Notes())
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")[name].double(), want)


def test_stacks_of_nvfp4_are_refused(tmp_path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    for kind in ("nvfp4", "nvfp4_single"):
        write_torchao(tmp_path / kind, {name: (kind, True, values((2, 128, 64)))})
        with pytest.raises(CheckpointError, match="torchao cannot tell what"):
            hybridq.load_checkpoint(tmp_path / kind)


def test_codes_are_kept_in_other_layouts(tmp_path) -> None:
    """Neither metadata nor configuration say torchao any longer."""
    kinds = {f"model.layers.{n}.mlp.up_proj.weight": one for n, one in enumerate(CASES)}
    given = {
        name: (*one, values((256, 384))) for name, one in kinds.items() if "group" not in one[0]
    }
    write_torchao(tmp_path / "in", given)
    hybridq.export(tmp_path / "in", tmp_path / "out", layout="compressed-tensors", observer=Notes())
    ours, theirs = (hybridq.load_checkpoint(tmp_path / one) for one in ("in", "out"))
    for name in given:
        assert torch.equal(ours[name].rowwise.data, theirs[name].rowwise.data)
        assert torch.equal(ours[name].rowwise.scale, theirs[name].rowwise.scale)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    hybridq.convert_checkpoint(tmp_path / "in", tmp_path / "own", "mxfp8", observer=Notes())
    with safe_open(tmp_path / "own" / "model.safetensors", "pt") as file:
        assert set(file.metadata()) == {"format", "hybridq"}


def test_static_scales_of_inputs(tmp_path) -> None:
    tensors, classes, _ = torchao_weight(UP, "nvfp4", values((64, 64)), True)
    said = json.loads(classes[UP])
    said["_tensor_data_names"].append("act_per_tensor_scale")
    scale = UP.replace("weight", "_weight_act_per_tensor_scale")
    tensors[scale] = torch.tensor(0.25)
    save_file(tensors, tmp_path / "in.safetensors", metadata_of({UP: json.dumps(said)}, {}))
    assert hybridq.load_checkpoint(tmp_path / "in.safetensors")[scale].item() == 0.25
    out = tmp_path / "out.safetensors"
    hybridq.export(tmp_path / "in.safetensors", out, layout="modelopt", observer=Notes())
    assert load_file(out)[UP.replace("weight", "input_scale")].item() == 0.25


@pytest.mark.parametrize("is_sharded", [False, True])
def test_names_of_torchao_014(is_sharded, tmp_path) -> None:
    """It called parts `W:qdata`, and plain tensors `b:_data`."""
    tensors, classes, want = torchao_weight(UP, "fp8_channel", values((64, 96)))
    said = json.loads(classes[UP])
    del said["_tensor_data_names"]
    bias = UP.replace("weight", "bias")
    old = {name.replace("._weight_", ".weight:"): one for name, one in tensors.items()}
    old[f"{bias}:_data"] = torch.ones(64)
    metadata = metadata_of({UP: json.dumps(said)}, {bias: old[f"{bias}:_data"]})
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    path = folder / "model.safetensors"
    if is_sharded:
        path = folder / "model-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(old, path.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(old, path, metadata)
    read = hybridq.load_checkpoint(folder)
    assert set(read) == {UP, bias} and torch.equal(read[bias], torch.ones(64))
    assert torch.equal(read[UP].rowwise.dequantize(torch.float32).double(), want)
    hybridq.export(folder, out, layout="bf16", observer=Notes())
    made = hybridq.load_checkpoint(out)
    assert torch.equal(made[UP], want.bfloat16()) and torch.equal(made[bias], torch.ones(64))


def without(parts, *names):
    return {key: one for key, one in parts.items() if not key.endswith(names)}


SAID = {
    "block_size": (
        "fp8_group",
        {"block_size": [1, 48]},
        r"block_size of .* must be \[1, 64\], got",
    ),
    "elem_dtype": (
        "mxfp4",
        {"elem_dtype": {"_type": "torch.dtype", "_data": "fp6_e3m2"}},
        "elem_dtype of .* must be float4_e2m1fn_x2, got fp6_e3m2",
    ),
    "block": ("mxfp8", {"block_size": 64}, "block_size of .* must be 32, got 64"),
}


@pytest.mark.parametrize("what", SAID)
def test_what_metadata_says_otherwise_is_refused(what, tmp_path) -> None:
    """Shapes are those that a reader expects: 192 columns have 3 blocks of 64, and 4 of 48."""
    kind, said, match = SAID[what]
    tensors, classes, _ = torchao_weight(UP, kind, values((64, 192)))
    one = json.loads(classes[UP])
    one["_data"] |= said
    path = tmp_path / "in.safetensors"
    save_file(tensors, path, metadata_of({UP: json.dumps(one)}, {}))
    with pytest.raises(CheckpointError, match=match):
        hybridq.load_checkpoint(path)


def test_what_is_gone_is_refused(tmp_path) -> None:
    """Without its second-level scale NVFP4 looks as if it had blocks alone."""
    tensors, classes, _ = torchao_weight(UP, "nvfp4", values((64, 192)), True)
    path = tmp_path / "in.safetensors"
    metadata = metadata_of(classes, {})
    save_file(without(tensors, "per_tensor_scale"), path, metadata)
    with pytest.raises(
        CheckpointError, match=r"parts of .* must be \['qdata', 'scale'\], got \['per"
    ):
        hybridq.load_checkpoint(path)
    save_file(without(tensors, "_weight_scale"), path, metadata)
    with pytest.raises(CheckpointError, match="torchao cannot tell what"):
        hybridq.load_checkpoint(path)
    save_file({"model.norm.weight": torch.ones(8)}, path, metadata)
    with pytest.raises(CheckpointError, match=r"must hold the parts of .* they are not there"):
        hybridq.load_checkpoint(path, "torchao")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"must say the class of .*, got nothing"):
        hybridq.load_checkpoint(path)


def test_pickled_files_say_what_helps(tmp_path) -> None:
    write_torchao(tmp_path / "in", {UP: ("mxfp8", True, values((64, 64)))})
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"\.bin.* \(transformers' save_pretrained does, with"
    ):
        hybridq.load_checkpoint(tmp_path / "in")


@pytest.mark.parametrize(
    "said",
    ["all", "3", '["a"]', '["format"]', '[["a"]]', "[" * 5000, '["up.weight"]'],
)
def test_metadata_of_others(said, tmp_path) -> None:
    """A key of the same name is no word of torchao's, and stays."""
    path = tmp_path / "in.safetensors"
    own = {"tensor_names": said, "format": "pt", "up.weight": '{"_type": 3}'}
    save_file({"up.weight": torch.ones(32, 32)}, path, own)
    hybridq.convert_checkpoint(path, tmp_path / "out.safetensors", "mxfp8", observer=Notes())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata()["tensor_names"] == said


def test_it_is_not_written(tmp_path) -> None:
    save_file({UP: torch.ones(64, 64)}, tmp_path / "in.safetensors")
    match = r"torchao.* is read, and not written; take compressed-tensors"
    with pytest.raises(SpecError, match=match):
        hybridq.export(tmp_path / "in.safetensors", tmp_path / "out.safetensors", layout="torchao")
    layout = layouts.get("torchao")
    spec = hybridq.formats.PlaneSpec.parse("mxfp8")
    with pytest.raises(SpecError, match=r"cannot hold mxfp8 .* it is read, and not written; take"):
        layout.stored(UP, spec, (64, 64))
    with pytest.raises(SpecError, match=match):
        layout.quantization_config({UP: layout.others[0]})
    with pytest.raises(SpecError, match=r"must be one of (?!.*torchao)"):
        hybridq.export(tmp_path / "in.safetensors", tmp_path / "out.safetensors", layout="none")


@pytest.mark.parametrize("names_all", [False, True])
def test_files_of_a_folder_may_name_their_own_tensors_alone(names_all, tmp_path) -> None:
    """torchao makes the metadata of one state dict, of all of the model or of one file's part."""
    parts, classes = [], {}
    for number, (kind, is_swizzled) in enumerate((("mxfp8", True), ("nvfp4", False))):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        tensors, said, want = torchao_weight(name, kind, values((64, 64)), is_swizzled)
        parts.append((name, kind, tensors, said, want))
        classes |= said
    weight_map = {}
    for number, (_, _, tensors, said, _) in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, tmp_path / file, metadata_of(classes if names_all else said, {}))
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = hybridq.load_checkpoint(tmp_path)
    for name, kind, _, _, want in parts:
        assert close(read[name].rowwise.dequantize(torch.float32), want, kind)
