"""`autocast(enabled=False, calibrating=True)`: histories from forwards in high precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hybridq
from hybridq import te
from hybridq.te.common.recipe import DelayedScaling, MXFP8BlockScaling

RECIPE = DelayedScaling(amax_history_len=4)
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3


def scales(model: Any) -> dict[str, float]:
    state = hybridq.state_dict_with_history(model)
    return {k[8:-6]: v.item() for k, v in state.items() if k.endswith(".scale")}


def _hidden(layer: Any) -> torch.Tensor:
    norm = F.layer_norm(X, (64,), layer.layer_norm_weight, layer.layer_norm_bias)
    return F.gelu(F.linear(norm, layer.fc1_weight, layer.fc1_bias), approximate="tanh")


#: A module, what its forward takes beside X, and what each of its places is.
MODULES: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Callable[[Any], dict[str, Any]]]] = {
    "Linear": (
        lambda: te.Linear(64, 32),
        (),
        lambda m: {"input": X, "weight": m.weight},
    ),
    "LayerNormLinear": (
        lambda: te.LayerNormLinear(64, 32),
        (),
        lambda m: {"input": F.layer_norm(X, (64,)), "weight": m.weight},
    ),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(64, 96),
        (),
        lambda m: {
            "fc1.input": F.layer_norm(X, (64,)),
            "fc1.weight": m.fc1_weight,
            "fc2.input": _hidden(m),
            "fc2.weight": m.fc2_weight,
        },
    ),
    "GroupedLinear": (
        lambda: te.GroupedLinear(3, 64, 32),
        ([6, 0, 10],),
        lambda m: {
            "0.input": X[:6],
            "2.input": X[6:],
            **{f"{i}.weight": getattr(m, f"weight{i}") for i in range(3)},
        },
    ),
    "ops.Linear": (
        lambda: te.ops.Linear(64, 32),
        (),
        lambda m: {"input": X, "weight": m.weight},
    ),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("trains", [False, True])
def test_amaxes_of_inputs_and_weights_become_scales(kind: str, trains: bool) -> None:
    make, given, tensors = MODULES[kind]
    module = make().train(trains)
    plain = module(X, *given)
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        assert te.FP8GlobalStateManager.is_fp8_calibration()
        assert not te.FP8GlobalStateManager.is_fp8_enabled()
        module(X / 2, *given)
        assert torch.equal(module(X, *given), plain)
    assert not te.FP8GlobalStateManager.is_fp8_calibration()
    found = scales(module)
    wanted = {name: 448.0 / one.abs().max().item() for name, one in tensors(module).items()}
    assert found == pytest.approx({f"{name}.e4m3": one for name, one in wanted.items()}, rel=1e-5)
    # They are in force, and in checkpoints.
    other = make().train(trains)
    other.load_state_dict(module.state_dict())
    with te.autocast(recipe=RECIPE):
        y, z = module(X, *given), other(X, *given)
    assert torch.equal(y, z)
    assert not torch.equal(y, plain)


def test_what_is_quantized_or_has_no_history_is_left_alone() -> None:
    layer = te.Linear(64, 32)
    with te.autocast(enabled=False, calibrating=True, recipe=MXFP8BlockScaling()):
        layer(X)
    with te.autocast(enabled=True, calibrating=True, recipe=MXFP8BlockScaling()):
        assert not te.FP8GlobalStateManager.is_fp8_calibration()
        layer(X)
    assert not scales(layer)
    outer = te.autocast(enabled=False, calibrating=True, recipe=RECIPE)
    with outer, te.autocast(recipe=RECIPE):
        layer.eval()(X)
    assert not scales(layer)


def test_older_names_decorators_and_errors() -> None:
    layer = te.Linear(64, 32)

    @te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE)
    def forward(x: torch.Tensor) -> Any:
        return layer(x)

    forward(X)
    assert scales(layer)["input.e4m3"] == pytest.approx(448.0 / X.abs().max().item())
    with (
        pytest.raises(KeyError),
        te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE),
    ):
        raise KeyError
    assert not te.FP8GlobalStateManager.is_fp8_calibration()
    with (
        pytest.warns(hybridq.HybridQWarning, match="calibrating: modules of hybridq must run"),
        te.autocast(enabled=False, calibrating=True, recipe=RECIPE),
    ):
        torch.nn.Linear(64, 32)(X)


def test_training_goes_on_from_them() -> None:
    """Steps by a loop of the caller's own are still seen."""
    layer = te.Linear(64, 32)
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        layer(X * 8)
    was = scales(layer)["input.e4m3"]
    for _ in range(6):
        with te.autocast(recipe=RECIPE):
            layer(X).square().mean().backward()
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad, alpha=0.01)
        layer.weight.grad = None
    with te.autocast(recipe=RECIPE):
        layer(X)
    assert scales(layer)["input.e4m3"] == pytest.approx(8 * was)


@pytest.mark.parametrize("given", ["fp8_delayed", hybridq.RecipeSchedule([(0, "fp8_delayed")])])
def test_a_recipe_is_given_as_to_autocast(given: Any) -> None:
    layer = hybridq.Linear(64, 32)
    with hybridq.nn.recording_amaxes(given):
        layer(X)
    assert scales(layer)["input.e4m3"] == pytest.approx(448.0 / X.abs().max().item())


def test_what_is_no_recipe_is_refused() -> None:
    for given, error in (("fp8_later", ValueError), (3, TypeError), (None, TypeError)):
        with pytest.raises(error, match="recipe"), hybridq.nn.recording_amaxes(given):
            hybridq.Linear(64, 32)(X)
