"""A quantized model in graphs: compiled whole, and exported with plain tensors, bit for bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hybridq
from compilers import BACKENDS
from hybridq.calibration import Calibration
from hybridq.moe import ExpertsLayout, convert_experts
from hybridq.tensor import is_quantized
from own_experts import OwnExperts, routing

X = torch.linspace(-3, 3, 5 * 64).reshape(5, 64).bfloat16()
SEEN = Calibration({name: {"input": torch.tensor(3.0)} for name in "02"}, {}, {})


def make(recipe: str, is_static: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16()
    return hybridq.quantize_model(model, recipe, SEEN if is_static else None)


CASES = [("mxfp8", False), ("nvfp4", False), ("nvfp4_1d_weight", True), ("fp8_current", True)]


@pytest.mark.thinned(1, few=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("recipe", "is_static"), CASES)
def test_compiled_in_one_graph_it_has_the_eager_bits(recipe, is_static, backend) -> None:
    model = make(recipe, is_static)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in (X, X[:1], 2 * X):
        assert torch.equal(compiled(x), model(x))
    before = model(X)
    hybridq.quantize_model(model, recipe, activations="high_precision")
    assert torch.equal(compiled(X), model(X)) and not torch.equal(model(X), before), "a new plan"


@pytest.mark.thinned(1, few=2)
@pytest.mark.parametrize(("recipe", "is_static"), CASES)
def test_exported_it_is_plain_tensors_with_the_same_bits(recipe, is_static) -> None:
    model = make(recipe, is_static)
    shapes = ({0: torch.export.Dim("tokens", max=64)},)
    program = torch.export.export(model, (X,), dynamic_shapes=shapes).run_decompositions({})
    held = {**program.state_dict, **program.constants}
    for name, value in held.items():
        assert type(value) in (torch.Tensor, nn.Parameter), name
    codes = [one for one in held.values() if one.dtype == torch.uint8]
    weights = [plane for i in (0, 2) for plane in model[i].weight.rowwise.tensors]
    assert len(codes) == sum(one.dtype == torch.uint8 for one in weights)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for x in (X, X[:3]):
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(again(x), model(x))


def test_exported_experts_have_the_same_bits() -> None:
    torch.manual_seed(0)
    layout = ExpertsLayout()
    own = OwnExperts(layout, torch.bfloat16, (5, 64, 96))
    experts = hybridq.quantize_model(convert_experts(own, layout), "nvfp4_1d_weight")
    indices, weights = routing(31)
    given = (torch.randn(31, 64).bfloat16(), indices, weights.bfloat16())
    program = torch.export.export(experts, given).run_decompositions({})
    assert all(type(one) is nn.Parameter for one in program.state_dict.values())
    assert torch.equal(program.module()(*given), experts(*given))


def test_a_trained_models_weights_are_taken_apart_once_they_need_no_gradient() -> None:
    with hybridq.quantized_model_init("mxfp8_fwd_nvfp4_bwd"):
        model = nn.Sequential(hybridq.Linear(64, 96), nn.GELU(), hybridq.Linear(96, 64)).eval()
    x = torch.linspace(-2, 2, 5 * 64).reshape(5, 64)
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8_fwd_nvfp4_bwd"):
        want = model(x)
        trained = torch.export.export(model, (x,))
        with pytest.raises(RuntimeError, match="can require gradients"):
            trained.run_decompositions({})
        program = torch.export.export(model.requires_grad_(False), (x,)).run_decompositions({})
    assert not any(is_quantized(one) for one in program.state_dict.values())
    assert torch.equal(program.module()(x), want)
