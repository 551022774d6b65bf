"""Modules whose weights another library has quantized are left alone, and refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq


class Int8Tensor(torch.Tensor):
    """A tensor class as torchao's: codes and scales of rows, which knows `F.linear` alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def values(self) -> torch.Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.addmm.default):
            return func(*(one.values() if isinstance(one, cls) else one for one in args))
        raise NotImplementedError(f"Int8Tensor dispatch: {func}")


Int8Tensor.__module__ = "torchao.quantization"


def quantized_elsewhere(model: nn.Module) -> nn.Module:
    """What torchao's `quantize_` does: other tensors in the same modules."""
    for one in model.modules():
        if isinstance(one, nn.Linear):
            weight = one.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            made = Int8Tensor((weight / scale).round().to(torch.int8), scale)
            one.weight = nn.Parameter(made, requires_grad=False)
    return model


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def product(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for one in model:
        x = x.relu() if isinstance(one, nn.ReLU) else x @ one.weight.values().T + one.bias
    return x


@pytest.mark.parametrize("way", ["convert", "quantize_model", "quantized_model_init"])
@pytest.mark.filterwarnings("ignore::hybridq.HybridQWarning")
def test_modules_that_it_quantized_before_are_left_alone(way) -> None:
    model, x = quantized_elsewhere(net()), torch.randn(4, 64)
    if way == "quantize_model":
        hybridq.quantize_model(model, "mxfp8")
    else:
        with hybridq.quantized_model_init("mxfp8", enabled=way != "convert"):
            hybridq.convert(model)
    assert [type(one) for one in model] == [nn.Linear, nn.ReLU, nn.Linear]
    reason = "its weight is quantized already, torchao's Int8Tensor"
    assert hybridq.conversion(model).left_alone == (("0", reason), ("2", reason))
    with hybridq.autocast(recipe="mxfp8"):
        torch.testing.assert_close(model(x), product(model, x))


def test_what_it_quantizes_afterwards_is_refused_by_name_under_a_recipe() -> None:
    model, x = quantized_elsewhere(hybridq.convert(net())), torch.randn(4, 64)
    torch.testing.assert_close(model(x), product(model, x))
    with (
        hybridq.autocast(recipe="mxfp8"),
        pytest.raises(TypeError, match=r"Linear 0: weight must be.*got torchao's Int8Tensor; run"),
    ):
        model(x)


def test_quantize_model_names_it_and_changes_nothing() -> None:
    model = hybridq.convert(net())
    quantized_elsewhere(model[2])
    with pytest.raises(TypeError, match=r"got torchao's Int8Tensor of 2\.weight, which is quant"):
        hybridq.quantize_model(model, "mxfp8")
    assert type(model[0].weight) is nn.Parameter
