"""`nn.MultiheadAttention`, converted: its products run under the recipe, all else is torch's."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import hybridq
from hybridq.nn import TorchMultiheadAttention

E, HEADS = 64, 4
#: Of the constructor, and whether queries, keys and values are one tensor.
KINDS = {
    "self": ({}, True),
    "cross": ({}, False),
    "first": ({"batch_first": True, "bias": False}, True),
    "apart": ({"kdim": 48, "vdim": 32, "batch_first": True}, False),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, False),
}


def made(kind: str, dtype: torch.dtype = torch.float32) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, HEADS, **KINDS[kind][0]).to(dtype)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape) / 8)
    return module


def inputs(kind: str, batch: int | None = 3) -> list[torch.Tensor]:
    """Queries of length 5, and keys and values of length 7."""
    options, is_one = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    sizes = ((5, E), (7, options.get("kdim", E)), (7, options.get("vdim", E)))
    found = []
    for length, features in sizes[:1] * 3 if is_one else sizes:
        shape = (length,) if batch is None else (length, batch)
        shape = shape[::-1] if options.get("batch_first") else shape
        found.append(torch.randn(*shape, features, generator=generator))
    return found[:1] * 3 if is_one else found


def masks(kind: str) -> list[dict]:
    keys = 5 if KINDS[kind][1] else 7
    generator = torch.Generator().manual_seed(2)
    padding = torch.zeros(3, keys, dtype=torch.bool)
    padding[0, -2:] = True
    added = torch.randn(3 * HEADS, 5, keys, generator=generator)
    hidden = torch.ones(5, keys, dtype=torch.bool).triu(1)
    return [
        {},
        {"need_weights": False, "attn_mask": hidden, "is_causal": True},
        {"attn_mask": added, "average_attn_weights": False},
        {"key_padding_mask": padding, "attn_mask": hidden},
        {"key_padding_mask": padding, "need_weights": False},
    ]


class Rounded(torch.autograd.Function):
    """A linear map of MXFP8 planes, in FP64; its backward is that of the planes, too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _decoded(x) @ _decoded(weight).T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = _decoded(flat) @ _decoded(weight.T).T
        dw = _decoded(flat.T) @ _decoded(x.reshape(-1, x.shape[-1]).T).T
        return dx.view(x.shape), dw


def _decoded(x: torch.Tensor) -> torch.Tensor:
    """Values after MXFP8 along the last axis, of what FP32 has of them."""
    flat = x.float().reshape(-1, x.shape[-1]).contiguous()
    return hybridq.quantize(flat, "mxfp8").dequantize().double().view(x.shape)


def rounded_linear(x, weight, bias=None):
    """A linear map of planes, in the place of torch's."""
    y = Rounded.apply(x, weight)
    return y if bias is None else y + bias


def outcome(module, given, options, dtype=torch.float32):
    leaves = {id(one): one.to(dtype, copy=True).requires_grad_() for one in given}
    module.zero_grad()
    y, weights = module(*(leaves[id(one)] for one in given), **options)
    generator = torch.Generator().manual_seed(3)
    dy = torch.randn(y.shape, generator=generator).to(dtype)
    (y * dy).sum().backward()
    grads = [one.grad for one in leaves.values()] + [p.grad for p in module.parameters()]
    found = [y.detach(), *(one.clone() for one in grads)]
    return found if weights is None else [*found, weights.detach()]


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_a_recipe_all_bits_are_torchs(kind: str) -> None:
    plain = made(kind)
    module = hybridq.convert(copy.deepcopy(plain))
    assert type(module) is TorchMultiheadAttention and type(module.out_proj) is hybridq.Linear
    assert list(module.state_dict()) == list(plain.state_dict())
    for options in masks(kind):
        results = [outcome(one, inputs(kind), options) for one in (module, plain)]
        assert all(map(torch.equal, *results))
    with torch.no_grad(), hybridq.autocast(recipe="bf16"):
        pair = [one.eval()(*inputs(kind))[0] for one in (module, plain)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("kind", list(KINDS))
def test_under_a_recipe_products_are_those_of_the_planes(kind: str, monkeypatch) -> None:
    """All masks and gradients, against torch's own forward in FP64 over such products."""
    module = hybridq.convert(made(kind))
    twin = made(kind, torch.float64)
    twin.load_state_dict(module.state_dict())
    for options in masks(kind):
        with hybridq.autocast(recipe="mxfp8"):
            got = outcome(module, inputs(kind), options)
        exact = {
            name: one.double() if name == "attn_mask" and one.is_floating_point() else one
            for name, one in options.items()
        }
        with monkeypatch.context() as patched:
            patched.setattr(nn.functional, "linear", rounded_linear)
            want = outcome(twin, inputs(kind), exact, torch.float64)
        plain = outcome(twin, inputs(kind), exact, torch.float64)
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one.shape == other.shape
            error = (one.double() - other).norm() / other.norm().clamp(min=1e-3)
            assert error < 2e-2, (options.keys(), number, error)
        assert (plain[0] - want[0]).norm() > 2e-2 * want[0].norm()


@pytest.mark.parametrize("kind", list(KINDS))
def test_sequences_without_a_batch(kind: str) -> None:
    module = hybridq.convert(made(kind))
    with hybridq.autocast(recipe="mxfp8"):
        y, weights = module(*inputs(kind, None))
        batched = [one.unsqueeze(0 if module.batch_first else 1) for one in inputs(kind, None)]
        if KINDS[kind][1]:
            batched = batched[:1] * 3
        other, others = module(*batched)
    assert torch.equal(y, other.squeeze(0 if module.batch_first else 1))
    assert torch.equal(weights, others.squeeze(0))


def test_names_parts_and_reports() -> None:
    asked = set()

    def factory(role):
        asked.add((role.name, role.module_type))
        return hybridq.quantizer("mxfp8")

    for kind in ("self", "apart"):
        model = nn.ModuleDict({"attn": made(kind)})
        before = hybridq.conversion(model)
        hybridq.convert(model)
        assert hybridq.conversion(model) == before
        assert before.converted == ("attn", "attn.out_proj") and not before.others
        with hybridq.autocast(recipe=hybridq.CustomRecipe(factory)):
            model["attn"](*inputs(kind))
    names = {"attn.in_proj", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"}
    assert {name for name, _ in asked} == names and {one for _, one in asked} == {"linear"}
    model = nn.ModuleDict({"attn": made("self")})
    hybridq.convert(model, lambda module, name: False)
    assert type(model["attn"]) is nn.MultiheadAttention
    assert dict(hybridq.conversion(model, lambda *_: False).left_alone) == {
        "attn": "filter_fn",
        "attn.out_proj": "filter_fn",
    }


def test_encoder_layers_training_and_copies() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 96, dropout=0.0, batch_first=True)
    plain = copy.deepcopy(layer).eval()
    model = hybridq.convert(nn.Sequential(layer)).eval()
    x = torch.randn(3, 5, E)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        y = model(x)
    assert not torch.equal(y, plain(x)) and (y - plain(x)).norm() < 0.1 * y.norm()
    other = pickle.loads(pickle.dumps(model))
    with hybridq.autocast(recipe="fp8_delayed"):
        for one in (model.train(), other.train()):
            one(x).square().mean().backward()
    for one, two in itertools.zip_longest(model.parameters(), other.parameters()):
        assert torch.equal(one.grad, two.grad)
    with hybridq.quantized_model_init("mxfp8"):
        held = hybridq.convert(made("self"))
    assert type(held.in_proj_weight.data) is torch.Tensor
    assert hybridq.tensor.is_quantized(held.out_proj.weight)
    with hybridq.autocast(recipe="mxfp8"):
        low = [one(*inputs("self"))[0] for one in (held, hybridq.convert(made("self")))]
    assert torch.equal(*low)
    assert torch.isfinite(held(*inputs("self"))[0]).all()


def test_refusals() -> None:
    module = hybridq.convert(made("self"))
    (x, *_) = inputs("self")
    with hybridq.autocast(recipe="mxfp8"):
        with pytest.raises(RuntimeError, match="is_causal needs the attn_mask"):
            module(x, x, x, is_causal=True)
        with pytest.raises(RuntimeError, match=r"attn_mask must be \[5, 5\] or \[12, 5, 5\]"):
            module(x, x, x, attn_mask=torch.zeros(5, 4))
        with pytest.raises(RuntimeError, match=r"key_padding_mask must be \[3, 5\]"):
            module(x, x, x, key_padding_mask=torch.zeros(3, 4))
        nested = torch.nested.nested_tensor([x[0], x[1]])
        with pytest.raises(TypeError, match="got nested tensors"):
            module(nested, nested, nested)
