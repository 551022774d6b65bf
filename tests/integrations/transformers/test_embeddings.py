"""Embeddings of transformers that scale what they look up."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import hybridq
from hybridq.tensor import is_quantized

transformers = pytest.importorskip("transformers")


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
