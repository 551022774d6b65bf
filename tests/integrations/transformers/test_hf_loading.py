"""Models of transformers that are quantized while they are loaded, saved and loaded again."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch
from torch import nn

import hybridq
from hf_models import IDS, assert_same, config, load, logits, quantized, saved, transformers
from hybridq import QuantizedTensor
from hybridq.integrations.transformers import VERSION, HybridQConfig
from hybridq.quantizers import Quantizer

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "fp8_delayed", "mxfp8_fwd_nvfp4_bwd")


@pytest.fixture(autouse=True)
def quiet():
    """That a mixture's experts stay in high precision is said by `convert`, and tested there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridq.HybridQWarning)
        yield


# ---- quantized while it is read


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_have_the_planes_of_quantized_model_init(recipe, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(recipe))
    with hybridq.quantized_model_init(recipe):
        other = hybridq.convert(transformers.AutoModelForCausalLM.from_config(config("llama")))
    other = other.bfloat16()
    other.load_state_dict(load(folder).state_dict())
    names = set(quantized(model))
    assert names == set(quantized(other)) and len(names) == 14
    assert all(model.get_parameter(name).requires_grad for name in names)
    for name in names:
        mine, its = model.get_parameter(name), other.get_parameter(name)
        assert torch.equal(mine.dequantize(), its.dequantize())
        assert mine.quantizer.text == its.quantizer.text


def test_a_spec_string_is_a_format(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    text = "nvfp4_16x16;4o6=mse;bound=256"
    model = load(folder, quantization_config=HybridQConfig(format=text))
    model.save_pretrained(tmp_path / "q")
    assert_same(model, load(tmp_path / "q"))
    specs = {one.quantizer.rowwise for one in quantized(model).values()}
    assert specs == {hybridq.PlaneSpec.parse(text)}


@pytest.mark.parametrize(
    ("format", "columnwise"), [("nvfp4", None), ("fp8_128x128", None), ("mxfp8", "nvfp4")]
)
def test_a_format_is_that_of_each_weight(format, columnwise, tmp_path) -> None:
    folder = saved("llama", tmp_path)
    asked = HybridQConfig(format=format, columnwise=columnwise)
    model, plain = load(folder, quantization_config=asked), load(folder)
    for name, value in quantized(model).items():
        want = hybridq.quantize(plain.get_parameter(name).detach(), format, columnwise=columnwise)
        assert torch.equal(value.dequantize(), want.dequantize())
        assert (value.columnwise is None) == (columnwise is None)
        if columnwise is not None:
            assert torch.equal(value.columnwise.data, want.columnwise.data)
    assert 0 < (logits(model) - logits(plain)).norm() < 0.5 * logits(plain).norm()


def test_no_second_copy_in_high_precision_is_ever_there(tmp_path, monkeypatch) -> None:
    """At each weight that is quantized, at most two plain ones of the model's size are alive."""
    folder = saved("llama", tmp_path, dtype=torch.float32)
    alive = []
    own = Quantizer.update_quantized

    def counting(self, tensor, target, **options):
        kinds = (torch.Tensor, nn.Parameter)
        plain = [one for one in gc.get_objects() if type(one) in kinds and not one.is_meta]
        shapes = {(64, 64), (32, 64), (96, 64), (64, 96)}
        own_size = [one for one in plain if tuple(one.shape) in shapes and one.is_floating_point()]
        storages = {one.untyped_storage().data_ptr() for one in own_size} - kept
        alive.append(len(storages))
        return own(self, tensor, target, **options)

    gc.collect()
    matrices = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    kept = {one.untyped_storage().data_ptr() for one in matrices if not one.is_meta}
    monkeypatch.setattr(Quantizer, "update_quantized", counting)
    model = load(folder, quantization_config=HybridQConfig("nvfp4"), dtype=torch.bfloat16)
    # The embedding and the head, [96, 64] each, are the model's own.
    assert len(alive) == 14 and max(alive) <= 4
    held = sum(one.nbytes for one in quantized(model).values())
    assert held < 0.6 * sum(one.numel() for one in quantized(model).values())


# ---- saved and loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_model_is_loaded_bit_for_bit(recipe, dtype, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain", dtype=dtype)
    model = load(folder, quantization_config=HybridQConfig(recipe))
    model.save_pretrained(tmp_path / "q", max_shard_size="30KB")
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1
    says = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert (says["quant_method"], says["recipe"], says["version"]) == ("hybridq", recipe, VERSION)
    again = load(tmp_path / "q")
    assert quantized(again) and again.dtype == dtype
    assert_same(model, again)
    assert torch.equal(logits(model), logits(again))
    again.save_pretrained(tmp_path / "third")
    assert_same(model, load(tmp_path / "third"))


@pytest.mark.more
@pytest.mark.parametrize("recipe", [n for n in hybridq.recipes.names() if n not in RECIPES])
def test_every_recipe_is_saved_and_loaded(recipe, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(recipe))
    model.save_pretrained(tmp_path / "q")
    assert_same(model, load(tmp_path / "q"))


@pytest.mark.parametrize("kind", ["tied", "qwen3", "mixtral", "qwen3_moe", "gpt2"])
def test_families(kind, tmp_path) -> None:
    folder = saved(kind, tmp_path / "plain")
    model, told = load(
        folder, quantization_config=HybridQConfig(format="mxfp8"), output_loading_info=True
    )
    assert not any(told.values())
    model.save_pretrained(tmp_path / "q", max_shard_size="40KB")
    again, told = load(tmp_path / "q", output_loading_info=True)
    assert not any(told.values())
    assert_same(model, again)
    assert torch.equal(logits(model), logits(again))
    again.save_pretrained(tmp_path / "own", save_original_format=False)
    assert_same(model, load(tmp_path / "own"))
    assert set(again.dequantize().state_dict()) == set(load(folder).state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_transposed_weight_has_the_values_of_its_forward(recipe, tmp_path) -> None:
    """GPT-2's are [in, out]: of its two planes, the columnwise one is what a forward takes."""
    folder = saved("gpt2", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(recipe))
    assert quantized(model)
    model.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    for name, value in quantized(model).items():
        assert torch.equal(value.dequantize(), again.get_parameter(name).dequantize())
        want = value.t().quantizer.quantize(load(folder).get_parameter(name).detach().t())
        assert torch.equal(value.dequantize(), want.dequantize().t())
    assert torch.equal(logits(model), logits(again))


def test_a_base_model_is_loaded_from_a_whole_one(tmp_path) -> None:
    folder = saved("tied", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(format="nvfp4"))
    model.save_pretrained(tmp_path / "q")
    base = transformers.AutoModel.from_pretrained(tmp_path / "q")
    assert_same(model.model, base)


def test_planes_have_their_documented_names(tmp_path) -> None:
    from safetensors import safe_open

    folder = saved("llama", tmp_path / "plain")
    load(folder, quantization_config=HybridQConfig("mxfp8")).save_pretrained(tmp_path / "q")
    name = "model.layers.0.mlp.up_proj.weight"
    with safe_open(tmp_path / "q" / "model.safetensors", framework="pt") as file:
        own = {key.removeprefix(name) for key in file.keys() if key.startswith(name)}  # noqa: SIM118
        assert own == {
            *(".rowwise.data", ".rowwise.scale", ".columnwise.data", ".columnwise.scale"),
        }
        record = json.loads(file.metadata()["hybridq"])["tensors"][name]
    assert record["shape"] == [96, 64] and "mxfp8" in record["quantizer"]
    again = load(tmp_path / "q")
    again.save_pretrained(tmp_path / "shards", max_shard_size="5KB")  # planes of one in several
    checkpoint = hybridq.load_checkpoint(tmp_path / "shards")
    assert torch.equal(checkpoint[name].columnwise.data, again.get_parameter(name).columnwise.data)
    assert set(checkpoint) == set(again.state_dict())


def test_a_dequantized_model_is_plain(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("nvfp4"))
    want = {name: one.dequantize() for name, one in quantized(model).items()}
    plain = model.dequantize()
    assert plain is model and not quantized(plain) and not plain.is_quantized
    assert all(torch.equal(plain.get_parameter(name), one) for name, one in want.items())
    plain.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again, told = load(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(logits(plain), logits(again))


# ---- options


def test_modules_that_are_not_converted(tmp_path) -> None:
    folder = saved("llama", tmp_path)
    asked = HybridQConfig("mxfp8", modules_to_not_convert=["model.layers.1", "down_proj"])
    model = load(folder, quantization_config=asked)
    assert len(quantized(model)) == 6
    for name, module in model.named_modules():
        kept = name.startswith("model.layers.1") or name.endswith(("down_proj", "lm_head"))
        if isinstance(module, nn.Linear):
            assert isinstance(module, hybridq.Linear) != kept, name
    typo = HybridQConfig("mxfp8", modules_to_not_convert=["model.layers.1", "down_porj"])
    with pytest.warns(hybridq.HybridQWarning, match="no module of LlamaForCausalLM by 'down_porj'"):
        model = load(folder, quantization_config=typo)
    model.save_pretrained(tmp_path / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridq.HybridQWarning)
        load(tmp_path / "again")  # it was said once; names in files may be others
    heads = load(folder, quantization_config=HybridQConfig("mxfp8", also=["heads"]))
    assert isinstance(heads.lm_head.weight, QuantizedTensor)
    wide = load(folder, quantization_config=HybridQConfig("mxfp8", least_width=65))
    assert not quantized(wide)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_frozen_weights_have_one_plane_and_no_gradient(recipe, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig(recipe, frozen=True))
    model.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    assert_same(model, again)
    for one in (model, again):
        assert quantized(one)
        for weight in quantized(one).values():
            assert weight.columnwise is None and not weight.requires_grad
        assert one.model.norm.weight.requires_grad


def test_a_tied_head_has_the_embeddings_weight(tmp_path) -> None:
    folder = saved("tied", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("mxfp8", also=["heads"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "q")
    assert_same(model, load(tmp_path / "q"))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_values_have_the_dtype_asked_for_before_they_are_quantized(given, asked, tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain", dtype=given)
    model = load(folder, quantization_config=HybridQConfig("nvfp4"), dtype=asked)
    plain = load(folder, dtype=asked)
    assert {one.dtype for one in model.parameters()} == {asked}
    for name, value in quantized(model).items():
        want = value.quantizer.quantize(plain.get_parameter(name).detach())
        assert torch.equal(value.rowwise.data, want.rowwise.data)
    model.save_pretrained(tmp_path / "q")
    other = load(tmp_path / "q", dtype=torch.float32)  # planes stay, and appear as asked
    assert {one.dtype for one in other.parameters()} == {torch.float32}
    for name, value in quantized(model).items():
        assert torch.equal(value.rowwise.data, other.get_parameter(name).rowwise.data)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(device_map, tmp_path) -> None:
    pytest.importorskip("accelerate")
    folder = saved("llama", tmp_path / "plain")
    asked = HybridQConfig("nvfp4")
    model = load(folder, quantization_config=asked, device_map=device_map)
    assert_same(model, load(folder, quantization_config=asked))
    model.save_pretrained(tmp_path / "q")
    assert_same(model, load(tmp_path / "q", device_map=device_map))


def test_a_disk_is_no_device(tmp_path) -> None:
    pytest.importorskip("accelerate")
    folder = saved("llama", tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    places |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ValueError, match=r"cannot be offloaded to the disk, got a device_map"):
        load(folder, quantization_config=HybridQConfig("nvfp4"), device_map=places)


def test_converted_for_training_and_no_more(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    asked = HybridQConfig("mxfp8", weights="high_precision")
    model, plain = load(folder, quantization_config=asked), load(folder)
    assert not quantized(model) and isinstance(model.model.layers[0].mlp.up_proj, hybridq.Linear)
    assert torch.equal(logits(model), logits(plain))
    with hybridq.autocast(recipe="mxfp8"):
        assert not torch.equal(logits(model), logits(plain))
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert isinstance(again.model.layers[0].mlp.up_proj, hybridq.Linear)
    assert_same(model, again)


def test_loaded_weights_train_under_their_recipe(tmp_path) -> None:
    """Under the recipe, planes as they are: the bits of high precision weights quantized there."""
    folder = saved("llama", tmp_path)
    model = load(folder, quantization_config=HybridQConfig("mxfp8")).train()
    plain = load(
        folder, quantization_config=HybridQConfig("mxfp8", weights="high_precision")
    ).train()
    losses = []
    for one in (model, plain):
        with hybridq.autocast(recipe="mxfp8"):
            losses.append(one(IDS, labels=IDS).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name
    before = model.model.layers[0].mlp.up_proj.weight.dequantize()
    hybridq.optim.AdamW(model.parameters(), lr=1e-1).step()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, QuantizedTensor) and not torch.equal(weight.dequantize(), before)


def test_generate_says_the_same_after_loading(tmp_path) -> None:
    folder = saved("llama", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("nvfp4"))
    model.save_pretrained(tmp_path / "q")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    told = [one.generate(IDS[:1], **options) for one in (model, load(tmp_path / "q"))]
    assert torch.equal(*told)
