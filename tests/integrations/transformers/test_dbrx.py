"""DBRX's experts: converted, they are the model's own, and compute under recipes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridq
from experts_oracle import HYBRID, MXFP8, relative
from hybridq.moe import Experts, ExpertsLayout
from own_experts import OwnExperts

transformers = pytest.importorskip("transformers")

HIDDEN, INNER, EXPERTS = 64, 48, 4
LAYOUT = ExpertsLayout(("gates", "ups"), "downs")


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    ffn = {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": 2}
    config = transformers.DbrxConfig(
        d_model=HIDDEN,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=96,
        ffn_config={**ffn, "hidden_size": HIDDEN},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.DbrxForCausalLM(config)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() >= 2:
                one.copy_(torch.randn(one.shape) * HIDDEN**-0.5)
    return model.to(dtype).train()


def step(model: nn.Module, recipe=None):
    ids = torch.arange(24).reshape(2, 12) * 5 % 96
    model.zero_grad()
    torch.manual_seed(1)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        given = model(input_ids=ids, labels=ids)
    given.loss.backward()
    return given


def test_without_a_recipe_all_bits_are_the_models_own() -> None:
    plain, model = made(), hybridq.convert(made())
    want, got = step(plain), step(model)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    for (name, one), (other, two) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(one.grad, two.grad), name
    assert plain.state_dict().keys() == model.state_dict().keys()
    found = hybridq.conversion(model)
    assert not found.others and sum(one.endswith("mlp") for one in found.converted) == 2
    assert all(name.endswith(("lm_head", "router.layer")) for name, _ in found.left_alone)


@pytest.mark.parametrize("formats", [MXFP8, HYBRID], ids=["mxfp8", "hybrid"])
def test_experts_under_a_recipe_are_those_of_the_planes(formats) -> None:
    """Against a loop in FP64 over matrices of their own, quantized alike."""
    experts = hybridq.convert(made()).transformer.blocks[0].ffn.experts
    mlp = experts.mlp
    assert isinstance(mlp, Experts)
    twin = OwnExperts(LAYOUT, torch.float64, (EXPERTS, HIDDEN, INNER))
    stacks = (mlp.w1, mlp.v1, mlp.w2)
    with torch.no_grad():
        for name, one in zip(("gates", "ups", "downs"), stacks, strict=True):
            own = one.view(EXPERTS, INNER, HIDDEN)
            getattr(twin, name).copy_(own.mT if name == "downs" else own)
    torch.manual_seed(2)
    x = torch.randn(2, 9, HIDDEN)
    top = torch.rand(18, EXPERTS).topk(2)
    dy = torch.randn(2, 9, HIDDEN)
    results = []
    for one, kind, recipe in (
        (experts, None, formats.recipe()),
        (twin, formats, None),
        (twin, None, None),
    ):
        one.zero_grad()
        one.formats = kind
        dtype = torch.float64 if one is twin else torch.float32
        given = x.to(dtype, copy=True).requires_grad_()
        rows = given.reshape(-1, HIDDEN) if one is twin else given
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
            y = one(rows, top.indices, top.values.to(dtype)).reshape(2, 9, HIDDEN)
        y.backward(dy.to(dtype))
        grads = [given.grad, *(p.grad for p in one.parameters())]
        results.append([y.detach(), *(one.clone() for one in grads)])
    got, want, exact = results
    want[4] = want[4].mT  # as the parameter has it
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert relative(one.reshape(other.shape), other) < 3e-3, number
    assert relative(exact[0], want[0]) > 1e-2 and relative(exact[1], want[1]) > 1e-2


def test_steps_copies_and_refusals() -> None:
    model = hybridq.convert(made(torch.bfloat16))
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    first = step(model, "mxfp8")
    assert torch.equal(first.loss, step(other, "mxfp8").loss)
    assert not torch.equal(first.logits, step(copy.deepcopy(model)).logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        last = step(model, "mxfp8").loss
        optimizer.step()
    assert last < 0.8 * first.loss
    mlp = model.transformer.blocks[0].ffn.experts.mlp
    x, weight = torch.randn(3, HIDDEN).bfloat16(), torch.randn(INNER, HIDDEN).bfloat16()
    with hybridq.autocast(recipe="mxfp8"), pytest.raises(TypeError, match="for indices"):
        mlp(x, weight, weight, weight)


def test_reports_count_them() -> None:
    assert "DbrxMatrices" in str(hybridq.summary(hybridq.convert(made(torch.bfloat16)), "mxfp8"))
