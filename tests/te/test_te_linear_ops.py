"""Operations as scripts begin and go on with them: initial values, checkpoints, aliases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hybridq.te as te
from hybridq.te import ops


def test_initial_values_are_those_of_the_operations() -> None:
    """Weights of torch's range, biases of zero."""
    for layer in (ops.Linear(64, 512), ops.GroupedLinear(2, 64, 512), ops.BasicLinear(64, 512)):
        for name, one in layer.named_parameters():
            if "bias" in name:
                assert not one.any(), name
                continue
            bound = 1 / math.sqrt(64)
            assert one.abs().max() <= bound
            assert one.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_checkpoints_of_the_linear_operation_are_loaded() -> None:
    """There its parameters belong to the operations that it is made of."""
    state: dict[str, Any] = {
        "0.basic_ops.0.weight": torch.randn(16, 8),
        "0.basic_ops.0._extra_state": torch.empty(0),
        "0.basic_ops.1.bias": torch.randn(16),
        "1.basic_ops.0.weight": torch.randn(4, 16),
    }
    model = ops.Sequential(ops.Linear(8, 16), ops.Linear(16, 4, bias=False))
    model.load_state_dict(dict(state))
    assert torch.equal(model[0].weight, state["0.basic_ops.0.weight"])
    assert torch.equal(model[0].bias, state["0.basic_ops.1.bias"])
    assert torch.equal(model[1].weight, state["1.basic_ops.0.weight"])
    twin = ops.Sequential(ops.Linear(8, 16), ops.Linear(16, 4, bias=False))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin[0].bias, model[0].bias)


class Aliased(te.LayerNormLinear):
    """Runs as operations that share its parameters, as Megatron-Core's fused MLP does."""

    def as_operations(self) -> Any:
        kinds = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}
        norm = kinds[self.normalization](
            self.weight.size(1), eps=self.eps, device="meta", dtype=self.weight.dtype,
            zero_centered_gamma=self.zero_centered_gamma,
        )  # fmt: skip
        norm.weight = self.layer_norm_weight
        if self.layer_norm_bias is not None:
            norm.bias = self.layer_norm_bias
        out, inner = self.weight.shape
        linear = ops.BasicLinear(
            inner, out, device="meta", dtype=self.weight.dtype,
            sequence_parallel=self.sequence_parallel, userbuffers_options=None,
            accumulate_into_main_grad=self.fuse_wgrad_accumulation,
        )  # fmt: skip
        linear.weight = self.weight
        made = ops.Sequential()
        made.append(norm)
        made.append(linear)
        if self.use_bias:
            made.append(ops.Bias(self.bias.numel(), device="meta", dtype=self.bias.dtype))
            made[2].bias = self.bias
        return made


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_operations_share_the_parameters_of_a_module(normalization: str) -> None:
    torch.manual_seed(0)
    layer = Aliased(64, 48, normalization=normalization, zero_centered_gamma=True, bias=False)
    with torch.no_grad():
        layer.layer_norm_weight.normal_()
    fused, x = layer.as_operations(), torch.randn(6, 64)
    found = []
    for run in (layer, fused):
        layer.zero_grad()
        with te.autocast(recipe=te.common.recipe.MXFP8BlockScaling()):
            y = run(x)
        y.square().sum().backward()
        found.append([y.detach(), *(one.grad.clone() for one in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
