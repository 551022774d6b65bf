"""What optimizers of other packages ask of a quantized parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridq
from hybridq import QuantizedTensor


class SecondMoments(torch.optim.Optimizer):
    """RMSprop whose state is made by `new_zeros`, in `step` or before it, as Conda's is."""

    def __init__(self, parameters: Any, lr: float, early: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        if early:
            self._make_state()

    def _make_state(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter]["square"] = parameter.new_zeros(list(parameter.shape))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._make_state()
        for parameter in self.param_groups[0]["params"]:
            square = self.state[parameter]["square"]
            square.mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
            parameter.addcdiv_(parameter.grad, square.sqrt() + 1e-8, value=-self.defaults["lr"])


@pytest.mark.parametrize("early", [False, True])
def test_state_made_by_new_zeros_is_plain(weight, early) -> None:
    """Values are those of plain code, quantized once for each write."""
    values, quantizer = weight.detach().dequantize(), weight.quantizer
    optimizer = SecondMoments([weight], lr=0.1, early=early)
    square = torch.zeros(48, 64)
    for _ in range(3):
        gradient = torch.randn(48, 64) * torch.logspace(-6, 0, 64)
        weight.grad = gradient.clone()
        optimizer.step()
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        values = values.addcdiv(gradient, square.sqrt() + 1e-8, value=-0.1)
        values = quantizer(values).dequantize()
    state = optimizer.state[weight]["square"]
    assert type(state) is torch.Tensor and torch.equal(state, square)
    assert torch.equal(weight.dequantize(), values)
    assert isinstance(weight.new_zeros(7, 32), QuantizedTensor)  # which FSDP2 makes shards by


def test_no_optimizer_takes_a_parameter_for_a_flat_one(weight) -> None:
    """Prodigy and D-Adaptation look for FSDP's mark, and then reduce over ranks of CUDA devices."""
    assert not hasattr(weight, "_fsdp_flattened")
    assert not getattr(weight, "_fsdp_flattened", False)
    with pytest.raises(RuntimeError, match="a flat parameter is made of plain ones"):
        weight._fsdp_flattened = True
    with hybridq.quantized_model_init("nvfp4"):
        layer = hybridq.Linear(32, 32)
    assert not any(hasattr(one, "_fsdp_flattened") for one in layer.parameters())
