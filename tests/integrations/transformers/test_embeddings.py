"""Embeddings of transformers that scale what they look up."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import hf_models
import hybridq
from hybridq.tensor import is_quantized

transformers = pytest.importorskip("transformers")

from hybridq.integrations.transformers import HybridQConfig  # noqa: E402 (after the skip)


def _gemma3():
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=False,
        )
    )


IDS = torch.arange(32).reshape(2, 16)


def test_scaled_tables_are_stored_quantized_and_decoded() -> None:
    torch.manual_seed(0)
    model = _gemma3().eval()
    embed = model.model.embed_tokens
    want = model(IDS).logits
    hybridq.convert(model, also=["embeddings"])
    assert model.model.embed_tokens is embed and isinstance(embed, hybridq.nn.Embedding)
    assert torch.equal(model(IDS).logits, want)
    again = _gemma3()
    again.load_state_dict(model.state_dict())
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(again, also=["embeddings"])
    other = again.model.embed_tokens
    assert is_quantized(other.weight) and type(other).__name__ == type(embed).__name__
    scale = other.embed_scale.to(torch.float32)
    assert torch.equal(other(IDS), other.weight.dequantize()[IDS] * scale)
    assert not torch.equal(other(IDS), embed(IDS))
    other(IDS).sum().backward()
    assert other.weight.grad.shape == (96, 64)


def test_copies_and_files() -> None:
    model = hybridq.convert(_gemma3(), also=["embeddings"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.model.embed_tokens) is type(model.model.embed_tokens)
        assert torch.equal(other.model.embed_tokens(IDS), model.model.embed_tokens(IDS))
    report = hybridq.conversion(model, also=["embeddings"])
    assert ("ScaledWordEmbedding", 1, 1) in report.kinds


def test_other_classes_of_embeddings_stay_and_are_named() -> None:
    from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

    model = torch.nn.ModuleList([BartLearnedPositionalEmbedding(16, 32), torch.nn.Linear(16, 16)])
    why = "BartLearnedPositionalEmbedding has a forward of its own"
    assert hybridq.conversion(model, also=["embeddings"]).left_alone == (("0", why),)
    assert hybridq.conversion(model).left_alone == ()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_quantized_table_is_resized_by_its_values(is_tied: bool, tmp_path) -> None:
    """As the refusal says: rows that were there keep their values, and files have all of them."""
    kind = "tied" if is_tied else "llama"
    config = HybridQConfig(format="mxfp8", also=["embeddings"])
    hf_models.saved(kind, tmp_path / "plain")
    model = hf_models.load(tmp_path / "plain", quantization_config=config)
    table, want = model.get_input_embeddings(), model(IDS).logits
    with pytest.raises(ValueError, match=r"\(100, 64\).*resize_token_embeddings.*dequantize"):
        model.resize_token_embeddings(100)
    assert model.config.vocab_size == 96 and torch.equal(model(IDS).logits, want)
    old, quantizer = table.weight, table.weight.quantizer
    table.weight = torch.nn.Parameter(old.dequantize())
    model.tie_weights()
    model.resize_token_embeddings(100)
    table.weight = torch.nn.Parameter(quantizer.quantize(table.weight.detach()))
    model.tie_weights()
    assert is_quantized(table.weight) and model.get_input_embeddings() is table
    assert torch.equal(table.weight.dequantize()[:96], old.dequantize())
    head = model.get_output_embeddings().weight
    assert head.shape == (100, 64) and (head is table.weight) == is_tied
    made = model(IDS).logits
    assert torch.equal(made[..., :96], want)
    model.save_pretrained(tmp_path / "more")
    again = hf_models.load(tmp_path / "more")
    assert is_quantized(again.get_input_embeddings().weight)
    assert torch.equal(again(IDS).logits, made)
