"""What torch.jit is told: modules are not scripted, and traces of planes are not saved."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hybridq

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = "torch.jit.trace: what is traced can be run and not be saved"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


MODULES = {
    "converted": lambda: hybridq.convert(net()),
    "served": lambda: hybridq.quantize_model(net(), "mxfp8"),
    "fused": lambda: nn.Sequential(hybridq.LayerNormMLP(64, 32)),
    "attention": lambda: hybridq.convert(nn.TransformerEncoderLayer(64, 4, 96)),
}


@pytest.mark.parametrize("name", MODULES)
def test_script_says_what_to_take(name) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script: modules.*torch\.export\.export"):
        torch.jit.script(MODULES[name]())


@pytest.mark.parametrize("made", ["served", "initialized"])
def test_a_trace_with_planes_runs_and_says_that_it_cannot_be_saved(made) -> None:
    if made == "served":
        model = hybridq.quantize_model(net(), "mxfp8")
    else:
        with hybridq.quantized_model_init("mxfp8"):
            model = hybridq.convert(net())
    x = torch.randn(4, 64)
    with pytest.warns(hybridq.HybridQWarning, match=TEXT):
        traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(2 * x), model(2 * x))


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_a_trace_without_planes_is_saved_and_says_nothing(recipe) -> None:
    model, x, file = hybridq.convert(net()), torch.randn(4, 64), io.BytesIO()
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
            traced, wanted = torch.jit.trace(model, (x,)), model(3 * x)
    assert not [one for one in found if TEXT in str(one.message)]
    torch.jit.save(traced, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(3 * x), wanted)


@pytest.mark.parametrize("kind", ["served", "quantized", "under a recipe"])
def test_an_export_to_onnx_of_planes_is_refused_by_name(kind, monkeypatch) -> None:
    """ONNX's exporters end in an error of their own otherwise, one of an operator or a dtype."""

    model, recipe = nn.Sequential(nn.Linear(32, 32)), None
    if kind == "served":
        hybridq.quantize_model(model, "mxfp8")
    elif kind == "quantized":
        with hybridq.quantized_model_init("mxfp8"):
            hybridq.convert(model)
    else:
        hybridq.convert(model)
        recipe = "mxfp8"
    x = torch.randn(4, 32)
    exporting = hybridq.autocast(recipe=recipe) if recipe else nullcontext()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    said = "ONNX has no form for products of planes"
    with exporting, torch.no_grad():
        with (
            pytest.warns(hybridq.HybridQWarning, match=said),
            pytest.raises(NotImplementedError, match=said),
        ):
            torch.export.export(model.eval(), (x,), strict=False)
        with pytest.raises(NotImplementedError, match=said):
            torch.jit.trace(model, x, check_trace=False)


def test_a_plain_model_is_exported(monkeypatch) -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(32, 32)))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    torch.export.export(model, (torch.randn(4, 32),), strict=False)
