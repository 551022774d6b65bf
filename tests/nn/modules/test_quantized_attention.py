"""Attention between quantized operands, against its formula and gradients by hand in FP64."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.nn import DotProductAttention

SHAPE = (2, 9, 16)  # heads, length, features


def _recipe(quantize_all=True, **own):
    names = {"qkv": "fp8", "s": "fp8", "do": "fp8_e5m2", "dp": "fp8_e5m2", **own}

    def factory(role):
        asked.append((role.module_type, role.tensor_type, role.name))
        if role.module_type != "dpa":
            return hybridq.IdentityQuantizer()
        return hybridq.quantizers.quantizer(names[role.tensor_type])

    asked = []
    factory.fp8_dpa = quantize_all
    return hybridq.CustomRecipe(factory), names, asked


def _rounded(x, name):
    return hybridq.quantize(x.float(), name, None).dequantize().double()


def _by_hand(q, k, v, dy, names, sees):
    """Result and gradients of one sequence `[heads, length, features]`."""
    scale = q.shape[-1] ** -0.5
    q, k, v = (_rounded(one, names["qkv"]) for one in (q, k, v))
    scores = (q @ k.mT * scale).masked_fill(~sees, -torch.inf)
    weights = scores.softmax(-1)
    short = _rounded(weights, names["s"])
    dy = _rounded(dy, names["do"])
    dv = short.mT @ dy
    dp = dy @ v.mT
    ds = weights * (dp - (dp * weights).sum(-1, keepdim=True))
    ds = _rounded(ds, names["dp"])
    return short @ v, ds @ k * scale, ds.mT @ q * scale, dv


@pytest.mark.parametrize("names", [{}, {"qkv": "mxfp8", "s": "mxfp8", "do": "mxfp8"}])
def test_operands_and_gradients_are_quantized_by_their_roles(names):
    torch.manual_seed(0)
    heads, length, features = SHAPE
    recipe, names, asked = _recipe(**names)
    module = DotProductAttention(heads, features, qkv_format="bshd", name="block.0")
    inputs = [torch.randn(1, length, heads, features, requires_grad=True) for _ in range(3)]
    dy = torch.randn(1, length, heads, features)
    with hybridq.autocast(recipe=recipe):
        y = module(*inputs)
    y.backward(dy.flatten(2))
    sees = torch.ones(length, length).tril().bool()
    given = [one.detach()[0].transpose(0, 1) for one in (*inputs, dy)]
    made = _by_hand(*given, names, sees)
    results = [y.view(dy.shape), *(one.grad for one in inputs)]
    for got, want in zip(results, made, strict=True):
        # FP32 products; where a value lies beside a boundary it may round to the other side.
        near = (got[0].transpose(0, 1).double() - want).abs() < 1e-5 * want.abs().amax()
        assert near.double().mean() > 0.98, near.double().mean()
        torch.testing.assert_close(got[0].transpose(0, 1).double(), want, rtol=0.05, atol=0.05)
    assert {one for one in asked if one[0] == "dpa"} == {
        ("dpa", what, "block.0") for what in ("qkv", "s", "do", "dp")
    }
    plain = module(*inputs)
    assert not torch.equal(y, plain)
    torch.testing.assert_close(y, plain, rtol=0.1, atol=0.2)


def test_identities_are_plain_attention():
    torch.manual_seed(0)
    own = dict.fromkeys(("qkv", "s", "do", "dp"), "identity")
    recipe, _, _ = _recipe(**own)
    module = DotProductAttention(4, 8, 2, softmax_type="learnable")
    q = torch.randn(9, 2, 4, 8, requires_grad=True)
    k, v = (torch.randn(9, 2, 2, 8, requires_grad=True) for _ in range(2))
    starts = torch.tensor([0, 9, 14])
    given = {"core_attention_bias_type": "alibi", "cu_seqlens_q": starts, "window_size": (4, 0)}
    want = module(q, k, v, **given)
    with hybridq.autocast(recipe=recipe):
        y = module(q, k, v, **given)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    leaves = [q, k, v, module.softmax_offset]
    dy = torch.randn_like(y)
    for got, other in zip(
        *(torch.autograd.grad(one, leaves, dy) for one in (y, want)), strict=True
    ):
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)


def test_recipes_that_do_not_ask_leave_attention_alone():
    torch.manual_seed(0)
    inputs = [torch.randn(5, 1, 2, 8) for _ in range(3)]
    module = DotProductAttention(2, 8)
    want = module(*inputs)
    by_name = hybridq.recipes.ByName([("other*", _recipe()[0])], "mxfp8")
    for recipe in (_recipe(False)[0], "mxfp8", by_name):
        with hybridq.autocast(recipe=recipe):
            assert torch.equal(module(*inputs), want)


def test_layers_give_their_names_and_recompute():
    torch.manual_seed(0)
    recipe, _, asked = _recipe()
    layer = hybridq.TransformerLayer(
        32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, name="blocks.1"
    )
    x = torch.randn(6, 2, 32, requires_grad=True)
    results = []
    for again in (False, True):
        with hybridq.autocast(recipe=recipe):
            y = layer(x, checkpoint_core_attention=again)
        results.append([y, *torch.autograd.grad(y.square().sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert ("dpa", "qkv", "blocks.1.self_attention.core_attention") in asked


def test_compiled_code_says_that_it_cannot():
    recipe, _, _ = _recipe()
    torch._dynamo.reset()
    graph = torch.compile(DotProductAttention(2, 8), backend="eager", fullgraph=True)
    with hybridq.autocast(recipe=recipe), pytest.raises(Exception, match="fp8_dpa"):
        graph(*(torch.randn(5, 1, 2, 8) for _ in range(3)))


def test_second_derivatives_raise():
    recipe, _, _ = _recipe()
    module = DotProductAttention(2, 16, qkv_format="bshd")
    inputs = [torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3)]
    with hybridq.autocast(recipe=recipe):
        y = module(*inputs)
    (grad,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="DotProductAttention"):
        grad.sum().backward()


def test_with_attention_takes_what_autocast_takes(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('recipe = "mxfp8"\n')
    wanted = hybridq.recipes.with_attention(hybridq.recipes.get("mxfp8"))
    for given in ("mxfp8", path, str(path)):
        assert hybridq.recipes.with_attention(given) == wanted and wanted.quantizes_attention
    role = hybridq.recipes.QuantizerRole("dpa", "qkv")
    for name, fmt in (("nvfp4", "fp8_e4m3"), ("nvfp4_1d_weight", "nvfp4")):
        made = hybridq.recipes.with_attention(name).ask(role)
        assert made.rowwise.short_text == fmt
    with pytest.raises(ValueError, match="did you mean 'mxfp8'"):
        hybridq.recipes.with_attention("mxpf8")
    schedule = hybridq.RecipeSchedule([(0, "mxfp8")])
    for bad in (schedule, None, hybridq.recipes.ByName):
        with pytest.raises(TypeError, match="must be a Recipe or the name of one"):
            hybridq.recipes.with_attention(bad)
