"""Weights whose inputs are scaled first: written nowhere, and read nowhere, without the scaling."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hybridq
from hf_models import load, saved
from hybridq.calibration import awq, gptq, smooth
from hybridq.errors import CheckpointError
from hybridq.integrations.transformers import HybridQConfig
from hybridq.integrations.transformers import load as load_layout
from layout_folders import written

REFUSED = r"must multiply the input as it comes, got '.*pre_quant_scale'"


@pytest.fixture
def scaled(tmp_path):
    """A file of a weight with factors of its input, as ModelOpt writes what AWQ could not fold."""
    tensors = {"m.up_proj.weight": torch.randn(64, 64), "m.up_proj.pre_quant_scale": torch.rand(64)}
    save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "hybridq", "fp32"])
def test_files_with_factors_are_not_written_anew(scaled, layout):
    target = scaled.with_name("out.safetensors")
    wanted = {} if layout == "fp32" else {"format": "nvfp4"}
    with pytest.raises(CheckpointError, match=REFUSED):
        hybridq.export(scaled, target, layout=layout, **wanted)
    assert not target.exists()


def test_models_that_scale_inputs_in_front_are_not_exported(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64))
    smooth(model, [torch.randn(32, 64)], in_front=True)
    with pytest.raises(CheckpointError, match=REFUSED):
        hybridq.export(model, tmp_path / "out", layout="modelopt", format="nvfp4")


def test_folders_with_factors_are_not_read(tmp_path):
    written("llama", tmp_path / "m", "modelopt", "nvfp4")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith("up_proj.weight_scale"))
    tensors[name.replace("weight_scale", "pre_quant_scale")] = torch.rand(64)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=REFUSED):
        load(tmp_path / "m")


def test_folders_with_transforms_at_run_time_are_not_read(tmp_path):
    """As llm-compressor writes layers that rotate their inputs: weights are rotated, too."""
    written("llama", tmp_path / "m", "compressed-tensors", "nvfp4")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    group = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}
    config["quantization_config"]["transform_config"] = {"config_groups": {"R4": group}}
    file.write_text(json.dumps(config))
    for read in (hybridq.load_checkpoint, load_layout):
        with pytest.raises(CheckpointError, match="got transform 'R4' of the configuration"):
            read(tmp_path / "m")


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_plain_weights_are_not_taken_without_their_factors(tmp_path, weights):
    """As save_pretrained writes a model that scales inputs: transformers reads no factors."""
    file = saved("llama", tmp_path / "m") / "model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith("up_proj.weight"))
    tensors[name.replace("weight", "pre_quant_scale")] = torch.rand(64)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=REFUSED):
        load(tmp_path / "m", quantization_config=HybridQConfig("mxfp8", weights=weights))


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_what_gptq_and_awq_have_made_is_what_a_file_holds(tmp_path, layout):
    """The planes' own bytes; a second level that is a reciprocal is within two ulp."""
    written("llama", tmp_path / "m", "modelopt", "nvfp4")
    model = load(tmp_path / "m-plain", dtype=torch.float32).eval()
    recipe = hybridq.recipe(fprop="nvfp4")
    batches = [{"input_ids": torch.randint(0, 64, (4, 16))}]
    assert awq(model, batches, recipe).inputs
    assert len(gptq(model, batches, recipe).weights) == 14
    hybridq.export(model, tmp_path / "out", layout=layout)
    hybridq.export(tmp_path / "out", tmp_path / "back", layout="fp32")
    found = load_file(tmp_path / "back" / "model.safetensors")
    count = 0
    for name, own in model.named_parameters():
        if hybridq.tensor.is_quantized(own):
            rtol = 0.0 if layout == "modelopt" else 2**-22
            torch.testing.assert_close(found[name], own.dequantize().detach(), rtol=rtol, atol=0.0)
            count += 1
    assert count == 14
