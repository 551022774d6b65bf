"""Arguments that Transformer Engine's linear modules have too, and a dtype that is none here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridq


def half(weight: torch.Tensor) -> None:
    weight.fill_(0.5)


def test_linear_takes_params_dtype_and_init_method() -> None:
    layer = hybridq.Linear(16, 24, init_method=half, params_dtype=torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert (layer.weight == 0.5).all() and not layer.bias.any()
    layer.weight.data.zero_()
    layer.reset_parameters()
    assert (layer.weight == 0.5).all()
    assert not hybridq.Linear(16, 24, bias=False, init_method=half).state_dict().keys() - {"weight"}
    with hybridq.quantized_model_init("mxfp8"):
        quantized = hybridq.Linear(64, 32, init_method=half)
    assert (quantized.weight.dequantize() == 0.5).all()
    for kind, sizes in ((hybridq.Linear, (4, 4)), (hybridq.GroupedLinear, (2, 4, 4))):
        assert kind(*sizes, dtype=torch.float16, params_dtype=torch.float16) is not None
        with pytest.raises(ValueError, match=rf"{kind.__name__}: dtype and params_dtype are two"):
            kind(*sizes, dtype=torch.float16, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", None])
@pytest.mark.parametrize("rows", [1, 40])
def test_linear_returns_its_bias_and_does_not_add_it(recipe, rows) -> None:
    both = hybridq.Linear(64, 32, return_bias=True)
    plain = hybridq.Linear(64, 32, bias=False)
    plain.weight = both.weight
    nn.init.normal_(both.bias)
    x = torch.randn(rows, 64, requires_grad=True)
    for layer in (both, copy.deepcopy(both)):
        with hybridq.autocast(recipe=recipe, enabled=recipe is not None):
            (y, bias), want = layer(x), plain(x)
        assert torch.equal(y, want) and bias is layer.bias
    (y + bias).sum().backward()
    none = hybridq.Linear(64, 32, bias=False, return_bias=True)
    assert none(x)[1] is None
    converted = hybridq.convert(nn.Linear(64, 32))
    assert isinstance(converted(x), torch.Tensor)


def test_linear_with_its_bias_compiles_in_one_graph() -> None:
    layer = hybridq.Linear(64, 32, return_bias=True)
    x = torch.randn(4, 64)

    def run(x):
        with hybridq.autocast(recipe="mxfp8"):
            y, bias = layer(x)
        return y, y + bias

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), run(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", None])
def test_grouped_linear_takes_them_too(recipe, single) -> None:
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    made = hybridq.GroupedLinear(
        2, 64, 32, return_bias=True, params_dtype=torch.bfloat16, init_method=half, **options
    )
    plain = hybridq.GroupedLinear(2, 64, 32, bias=False, dtype=torch.bfloat16, **options)
    plain.load_state_dict(made.state_dict(), strict=False)
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    with hybridq.autocast(recipe=recipe, enabled=recipe is not None):
        (y, biases), want = made(x, [4, 5]), plain(x, [4, 5])
    assert torch.equal(y, want) and y.dtype == torch.bfloat16
    assert len(biases) == 2 and all(not one.any() and one.shape == (32,) for one in biases)
    assert (
        hybridq.GroupedLinear(2, 64, 32, bias=False, return_bias=True)(x.float(), [4, 5])[1] == []
    )


# ---- FP64

MODULES = {
    "Linear": lambda: hybridq.Linear(32, 32),
    "LayerNormLinear": lambda: hybridq.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: hybridq.LayerNormMLP(32, 32),
    "GroupedLinear": lambda: hybridq.GroupedLinear(1, 32, 32),
    "MultiheadAttention": lambda: hybridq.MultiheadAttention(32, 2, None, 0.0),
    "TransformerLayer": lambda: hybridq.TransformerLayer(32, 64, 2, None, 1e-5, 0.0, 0.0),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_fp64_is_torchs_without_a_recipe_and_refused_by_one_that_quantizes(name, rows) -> None:
    module = MODULES[name]().double()
    x = torch.randn(rows, 32, dtype=torch.float64)
    x = x[:, None] if name in ("MultiheadAttention", "TransformerLayer") else x
    given = (x, [rows]) if name == "GroupedLinear" else (x,)
    assert module(*given).dtype == torch.float64
    told = r"must be float32, bfloat16 or float16, got torch.float64"
    with pytest.raises(TypeError, match=told), hybridq.autocast(recipe="mxfp8"):
        module(*given)
    if name != "GroupedLinear":  # nothing is quantized: torch's own operations
        plain = module(*given)
        with hybridq.autocast(recipe="bf16"):
            assert torch.equal(module(*given), plain)


@pytest.mark.parametrize("function", [hybridq.autocast, hybridq.fp8_autocast])
def test_calibrating_is_refused_and_no_other_function_is_said_to_do_it(function) -> None:
    with pytest.raises(ValueError, match=r"autocast: .*got calibrating=True") as raised:
        function(calibrating=True)
    assert "convert_checkpoint" not in str(raised.value)
    assert "fp8_delayed" in str(raised.value)
