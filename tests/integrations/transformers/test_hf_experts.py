"""Mixtures whose experts are quantized while they are loaded."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from torch import nn

import hybridq
from hf_models import IDS, assert_same, load, logits, quantized, saved
from hybridq import QuantizedTensor
from hybridq.integrations.transformers import HybridQConfig
from hybridq.quantizers import Quantizer

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4")


def experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model's experts, `[experts, rows, columns]` each."""
    named = model.named_parameters()
    return {name: one for name, one in named if "experts" in name and one.dim() == 3}


def is_transposed(kind: str) -> bool:
    """Whether weights are `[experts, in, out]`."""
    return kind in ("gpt_oss", "llama4")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_planes_are_those_of_a_forward(kind, recipe, tmp_path) -> None:
    """Loss and gradients under the recipe: the bits of weights in high precision."""
    folder = saved(kind, tmp_path)
    model = load(folder, quantization_config=HybridQConfig(recipe)).train()
    asked = HybridQConfig(recipe, weights="high_precision")
    plain = load(folder, quantization_config=asked).train()
    own = experts(model)
    assert own and all(isinstance(one, QuantizedTensor) for one in own.values())
    for name, value in own.items():
        whole = plain.get_parameter(name).detach()
        for one, matrix in zip(value.detach().unbind(0), whole, strict=True):
            one, matrix = (one.t(), matrix.t()) if is_transposed(kind) else (one, matrix)
            want = one.quantizer.quantize(matrix)
            assert torch.equal(one.dequantize(), want.dequantize())
            for mine, its in zip(
                one.tensor_storage.planes, want.tensor_storage.planes, strict=True
            ):
                assert all(map(torch.equal, mine.tensors, its.tensors))
    found = []
    for one in (model, plain):
        torch.manual_seed(0)
        with hybridq.autocast(recipe=recipe):
            loss = one(IDS, labels=IDS).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters())])
    for mine, its in zip(*found, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or torch.equal(mine, its)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "frozen"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_they_are_saved_and_loaded_bit_for_bit(kind, recipe, tmp_path) -> None:
    folder = saved(kind, tmp_path / "plain")
    is_frozen = recipe == "frozen"
    asked = HybridQConfig(format="nvfp4", frozen=True) if is_frozen else HybridQConfig(recipe)
    model, told = load(folder, quantization_config=asked, output_loading_info=True)
    assert not any(told.values())
    model.save_pretrained(tmp_path / "q", max_shard_size="60KB")
    again, told = load(tmp_path / "q", output_loading_info=True)
    assert not any(told.values())
    assert_same(model, again)
    assert set(experts(again)) <= set(quantized(again))
    assert torch.equal(logits(model), logits(again))
    if is_frozen:
        for one in experts(again).values():
            assert len(one.tensor_storage.planes) == 1 and not one.requires_grad
            assert one.nbytes < 0.6 * one.numel()
    again.save_pretrained(tmp_path / "own", save_original_format=False)
    assert_same(model, load(tmp_path / "own"))
    exact = load(tmp_path / "q", dtype=torch.float32)
    said = logits(exact)
    assert (logits(exact.dequantize()) - said).norm() < 1e-4 * said.norm()
    plain = again.dequantize()
    assert not quantized(plain)
    for name, one in experts(model).items():
        assert torch.equal(one.dequantize(), plain.get_parameter(name))
    plain.save_pretrained(tmp_path / "out")
    other, told = load(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()) and torch.equal(logits(other), logits(plain))


def test_one_layers_experts_in_high_precision_at_most(tmp_path, monkeypatch) -> None:
    folder = saved("mixtral", tmp_path, dtype=torch.float32)
    alive = []
    own = Quantizer.encode_stack

    def large() -> set[int]:
        kinds = (torch.Tensor, nn.Parameter)
        plain = [one for one in gc.get_objects() if type(one) in kinds and not one.is_meta]
        plain = [one for one in plain if one.is_floating_point() and one.numel() >= 4 * 64 * 96]
        return {one.untyped_storage().data_ptr() for one in plain}

    def counting(self, matrices):
        alive.append(len(large() - kept))
        return own(self, matrices)

    gc.collect()
    kept = large()
    monkeypatch.setattr(Quantizer, "encode_stack", counting)
    asked = HybridQConfig("nvfp4")
    model = load(folder, quantization_config=asked, dtype=torch.bfloat16)
    assert len(experts(model)) == 4 and max(alive) <= 1


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_maps(device_map, tmp_path) -> None:
    pytest.importorskip("accelerate")
    folder = saved("qwen3_moe", tmp_path / "plain")
    asked = HybridQConfig("nvfp4")
    model = load(folder, quantization_config=asked, device_map=device_map)
    assert_same(model, load(folder, quantization_config=asked))
    model.save_pretrained(tmp_path / "q")
    assert_same(model, load(tmp_path / "q", device_map=device_map))


def test_nothing_is_said_to_stay_in_high_precision(tmp_path, caplog) -> None:
    folder = saved("mixtral", tmp_path)
    load(folder, quantization_config=HybridQConfig(format="nvfp4"))
    assert "high precision" not in caplog.text


def test_they_train_and_generate(tmp_path) -> None:
    folder = saved("qwen3_moe", tmp_path / "plain")
    model = load(folder, quantization_config=HybridQConfig("mxfp8")).train()
    optimizer = hybridq.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: one.detach().dequantize() for name, one in experts(model).items()}
    losses = []
    for _ in range(4):
        with hybridq.autocast(recipe="mxfp8"):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for name, one in experts(model).items():
        assert isinstance(one, QuantizedTensor) and not torch.equal(one.dequantize(), before[name])
    model.eval().save_pretrained(tmp_path / "q")
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    told = [one.generate(IDS[:1], **options) for one in (model, load(tmp_path / "q"))]
    assert torch.equal(*told)


def test_experts_that_files_may_have_transposed_stay_planes(tmp_path) -> None:
    """Qwen3-VL-MoE's converter looks at the shape: planes that it would not turn are taken."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_experts": 4}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "moe_intermediate_size": 48, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4}
    vision |= {"intermediate_size": 96, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(1)
    plain = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    read = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained
    given = HybridQConfig(format="mxfp8")
    model = read(tmp_path / "plain", quantization_config=given)
    model.save_pretrained(tmp_path / "planes")
    again = read(tmp_path / "planes")
    held = again.model.language_model.layers[0].mlp.experts
    assert isinstance(held.gate_up_proj, QuantizedTensor)
    assert isinstance(held.down_proj, QuantizedTensor)
    assert_same(model, again)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    plain.load_state_dict(hybridq.dequantized_state_dict(again))
    torch.testing.assert_close(again(IDS).logits, plain(IDS).logits, rtol=1e-5, atol=1e-5)
