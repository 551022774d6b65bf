"""What methods that change weights do with values that they cannot take: nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import awq, clip_weights, gptq, smooth

RECIPE = hybridq.recipe(fprop="nvfp4")
METHODS: dict[str, Callable] = {
    "gptq": lambda model, data, **given: gptq(model, data, RECIPE, **given),
    "clip_weights": lambda model, data, **given: clip_weights(model, data, RECIPE, **given),
    "awq": lambda model, data, **given: awq(model, data, RECIPE, in_front=True, **given),
    "smooth": lambda model, data, **given: smooth(model, data, in_front=True, **given),
}


class Times(nn.Module):
    """A factor, of which a spoiled model may have any."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Double(nn.Module):
    """From here on FP64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def three(between: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32), between or nn.Identity()]
    return nn.Sequential(*layers, nn.Linear(32, 16, dtype=dtype))


def assert_unchanged(model: nn.Module, before: dict) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    for name, value in before.items():
        assert type(now[name]) is torch.Tensor, name
        torch.testing.assert_close(now[name], value, rtol=0, atol=0, equal_nan=True)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_named_before_any_weight_is_changed(method, factor):
    model = three(Times(factor))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"inputs must be finite.* in the input of 4 in batch 0"):
        METHODS[method](model, [torch.randn(8, 32) for _ in range(2)])
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_before_any_other_is_changed(method, value):
    """Clipping took it, and AWQ chose no scales for it: errors of the reports were NaN."""
    model = three()
    with torch.no_grad():
        model[4].weight[3, 5] = value
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = f"got 1 values that are not in the weight of 4, the first of them {value}"
    with pytest.raises(ValueError, match=text):
        METHODS[method](model, [torch.randn(8, 32)])
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ["gptq", "clip_weights", "awq"])
def test_sums_of_squares_that_are_not_finite_are_found_before_any_weight_is_changed(method):
    model = three(Times(1e25))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"sums of their squares, got .* in the input of 4"):
        METHODS[method](model, [torch.randn(8, 32)])
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ["gptq", "clip_weights"])
def test_a_weight_in_fp64_is_left_and_listed(method):
    """Nothing encodes it: the methods stopped there, and the layers before were changed."""
    model = three(Double(), torch.float64)
    last = model[4].weight.detach().clone()
    report = METHODS[method](model, [torch.randn(8, 32)])
    assert report.left == {"4": "its weight is torch.float64, which is not quantized"}
    assert [one.name for one in report.weights] == ["0", "2"]
    assert torch.equal(model[4].weight, last)


@pytest.mark.parametrize(
    ("method", "given", "text"),
    [
        ("gptq", {"damping": -0.1}, "gptq: damping must be finite and not negative, got -0.1"),
        ("gptq", {"damping": float("nan")}, "gptq: damping must be finite"),
        ("clip_weights", {"clips": ()}, "clip_weights: clips must be above 0"),
        ("clip_weights", {"clips": (1.5,)}, "clip_weights: clips must be above 0"),
        ("awq", {"grid": 0}, "awq: grid must be at least 1, got 0"),
        ("smooth", {"alpha": 1.5}, r"smooth: alpha must be from 0 to 1, got 1\.5"),
    ],
)
def test_options_are_looked_at_before_the_model_runs(method, given, text):
    """Where no place was found, as without `in_front`, SmoothQuant and AWQ took any."""

    def never() -> Iterator[torch.Tensor]:
        raise AssertionError("data are read")
        yield

    model = three()
    with pytest.raises(ValueError, match=text):
        METHODS[method](model, never(), **given)


def test_a_grid_that_is_no_int_is_a_type_error():
    with pytest.raises(TypeError, match=r"awq: grid must be an int, got 2\.5"):
        awq(three(), [torch.randn(8, 32)], RECIPE, grid=2.5)


def test_a_damping_that_is_too_small_for_a_weight_names_it():
    """Eight tokens are no Hessian of 32 columns without damping."""
    with pytest.raises(ValueError, match=r"gptq: the weight of 0: .* positive definite"):
        gptq(three(), [torch.randn(8, 32)], RECIPE, damping=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_fused_modules_are_listed_among_what_is_left(method):
    """They were in no list, so that a report of a model of them was empty."""
    torch.manual_seed(1)
    first = hybridq.LayerNormLinear(32, 48)
    model = nn.Sequential(first, nn.Linear(48, 32), hybridq.LayerNormMLP(32, 48))
    report = METHODS[method](model, [torch.randn(8, 32)])
    assert sorted(report.left) == ["0", "2.fc1", "2.fc2"]
    assert "make their operands themselves" in report.left["0"] and "2.fc2: left" in str(report)
    only = METHODS[method](nn.Sequential(first), [torch.randn(8, 32)])
    assert list(only.left) == ["0"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(32, 4))])
def test_a_model_without_a_product_is_refused(method, model):
    with pytest.raises(ValueError, match=f"{method}: the model must have products"):
        METHODS[method](model, [torch.randn(8, 32)])


@pytest.mark.parametrize("method", [*METHODS, "calibrate"])
def test_weights_without_values_are_named(method):
    """On the meta device it was torch's word about devices; a lazy layer was in no report."""
    run = METHODS.get(method, lambda model, data: hybridq.calibrate(model, data, RECIPE))
    data = [torch.randn(8, 32)]
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8, device="meta"))
    with pytest.raises(ValueError, match=f"{method}: weights must be in memory, got 1 on"):
        run(model, data)
    lazy = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 8))
    with pytest.raises(ValueError, match=f"{method}: parameters must have been made, got 0.weigh"):
        run(lazy, data)
    lazy(data[0])
    run(lazy, data)
