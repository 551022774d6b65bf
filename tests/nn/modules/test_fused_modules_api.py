"""Fused modules: parameters, initial values, arguments, wrong inputs, copies."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from fused_model import INNER, MAKERS, assert_same, data, mlp
from hybridq import LayerNormLinear, LayerNormMLP, RMSNormLinear
from hybridq.quantizers import NVFP4Quantizer
from hybridq.recipes import CustomRecipe, autocast
from linear_model import equal, run


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_keys_and_initial_values_are_those_of_torchs_modules(normalization, bias):
    options = {"bias": bias, "normalization": normalization}
    norm = ["layer_norm_weight"] + ["layer_norm_bias"] * (normalization == "LayerNorm")
    torch.manual_seed(5)
    one = LayerNormLinear(13, 7, **options)
    torch.manual_seed(5)
    plain = nn.Linear(13, 7, bias)
    assert list(one.state_dict()) == norm + ["weight", "bias"][: 1 + bias]
    assert equal(list(one.parameters())[len(norm) :], list(plain.parameters()))
    assert torch.equal(one.layer_norm_weight, torch.ones(13))
    torch.manual_seed(5)
    two = LayerNormMLP(13, 20, activation="swiglu", **options)
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(13, 40, bias), nn.Linear(20, 13, bias))
    names = [f"fc{i}_{name}" for i in (1, 2) for name in ["weight", "bias"][: 1 + bias]]
    assert list(two.state_dict()) == norm + names
    assert equal(list(two.parameters())[len(norm) :], list(plain.parameters()))
    zero = LayerNormLinear(13, 7, zero_centered_gamma=True, **options)
    assert not zero.layer_norm_weight.any()


def test_init_methods_and_dtypes():
    def fill(value):
        return lambda weight: nn.init.constant_(weight, value)

    module = LayerNormMLP(8, 4, init_method=fill(2.0), output_layer_init_method=fill(3.0))
    assert module.fc1_weight.eq(2).all() and module.fc2_weight.eq(3).all()
    assert not module.fc1_bias.any() and not module.fc2_bias.any()
    assert all(parameter.requires_grad for parameter in module.parameters())
    for options in ({"dtype": torch.bfloat16}, {"params_dtype": torch.bfloat16}):
        assert {p.dtype for p in LayerNormMLP(8, 4, **options).parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        assert LayerNormLinear(8, 4).weight.is_meta
    with pytest.raises(ValueError, match="two names of one thing"):
        LayerNormLinear(8, 4, dtype=torch.bfloat16, params_dtype=torch.float32)


@pytest.mark.parametrize("cls", [LayerNormLinear, RMSNormLinear, LayerNormMLP])
@pytest.mark.parametrize("argument", ["ub_overlap_ag", "ub_name"])
def test_what_makes_no_sense_here_is_no_argument(cls, argument):
    assert argument not in inspect.signature(cls).parameters
    with pytest.raises(TypeError, match=argument):
        cls(8, 4, **{argument: None})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LayerNormLinear(8, 4, normalization="BatchNorm"), ValueError, "BatchNorm"),
        (lambda: LayerNormLinear(8, 4, -1.0), ValueError, "eps"),
        (lambda: LayerNormMLP(8, 4, eps=float("nan")), ValueError, "eps"),
        (lambda: LayerNormMLP(8, 4, activation="elu"), ValueError, "activation.*'elu'"),
        (lambda: LayerNormLinear(8, -4), ValueError, "out_features must not be negative, got -4"),
        (lambda: LayerNormLinear(-8, 4), ValueError, "in_features must not be negative, got -8"),
        (lambda: LayerNormMLP(8, -4), ValueError, "ffn_hidden_size must not be negative, got -4"),
        (lambda: LayerNormLinear(8, 4, name=3), TypeError, "name"),
    ],
)
def test_bad_constructor_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: torch.randn(2, INNER, dtype=torch.bfloat16), RuntimeError, "same dtype"),
        (lambda: torch.randn(2, INNER, dtype=torch.float64), TypeError, "float64"),
        (lambda: torch.ones(2, INNER, dtype=torch.int64), TypeError, "int64"),
        (lambda: torch.randn(2, INNER + 1), RuntimeError, rf"{INNER}.*\(2, {INNER + 1}\)"),
        (lambda: torch.tensor(1.0), RuntimeError, str(INNER)),
        (lambda: torch.randn(2, INNER).to_sparse(), TypeError, "strided"),
        (lambda: torch.randn(2, INNER, device="meta"), RuntimeError, "one device"),
        (lambda: [[1.0] * INNER], TypeError, "Tensor"),
    ],
)
def test_bad_inputs(maker, make, error, words):
    module = MAKERS[maker](name="head.proj")
    with autocast(recipe="mxfp8"), pytest.raises(error, match=words) as caught:
        module(make())
    assert "head.proj" in str(caught.value)
    with autocast(recipe="mxfp8"), pytest.raises(TypeError, match="is_first_microbatch"):
        module(torch.randn(2, INNER), is_first_microbatch=1)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("maker", ["LayerNormLinear", "LayerNormMLP"])
def test_copies(maker, copier):
    module = MAKERS[maker](name="q")
    x, dy = data(module)
    expected = run(module, x, dy, recipe=CustomRecipe(lambda role: NVFP4Quantizer()))
    twin = copier(module)
    assert twin.name == "q" and list(twin.state_dict()) == list(module.state_dict())
    recipe = CustomRecipe(lambda role: NVFP4Quantizer())
    assert_same(twin, run(twin, x, dy, recipe=recipe), expected)
    twin.bfloat16()
    assert run(twin, x.bfloat16(), dy.bfloat16(), recipe="mxfp8")[0].dtype == torch.bfloat16


def test_meta_and_nan():
    with autocast(recipe="mxfp8"), torch.no_grad():
        assert mlp(device="meta")(torch.empty(3, INNER, device="meta")).shape == (3, INNER)
        x = torch.randn(4, INNER)
        x[1, 3] = float("nan")
        y = mlp("swiglu")(x)
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
