"""Layers on packed sequences and on tokens kept, against each whole sequence by itself."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.nn import InferenceParams

HIDDEN, CLOSE = 32, {"rtol": 2e-5, "atol": 2e-5}


def _layer(layout, **options):
    torch.manual_seed(0)
    layer = hybridq.TransformerLayer(
        HIDDEN, 48, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=layout,
        **options,
    )  # fmt: skip
    return layer, hybridq.RotaryPositionEmbedding(8)(16)


def _starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"softmax_type": "learnable"}, {"window_size": (2, 0)}])
def test_a_packed_layer_is_the_layer_of_each_sequence(options):
    lengths = [3, 7, 1]
    layer, angles = _layer("thd", **options)
    whole, _ = _layer("sbhd", **options)
    assert layer.state_dict().keys() == whole.state_dict().keys()
    x = torch.randn(sum(lengths), HIDDEN, requires_grad=True)
    dy = torch.randn_like(x)
    y = layer(x, rotary_pos_emb=angles, cu_seqlens_q=_starts(lengths), max_seqlen_q=7)
    y.backward(dy)
    got, x.grad = x.grad, None
    parts = [whole(one[:, None], rotary_pos_emb=angles)[:, 0] for one in x.split(lengths)]
    torch.testing.assert_close(y, torch.cat(parts), **CLOSE)
    torch.cat(parts).backward(dy)
    torch.testing.assert_close(got, x.grad, **CLOSE)
    for one, other in zip(layer.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_a_packed_decoder_attends_to_its_own_sequences():
    of_queries, of_keys = [3, 4], [5, 2]
    layer, angles = _layer("thd", layer_type="decoder")
    whole, _ = _layer("sbhd", layer_type="decoder")
    x, other = torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    starts = {"cu_seqlens_q": _starts(of_queries), "cu_seqlens_kv": _starts(of_keys)}
    y = layer(x, encoder_output=other, rotary_pos_emb=angles, **starts)
    parts = [
        whole(a[:, None], encoder_output=b[:, None], rotary_pos_emb=angles)[:, 0]
        for a, b in zip(x.split(of_queries), other.split(of_keys), strict=True)
    ]
    torch.testing.assert_close(y, torch.cat(parts), **CLOSE)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_steps_with_a_cache_are_the_whole_sequence(layout):
    layer, angles = _layer(layout, window_size=(4, 0))
    whole, _ = _layer("bshd", window_size=(4, 0))
    layer.eval(), whole.eval()
    texts = {name: torch.randn(9, HIDDEN) for name in "abc"}
    cache = InferenceParams(2, 9)
    seen = dict.fromkeys(texts, 0)
    # Sequences come, change places in the batch and go; c takes the memory of a.
    for step in ({"a": 4, "b": 2}, {"b": 1, "a": 1}, {"c": 5, "b": 3}, {"b": 1, "c": 1}):
        cache.pre_step(step)
        before = cache.get_seqlens_pre_step().tolist()
        assert before == [seen[name] for name in step]
        new = [texts[name][seen[name] : seen[name] + n] for name, n in step.items()]
        if layout == "thd":
            given = {"cu_seqlens_q": _starts(list(step.values()))}
            x = torch.cat(new)
        else:
            given = {}
            x = torch.nn.utils.rnn.pad_sequence(new, batch_first=layout == "bshd")
        with torch.no_grad():
            y = layer(x, rotary_pos_emb=angles, inference_params=cache, **given)
        if layout == "thd":
            made = list(y.split(list(step.values())))
        else:
            rows = y if layout == "bshd" else y.transpose(0, 1)
            made = [row[:n] for row, n in zip(rows, step.values(), strict=True)]
        for name, one in zip(step, made, strict=True):
            seen[name] += len(one)
            with torch.no_grad():
                want = whole(texts[name][None, : seen[name]], rotary_pos_emb=angles)
            torch.testing.assert_close(one, want[0, -len(one) :], **CLOSE)


def test_lengths_and_biases_reach_attention():
    layer, _ = _layer("sbhd", self_attn_mask_type="padding_causal")
    x = torch.randn(6, 2, HIDDEN)
    starts = _starts([6, 4])
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    by_mask, by_lengths = layer(x, hidden), layer(x, cu_seqlens_q=starts)
    torch.testing.assert_close(by_mask[:, 0], by_lengths[:, 0])
    torch.testing.assert_close(by_mask[:4, 1], by_lengths[:4, 1])
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    y = layer(x, cu_seqlens_q=starts, **given, checkpoint_core_attention=True)
    y.square().sum().backward()
    assert bias.grad.abs().sum() > 0
    assert bias.grad.triu(1).eq(0).all()


def test_what_a_cache_refuses():
    layer, _ = _layer("bshd")
    cache = InferenceParams(1, 4)
    with pytest.raises(ValueError, match="1 to 1 sequences, got"):
        cache.pre_step({0: 1, 1: 1})
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        cache.pre_step({0: 5})
    with pytest.raises(ValueError, match="number of tokens of 'a' must not be negative, got -1"):
        cache.pre_step({"a": -1})
    for wrong in (1.5, True, "2"):
        with pytest.raises(TypeError, match="the number of tokens of 0 must be an int, got"):
            cache.pre_step({0: wrong})
    with torch.no_grad(), pytest.raises(ValueError, match="call pre_step before each forward"):
        layer(torch.randn(1, 3, HIDDEN), inference_params=cache)
    cache.pre_step({0: 3})
    with pytest.raises(RuntimeError, match=r"run the forward in torch\.no_grad"):
        layer(torch.randn(1, 3, HIDDEN), inference_params=cache)
    cross, _ = _layer("bshd", layer_type="decoder")
    with pytest.raises(ValueError, match="inference_params go with self-attention"):
        cross.inter_attention(
            torch.randn(1, 3, HIDDEN), encoder_output=torch.randn(1, 3, HIDDEN),
            inference_params=cache,
        )  # fmt: skip
    with pytest.raises(ValueError, match="drop_path_rate goes with samples"):
        _layer("thd", drop_path_rate=0.1)


@torch.no_grad()
def test_tokens_that_no_step_announced_are_refused():
    """A forgotten pre_step wrote each token over the last one; so did a layer in two places."""
    torch.manual_seed(3)
    layer = hybridq.TransformerLayer(32, 48, 2, attn_input_format="bshd").eval()
    x, cache = torch.randn(1, 6, 32), hybridq.nn.InferenceParams(2, 8)
    cache.pre_step({0: 4})
    first = layer(x[:, :4], inference_params=cache)
    assert torch.equal(layer(x[:, :4], inference_params=cache), first)  # the same again
    cache.pre_step({0: 1})
    layer(x[:, 4:5], inference_params=cache)
    with pytest.raises(RuntimeError, match="once after each pre_step, got others a second time"):
        layer(x[:, 5:], inference_params=cache)
    cache.pre_step({0: 1})
    last = layer(x[:, 5:], inference_params=cache)
    torch.testing.assert_close(last, layer(x)[:, 5:], rtol=0, atol=1e-5)
    cache.pre_step({1: 3})
    with pytest.raises(RuntimeError, match="have a module for each place in the model"):
        layer(layer(x[:, :3], inference_params=cache), inference_params=cache)
    cache.reset()
    cache.pre_step({0: 6})
    y = layer(x, inference_params=cache)
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-5)
    cache.pre_step({0: 1})
    with pytest.raises(RuntimeError, match=r"keys must be torch.float32 on cpu, .* got torch.bflo"):
        layer.bfloat16()(x[:, :1].bfloat16(), inference_params=cache)


def test_a_mask_of_padding_says_of_which_sequences_it_is():
    """[batch, keys] was taken for [queries, keys] where both are as many, silently."""
    attention = hybridq.nn.DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="padding", attention_dropout=0.0
    )
    torch.manual_seed(5)
    q, k, v = (torch.randn(5, 5, 2, 16) for _ in range(3))
    hidden = torch.arange(5) >= torch.tensor([5, 3, 4, 1, 2])[:, None]  # [batch, keys]
    text = r"must say which sequence it is of, \[batch, 1, 1, keys\], got \(5, 5\)"
    with pytest.raises(ValueError, match=text):
        attention(q, k, v, attention_mask=hidden)
    y = attention(q, k, v, attention_mask=hidden[:, None, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).flatten(2)
    torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-5)
    one = attention(q, k, v, attention_mask=hidden[3:4])  # of all sequences
    again = attention(q, k, v, attention_mask=hidden[3].expand(5, 1, 1, 5))
    assert torch.equal(one, again)
    for kind, shape in (
        ("padding", (5, 1, 1, 4)),
        ("arbitrary", (5, 1, 4, 5)),
        ("arbitrary", (5,)),
    ):
        mask = torch.zeros(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"attention_mask must be .* for 5 queries and 5 keys"):
            attention(q, k, v, attention_mask=mask, attn_mask_type=kind)


@pytest.mark.parametrize("wrong", [(1.5, 0), (2,), (-2, 0), 3, ("1", 0)])
def test_a_window_is_two_whole_numbers(wrong):
    with pytest.raises(ValueError, match="window_size must be two whole numbers"):
        hybridq.nn.DotProductAttention(4, 16, window_size=wrong)
    layer = hybridq.nn.DotProductAttention(4, 16, qkv_format="bshd")
    q = torch.randn(1, 3, 4, 16)
    with pytest.raises(ValueError, match="window_size must be two whole numbers"):
        layer(q, q, q, window_size=wrong)
