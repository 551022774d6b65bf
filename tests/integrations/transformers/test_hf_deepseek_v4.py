"""A folder as DeepSeek-V4 is published: the weights that transformers decodes, and its logits."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridq
from hybridq.integrations.transformers import load

transformers = pytest.importorskip("transformers", minversion="5.24")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "num_nextn_predict_layers": 0,
    "hc_mult": 2,
    "layer_types": ["sliding_attention"],
    "mlp_layer_types": ["moe"],
}
#: In FP8 there, beside the experts in FP4.
DENSE = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_experts")
SAID = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def powers(*shape: int) -> torch.Tensor:
    """Scales from 2^-9 to 2^-5 as the files have them."""
    return torch.exp2(torch.randint(-9, -4, shape).float()).to(torch.float8_e8m0fnu)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**SIZES)
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = {}
    for name, weight in load_file(file).items():
        tensors[name], module = weight, name.removesuffix("weight")
        if weight.dim() != 2:
            continue
        rows, cols = weight.shape
        if ".experts." in name:
            tensors[name] = torch.randint(-128, 128, (rows, cols // 2), dtype=torch.int8)
            tensors[f"{module}scale"] = powers(rows, cols // 32)
        elif any(part in name for part in DENSE):
            codes = (torch.randn(rows, cols) * 50.0).clamp(-448.0, 448.0)
            tensors[name] = codes.to(torch.float8_e4m3fn)
            tensors[f"{module}scale"] = powers(-(-rows // 128), -(-cols // 128))
    save_file(tensors, file, {"format": "pt"})
    said = json.loads((tmp_path / "m" / "config.json").read_text())
    said |= {"quantization_config": {**SAID, "activation_scheme": "dynamic", "expert_dtype": "fp4"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(said))
    return tmp_path / "m"


def test_no_weight_that_the_folder_has_planes_of_is_said_to_stay_plain(
    folder, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(hybridq.errors, "_seen", set())
    with caplog.at_level(logging.INFO, "hybridq"):
        model = load(folder)
        block = model.model.layers[0].self_attn.o_a_proj
        assert isinstance(block.weight, hybridq.QuantizedTensor)
        assert "stays in high precision" not in caplog.text
        plain = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**SIZES))
        with hybridq.quantized_model_init("mxfp8"):
            hybridq.convert(plain)
    assert "o_a_proj.weight [256, 128] stays in high precision" in caplog.text


def test_weights_and_logits_are_those_of_transformers(folder) -> None:
    own = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    plain = {"dtype": torch.float32, "output_loading_info": True}
    kind = transformers.AutoModelForCausalLM
    theirs, told = kind.from_pretrained(folder, quantization_config=own, **plain)
    assert not any(told.values()), told
    ours, told = load(folder, **plain)
    assert not any(told.values()), told
    formats = {}
    for name, weight in ours.named_parameters():
        value = weight.detach()
        if isinstance(weight, hybridq.QuantizedTensor):
            one = weight if weight.dim() == 2 else weight[0]
            formats[name] = one.rowwise.spec.format.element.name
            value = weight.dequantize()
        assert torch.equal(value.float(), theirs.get_parameter(name).detach().float()), name
    assert len(formats) == 8 + 2
    for name, element in formats.items():
        assert element == ("e2m1" if ".experts." in name else "e4m3"), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, wanted = ours(ids).logits, theirs(ids).logits
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
