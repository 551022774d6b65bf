"""FBGEMM's FP8 checkpoints, as Meta published Llama 3.1 405B: one scale per row."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq.errors import CheckpointError

CONFIG = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


def folder(path, tensors, said=CONFIG):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": said} if said else {}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_read(dtype, tmp_path) -> None:
    codes = torch.randn(64, 96).mul(40).to(torch.float8_e4m3fn)
    scale = torch.rand(64, 1).add(0.5).to(dtype)
    name = "model.layers.1.mlp.up_proj"
    tensors = {
        f"{name}.weight": codes,
        f"{name}.weight_scale": scale,
        f"{name}.input_scale_ub": torch.tensor([1200.0]),
        "model.norm.weight": torch.ones(96),
    }
    source = folder(tmp_path / "in", tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = hybridq.load_checkpoint(source)
    assert sorted(read) == [f"{name}.weight", "model.norm.weight"]
    weight = read[f"{name}.weight"]
    assert torch.equal(weight.rowwise.dequantize(torch.float32), codes.float() * scale.float())
    bare = folder(tmp_path / "bare", {k: tensors[k] for k in list(tensors)[:2]}, None)
    with pytest.raises(CheckpointError, match=r"could mean .*fbgemm-fp8"):
        hybridq.load_checkpoint(bare)
    assert sorted(hybridq.load_checkpoint(bare, "fbgemm-fp8")) == [f"{name}.weight"]


def test_a_checkpoint_is_written(tmp_path) -> None:
    torch.manual_seed(0)
    names = [f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up")]
    source = folder(tmp_path / "in", {one: torch.randn(64, 96).bfloat16() for one in names}, None)
    (source / "config.json").write_text('{"model_type": "llama"}')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybridq.export(source, tmp_path / "out", layout="fbgemm-fp8", format="fp8_channel")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["activation_scale_ub"]) == ("fbgemm_fp8", 1200.0)
    made = load_file(tmp_path / "out" / "model.safetensors")
    x = load_file(source / "model.safetensors")[names[0]].float()
    scale = made[f"{names[0]}_scale"]
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (64, 1))
    wanted = x.abs().amax(1, keepdim=True) / 448.0
    assert torch.allclose(scale, wanted, rtol=2.0**-23, atol=0.0)
    error = (made[names[0]].float() * scale - x).abs() / x.abs().amax(1, keepdim=True)
    assert error.max() <= 2.0**-4 / 1.75 + 1e-6
    again = hybridq.load_checkpoint(tmp_path / "out")
    assert sorted(again) == sorted(names)


def test_a_decoded_folder_is_loaded_as_it_was_decoded(tmp_path) -> None:
    """FP32 in the files and in the configuration, whose BF16 rounded them when they were loaded."""
    codes, scale = torch.randn(64, 96).mul(40).to(torch.float8_e4m3fn), torch.rand(64, 1) + 0.5
    name = "model.layers.1.mlp.up_proj.weight"
    source = folder(tmp_path / "in", {name: codes, f"{name}_scale": scale})
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "bfloat16", "text_config": {"torch_dtype": "float16", "act": "float32"}}
    (source / "config.json").write_text(json.dumps(config))
    for layout, said in (("fp32", ["float32", "float32"]), ("bf16", ["bfloat16", "float16"])):
        hybridq.export(source, tmp_path / layout, layout=layout)
        made = json.loads((tmp_path / layout / "config.json").read_text())
        assert [made["dtype"], made["text_config"]["torch_dtype"]] == said
    found = load_file(tmp_path / "fp32" / "model.safetensors")
    assert torch.equal(found[name], codes.float() * scale)
