"""torchtitan's experts and its way to make a model parallel, on modules in its style."""

from __future__ import annotations

import copy
import logging
import sys
import types

import pytest
import torch

import hybridq
from hybridq.integrations.torchtitan import parallelize_under
from hybridq.moe import Experts
from linear_model import equal
from rank_runs import needs_gloo, run
from torchtitan_like import (
    GptOssGroupedExperts,
    GroupedExperts,
    Linear,
    Model,
    adapted_class,
    parallelize,
)

SIZES = torch.tensor([5, 0, 7, 4])


@pytest.fixture(autouse=True)
def _installed(monkeypatch) -> None:
    """The library is there, and nothing of it is imported."""
    monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))


def step(module, x, recipe=None) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, SIZES)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(one.grad.clone() for one in module.parameters())]


@pytest.mark.parametrize(
    "make",
    [GroupedExperts, lambda: GroupedExperts(suffix=False), GptOssGroupedExperts],
    ids=["GroupedExperts", "of version 0.2", "GptOssGroupedExperts"],
)
def test_experts_are_converted(make) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(16, 32)
    plain = copy.deepcopy(module)
    want = step(plain, x)
    hybridq.convert(module)
    assert isinstance(module, Experts) and isinstance(module, type(plain))
    assert hybridq.conversion(module).kinds == (("experts of torchtitan", 1, 1),)
    assert equal(step(module, x), want)  # its own forward
    # Weights and tokens that the format holds exactly: the products alone are rounded, in FP32.
    for one in (*plain.parameters(), x):
        one.data = torch.randint(-2, 3, one.shape).float() / 4
    for one, own in zip(module.parameters(), plain.parameters(), strict=True):
        one.data.copy_(own)
    errors = {}
    for recipe in ("fp8_current", "mxfp8", "nvfp4"):
        got, exact = step(module, x, recipe), step(plain, x)
        errors[recipe] = ((got[0] - exact[0]).norm() / exact[0].norm()).item()
        for a, b in zip(got[1:], exact[1:], strict=True):
            assert a.shape == b.shape and (a - b).norm() < 0.3 * b.norm().clamp(min=1e-6)
    # What is left is the second product's input: 3 bits of a mantissa, and 1.
    assert 0 < errors["mxfp8"] < 0.04 and 0 < errors["fp8_current"] < 0.04
    assert errors["mxfp8"] < errors["nvfp4"] < 0.15


def test_a_class_that_derives_from_them_stays() -> None:
    class Fused(GroupedExperts):
        def forward(self, x, sizes):
            return 2 * super().forward(x, sizes)

    kept = hybridq.conversion(Fused()).kept
    assert [one.state for one in kept] == ["not known"]


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
def test_layers_with_adapters_are_converted(recipe) -> None:
    torch.manual_seed(0)
    layer, x = adapted_class(Linear)(64, 96), torch.randn(5, 64)
    base = torch.nn.Linear(64, 96)
    base.load_state_dict({name: getattr(layer, name) for name in ("weight", "bias")})
    hybridq.convert(base)
    keys = list(layer.state_dict())
    model = hybridq.convert(torch.nn.Sequential(layer, torch.nn.ReLU()))
    assert isinstance(layer, adapted_class(Linear)) and isinstance(layer, hybridq.Linear)
    assert list(layer.state_dict()) == keys and type(layer.lora_b) is Linear
    found = hybridq.conversion(model)
    assert found.kinds == (("LoRA of torchtitan", 1, 1), ("nn.Linear", 0, 2))
    assert {one.reason for one in found.kept} == {"adapters"}
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y, product = layer(x), base(x)
        assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(y, product + 0.5 * layer.lora_b(layer.lora_a(x)))
    assert torch.equal(product, base(x)) == (recipe is None)
    y.sum().backward()
    assert layer.weight.grad is None and layer.lora_a.weight.grad is not None


def test_adapters_of_other_layers_stay() -> None:
    class Float8Linear(Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    (kept,) = hybridq.conversion(adapted_class(Float8Linear)(64, 96)).kept[:1]
    assert kept.reason == "own forward"


def dims(ep: int = 1, mesh=None):
    return types.SimpleNamespace(tp=1, ep=ep, mesh=mesh)


def test_a_model_is_parallelized_under_a_recipe() -> None:
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(16, 32)
    own = hybridq.convert(copy.deepcopy(plain))
    made = parallelize_under(parallelize, "mxfp8")(copy.deepcopy(plain), parallel_dims=dims())
    found = {name for name, one in made.named_modules() if getattr(one, "prepared_weights", {})}
    assert found == {"into", "experts", "out"}
    with hybridq.autocast(recipe="mxfp8"):
        want = own(x, SIZES)
    assert torch.equal(made(x, SIZES), want)
    made.eval()
    assert torch.equal(made(x, SIZES), plain(x, SIZES))  # in training alone
    with pytest.raises(ValueError, match="got 'mxfp9'; did you mean 'mxfp8'"):
        parallelize_under(parallelize, "mxfp9")
    with pytest.raises(TypeError, match="parallelize_fn must be callable"):
        parallelize_under(None, "mxfp8")


def test_options_are_those_of_convert() -> None:
    fn = parallelize_under(parallelize, "mxfp8", filter_fn=lambda module, name: name == "out")
    made = fn(Model(), parallel_dims=dims())
    assert [name for name, one in made.named_modules() if isinstance(one, hybridq.Linear)] == [
        "out"
    ]


def test_where_planes_do_not_travel_the_log_says_so(caplog, monkeypatch) -> None:
    over = types.SimpleNamespace(spmd_backend="spmd_types")
    fn = parallelize_under(lambda model, **given: model, "mxfp8")
    with caplog.at_level(logging.WARNING, "hybridq"):
        for _ in range(2):
            fn(Model(), parallel_dims=dims(ep=2), parallelism=over)
    said = [one for one in caplog.messages if one.startswith("torchtitan")]
    assert len(said) == 1 and "'partial_dtensor'" in said[0]
    caplog.clear()
    over.spmd_backend = "partial_dtensor"
    with caplog.at_level(logging.WARNING, "hybridq"):
        made = fn(Model(), parallel_dims=dims(ep=2), parallelism=over)  # calls no parallelize
    assert "call prepare_fsdp2(model)" in caplog.text and "parallelize" not in vars(made)


@needs_gloo
def test_experts_that_are_dealt_out(tmp_path) -> None:
    run(2, tmp_path / "store", "dealt_out", "refused", "sharded", program="torchtitan_program.py")
