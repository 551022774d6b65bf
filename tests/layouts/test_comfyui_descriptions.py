"""What ComfyUI's files say of their layers is held against the tensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq.errors import CheckpointError, HybridQWarning
from hybridq.layouts.comfyui import METADATA

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def in_tensor(said: object) -> torch.Tensor:
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    return torch.tensor(list(data), dtype=torch.uint8)


def in_header(said: object, module: str) -> dict[str, str]:
    return {METADATA: json.dumps({"format_version": "1.0", "layers": {module: said}})}


def fp8(dtype: torch.dtype = E4M3) -> dict[str, torch.Tensor]:
    return {"m.a.weight": torch.randn(32, 96).to(dtype), "m.a.weight_scale": torch.tensor(0.5)}


@pytest.mark.parametrize("where", ["tensor", "header"])
@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"format": "float8_e4m3fn", "convrot": True}, "is rotated first"),
        ({"format": "float8_e4m3fn", "orig_shape": [24, 96]}, "filled up with zeros"),
        ({"format": "nvfp4"}, "must be float8_e4m3fn or float8_e4m3fn_rowwise, got 'nvfp4'"),
        ({}, "got None"),
    ],
)
def test_a_weight_is_what_its_description_says(said, match, where, tmp_path) -> None:
    tensors, metadata = fp8(), {}
    if where == "tensor":
        tensors["m.a.comfy_quant"] = in_tensor(said)
    else:
        metadata = in_header(said, "a")
    save_file(tensors, tmp_path / "in.safetensors", metadata)
    with pytest.raises(CheckpointError, match=match):
        hybridq.load_checkpoint(tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=match):
        hybridq.export(tmp_path / "in.safetensors", tmp_path / "o.safetensors", layout="bf16")


@pytest.mark.parametrize(
    "said",
    [
        {"format": "float8_e4m3fn", "orig_shape": [32, 96], "orig_dtype": "torch.bfloat16"},
        {"format": "float8_e4m3fn", "convrot": False, "full_precision_matrix_mult": True},
    ],
)
def test_what_changes_no_value_is_read_over(said, tmp_path) -> None:
    tensors = {**fp8(), "m.a.comfy_quant": in_tensor(said)}
    save_file(tensors, tmp_path / "in.safetensors", in_header(said, "gone"))
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors")["m.a.weight"]
    assert torch.equal(read.rowwise.dequantize(torch.float32), tensors["m.a.weight"].float() / 2)


def test_integers_of_a_format_that_is_not_known_are_no_values(tmp_path) -> None:
    tensors = {
        "a.weight": torch.ones(64, 32, dtype=torch.int8),
        "a.weight_s_rel": torch.ones(64, 2),
        "a.weight_s_channel": torch.ones(64),
        "a.comfy_quant": in_tensor({"format": "w4a8_int8"}),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="got 'w4a8_int8'; decode the file"):
        hybridq.load_checkpoint(tmp_path / "in.safetensors")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_description_that_is_no_json_is_an_error(data, tmp_path) -> None:
    tensors = {**fp8(), "m.a.comfy_quant": in_tensor(data)}
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="must be an object in JSON"):
        hybridq.load_checkpoint(tmp_path / "in.safetensors")


def test_e5m2_is_read_where_the_header_alone_says_what_it_is(tmp_path) -> None:
    tensors = fp8(E5M2)
    save_file(tensors, tmp_path / "in.safetensors", in_header({"format": "float8_e5m2"}, "m.a"))
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors")["m.a.weight"]
    assert torch.equal(read.rowwise.dequantize(torch.float32), tensors["m.a.weight"].float() / 2)


def test_names_that_two_layers_end_with_are_left_alone(tmp_path) -> None:
    """A file of a whole pipeline: the header leaves out how names of the model begin."""
    tensors = {**fp8(), "text.a.weight": torch.randn(8, 8)}
    save_file(tensors, tmp_path / "in.safetensors", in_header({"format": "float8_e4m3fn"}, "a"))
    read = hybridq.load_checkpoint(tmp_path / "in.safetensors")
    assert hasattr(read["m.a.weight"], "rowwise")
    assert torch.equal(read["text.a.weight"], tensors["text.a.weight"])


def test_a_folder_that_says_it_in_a_header_is_loaded(tmp_path) -> None:
    """Its NVFP4 has names, dtypes and, of 128 rows and 64 columns, shapes of ModelOpt's."""
    transformers = pytest.importorskip("transformers")
    from hybridq.integrations.transformers import load

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=128, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    folder = tmp_path / "out"
    with pytest.warns(HybridQWarning, match="transformers takes codes of comfyui for values"):
        hybridq.export(tmp_path / "plain", folder, layout="comfyui", format="nvfp4")
    tensors = load_file(folder / "model.safetensors")
    layers = {
        name.removesuffix(".comfy_quant"): {"format": "nvfp4"}
        for name in tensors
        if name.endswith(".comfy_quant")
    }
    left = {name: one for name, one in tensors.items() if not name.endswith(".comfy_quant")}
    metadata = {"format": "pt", METADATA: json.dumps({"layers": layers})}
    save_file(left, folder / "model.safetensors", metadata)
    weight = load(folder).model.layers[0].mlp.up_proj.weight
    wanted = hybridq.load_checkpoint(folder)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight.rowwise.data, wanted.rowwise.data)
    assert torch.equal(weight.rowwise.scale, wanted.rowwise.scale)
    layers["model.layers.0.mlp.up_proj"]["convrot"] = True
    save_file(left, folder / "model.safetensors", {METADATA: json.dumps({"layers": layers})})
    with pytest.raises(CheckpointError, match="is rotated first"):
        load(folder)


@pytest.mark.parametrize("config", [None, {"quant_method": "modelopt", "quant_algo": "NVFP4"}])
def test_another_layout_does_not_read_its_bytes(config, tmp_path) -> None:
    """Of 128 rows and 64 columns all names, dtypes and shapes are ModelOpt's, and no value is."""
    (tmp_path / "in").mkdir()
    source, folder = tmp_path / "in.safetensors", tmp_path / "in"
    save_file({"a.weight": torch.randn(128, 64)}, source)
    hybridq.export(source, folder / "model.safetensors", layout="comfyui", format="nvfp4")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    layout = "modelopt" if config is None else None
    with pytest.raises(CheckpointError, match="how comfyui holds it"):
        hybridq.load_checkpoint(folder, layout)
    assert hasattr(hybridq.load_checkpoint(folder, "comfyui")["a.weight"], "rowwise")
