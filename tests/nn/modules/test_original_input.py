"""`save_original_input`: the same bits, and the input in the place of its columnwise plane."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import hybridq


def _run(recipe, saves, compiled=False):
    torch.manual_seed(0)
    module = hybridq.Linear(64, 32, save_original_input=saves)
    x = torch.randn(40, 64, requires_grad=True)
    pointers = []

    def pack(tensor):
        pointers.append(tensor.data_ptr())
        return tensor

    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    torch.manual_seed(1)
    with hybridq.autocast(recipe=recipe), saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x)
    y.square().sum().backward()
    gradients = [x.grad, module.weight.grad, module.bias.grad]
    return [y.detach(), *gradients], x.data_ptr() in pointers


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "mxfp8_fwd_nvfp4_bwd"])
def test_bits_are_the_same_and_the_input_is_what_is_saved(recipe):
    planes, has_input = _run(recipe, False)
    assert not has_input
    again, has_input = _run(recipe, True)
    assert has_input
    assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))


def test_compiled_code_has_the_same_bits():
    torch._dynamo.reset()
    eager, _ = _run("mxfp8", True)
    compiled, _ = _run("mxfp8", True, compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_delayed_scales_save_planes():
    planes, _ = _run("fp8_delayed", False)
    again, has_input = _run("fp8_delayed", True)
    assert not has_input and all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))
