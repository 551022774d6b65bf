"""Folders that other programs quantized, loaded as quantized tensors with their own planes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hybridq
import hybridq.integrations.transformers as ours
from hf_models import assert_same, load, logits, quantized, saved
from hybridq import layouts
from hybridq.errors import CheckpointError
from hybridq.integrations.transformers import HybridQConfig, LayoutConfig
from layout_folders import written

KINDS = ("llama", "wide_moe", "mixtral")
#: Layout, scheme, and what its configuration needs to be told.
FOREIGN = [
    ("compressed-tensors", "nvfp4", {"inputs": "static"}),
    ("compressed-tensors", "mxfp8", {}),
    ("compressed-tensors", "mxfp4", {}),
    ("compressed-tensors", "fp8_tensor", {"inputs": "static"}),
    ("compressed-tensors", "fp8_channel", {}),
    ("fine-grained-fp8", "fp8_block", {}),
    ("fine-grained-fp8", "mxfp8", {}),
    ("fine-grained-fp8", "fp8_tensor", {"inputs": "static"}),
    ("quark", "mxfp4", {}),
    ("quark", "fp8_channel", {"inputs": "static"}),
    ("fbgemm-fp8", "fp8_channel", {}),
    ("auto-fp8", "fp8_tensor", {"inputs": "static"}),
    ("deepseek-v4", "mxfp8_32x32", {}),
    ("mistral", "fp8_tensor", {}),
]


def check(model, folder: Path, planes, is_reciprocal: bool = False) -> None:
    """The model has these planes, and says what that of the decoded weights does.

    Of a second-level scale that a file has as its reciprocal, the last bit is not in the file.
    """
    rtol = 2**-22 if is_reciprocal else 0.0
    own = quantized(model)
    codes = {bytes(one.data.view(torch.uint8).flatten().tolist()) for one in planes.values()}
    found = set()
    for value in own.values():
        each = value.detach().unbind(0) if value.dim() == 3 else [value.detach()]
        for one in each:
            data = one.tensor_storage.first.data.view(torch.uint8)
            found.add(bytes(data.flatten().tolist()))
    joined = b"".join(sorted(found))
    assert all(one in joined for one in codes) and sum(map(len, codes)) == sum(map(len, found))
    decoded = load(folder.with_name(folder.name + "-decoded"), dtype=torch.float32)
    for name, value in decoded.named_parameters():
        mine = model.get_parameter(name).detach()
        mine = mine.dequantize(dtype=torch.float32) if name in own else mine.float()
        torch.testing.assert_close(mine, value.detach(), rtol=rtol, atol=0.0, msg=name)
    said = logits(decoded)
    exact = logits(model.float() if model.dtype != torch.float32 else model)
    assert (exact - said).norm() <= 1e-5 * said.norm()


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_tensor", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_modelopts_folders_have_their_own_planes(kind, scheme, tmp_path) -> None:
    inputs = {} if scheme == "mxfp8" else {"inputs": "static"}
    planes = written(kind, tmp_path / "m", "modelopt", scheme, **inputs)
    model, told = load(tmp_path / "m", output_loading_info=True)
    assert not any(told.values())
    names = set(quantized(model))
    assert any("experts" in name for name in names) == (kind != "llama")
    assert not any("lm_head" in name or "mlp.gate." in name for name in names)
    model.save_pretrained(tmp_path / "again")
    again, told = load(tmp_path / "again", output_loading_info=True)
    assert not any(told.values())
    assert_same(model, again)
    assert torch.equal(logits(model), logits(again))
    says = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert says["quant_method"] == "hybridq" == model.config.quantization_config.quant_method
    check(load(tmp_path / "m", dtype=torch.float32), tmp_path / "m", planes)
    plain = model.dequantize()
    assert not quantized(plain)


@pytest.mark.parametrize(("layout", "scheme", "says"), FOREIGN)
@pytest.mark.parametrize("kind", ["wide", "wide_moe"])
def test_other_layouts_are_loaded_as_quantized_tensors(
    kind, layout, scheme, says, tmp_path
) -> None:
    planes = written(kind, tmp_path / "m", layout, scheme, **says)
    model, told = ours.load(tmp_path / "m", output_loading_info=True, dtype=torch.float32)
    assert not any(told.values())
    check(model, tmp_path / "m", planes, (layout, scheme) == FOREIGN[0][:2])
    model.save_pretrained(tmp_path / "again")
    assert_same(model, load(tmp_path / "again"))


def test_gpt_oss_experts_are_mxfp4(tmp_path) -> None:
    """[E, out, in] in the file, [E, in, out] in memory."""
    planes = written("gpt_oss", tmp_path / "m", "gpt-oss-mxfp4", "mxfp4")
    model = ours.load(tmp_path / "m", dtype=torch.float32)
    names = set(quantized(model))
    assert names and all("experts" in name for name in names)
    check(model, tmp_path / "m", planes)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert_same(model, again)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_experts_that_the_model_has_no_place_for_are_refused(kind, tmp_path) -> None:
    """Each expert's matrices, of a model that holds one stack: its experts would be random."""
    saved(kind, tmp_path / "plain")
    with pytest.warns(hybridq.HybridQWarning, match="has no place for"):
        hybridq.export(tmp_path / "plain", tmp_path / "m", layout="modelopt", format="mxfp8")
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight is no parameter of .*ran"):
        ours.load(tmp_path / "m")
    assert len(hybridq.load_checkpoint(tmp_path / "m")) > 10


def test_weights_that_the_model_leaves_out_by_intent_are_no_fault(tmp_path) -> None:
    """DeepSeek-V3's layer behind its last one, to predict more tokens."""
    saved("deepseek_v3", tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in ("mlp.up_proj.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.61.{name}"] = torch.randn(64, 64)
    save_file(tensors, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    hybridq.export(tmp_path / "plain", tmp_path / "m", layout="modelopt", format="mxfp8")
    assert len(quantized(ours.load(tmp_path / "m"))) > 5


def test_experts_whose_planes_cannot_be_put_together_are_decoded(tmp_path, caplog) -> None:
    """Gate and up have second-level scales of their own."""
    written("qwen3_moe", tmp_path / "m", "compressed-tensors", "nvfp4", shares=False)
    model = ours.load(tmp_path / "m", dtype=torch.float32)
    decoded = load(tmp_path / "m-decoded", dtype=torch.float32)
    for name, value in decoded.named_parameters():
        mine = model.get_parameter(name).detach()
        mine = mine.dequantize() if name in quantized(model) else mine
        # The file has the second-level scale's reciprocal, rounded once more.
        torch.testing.assert_close(mine, value.detach(), rtol=2.0**-22, atol=0.0, msg=name)
    assert "model.layers.0.mlp.experts.down_proj" in quantized(model)
    assert "experts.gate_up_proj [4, 96, 64] is in high precision" in caplog.text


@pytest.mark.parametrize(
    ("kind", "scheme", "kv_cache", "recipe"),
    [
        ("llama", "nvfp4", "nvfp4", "nvfp4_1d_weight"),
        ("llama", "fp8_tensor", "fp8", "fp8_current"),
        ("qwen3_moe", "nvfp4", "fp8", "nvfp4_1d_weight"),
    ],
)
def test_static_scales_and_those_of_caches_are_kept(
    kind, scheme, kv_cache, recipe, tmp_path
) -> None:
    written(kind, tmp_path / "m", "modelopt", scheme, inputs="static", kv_cache=kv_cache)
    model, told = load(tmp_path / "m", output_loading_info=True)
    assert not any(told.values())
    found = model.hf_quantizer.calibration
    attention = "model.layers.1.self_attn"
    assert float(found.amax(f"{attention}.q_proj", "input")) == pytest.approx(3.5, rel=1e-6)
    for slot in ("k", "v"):
        assert float(found.amax(attention, slot)) == pytest.approx(7.0, rel=1e-6)
    if kind == "qwen3_moe":
        stack = "model.layers.0.mlp.experts.down_proj"
        assert float(found.amax(f"{stack}.2", "input")) == pytest.approx(3.5, rel=1e-6)
    found.save(tmp_path / "scales.safetensors")
    planes = {name: one.rowwise.data for name, one in quantized(model).items()}
    hybridq.quantize_model(model, recipe, tmp_path / "scales.safetensors")
    assert all(torch.equal(planes[name], quantized(model)[name].rowwise.data) for name in planes)
    static = logits(model)
    hybridq.quantize_model(model, recipe)
    assert static.isfinite().all() and not torch.equal(static, logits(model))


@pytest.mark.parametrize(
    ("layout", "kv_cache"),
    [("fine-grained-fp8", None), ("quark", "fp8"), ("auto-fp8", "fp8"), ("mistral", None)],
)
def test_scales_of_inputs_are_found_by_each_layouts_names(layout, kv_cache, tmp_path) -> None:
    written("llama", tmp_path / "m", layout, "fp8_tensor", inputs="static", kv_cache=kv_cache)
    model, told = ours.load(tmp_path / "m", output_loading_info=True)
    assert not any(told.values())
    found = model.hf_quantizer.calibration
    attention = "model.layers.1.self_attn"
    assert float(found.amax(f"{attention}.q_proj", "input")) == pytest.approx(3.5, rel=1e-6)
    for slot in ("k", "v") if kv_cache else ():
        assert float(found.amax(attention, slot)) == pytest.approx(7.0, rel=1e-6)


def test_a_folder_that_says_it_in_a_file_of_its_own(tmp_path) -> None:
    """`hf_quant_config.json`, and a `config.json` that says nothing."""
    planes = written("llama", tmp_path / "m", "modelopt", "nvfp4", inputs="static")
    path = tmp_path / "m" / "config.json"
    says = json.loads(path.read_text())
    del says["quantization_config"]
    path.write_text(json.dumps(says))
    asked = LayoutConfig(frozen=True)
    model = load(tmp_path / "m", quantization_config=asked, dtype=torch.float32)
    assert not any(one.requires_grad for one in quantized(model).values())
    check(model, tmp_path / "m", planes)
    check(ours.load(tmp_path / "m", dtype=torch.float32), tmp_path / "m", planes)
    (tmp_path / "m" / "hf_quant_config.json").unlink()
    check(ours.load(tmp_path / "m", dtype=torch.float32), tmp_path / "m", planes)  # by its names


@pytest.mark.filterwarnings("ignore::hybridq.HybridQWarning")
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_what_is_exported_comes_back(layout, tmp_path) -> None:
    """A mixture that was quantized while it was loaded, in a server's layout, and loaded again."""
    folder = saved("wide_moe", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(format="mxfp8"))
    hybridq.export(model, tmp_path / "out", layout=layout)
    again, told = ours.load(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    mine, its = quantized(model), quantized(again)
    assert mine.keys() == its.keys() and any("experts" in name for name in mine)
    for name, value in mine.items():
        assert torch.equal(value.rowwise.data, its[name].rowwise.data)
        assert torch.equal(value.rowwise.scale, its[name].rowwise.scale)
    assert torch.equal(logits(model), logits(again))


def test_a_loaded_model_trains(tmp_path) -> None:
    written("qwen3_moe", tmp_path / "m", "modelopt", "nvfp4", inputs="static")
    model = load(tmp_path / "m").train()
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    assert all(one.grad is not None for one in quantized(model).values())


def _t5():
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1}
    config = transformers.T5Config(num_heads=4, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def _bart():  # of which AutoModelForCausalLM would make the decoder alone
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    widths = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.2}
    config = transformers.BartConfig(vocab_size=96, **layers, **widths, **heads)
    return transformers.BartForConditionalGeneration(config)


def _llava():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = 1
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=64, **sizes)
    text = transformers.LlamaConfig(vocab_size=96, **sizes)
    configs = {"vision_config": vision, "text_config": text, "vision_feature_layer": -1}
    config = transformers.LlavaConfig(image_token_index=95, **configs)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_t5, _bart, _llava])
def test_the_class_is_the_one_that_the_folder_names(make, tmp_path) -> None:
    torch.manual_seed(0)
    made = make()
    made.save_pretrained(tmp_path / "m-plain")
    planes = written("", tmp_path / "m", "modelopt", "nvfp4")
    model = ours.load(tmp_path / "m").eval()
    assert type(model) is type(made) and len(quantized(model)) == len(planes) > 5
    decoded = type(made).from_pretrained(tmp_path / "m-decoded").eval()
    ids = {"input_ids": torch.arange(2, 14)[None]}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.arange(5)[None]
    want = decoded(**ids).logits
    assert (model(**ids).logits - want).norm() <= 1e-5 * want.norm()
    assert (made.eval()(**ids).logits - want).norm() > 1e-3 * want.norm()
    path = tmp_path / "m" / "config.json"
    says = json.loads(path.read_text())
    path.write_text(json.dumps({**says, "architectures": ["NoSuchModel"]}))
    if make is not _bart:  # there is a class for causal models
        with pytest.raises(
            ValueError, match=r"architectures, got \['NoSuchModel'\] .*model_class="
        ):
            ours.load(tmp_path / "m")
    assert type(ours.load(tmp_path / "m", type(made))) is type(made)


@pytest.mark.parametrize("layout", ["compressed-tensors", "fine-grained-fp8", "auto-fp8"])
def test_what_the_text_of_a_model_says_is_read(layout, tmp_path) -> None:
    """As published: `quantization_config` inside of `text_config`, for which others have one."""
    torch.manual_seed(0)
    _llava().save_pretrained(tmp_path / "m-plain")
    planes = written("", tmp_path / "m", layout, "fp8_tensor")
    path = tmp_path / "m" / "config.json"
    says = json.loads(path.read_text())
    says["text_config"]["quantization_config"] = says.pop("quantization_config")
    path.write_text(json.dumps(says))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    model = ours.load(tmp_path / "m", config=config).eval()
    assert config.text_config.quantization_config is not None, "the caller's own stays as it is"
    assert len(quantized(model)) == len(planes) > 5
    model.save_pretrained(tmp_path / "own")
    says = json.loads((tmp_path / "own" / "config.json").read_text())
    assert says["quantization_config"]["quant_method"] == "hybridq"
    assert "quantization_config" not in says["text_config"]
    decoded = type(model).from_pretrained(tmp_path / "m-decoded").eval()
    ids = torch.arange(2, 14)[None]
    want = decoded(input_ids=ids).logits
    for one in (model, type(model).from_pretrained(tmp_path / "own").eval()):
        assert (one(input_ids=ids).logits - want).norm() <= 1e-5 * want.norm()


def test_causal_models_need_no_name(tmp_path) -> None:
    written("llama", tmp_path / "m", "modelopt", "nvfp4")
    path = tmp_path / "m" / "config.json"
    says = json.loads(path.read_text())
    del says["architectures"]
    path.write_text(json.dumps(says))
    assert type(ours.load(tmp_path / "m")) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("config", [None, HybridQConfig("nvfp4")])
def test_a_file_that_is_cut_is_named(config, tmp_path) -> None:
    written("llama", tmp_path / "m", "modelopt", "mxfp8")
    folder = tmp_path / ("m" if config is None else "m-plain")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{path.name} is no whole safetensors file"):
        ours.load(folder) if config is None else load(folder, quantization_config=config)


def test_what_is_no_such_folder_is_refused(tmp_path) -> None:
    written("llama", tmp_path / "m", "modelopt", "mxfp8")
    plain = tmp_path / "m-plain"
    with pytest.raises(ValueError, match="must hold weights that another program quantized, got n"):
        ours.load(plain)
    with pytest.raises(ValueError, match="a folder of modelopt must have quantized weights"):
        load(plain, quantization_config=LayoutConfig("modelopt"))
    load(plain, quantization_config=HybridQConfig("mxfp8")).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="planes of hybridq, which need no LayoutConfig"):
        ours.load(tmp_path / "own")
    with pytest.raises(hybridq.errors.SpecError, match="a layout must be one of"):
        LayoutConfig("model-opt")
    path = tmp_path / "m" / "config.json"
    says = json.loads(path.read_text())
    says["quantization_config"]["quant_method"] = "awq"
    path.write_text(json.dumps(says))
    with pytest.raises(CheckpointError, match="quant_method of the configuration must be one of"):
        ours.load(tmp_path / "m")
    assert "modelopt" in layouts.names()
