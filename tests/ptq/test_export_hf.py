"""Exported folders as transformers loads them: the weights, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

import hybridq
from checkpoint_tools import Notes
from hf_models import IDS, load

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama whose columns are multiples of every block."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, num_hidden_layers=2, num_key_value_heads=1, head_dim=128, **SIZES
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    made = tmp_path_factory.mktemp("hf") / "plain"
    model.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("layout", "fmt"), [("compressed-tensors", "nvfp4"), ("fine-grained-fp8", "fp8_block")]
)
def test_transformers_loads_it(layout, fmt, folder, tmp_path) -> None:
    if layout == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    notes = Notes()
    done = hybridq.export(folder, tmp_path / "q", layout=layout, format=fmt, observer=notes)
    assert len(done.tensors) == 14 and not notes.warnings
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in said.get("ignore", said.get("modules_to_not_convert"))
    # What is decoded here is what the values are to be.
    hybridq.export(tmp_path / "q", tmp_path / "plain", layout="bf16", observer=notes)
    plain = load(tmp_path / "plain")
    from transformers import FineGrainedFP8Config

    own = (
        {}
        if layout == "compressed-tensors"
        else {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    )
    model, told = load(tmp_path / "q", output_loading_info=True, **own)
    assert not any(told.values()), told
    with torch.no_grad():
        model(IDS)  # compressed-tensors decodes at the first forward
    weights = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        if name in weights:
            assert torch.equal(value.bfloat16(), weights[name]), name
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert not torch.equal(plain(IDS).logits, load(folder)(IDS).logits)
