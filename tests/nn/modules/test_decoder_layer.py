"""Decoders, norms of queries and keys, norms at the end, parallel branches, skipped branches.

The oracle is the layer written a second time with torch's functions and the parts' own weights;
under a recipe with `hybridq.Linear` and the library's norm and activation as parts of their own.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import hybridq
from fused_model import apart
from hybridq import MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from hybridq.nn.modules.attention_masks import MASKS, visible
from hybridq.quantizers import MXFP8Quantizer
from hybridq.recipes import CustomRecipe, autocast

HIDDEN, FFN, HEADS, GROUPS, LENGTH, KEYS, BATCH = 40, 24, 4, 2, 6, 9, 3
FEATURES = HIDDEN // HEADS
OPTIONS = {
    "decoder": {"layer_type": "decoder"},
    "decoder, rmsnorm": {
        "layer_type": "decoder",
        "normalization": "RMSNorm",
        "qk_norm_type": "RMSNorm",
        "bias": False,
    },
    "decoder, post": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
        "attn_input_format": "sbhd",
    },
    "output norm": {"output_layernorm": True, "zero_centered_gamma": True},
    "output norm, post": {
        "output_layernorm": True,
        "apply_residual_connection_post_layernorm": True,
    },
    "parallel": {"parallel_attention_mlp": True},
    "l2": {"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True},
    "layernorm": {"qk_norm_type": "LayerNorm"},
}
ROTARY = ("l2", "layernorm", "parallel")


def make(which: str, **options) -> TransformerLayer:
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    given |= OPTIONS[which] | options
    layer = TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **given)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


class Plain(nn.Module):
    """The layer of separate parts, batch first."""

    def __init__(self, layer: TransformerLayer, *, is_ours: bool) -> None:
        super().__init__()
        self.layer, self.is_ours = [layer], is_ours
        own = layer.self_attention
        self.first = self._linear(own.layernorm_qkv if own.input_layernorm else own.qkv)
        self.projections = nn.ModuleList([self._linear(own.proj)])
        if layer.inter_attention is not None:
            cross = layer.inter_attention
            self.query = self._linear(cross.layernorm_query)
            self.key_value = self._linear(cross.key_value)
            self.projections.append(self._linear(cross.proj))
        self.mlp = apart(layer.layernorm_mlp, is_ours=is_ours)

    def _linear(self, module):
        if isinstance(module, hybridq.LayerNormLinear):
            return apart(module, is_ours=self.is_ours)
        made = copy.deepcopy(module)
        if not self.is_ours:
            made.__class__ = nn.Linear
        return made

    def _norm(self, module, x):
        if module is None:
            return x
        if module.kind == "L2Normalization":
            return (x.float() / (x.float().square().sum(-1, keepdim=True) + module.eps).sqrt()).to(
                x.dtype
            )
        weight = module.weight + 1 if module.zero_centered_gamma else module.weight
        if module.kind == "RMSNorm":
            return F.rms_norm(x, x.shape[-1:], weight, module.eps)
        return F.layer_norm(x, x.shape[-1:], weight, module.bias, module.eps)

    def _attend(self, attention, query, key, value, is_causal, angles):
        query, key, value = (
            t.unflatten(-1, (-1, FEATURES)).transpose(1, 2) for t in (query, key, value)
        )
        turn = hybridq.nn.modules.rotary.apply_rotary
        first = attention.qk_norm_before_rope
        steps = [lambda t, norm: self._norm(norm, t)]
        if angles is not None:
            steps.insert(len(steps) if first else 0, lambda t, norm: turn(t, angles, False))
        for one in steps:
            query, key = one(query, attention.q_norm), one(key, attention.k_norm)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x, encoder_output=None, angles=None):
        (layer,) = self.layer
        post, of_keys = layer.residual_post_layernorm, GROUPS * FEATURES
        normed = x
        if layer.self_attention.input_layernorm:
            normed = self.first[0](x)
            made = self.first[1](normed)
        else:
            made = self.first(x)
        parts = made.split([HIDDEN, of_keys, of_keys], -1)
        own = self._attend(layer.self_attention, *parts, True, angles)
        attended = self.projections[0](own)
        if layer.parallel_attention_mlp:
            return x + (attended + self.mlp(x))
        hidden = (normed if post else x) + attended
        if layer.inter_attention is not None:
            normed = self.query[0](hidden)
            query = self.query[1](normed)  # first: random seeds are drawn in this order
            parts = (query, *self.key_value(encoder_output).split([of_keys, of_keys], -1))
            own = self._attend(layer.inter_attention, *parts, False, None)
            hidden = (normed if post else hidden) + self.projections[1](own)
        normed = self.mlp[0](hidden)
        y = (normed if post else hidden) + self.mlp[1:](normed)
        return self._norm(layer.layernorm, y)


def inputs(which, dtype=torch.float32):
    """Batch first: x, an encoder's output or None, dy."""
    x, dy = (torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype) for _ in range(2))
    other = torch.randn(BATCH, KEYS, HIDDEN, dtype=dtype) if "decoder" in which else None
    return x, other, dy


def angles_of(which):
    return RotaryPositionEmbedding(FEATURES)(LENGTH) if which in ROTARY else None


def run(layer, call, x, other, dy, recipe=None, seed=3):
    """[y, dx, gradient of the encoder's output, *of the parameters]."""
    layer.zero_grad()
    given = [None if t is None else t.clone().requires_grad_() for t in (x, other)]
    torch.manual_seed(seed)
    with autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = call(*given)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in given if t is not None)], {
        name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None
    }


def ours(layer, which, sbhd=False):
    """The layer, called batch first."""

    def call(x, other):
        given = {"encoder_output": other, "rotary_pos_emb": angles_of(which)}
        if sbhd:
            x = x.transpose(0, 1)
            given["encoder_output"] = None if other is None else other.transpose(0, 1)
        y = layer(x, **given)
        return y.transpose(0, 1) if sbhd else y

    return call


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", OPTIONS)
def test_without_a_recipe_it_is_torch(which, dtype) -> None:
    """Forward and backward; in FP32 within what the order of a transposed copy's sums allows."""
    layer = make(which, dtype=dtype)
    plain = Plain(layer, is_ours=False)
    data = inputs(which, dtype)
    sbhd = OPTIONS[which].get("attn_input_format") == "sbhd"
    got, grads = run(layer, ours(layer, which, sbhd), *data)
    want, others = run(plain, lambda x, other: plain(x, other, angles_of(which)), *data)
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    for one, two in zip(got, want, strict=True):
        assert torch.allclose(one, two, rtol=tolerance, atol=tolerance)
        assert sbhd or which == "l2" or dtype != torch.float32 or torch.equal(one, two)
    # The norms of queries and keys, and the last, are the layer's own in both.
    assert len(others) + sum("_norm." in n or n.startswith("layernorm.") for n in grads) == len(
        grads
    )
    for value in others.values():
        mine = [g for g in grads.values() if g.shape == value.shape]
        assert any(torch.allclose(g, value, rtol=tolerance, atol=tolerance * 10) for g in mine)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "mxfp8_fwd_nvfp4_bwd"])
@pytest.mark.parametrize("which", [name for name in OPTIONS if name not in ("decoder, post", "l2")])
def test_under_a_recipe_it_is_its_parts(which, recipe) -> None:
    layer = make(which)
    plain = Plain(layer, is_ours=True)
    data = inputs(which)
    got, _ = run(layer, ours(layer, which), *data, recipe)
    want, _ = run(plain, lambda x, other: plain(x, other, angles_of(which)), *data, recipe)
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
    assert not torch.equal(got[0], ours(layer, which)(*data[:2]))


@pytest.mark.more
@pytest.mark.parametrize(
    "recipe", [pytest.param("mxfp8", marks=pytest.mark.slow), "mxfp8_fwd_nvfp4_bwd"]
)
@pytest.mark.parametrize(
    "which",
    [
        "decoder, rmsnorm",
        *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS if n != "decoder, rmsnorm"),
    ],
)
def test_compiled_and_recomputed(which, recipe) -> None:
    torch._dynamo.reset()
    counters.clear()
    layer = make(which, drop_path_rate=0.4)
    sbhd = OPTIONS[which].get("attn_input_format") == "sbhd"
    call, data = ours(layer, which, sbhd), inputs(which)
    want, grads = run(layer, call, *data, recipe)
    angles = angles_of(which)

    def step(x, other):
        given = {"encoder_output": other, "rotary_pos_emb": angles}
        if sbhd:
            x = x.transpose(0, 1)
            given["encoder_output"] = None if other is None else other.transpose(0, 1)
        y = layer(x, **given)
        return y.transpose(0, 1) if sbhd else y

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for again in (compiled, compiled, lambda *given: hybridq.checkpoint(call, *given)):
        got, mine = run(layer, again, *data, recipe)
        assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
        assert all(torch.equal(mine[name], value) for name, value in grads.items())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


def test_skipped_branches() -> None:
    """Per sample: all or nothing of a branch, scaled up; in training only; half of them at 0.5."""
    layer = make("parallel", drop_path_rate=0.5)
    whole = copy.deepcopy(layer)
    whole.drop_path_rate = 0.0
    x = torch.randn(200, 2, HIDDEN)
    y, branch = layer(x), whole(x) - x
    kept = ((y - x) / 2 - branch).abs().amax((1, 2)) < 1e-5
    skipped = (y == x).all(2).all(1)
    assert (kept ^ skipped).all() and 60 < skipped.sum() < 140
    layer.drop_path_rate = 1.0
    assert torch.equal(layer(x), x)
    layer.eval()
    assert torch.equal(layer(x), whole.eval()(x))
    transposed = make("parallel", drop_path_rate=0.5, attn_input_format="sbhd")
    y = transposed(x.transpose(0, 1))
    skipped = (y == x.transpose(0, 1)).all(2)  # [length, batch]: a sample as a whole
    assert torch.equal(skipped[0], skipped[1]) and 60 < skipped[0].sum() < 140


def test_masks_of_other_lengths() -> None:
    """Queries and keys of two lengths: where the diagonal lies, and windows along it."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(KEYS)
    behind = KEYS - LENGTH
    hidden = torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool)
    hidden[1, ..., 5:] = True
    everything = torch.ones(LENGTH, KEYS, dtype=torch.bool)
    cases = {
        "no_mask": everything,
        "causal": j <= i,
        "causal_bottom_right": j <= i + behind,
        "padding": everything & ~hidden,
        "padding_causal": (j <= i) & ~hidden,
        "causal_padding": (j <= i) & ~hidden,
        "padding_causal_bottom_right": (j <= i + behind) & ~hidden,
        "arbitrary": everything & ~hidden,
    }
    assert set(cases) == set(MASKS)
    layer = make("decoder")
    x, other, _ = inputs("decoder")
    attention = layer.inter_attention
    made = []
    for kind, seen in cases.items():
        given = hidden if MASKS[kind].needs_mask else None
        mask, is_causal = visible(kind, None, given, LENGTH, KEYS, x.device)
        expected = seen if not is_causal else None
        assert is_causal == (kind == "causal")
        if not is_causal and mask is not None:
            assert torch.equal(mask.broadcast_to(expected.shape), expected)
        query = attention.layernorm_query(x).unflatten(-1, (HEADS, FEATURES)).transpose(1, 2)
        pair = attention.key_value(other).unflatten(-1, (2, GROUPS, FEATURES)).unbind(2)
        key, value = (t.transpose(1, 2) for t in pair)
        mixed = F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
        want = attention.proj(mixed.transpose(1, 2).flatten(2))
        got = attention(x, given, encoder_output=other, attn_mask_type=kind)
        assert torch.allclose(got, want, atol=1e-5), kind
        made.append(got)
        y = layer(x, encoder_output=other, enc_dec_attn_mask=given, enc_dec_attn_mask_type=kind)
        assert y.shape == x.shape
    assert not torch.equal(made[1], made[2])
    window, _ = visible("no_mask", (1, 2), None, LENGTH, KEYS, x.device)
    assert torch.equal(window, (j >= i + behind - 1) & (j <= i + behind + 2))
    window, _ = visible("causal", (1, 0), None, LENGTH, KEYS, x.device)
    assert torch.equal(window, (j >= i - 1) & (j <= i))
    assert visible("causal_bottom_right", None, None, 4, 4, x.device) == (None, True)


def test_one_token_after_the_others() -> None:
    """The last queries alone, all keys before them seen, are the last rows of all queries."""
    attention = MultiheadAttention(HIDDEN, HEADS, attention_type="cross", attention_dropout=0.0)
    x = torch.randn(KEYS, BATCH, HIDDEN)
    whole = attention(x, encoder_output=x, attn_mask_type="causal")
    last = attention(x[-2:], encoder_output=x, attn_mask_type="causal_bottom_right")
    assert torch.allclose(last, whole[-2:], atol=1e-5)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("norm", [False, True])
def test_checkpoints_with_names_of_their_own_for_queries_keys_and_values(kind, norm) -> None:
    options = {"num_gqa_groups": GROUPS, "attention_type": kind, "input_layernorm": norm}
    source = MultiheadAttention(HIDDEN, HEADS, **options)
    whole = source.state_dict()
    names = {"self": ("query", "key", "value"), "cross": ("key", "value")}[kind]
    sizes = {"query": HIDDEN, "key": GROUPS * FEATURES, "value": GROUPS * FEATURES}
    module = "key_value" if kind == "cross" else "layernorm_qkv" if norm else "qkv"
    apart_names = dict(whole)
    for what in ("weight", "bias"):
        parts = apart_names.pop(f"{module}.{what}").split([sizes[n] for n in names])
        apart_names |= {f"{module}.{n}_{what}": t for n, t in zip(names, parts, strict=True)}
    if kind == "cross":
        own = "layernorm_query" if norm else "query_layer"
        for what in ("weight", "bias"):
            apart_names[f"{own}.query_{what}"] = apart_names.pop(f"{own}.{what}")
    for copied in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        target = copied(MultiheadAttention(HIDDEN, HEADS, **options))
        given = dict(apart_names)
        target.load_state_dict(given, strict=True)
        assert list(given) == list(apart_names)
        assert all(torch.equal(target.state_dict()[name], whole[name]) for name in whole)
        target.load_state_dict(whole, strict=True)
    broken = dict(apart_names)
    broken[f"{module}.value_weight"] = broken[f"{module}.value_weight"][1:]
    with pytest.raises(RuntimeError, match=rf"value_weight: must have {sizes['value']} rows"):
        target.load_state_dict(broken)
    del broken[f"{module}.value_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*\.weight"):
        target.load_state_dict(broken)


def test_keys_and_names_of_roles() -> None:
    seen = []

    def factory(role):
        seen.append(role.name)
        return MXFP8Quantizer()

    layer = make("decoder, rmsnorm", name="tl0")
    x, other, _ = inputs("decoder")
    with autocast(recipe=CustomRecipe(factory)):
        layer(x, encoder_output=other)
    first = [f"tl0.self_attention.{part}" for part in ("layernorm_linear_qkv", "proj")]
    cross = ("layernorm_linear_q", "linear_kv", "proj")
    first += [f"tl0.inter_attention.{part}" for part in cross]
    assert list(dict.fromkeys(seen)) == [*first, "tl0.layernorm_mlp.fc1", "tl0.layernorm_mlp.fc2"]
    keys = [key for key in layer.state_dict() if key.startswith("inter_attention")]
    own = ("layernorm_query.layer_norm_weight", "layernorm_query.weight", "key_value.weight")
    norms = ("q_norm.weight", "k_norm.weight")
    assert keys == [f"inter_attention.{key}" for key in (*own, *norms, "proj.weight")]
    assert [k for k in make("output norm").state_dict() if k.startswith("layernorm.")] == [
        "layernorm.weight",
        "layernorm.bias",
    ]
    assert not any("norm.weight" in k for k in make("l2").state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_type": "both"}, "layer_type must be encoder or decoder"),
        ({"drop_path_rate": 1.1}, "drop_path_rate"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "parallel_attention_mlp"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "parallel_attention_mlp"),
        ({"qk_norm_type": "BatchNorm"}, "type must be one of LayerNorm, RMSNorm, L2Normalization"),
        ({"qk_norm_type": "RMSNorm", "qk_norm_eps": -1.0}, "eps must be finite"),
        ({"layer_type": "decoder", "enc_dec_attn_mask_type": "x"}, "mask type must be one of"),
    ],
)
def test_bad_constructor_arguments(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        TransformerLayer(HIDDEN, FFN, HEADS, **options)


def test_bad_calls() -> None:
    x, other, _ = inputs("decoder")
    with pytest.raises(ValueError, match="encoder_output goes with attention_type='cross', got no"):
        make("decoder")(x)
    with pytest.raises(ValueError, match="encoder_output goes with layer_type='decoder'"):
        make("layernorm")(x, encoder_output=other)
    with pytest.raises(ValueError, match=r"encoder_output goes with .*'self'"):
        MultiheadAttention(HIDDEN, HEADS)(x, encoder_output=other)
    with pytest.raises(ValueError, match="type must be self or cross"):
        MultiheadAttention(HIDDEN, HEADS, attention_type="both")
