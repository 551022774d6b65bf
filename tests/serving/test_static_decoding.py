"""Small M with a static scale: the fast path, and the bits of the general one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import Calibration
from hybridq.nn.autograd import prepared_linear
from hybridq.nn.modules import linear

RECIPES = ("fp8_current", "nvfp4_1d_weight", "nvfp4", "fp8_delayed")


def served(recipe: str, dtype: torch.dtype, amax: float, has_bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(160, 96, bias=has_bias).to(dtype)})
    found = Calibration(
        {"up": {"input": torch.tensor(amax)}}, {"up": torch.tensor(1)}, {"input": "max"}
    )
    return hybridq.quantize_model(model, recipe, found)["up"]


@pytest.fixture
def prepared(monkeypatch) -> list[torch.Tensor | None]:
    """The amaxes of the calls that took the fast path."""
    amaxes: list[torch.Tensor | None] = []
    original = prepared_linear.PreparedLinear.with_plane

    def call(self, x, w, bias, amax=None):
        amaxes.append(amax)
        return original(self, x, w, bias, amax)

    monkeypatch.setattr(prepared_linear.PreparedLinear, "with_plane", call)
    return amaxes


def general(monkeypatch, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(linear, "eager_forward", lambda *_: None)
        return model(x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fast_path_has_the_bits_of_the_general_one(recipe, dtype, prepared, monkeypatch):
    for rows, has_bias in ((1, True), (1, False), (3, True), (40, True)):
        model = served(recipe, dtype, 2.5, has_bias)
        for shape in ((rows, 160), (2, rows, 160)):
            x = torch.randn(shape).to(dtype)
            prepared.clear()
            y = model(x)
            assert [one is model.static_amax("") for one in prepared] == [True]
            want = general(monkeypatch, model, x)
            assert len(prepared) == 1 and torch.equal(y, want)
            far = model(4.0 * x)
            assert torch.equal(far, general(monkeypatch, model, 4.0 * x))
            assert not torch.equal(far, 4.0 * y), "what is larger saturates"


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4_1d_weight"])
def test_another_amax_counts_at_once(recipe, prepared, monkeypatch):
    """Written in place, or another tensor: what was made of the one before is not taken."""
    model, x = served(recipe, torch.bfloat16, 2.5), torch.randn(1, 160).bfloat16()
    first = model(x)
    model.static_amax("").fill_(0.75)
    second = model(x)
    assert not torch.equal(first, second)
    assert torch.equal(second, general(monkeypatch, model, x))
    assert torch.equal(second, served(recipe, torch.bfloat16, 0.75)(x))
    model._buffers["input_amax"] = torch.tensor([2.5])
    assert torch.equal(model(x), first) and len(prepared) == 4
    with torch.inference_mode():
        assert torch.equal(model(x), first)
        model._buffers["input_amax"] = torch.tensor([0.75])
        assert torch.equal(model(x), second)
    assert torch.equal(model(x), second)
