"""torch's encoder layers in evaluation: their own bits without a recipe, quantized under one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridq
from linear_model import Recorder


def make(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, layers).eval()


X = torch.linspace(-2, 2, 2 * 7 * 64).reshape(2, 7, 64)
#: The second sample has four tokens: torch's encoder makes a nested tensor of the two.
MASK = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
@torch.no_grad()
def test_evaluation_calls_the_converted_children(mask) -> None:
    model = make()
    want = model(X, src_key_padding_mask=mask)
    hybridq.convert(model)
    assert torch.equal(model(X, src_key_padding_mask=mask), want), "torch's own way, bit for bit"
    with hybridq.autocast(recipe="mxfp8"), Recorder() as seen:
        y = model(X, src_key_padding_mask=mask)
    assert len(seen.encodes) == 16, "input and weight of four products in two layers"
    with hybridq.autocast(recipe="mxfp8"), torch.enable_grad():
        trained = model(X, src_key_padding_mask=mask)
    own = slice(None) if mask is None else ~mask
    # Attention has a way of its own for evaluation, which adds in another order.
    assert torch.allclose(y[own], trained[own], atol=0.1) and not torch.equal(y, want)
    assert torch.equal(model(X, src_key_padding_mask=mask), want), "and afterwards as before"


def test_only_what_has_converted_children_changes() -> None:
    plain = make()
    hybridq.convert(plain, lambda module, name: False)
    assert type(plain) is nn.TransformerEncoder
    mixed = make()
    hybridq.convert(mixed, lambda module, name: name.startswith("layers.0"))
    kinds = [type(one).__name__ for one in (mixed, *mixed.layers)]
    assert kinds == ["TorchEncoder", "TorchEncoderLayer", "TransformerEncoderLayer"]
    for other in (copy.deepcopy(mixed), pickle.loads(pickle.dumps(mixed))):
        assert [type(one).__name__ for one in (other, *other.layers)] == kinds
    assert list(mixed.state_dict()) == list(make().state_dict())


def test_the_summary_counts_what_the_fast_way_hides() -> None:
    model = make(1)
    before = torch.backends.mha.get_fastpath_enabled()
    found = hybridq.summary(model, input=X)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert {one.name.split(".", 2)[2]: one.flops for one in found.modules if one.flops} == {
        "self_attn": 2 * 14 * 64 * 64 * 4,
        "linear1": 2 * 14 * 64 * 128,
        "linear2": 2 * 14 * 64 * 128,
    }
    assert found.share_of_linear_flops == 1.0
