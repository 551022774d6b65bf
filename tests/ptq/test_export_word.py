"""Which layers keep their precision is the model's own word, where it can be asked."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hybridq
from export_tools import run
from hf_models import saved
from hybridq.ptq.model_word import ask_model, word_of

OPTIONS = {"layout": "compressed-tensors", "format": "mxfp8"}


def ignored(folder) -> list[str]:
    said = json.loads((folder / "config.json").read_text())
    return said["quantization_config"]["ignore"]


def test_heads_tied_weights_and_routers_stay(tmp_path):
    for kind, names in {
        "tied": ["lm_head"],
        "mixtral": [
            "lm_head",
            "model.layers.0.block_sparse_moe.gate",
            "model.layers.1.block_sparse_moe.gate",
        ],
    }.items():
        source = saved(kind, tmp_path / kind)
        notes = run(source, tmp_path / f"{kind}-q", **OPTIONS)
        assert ignored(tmp_path / f"{kind}-q") == names
        assert not any("by names alone" in text for text in notes.warnings)
        assert not {"lm_head.weight", *names}.intersection(notes.outcome.tensors)


def test_what_the_model_lists_stays_whatever_its_name(tmp_path):
    """T5 keeps `wo` in FP32; by its name it is a linear layer like another."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "in")
    notes = run(tmp_path / "in", tmp_path / "q", **OPTIONS)
    found = set(notes.outcome.tensors)
    assert any(name.endswith(".wi.weight") for name in found)
    assert not any(name.endswith(".wo.weight") for name in found)
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in ignored(tmp_path / "q")
    assert not any("relative_attention_bias" in name for name in found)  # an embedding
    # What is named is chosen all the same.
    notes = run(tmp_path / "in", tmp_path / "named", include=("*.wo.weight",), **OPTIONS)
    assert set(notes.outcome.tensors) and all("wo" in name for name in notes.outcome.tensors)


def test_the_layout_of_planes_keeps_what_the_others_keep(tmp_path):
    """Tables that an encoder and a decoder share, tied heads, what stays in FP32: by every door."""
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = transformers.BartConfig(vocab_size=64, d_model=32, **sizes, **heads)
    t5 = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    for model, other, kept in (
        (transformers.BartForConditionalGeneration(bart), "fc1.weight", "model.shared.weight"),
        (transformers.T5ForConditionalGeneration(t5), "wi.weight", "wo.weight"),
    ):
        source = tmp_path / kept / "in"
        model.save_pretrained(source)
        found = run(source, tmp_path / kept / "ct", **OPTIONS).outcome.tensors
        assert any(name.endswith(other) for name in found)
        assert not any(name.endswith((kept, "shared.weight")) for name in found)
        for number, given in enumerate((source, model)):
            notes = run(given, tmp_path / kept / str(number), layout="hybridq", format="mxfp8")
            assert set(notes.outcome.tensors) == set(found)
            assert not any("by names alone" in text for text in notes.warnings)
        done = hybridq.convert_checkpoint(source, tmp_path / kept / "own", "mxfp8")
        assert set(done.tensors) == set(found)
        named = hybridq.ptq.Selection(hybridq.quantizer("mxfp8"), include=(f"*{kept}",))
        done = hybridq.convert_checkpoint(source, tmp_path / kept / "named", named)
        assert done.tensors and all(name.endswith(kept) for name in done.tensors)


def test_a_model_that_cannot_be_asked_is_said(tmp_path):
    source = saved("llama", tmp_path / "in")
    path = source / "config.json"
    config = json.loads(path.read_text())
    for change, text in (
        ({"architectures": ["OwnModel"]}, "transformers has no OwnModel"),
        ({"model_type": "own"}, "transformers cannot build LlamaForCausalLM"),
        ({"hidden_size": "many"}, "transformers cannot build LlamaForCausalLM"),
    ):
        path.write_text(json.dumps(config | change))
        assert (ask_model(source, config | change).reason or "").startswith(text)
        notes = run(source, tmp_path / text.replace(" ", ""), **OPTIONS)
        assert any(text in one and "by names alone" in one for one in notes.warnings)
        with pytest.warns(hybridq.HybridQWarning, match="by names alone"):
            hybridq.convert_checkpoint(source, tmp_path / f"own {text}", "mxfp8")
        assert ignored(tmp_path / text.replace(" ", "")) == ["lm_head"]
    path.unlink()
    notes = run(source, tmp_path / "none", **OPTIONS)
    assert any("no program will load the new folder" in one for one in notes.warnings)


def test_names_that_the_model_does_not_read_are_said(tmp_path):
    source = saved("gpt_oss", tmp_path / "in")
    notes = run(source, tmp_path / "q", **OPTIONS)
    (text,) = [one for one in notes.warnings if "has no place for" in one]
    assert "GptOssForCausalLM" in text and "experts.0.down_proj.weight and 23 others" in text
    for kind in ("mixtral", "qwen3_moe"):
        notes = run(saved(kind, tmp_path / kind), tmp_path / f"{kind}-q", **OPTIONS)
        assert not any("has no place for" in one for one in notes.warnings)
    # Stacks of experts have the names of the model's own parameters, without `.weight`.
    notes = run(source, tmp_path / "mxfp4", layout="gpt-oss-mxfp4", format="mxfp4")
    assert not any("has no place for" in one for one in notes.warnings)

    # Nor does the model read them when they are decoded.
    notes = run(tmp_path / "q", tmp_path / "decoded", layout="bf16")
    (text,) = [one for one in notes.warnings if "has no place for" in one]
    assert "GptOssForCausalLM" in text and "experts.0.down_proj.weight and 23 others" in text
    notes = run(tmp_path / "mixtral-q", tmp_path / "mixtral-decoded", layout="bf16")
    assert not any("has no place for" in one for one in notes.warnings)


def test_what_the_model_leaves_out_by_intent_is_not_said(tmp_path):
    """As published: DeepSeek-V3 has a layer behind its last one, to predict more tokens."""
    source = saved("deepseek_v3", tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    for name in ("mlp.up_proj.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.61.{name}"] = torch.randn(64, 64)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for layout, given in (("q", OPTIONS), ("decoded", {"layout": "bf16"})):
        notes = run(source if layout == "q" else tmp_path / "q", tmp_path / layout, **given)
        assert not any("has no place for" in one for one in notes.warnings)


def test_weights_kept_as_in_out_are_not_written_as_if_they_were_not(tmp_path):
    source = saved("gpt2", tmp_path / "in")
    with pytest.raises(hybridq.CheckpointError, match=r"cannot hold .*keeps it as \[in, out\]"):
        run(source, tmp_path / "q", **OPTIONS)
    assert not (tmp_path / "q").exists()


def test_any_module_has_a_word():
    word = word_of(nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 8)))
    assert word.others == {"1"} and word.in_model("0.weight") == "0.weight"
    assert word.has_place("0.weight")
