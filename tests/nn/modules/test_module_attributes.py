"""What looks at all attributes of a module finds no errors there."""

from __future__ import annotations

import inspect

import pytest
import torch

import hybridq

MAKERS = {
    "Linear": lambda: hybridq.Linear(64, 32),
    "GroupedLinear": lambda: hybridq.GroupedLinear(2, 64, 32),
    "LayerNormLinear": lambda: hybridq.LayerNormLinear(64, 32),
    "LayerNormMLP": lambda: hybridq.LayerNormMLP(64, 32),
    "MultiheadAttention": lambda: hybridq.MultiheadAttention(64, 4),
    "TransformerLayer": lambda: hybridq.TransformerLayer(64, 128, 4),
}


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_members_are_listed(name, is_quantized) -> None:
    with hybridq.quantized_model_init("mxfp8", enabled=is_quantized):
        module = MAKERS[name]()
    found = dict(inspect.getmembers(module))
    assert found["training"] is True and "_distribute_module_applied" in found


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_a_quantized_layer_without_a_recipe_is_its_product() -> None:
    with hybridq.quantized_model_init("mxfp8"):
        layer = hybridq.Linear(64, 32)
    x = torch.randn(4, 64)
    values = layer.weight.detach().dequantize()
    wanted = torch.nn.functional.linear(x.double(), values.double(), layer.bias.double())
    traced = torch.jit.trace(layer, (x,))
    torch.testing.assert_close(traced(x).double(), wanted, rtol=1e-5, atol=1e-5)
