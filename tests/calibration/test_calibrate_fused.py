"""What hybridq's fused modules multiply, which is not what they are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybridq
from hybridq.errors import HybridQWarning


class Net(nn.Module):
    """A norm and a product, a norm and two products, and tokens by group."""

    def __init__(self, single: bool = False) -> None:
        super().__init__()
        self.qkv = hybridq.LayerNormLinear(32, 64, normalization="RMSNorm")
        self.mlp = hybridq.LayerNormMLP(64, 96, activation="swiglu")
        self.grouped = hybridq.GroupedLinear(3, 64, 16, single_grouped_weight=single)
        self.sizes: object = [3, 0, 5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(self.mlp(self.qkv(x)), self.sizes)


def net(single: bool = False) -> Net:
    torch.manual_seed(0)
    made = Net(single).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made


def wanted(model: Net, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The amaxes by torch's own operations."""
    most: dict[str, torch.Tensor] = {}

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        most[name] = torch.maximum(most.get(name, torch.zeros(())), x.abs().max())
        return x

    for x in batches:
        norm = see("qkv", F.rms_norm(x, (32,), model.qkv.layer_norm_weight, model.qkv.eps))
        y = F.linear(norm, model.qkv.weight, model.qkv.bias)
        mlp = model.mlp
        norm = F.layer_norm(y, (64,), mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.eps)
        gate, up = F.linear(see("mlp.fc1", norm), mlp.fc1_weight, mlp.fc1_bias).chunk(2, -1)
        y = F.linear(see("mlp.fc2", F.silu(gate) * up), mlp.fc2_weight, mlp.fc2_bias)
        see("grouped", y[: sum(map(int, model.sizes))])
    return most


@pytest.mark.parametrize("single", [False, True])
def test_inputs_are_what_is_multiplied(single: bool) -> None:
    model = net(single)
    batches = [torch.randn(8, 32) for _ in range(3)]
    before = model(batches[0])
    with torch.no_grad():
        want = wanted(model, batches)
    found = hybridq.calibrate(model, batches, "nvfp4")
    assert found.tokens.keys() == want.keys()
    for name, amax in want.items():
        torch.testing.assert_close(found.amax(name, "input"), amax, rtol=1e-5, atol=0)
    assert found.tokens["grouped"].tolist() == [9, 0, 15] and int(found.tokens["mlp.fc2"]) == 24
    # The group without tokens has the amax of the layer; weights have one for each.
    assert found.amax("grouped.1", "input") == found.amax("grouped", "input")
    for g in range(3):
        weight = model.grouped.weight[g] if single else getattr(model.grouped, f"weight{g}")
        assert found.amax(f"grouped.{g}", "weight") == weight.abs().max()
    assert found.amax("mlp.fc1", "weight") == model.mlp.fc1_weight.abs().max()
    assert torch.equal(model(batches[0]), before) and not model.mlp._forward_pre_hooks


def test_they_become_static_scales() -> None:
    model = net()
    model.sizes = torch.tensor([3, 0, 5])
    batches = [torch.randn(8, 32) for _ in range(3)]
    found = hybridq.calibrate(model, batches)
    hybridq.quantize_model(model, "fp8_current", found)
    assert model.qkv.static_amax("") == found.amax("qkv", "input")
    for part in ("fc1", "fc2"):
        assert model.mlp.static_amax(part) == found.amax(f"mlp.{part}", "input")
    again = hybridq.calibrate(model, batches)  # of weights that are quantized: as they decode
    for name in ("qkv", "mlp.fc1"):
        torch.testing.assert_close(
            again.amax(name, "input"), found.amax(name, "input"), rtol=0.1, atol=0
        )
    together = model(batches[0])
    assert torch.isfinite(together).all() and not torch.equal(together, net()(batches[0]))


def test_filters_and_what_is_left_out() -> None:
    model = net()
    x = [torch.randn(8, 32)]
    some = hybridq.calibrate(model, x, filter_fn=lambda module, name: name == "mlp")
    assert set(some.tokens) == {"mlp.fc1", "mlp.fc2"}
    with pytest.warns(HybridQWarning, match="outputs of fused modules are not observed, got qkv"):
        found = hybridq.calibrate(model, x, slots=("input", "output"))
    assert found.amax("qkv", "output") is None and found.amax("qkv", "input") is not None
