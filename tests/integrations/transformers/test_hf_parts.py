"""`save_pretrained` of a model inside of a model that was loaded with a HybridQConfig."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import hf_models
import hybridq
from hf_models import IDS, assert_same, quantized, saved

transformers = pytest.importorskip("transformers", minversion="5.23")

from hybridq.integrations.transformers import HybridQConfig  # noqa: E402 (after the skip)

#: That routers stay in high precision is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::hybridq.HybridQWarning")


def says(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kept", [[], ["model.layers.0.mlp"]])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "tied"])
def test_it_has_planes_as_the_whole_has(kind: str, kept: list[str], tmp_path) -> None:
    folder = saved(kind, tmp_path / "plain")
    config = HybridQConfig(format="nvfp4", modules_to_not_convert=kept)
    model = hf_models.load(folder, quantization_config=config)
    part, want = model.model, model.model(IDS).last_hidden_state
    part.save_pretrained(tmp_path / "part", max_shard_size="30KB")
    assert says(tmp_path / "part")["quantization_config"]["format"] == "nvfp4"
    names = [n for f in (tmp_path / "part").glob("*.safetensors") for n in load_file(f)]
    codes = [name for name in names if name.endswith(".rowwise.data")]
    assert len(codes) == len(quantized(part)) == len(quantized(model)) > 4
    again = transformers.AutoModel.from_pretrained(tmp_path / "part")
    assert quantized(again).keys() == quantized(part).keys()
    assert_same(part, again)
    assert torch.equal(again(IDS).last_hidden_state, want)
    again.save_pretrained(tmp_path / "third")
    assert_same(part, transformers.AutoModel.from_pretrained(tmp_path / "third"))
    model.save_pretrained(tmp_path / "whole")  # as before
    assert_same(model, hf_models.load(tmp_path / "whole"))


def test_the_whole_is_dequantized(tmp_path) -> None:
    config = HybridQConfig(format="mxfp8")
    model = hf_models.load(saved("llama", tmp_path / "plain"), quantization_config=config)
    with pytest.raises(ValueError, match=r"of the whole model.* got a LlamaModel inside of it"):
        model.model.dequantize()
    assert quantized(model)
    want = {name: one.detach().dequantize() for name, one in quantized(model.model).items()}
    model.dequantize().model.save_pretrained(tmp_path / "part")
    assert "quantization_config" not in says(tmp_path / "part")
    found = load_file(tmp_path / "part" / "model.safetensors")
    assert want and all(torch.equal(found[name], value) for name, value in want.items())


def test_one_with_a_configuration_of_its_own_has_values(tmp_path) -> None:
    """LLaVA's language model: no planes, and no word of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = 1
    configs = {
        "vision_config": transformers.CLIPVisionConfig(image_size=8, patch_size=4, **sizes),
        "text_config": transformers.LlamaConfig(vocab_size=96, **sizes),
    }
    config = transformers.LlavaConfig(image_token_index=95, vision_feature_layer=-1, **configs)
    kind = transformers.LlavaForConditionalGeneration
    kind(config).save_pretrained(tmp_path / "plain")
    given = {"quantization_config": HybridQConfig(format="nvfp4")}
    model = kind.from_pretrained(tmp_path / "plain", **given)
    part = model.model.language_model
    part.save_pretrained(tmp_path / "text")
    assert "quantization_config" not in says(tmp_path / "text")
    with safe_open(tmp_path / "text" / "model.safetensors", "pt") as file:
        assert "hybridq" not in file.metadata()
    again = dict(transformers.AutoModel.from_pretrained(tmp_path / "text").named_parameters())
    assert len(quantized(part)) == 7
    for name, one in quantized(part).items():
        assert torch.equal(again[name], one.detach().dequantize())
    model.model.save_pretrained(tmp_path / "both")
    both = transformers.AutoModel.from_pretrained(tmp_path / "both")
    assert_same(model.model, both)
    assert isinstance(both.language_model.layers[0].mlp.up_proj.weight, hybridq.NVFP4Tensor)


def test_a_layout_of_others_is_saved_as_planes_too(tmp_path) -> None:
    from hybridq.integrations.transformers import load
    from layout_folders import written

    written("llama", tmp_path / "m", "modelopt", "mxfp8")
    model = load(tmp_path / "m")
    model.model.save_pretrained(tmp_path / "part")
    assert says(tmp_path / "part")["quantization_config"]["quant_method"] == "hybridq"
    assert_same(model.model, transformers.AutoModel.from_pretrained(tmp_path / "part"))


@pytest.mark.skipif(not hasattr(transformers, "NomicBertModel"), reason="transformers lacks it")
def test_weights_of_one_tensor_of_the_file_may_be_partly_planes(tmp_path) -> None:
    """Queries, keys and values are one tensor in plain files: values that stay have a name then."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.NomicBertConfig(vocab_size=96, num_hidden_layers=2, head_dim=16, **sizes)
    torch.manual_seed(3)
    plain = transformers.NomicBertModel(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    names = load_file(tmp_path / "plain" / "model.safetensors").keys()
    assert not any("v_proj" in name for name in names)
    given = HybridQConfig(format="mxfp8", modules_to_not_convert=["v_proj"])
    load = transformers.NomicBertModel.from_pretrained
    model = load(tmp_path / "plain", quantization_config=given)
    model.save_pretrained(tmp_path / "planes")
    again, value = load(tmp_path / "planes"), "layers.1.self_attn.v_proj.weight"
    assert again.state_dict()[value].equal(plain.state_dict()[value])
    assert_same(model, again)
    again.save_pretrained(tmp_path / "third")
    assert_same(model, load(tmp_path / "third"))
    plain.load_state_dict(hybridq.dequantized_state_dict(again))
    got, want = (one(IDS).last_hidden_state for one in (again, plain))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    again.dequantize().save_pretrained(tmp_path / "decoded")  # as the plain files are
    assert load_file(tmp_path / "decoded" / "model.safetensors").keys() == names
