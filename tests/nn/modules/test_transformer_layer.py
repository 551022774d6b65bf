"""TransformerLayer and MultiheadAttention against the same layer written with torch's modules."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hybridq
from fused_model import apart
from hybridq import MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from hybridq.nn.modules.rotary import apply_rotary
from hybridq.quantizers import MXFP8Quantizer
from hybridq.recipes import CustomRecipe, autocast
from linear_model import equal, run

HIDDEN, FFN, HEADS, LENGTH, BATCH = 48, 56, 4, 10, 3


def turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary positions of `[batch, heads, length, features]` by complex numbers."""
    length, features = x.shape[-2:]
    speed = 10000.0 ** (-torch.arange(0, features, 2, dtype=torch.float32) / features)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * speed
    pairs = x.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    cos, sin = angle.cos(), angle.sin()
    made = torch.stack((a * cos + -b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return made.flatten(-2).to(x.dtype)


class Plain(nn.Module):
    """The layer's parts as modules of their own, and attention written out."""

    def __init__(self, layer: TransformerLayer, *, is_ours: bool, rotary: bool = False) -> None:
        super().__init__()
        attention = layer.self_attention
        self.shape = attention.num_attention_heads, attention.num_gqa_groups, attention.kv_channels
        self.sbhd = attention.qkv_format == "sbhd"
        self.rotated_in_pairs = attention.rotary_pos_interleaved
        self.group_by_group = attention.qkv_weight_interleaved
        self.post = layer.residual_post_layernorm
        self.rotary = rotary
        self.qkv = apart(attention.layernorm_qkv, is_ours=is_ours)
        self.proj = copy.deepcopy(attention.proj)
        if not is_ours:
            self.proj.__class__ = nn.Linear
        self.mlp = apart(layer.layernorm_mlp, is_ours=is_ours)

    def forward(self, x, seen=None):
        heads, groups, features = self.shape
        normed = self.qkv[0](x)
        made = self.qkv[1](normed)
        if self.sbhd:
            made = made.transpose(0, 1)
        batch, length, _ = made.shape
        if self.group_by_group:
            each = made.reshape(batch, length, groups, -1, features)
            ratio = heads // groups
            query = each[:, :, :, :ratio].flatten(2, 3)
            key, value = each[:, :, :, ratio], each[:, :, :, ratio + 1]
        else:
            query, key, value = made.split([n * features for n in (heads, groups, groups)], -1)
        query, key, value = (
            t.reshape(batch, length, -1, features).transpose(1, 2) for t in (query, key, value)
        )
        if self.rotary:
            query, key = turn(query, self.rotated_in_pairs), turn(key, self.rotated_in_pairs)
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
        is_causal = seen is None
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, seen, is_causal=is_causal
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        if self.sbhd:  # contiguous: torch's BF16 product rounds a strided one in another order
            mixed = mixed.transpose(0, 1).contiguous()
        hidden = (normed if self.post else x) + self.proj(mixed)
        normed = self.mlp[0](hidden)
        return (normed if self.post else hidden) + self.mlp[1:](normed)


OPTIONS = {
    "default": {},
    "llama": {
        "num_gqa_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "attn_input_format": "bshd",
    },
    "interleaved": {
        "num_gqa_groups": 2,
        "qkv_weight_interleaved": True,
        "rotary_pos_interleaved": True,
        "zero_centered_gamma": True,
    },
    "post": {"apply_residual_connection_post_layernorm": True, "kv_channels": 8},
}


def make(which: str = "default", dropout: float = 0.0, **options) -> TransformerLayer:
    given = {"hidden_dropout": dropout, "attention_dropout": dropout, **OPTIONS[which], **options}
    layer = TransformerLayer(HIDDEN, FFN, HEADS, **given)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "layer_norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def data(layer: TransformerLayer) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = next(layer.parameters()).dtype
    lead = (LENGTH, BATCH) if layer.self_attention.qkv_format == "sbhd" else (BATCH, LENGTH)
    return torch.randn(*lead, HIDDEN, dtype=dtype), torch.randn(*lead, HIDDEN, dtype=dtype)


class Rotated(nn.Module):
    """A layer that is called with angles."""

    def __init__(self, layer: TransformerLayer) -> None:
        super().__init__()
        self.layer = layer
        attention = layer.self_attention
        self.angles = RotaryPositionEmbedding(
            attention.kv_channels, interleaved=attention.rotary_pos_interleaved
        )

    def forward(self, x):
        return self.layer(x, rotary_pos_emb=self.angles(LENGTH + 5))


def gradients(module: nn.Module, results: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(["y", "dx", *dict(module.named_parameters())], results, strict=True))


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", OPTIONS)
def test_without_a_recipe_it_is_torch(which, dtype, rotary):
    layer = make(which, dtype=dtype)
    plain = Plain(layer, is_ours=False, rotary=rotary)
    x, dy = data(layer)
    module = Rotated(layer) if rotary else layer
    expected = run(plain, x, dy, enabled=False)
    for options in ({"enabled": False}, {"recipe": "high_precision"}):
        got = run(module, x, dy, **options)
        for name, a, b in zip(gradients(module, got), got, expected, strict=True):
            if layer.self_attention.num_gqa_groups == HEADS:
                assert torch.equal(a, b), name
            else:  # torch adds the gradients of shared heads in an order of its own
                scale = b.abs().max()
                assert (a - b).abs().max() <= 64 * torch.finfo(dtype).eps * scale, name


def test_ten_adamw_steps_with_identity_quantizers():
    ours = make()
    plain = Plain(ours, is_ours=False)
    for model in (ours, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(10):
            with autocast(recipe="high_precision"):
                model(torch.randn(LENGTH, BATCH, HIDDEN)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(list(ours.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "mxfp8_fwd_nvfp4_bwd"])
@pytest.mark.parametrize("which", ["default", "interleaved", "post"])
def test_under_a_recipe_it_is_its_parts(which, recipe):
    layer = make(which, num_gqa_groups=HEADS)
    plain = Plain(layer, is_ours=True, rotary=True)
    x, dy = data(layer)
    torch.manual_seed(1)
    expected = run(plain, x, dy, recipe=recipe)
    torch.manual_seed(1)
    got = run(Rotated(layer), x, dy, recipe=recipe)
    for name, a, b in zip(gradients(plain, got), got, expected, strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(got[0], layer(x))


def test_masks():
    layer = make("default", self_attn_mask_type="no_mask")
    plain = Plain(layer, is_ours=False)
    x, _ = data(layer)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    hidden = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    hidden[1, ..., 7:] = True
    free = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.3
    free[..., 0] = False
    cases = [
        (everything, None, {}),
        (j <= i, None, {"self_attn_mask_type": "causal"}),
        ((j <= i) & (j >= i - 3), None, {"self_attn_mask_type": "causal", "window_size": (3, 0)}),
        ((j <= i + 2) & (j >= i - 1), None, {"window_size": (1, 2)}),
        ((j <= i + 2), None, {"window_size": (-1, 2)}),
        (~hidden & everything, hidden, {"self_attn_mask_type": "padding"}),
        ((j <= i) & ~hidden, hidden, {"self_attn_mask_type": "padding_causal"}),
        (~free, free, {"self_attn_mask_type": "arbitrary"}),
    ]
    seen = []
    for allowed, mask, options in cases:
        got = layer(x, mask, **options)
        assert torch.allclose(got, plain(x, allowed), atol=1e-5)
        seen.append(got)
    assert all(not torch.equal(a, b) for k, a in enumerate(seen) for b in seen[:k])
    made = make("default", window_size=(3, 0))
    made.load_state_dict(layer.state_dict())
    assert torch.equal(made(x), seen[2])


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        (None, {"self_attn_mask_type": "padding"}, "needs an attention_mask .*, got none"),
        (torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool), {}, "takes no attention_mask"),
        (torch.zeros(1, 1, 1, LENGTH), {"self_attn_mask_type": "padding"}, "must be bool"),
        (None, {"self_attn_mask_type": "diagonal"}, "mask type must be one of"),
        (None, {"window_size": (-2, 0)}, "window_size"),
        (None, {"rotary_pos_emb": torch.zeros(LENGTH - 1, 1, 1, 12)}, "rotary_pos_emb"),
        (None, {"rotary_pos_emb": torch.zeros(LENGTH, 1, 1, 14)}, "rotary_pos_emb"),
    ],
)
def test_bad_masks_and_angles(mask, options, words):
    layer = make()
    with pytest.raises(ValueError, match=words):
        layer(data(layer)[0], mask, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups"),
        ({"hidden_size": 50}, ValueError, "hidden_size"),
        ({"attn_input_format": "bhsd"}, ValueError, "qkv_format must be one of"),
        ({"hidden_dropout": 1.0}, ValueError, "hidden_dropout"),
        ({"attention_dropout": -0.1}, ValueError, "dropout"),
        ({"self_attn_mask_type": "x"}, ValueError, "mask type"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"activation": "elu"}, ValueError, "activation"),
        ({"ub_name": None}, TypeError, "ub_name"),
        ({"ub_tp_comm_overlap": False}, TypeError, "ub_tp_comm_overlap"),
    ],
)
def test_bad_constructor_arguments(options, error, words):
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS}
    with pytest.raises(error, match=words):
        TransformerLayer(**{**sizes, **options})


def test_an_input_of_another_rank():
    with pytest.raises(ValueError, match=r"the input must be \[length, batch, hidden_size\]"):
        make()(torch.randn(LENGTH, HIDDEN))


def test_dropout_in_training_only():
    layer = make("default", dropout=0.3)
    x, _ = data(layer)
    one, two = layer(x), layer(x)
    assert not torch.equal(one, two)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    none = make("default")
    none.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), none(x))
    hidden_only = make("default", hidden_dropout=0.9)
    hidden_only.load_state_dict(layer.state_dict())
    kept = hidden_only(x).eq(x).double().mean().item()
    assert math.isclose(kept, 0.81, abs_tol=0.1)  # neither of two additions


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_bits(use_reentrant, recipe):
    layer = make("llama", dropout=0.2)
    x, dy = data(layer)
    torch.manual_seed(1)
    expected = run(layer, x, dy, recipe=recipe)
    outer = nn.Module()
    outer.inner = layer
    outer.forward = lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)
    torch.manual_seed(1)
    assert equal(run(outer, x, dy, recipe=recipe), expected)


def compiled_steps(module, compiled, data, recipes):
    """Three steps per recipe: eager's bits, one graph each, none after the first step."""
    for count, recipe in enumerate(recipes, 1):
        torch.manual_seed(1)
        expected = run(module, *data, recipe=recipe)
        for _ in range(3):
            torch.manual_seed(1)
            assert equal(run(compiled, *data, recipe=recipe), expected), recipe
            assert counters["stats"]["unique_graphs"] == count, recipe
    assert not counters["graph_break"]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("amp", [False, True])
def test_compiled_in_one_graph(which, amp, fresh_dynamo):
    layer = make(which)
    module = Rotated(layer)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        compiled_steps(module, compiled, data(layer), ("mxfp8", "nvfp4_fwd_mxfp8_bwd"))


@pytest.mark.slow
def test_compiled_under_every_recipe(fresh_dynamo):
    layer = make("llama", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    names = [name for name in hybridq.recipes.names() if name != "bf16"]  # high_precision
    with torch._dynamo.config.patch(recompile_limit=2 * len(names)):
        compiled_steps(layer, compiled, data(layer), names)


def test_cached_weights_and_first_microbatch():
    layer = make("llama")
    batches = [data(layer) for _ in range(2)]

    def steps(flags):
        layer.zero_grad()
        for (x, dy), first in zip(batches, flags, strict=True):
            with autocast(recipe="mxfp8"):
                y = layer(x, is_first_microbatch=first)
            y.backward(dy)
        return [parameter.grad.clone() for parameter in layer.parameters()]

    expected = steps([None, None])
    assert equal(steps([True, False]), expected)
    attention = layer.self_attention
    kept = [attention.layernorm_qkv, attention.proj, layer.layernorm_mlp]
    assert [len(module._cached_weights) for module in kept] == [1, 1, 2]


def test_names_of_roles():
    seen = []

    def factory(role):
        seen.append(role.name)
        return MXFP8Quantizer()

    def names(model):
        seen.clear()
        with autocast(recipe=CustomRecipe(factory)):
            model(torch.randn(LENGTH, BATCH, HIDDEN))
        return list(dict.fromkeys(seen))

    parts = ["layernorm_mlp.fc1", "layernorm_mlp.fc2"]
    named = names(make(name="tl0"))
    own = ["self_attention.layernorm_linear_qkv", "self_attention.proj", *parts]
    assert named == [f"tl0.{part}" for part in own]
    # By the model, where no name was given.
    own[0] = "self_attention.layernorm_qkv"
    assert names(hybridq.convert(nn.Sequential(make(), make()))) == [
        f"{i}.{part}" for i in (0, 1) for part in own
    ]
    assert names(hybridq.convert(nn.Sequential(make(name="a"))))[0].startswith("a.self")


def test_keys_of_the_state_dict():
    norm = ["layer_norm_weight", "layer_norm_bias"]
    expected = [f"self_attention.layernorm_qkv.{n}" for n in (*norm, "weight", "bias")]
    expected += ["self_attention.proj.weight", "self_attention.proj.bias"]
    mlp = [f"fc{i}_{n}" for i in (1, 2) for n in ("weight", "bias")]
    expected += [f"layernorm_mlp.{n}" for n in (*norm, *mlp)]
    assert list(make().state_dict()) == expected
    twin = make()
    twin.load_state_dict(make().state_dict(), strict=True)
    assert next(TransformerLayer(8, 8, 2, params_dtype=torch.float16).parameters()).dtype == (
        torch.float16
    )


@pytest.mark.parametrize("options", [{}, {"output_layernorm": True}, {"layer_type": "decoder"}])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_initial_values_are_those_of_the_init_methods_whenever_they_are_set(options, recipe):
    """On the meta device first, by `reset_parameters` again, and as what planes were made of."""

    def fill(value):  # in two operations: a quantized weight is written once, not twice
        return lambda weight: weight.fill_(value).add_(0.001)

    def make(**more):
        own = {"init_method": fill(2.0), "output_layer_init_method": fill(3.0)}
        with hybridq.quantized_model_init(
            recipe or "mxfp8", enabled=recipe is not None, preserve_high_precision_init_val=True
        ):
            return TransformerLayer(64, 96, 4, **own, **options, **more)

    def check(layer):
        seen = 0
        for name, parameter in layer.named_parameters():
            if "bias" in name or parameter.dim() < 2:
                continue
            kept = getattr(parameter, "get_high_precision_init_val", parameter.detach)()
            wanted = 3.001 if "proj" in name or "fc2" in name else 2.001
            assert torch.equal(kept, torch.full_like(kept, wanted)), name
            seen += 1
        assert seen == (7 if "layer_type" in options else 4)

    check(make())
    late = make(device="meta").to_empty(device="cpu")
    for module in late.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    check(late)


def test_init_methods():
    def fill(value):
        return lambda weight: nn.init.constant_(weight, value)

    layer = TransformerLayer(8, 8, 2, init_method=fill(2.0), output_layer_init_method=fill(3.0))
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    assert attention.layernorm_qkv.weight.eq(2).all() and mlp.fc1_weight.eq(2).all()
    assert attention.proj.weight.eq(3).all() and mlp.fc2_weight.eq(3).all()
    assert not attention.proj.bias.any() and not attention.layernorm_qkv.bias.any()


@pytest.mark.parametrize("recipe", ["mxfp8", None])
def test_attention_alone(recipe):
    """Without a norm of its own, and with the bias left to the caller."""
    plain = MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0)
    apart_bias = MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, return_bias=True)
    apart_bias.load_state_dict(plain.state_dict())
    keys = [f"{module}.{name}" for module in ("qkv", "proj") for name in ("weight", "bias")]
    assert list(plain.state_dict()) == keys
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    with autocast(recipe=recipe, enabled=recipe is not None):
        y = plain(x)
        z, bias = apart_bias(x)
    assert bias is apart_bias.proj.bias
    assert torch.allclose(z + bias, y, atol=1e-6) and not torch.allclose(z, y, atol=1e-3)
    with pytest.raises(ValueError, match="needs input_layernorm"):
        MultiheadAttention(HIDDEN, HEADS, return_layernorm_output=True)


def test_rotary_angles():
    x = torch.randn(2, 3, LENGTH, 16)
    for interleaved in (False, True):
        angles = RotaryPositionEmbedding(16, interleaved=interleaved)(LENGTH)
        assert angles.shape == (LENGTH, 1, 1, 16) and angles.dtype == torch.float32
        assert torch.equal(apply_rotary(x, angles, interleaved), turn(x, interleaved))
        half = RotaryPositionEmbedding(16, 0.5, interleaved=interleaved)(LENGTH)
        rotated = apply_rotary(x, half, interleaved)
        assert torch.equal(rotated[..., 8:], x[..., 8:])
        assert torch.equal(rotated[..., :8], turn(x[..., :8], interleaved))
    later = RotaryPositionEmbedding(16)(4, offset=6)
    assert torch.equal(later, RotaryPositionEmbedding(16)(LENGTH)[6:])
    for options in ({"dim": 5}, {"dim": 16, "rotary_percent": 0.0}, {"dim": 1}):
        with pytest.raises(ValueError, match="RotaryPositionEmbedding"):
            RotaryPositionEmbedding(**options)
