"""States of FusedAdam that a script makes and fills in before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridq.te as te
from hybridq.te.optimizers import FusedAdam

MASTERS: dict[str, Any] = {"master_weights": True, "master_weight_dtype": torch.float32}


def layer_of(recipe: Any) -> Any:
    torch.manual_seed(0)
    with te.quantized_model_init(
        enabled=recipe is not None, recipe=recipe, preserve_high_precision_init_val=True
    ):
        return te.Linear(64, 32, params_dtype=torch.bfloat16)


def trained(layer: Any, optimizer: Any, steps: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        layer(torch.randn(16, 64).bfloat16()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = {"weight": layer.weight.detach(), "bias": layer.bias.detach()}
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        saved[name] = optimizer.get_unscaled_state(layer.weight, name)
    return saved


@pytest.mark.parametrize("kind", [None, "MXFP8BlockScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize(
    "options",
    [{}, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}],
    ids=["fp32", "short"],
)
def test_a_state_that_is_made_first_is_that_of_the_first_step(kind: Any, options: Any) -> None:
    """As Transformer Engine's example of FSDP2 does: made, and seeded with what was kept."""
    recipe = None if kind is None else getattr(te.common.recipe, kind)()
    found = []
    for is_first in (False, True):
        layer = layer_of(recipe)
        optimizer = FusedAdam(layer.parameters(), lr=0.1, **MASTERS, **options)
        if is_first:
            for parameter in layer.parameters():
                optimizer.initialize_state(parameter, store_param_remainders=False)
                assert not optimizer.get_unscaled_state(parameter, "exp_avg").any()
                if isinstance(parameter, te.QuantizedTensor):
                    values = parameter.get_high_precision_init_val()
                    optimizer.set_scaled_state(parameter, "master_param", values.float())
                    parameter.clear_high_precision_init_val()
        found.append(trained(layer, optimizer))
    for name, wanted in found[0].items():
        assert torch.equal(found[1][name], wanted), name


def test_a_master_that_is_set_before_the_first_step_is_what_it_updates() -> None:
    layer = layer_of(te.common.recipe.MXFP8BlockScaling())
    optimizer = FusedAdam(layer.parameters(), lr=0.0, **MASTERS)
    values = torch.randn(32, 64)
    optimizer.set_scaled_state(layer.weight, "master_param", values)
    trained(layer, optimizer, 1)
    wanted = layer.weight._quantizer(values).dequantize(dtype=torch.float32)
    assert torch.equal(layer.weight.dequantize(dtype=torch.float32), wanted)
    optimizer.initialize_state(layer.weight)  # anew: of what the weight holds now
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), wanted)


def test_remainders_are_asked_for_as_the_optimizer_was_told() -> None:
    layer = layer_of(None)
    for told in (False, True):
        optimizer = FusedAdam(layer.parameters(), store_param_remainders=told, **MASTERS)
        with pytest.raises(ValueError, match=f"must be the optimizer's own {told}, got {not told}"):
            optimizer.initialize_state(layer.weight, not told)
        optimizer.initialize_state(layer.weight, told)
        master = optimizer.state[layer.weight]["master_param"]
        assert master.dtype == (torch.int16 if told else torch.float32)
        got = optimizer.get_unscaled_state(layer.weight, "master_param")
        assert torch.equal(got, layer.weight.float())
    with pytest.raises(ValueError, match=r"AdamW: param must be one of the optimizer's own"):
        optimizer.initialize_state(torch.nn.Parameter(torch.ones(2)))
