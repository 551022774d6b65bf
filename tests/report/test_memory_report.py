"""memory_report: bytes against sizes counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.report import KINDS

TOKENS, IN, OUT = 256, 64, 96


def _model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(
        hybridq.Linear(IN, OUT, bias=False, dtype=dtype),
        nn.ReLU(),
        hybridq.Linear(OUT, IN, dtype=dtype),
    )


def _column_nbytes(recipe: str, rows: int, cols: int) -> int:
    """Bytes of the columnwise plane of `[rows, cols]`: codes, scales, amax."""
    if recipe == "mxfp8":
        return rows * cols + cols * -(-rows // 32)
    return rows * cols // 2 + cols * -(-rows // 16) + 4


@pytest.mark.parametrize(("recipe", "ratio"), [("mxfp8", 0.52), ("nvfp4", 0.29)])
def test_a_linear_saves_one_columnwise_plane_of_its_input(recipe, ratio) -> None:
    layer = hybridq.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16)
    with hybridq.autocast(recipe=recipe):
        report = hybridq.memory_report(layer, lambda: layer(x))
    # One seed beside it where gradients are rounded stochastically.
    extra = 8 if recipe == "nvfp4" else 0
    assert report.nbytes("saved") == _column_nbytes(recipe, TOKENS, IN) + extra
    assert report.nbytes("saved") < ratio * x.nbytes


def test_a_linear_that_passes_gradients_on_saves_its_weights_columns_too() -> None:
    layer = hybridq.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8"):
        report = hybridq.memory_report(layer, lambda: layer(x))
    planes = _column_nbytes("mxfp8", TOKENS, IN) + _column_nbytes("mxfp8", OUT, IN)
    assert report.nbytes("saved") == planes


def test_every_kind_is_booked_on_its_module() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16)
    with hybridq.autocast(recipe="mxfp8", is_first_microbatch=True):
        model(x).sum().backward()
        optimizer.step()
        report = hybridq.memory_report(model, lambda: model(x), optimizer=optimizer)
    weight, bias = IN * OUT * 2, IN * 2
    assert report.nbytes("parameters", "0") == weight == report.nbytes("gradients", "0")
    assert report.nbytes("parameters", "2") == weight + bias
    assert report.nbytes("optimizer", "2") == 2 * (weight + bias) + 2 * 4  # and a step each
    # Both planes of the second weight; of the first, which passes nothing on, one.
    assert report.nbytes("kept", "0") >= IN * OUT + OUT * IN // 32
    assert report.nbytes("kept", "2") >= 2 * (IN * OUT + OUT * IN // 32)
    assert report.nbytes("saved", "1") == TOKENS * OUT * 2
    assert report.nbytes() == sum(report.nbytes(kind) for kind in KINDS)
    assert report.by_dtype("parameters") == {torch.bfloat16: 2 * weight + bias}
    assert report.by_module(depth=1)["0"]["parameters"] == weight
    text = str(report)
    assert "parameters" in text and "total" in text and "saved as uint8" in text


def test_shared_memory_counts_once_and_quantized_parameters_by_their_planes() -> None:
    tied = nn.ModuleList([hybridq.Linear(IN, IN, bias=False), hybridq.Linear(IN, IN, bias=False)])
    tied[1].weight = tied[0].weight
    assert hybridq.memory_report(tied).nbytes() == IN * IN * 4
    module = nn.Module()
    quantized = hybridq.quantize(torch.randn(IN, OUT), "mxfp8")
    module.weight = nn.Parameter(quantized, requires_grad=False)
    assert hybridq.memory_report(module).nbytes("parameters") == quantized.nbytes


def test_hooks_are_gone_and_errors_say_what_is_wrong() -> None:
    model = _model()
    with pytest.raises(ZeroDivisionError):
        hybridq.memory_report(model, lambda: 1 / 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(TypeError, match=r"memory_report: model must be an nn.Module, got int"):
        hybridq.memory_report(3)
    with pytest.raises(TypeError, match=r"forward must be callable .* got Tensor"):
        hybridq.memory_report(model, torch.ones(1))
    with pytest.raises(ValueError, match=r"nbytes: kind must be one of parameters"):
        hybridq.memory_report(model).nbytes("activations")
    with pytest.raises(ValueError, match=r"by_dtype: kind must be one of .* mean 'saved'"):
        hybridq.memory_report(model).by_dtype("save")
    for depth in (-1, 1.0, "0"):
        with pytest.raises(ValueError, match=rf"by_module: depth must be .* got {depth!r}"):
            hybridq.memory_report(model).by_module(depth)
    with pytest.raises(TypeError, match=r"optimizer must be one of torch .* got generator"):
        hybridq.memory_report(model, optimizer=model.parameters())


@pytest.mark.parametrize("length", [4, 1024])
def test_histories_of_delayed_scaling_are_counted(length: int) -> None:
    """An amax per step that is looked back on, FP32, for each of input, weight and gradient."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16)
    before = hybridq.memory_report(model).nbytes()
    for _ in range(2):
        with hybridq.autocast(recipe=hybridq.recipes.DelayedScaling(amax_history_len=length)):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = hybridq.memory_report(model)
    assert report.nbytes("histories", "0") == report.nbytes("histories", "2") == 3 * length * 4
    assert report.nbytes() == before + 2 * 3 * length * 4
