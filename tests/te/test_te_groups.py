"""Groups as scripts of Transformer Engine ask for them: memory of the caller, products of lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hybridq.te.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from hybridq.te.pytorch.tensor.grouped_tensor import GroupedTensor

import hybridq
import hybridq.te as te
from hybridq.te.common import recipe

E4M3 = te.DType.kFloat8E4M3
SPLITS = [16, 0, 20, 28]


def experts(**options: Any) -> te.GroupedLinear:
    torch.manual_seed(0)
    return te.GroupedLinear(4, 32, 48, params_dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("given", [None, recipe.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("is_tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("dgrad", [False, True], ids=["", "dgrad"])
def test_results_and_gradients_lie_in_the_callers_memory(
    given: Any, is_tensor: bool, out: bool, dgrad: bool
) -> None:
    module = experts()
    rows = 64 + 8 * is_tensor  # behind the splits on a device there may be rows of nobody
    splits = torch.tensor(SPLITS) if is_tensor else SPLITS
    x, dy = torch.randn(rows, 32).bfloat16(), torch.randn(rows, 48).bfloat16()
    place = torch.full((rows, 48), 7.0, dtype=torch.bfloat16) if out else None
    grad_place = torch.full((rows, 32), 7.0, dtype=torch.bfloat16) if dgrad else None
    results = []
    own = {"out": place, "dgrad_out": grad_place}
    for options in ({}, own, own):  # memory serves again
        module.zero_grad()
        inp = x.clone().requires_grad_()
        with te.autocast(enabled=given is not None, recipe=given):
            y = module(inp, splits, **options)
        y.backward(dy)
        results.append([y[:64], inp.grad[:64], *(one.grad for one in module.parameters())])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))
    if place is not None:
        assert y.data_ptr() == place.data_ptr()
        assert torch.equal(place[64:], torch.full_like(place[64:], 7.0))
    if grad_place is not None:
        assert torch.equal(grad_place[:64], results[0][1])
        assert torch.equal(grad_place[64:], torch.full_like(grad_place[64:], 7.0))


def test_compiled_groups_keep_their_gradients() -> None:
    torch.compiler.reset()
    module = experts()
    compiled = torch.compile(module, backend="aot_eager")
    x = torch.randn(64, 32).bfloat16()
    for options in ({}, {"out": torch.empty(64, 48).bfloat16(), "dgrad_out": torch.empty_like(x)}):
        results = []
        for run in (module, compiled):
            inp = x.clone().requires_grad_()
            y = run(inp, SPLITS, **options)
            y.sum().backward()
            results.append((y.detach().clone(), inp.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_memory_that_does_not_fit_is_refused() -> None:
    module, x = experts(), torch.randn(64, 32).bfloat16().requires_grad_()
    for name, shape, dtype in (("out", (65, 48), x.dtype), ("dgrad_out", (64, 32), torch.float32)):
        with pytest.raises(ValueError, match=f"te.GroupedLinear.forward: {name} must be"):
            module(x, SPLITS, **{name: torch.empty(shape, dtype=dtype)}).sum().backward()


def test_a_single_bias_that_is_returned_is_the_parameter() -> None:
    module = experts(return_bias=True, single_grouped_bias=True, use_grouped_tensor=True)
    y, bias = module(torch.randn(64, 32).bfloat16(), torch.tensor(SPLITS))
    assert bias is module.bias and y.shape == (64, 48)
    y, bias = experts(return_bias=True)(torch.randn(64, 32).bfloat16(), SPLITS)
    assert [one.shape for one in bias] == [(48,)] * 4


def test_a_single_weight_is_read_as_a_grouped_tensor() -> None:
    single = experts(single_grouped_weight=True, single_grouped_bias=True)
    each = experts()
    names = [f"weight{g}" for g in range(4)]
    assert isinstance(single.weight, GroupedTensor) and not isinstance(each.weight0, GroupedTensor)
    weights = torch.stack([getattr(each, name).detach() for name in names])
    single.weight.rowwise_data.view_as(weights).copy_(weights)
    for again in (single, copy.deepcopy(single), single.float().bfloat16()):
        assert again.weight.num_tensors == again.bias.num_tensors == 4
        parts = again.weight.split_into_quantized_tensors()
        assert all(torch.equal(a, getattr(each, b)) for a, b in zip(parts, names, strict=True))
        assert again.weight.rowwise_data.data_ptr() == again.weight.data_ptr()
    x = torch.randn(64, 32).bfloat16()
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert torch.equal(single(x, SPLITS), each(x, SPLITS))
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        assert not hasattr(experts(single_grouped_weight=True).weight, "rowwise_data")


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("quantizer", [None, te.MXFP8Quantizer(E4M3)], ids=["plain", "mxfp8"])
def test_products_of_lists_are_those_of_their_pairs(
    layout: str, accumulate: bool, quantizer: Any
) -> None:
    def made(*shape: int) -> Any:
        values = torch.randn(*shape)
        return values if quantizer is None else quantizer(values)

    is_single, grad = layout != "NT", layout != "TN"
    left = [made(48, 32) if is_single else made(rows, 32) for rows in SPLITS]
    right = [made(rows, 32 if layout == "TN" else 48) for rows in SPLITS]
    if is_single:
        places = [torch.randn(64, 48 if layout == "TN" else 32)]
    else:
        places = [torch.randn(48, 32) for _ in SPLITS]
    each = [one.clone() for one in (places[0].split(SPLITS) if is_single else places)]
    biases = [torch.randn(48 if layout != "NN" else 32) for _ in SPLITS]
    options: dict[str, Any] = {"layout": layout, "grad": grad, "accumulate": accumulate}
    sums = [
        general_gemm(a, b, out=place, bias=bias, **options)[1]
        for a, b, place, bias in zip(left, right, each, biases, strict=True)
    ]
    got, found, nothing = general_grouped_gemm(
        left,
        right,
        places,
        [None] * 4,
        torch.bfloat16,
        m_splits=SPLITS,
        bias=biases,
        use_bias=True,
        single_output=is_single,
        **options,
    )
    assert got is places and nothing is None
    whole = [torch.cat(each)] if is_single else each
    assert all(torch.equal(a, b) for a, b in zip(places, whole, strict=True))
    assert found is biases if not grad else all(map(torch.equal, found, sums))


def test_what_products_of_lists_do_not_know_raises() -> None:
    pair = [torch.randn(4, 8)], [torch.randn(2, 8)]
    places = [torch.empty(2, 4)]
    with pytest.raises(NotImplementedError, match="gelu must be False"):
        general_grouped_gemm(*pair, places, [None], None, gelu=True)
    with pytest.raises(NotImplementedError, match="quantization_params must be None"):
        general_grouped_gemm(*pair, places, [te.MXFP8Quantizer(E4M3)], None)
    with pytest.raises(ValueError, match="a single output needs m_splits"):
        general_grouped_gemm(*pair, places, None, None, single_output=True)


@pytest.mark.parametrize("single", [False, True])
def test_scales_that_are_read_are_those_of_each_group(single: bool) -> None:
    """A scale is the largest value of the format over the largest amax of the group's history."""
    torch.manual_seed(2)
    layer = te.GroupedLinear(2, 32, 48, bias=False, single_grouped_weight=single)
    delayed = te.common.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    rows, inputs = [3, 5], torch.randn(3, 8, 32)
    for x in inputs:
        with te.fp8_autocast(enabled=True, fp8_recipe=delayed):
            y = layer(x, rows)
        (y * torch.arange(1, 9).view(8, 1)).sum().backward()
        hybridq.update_scaling(layer)
    weights = list(layer.weight) if single else [layer.weight0, layer.weight1]
    scales, backward = [], []
    for g, part in enumerate((slice(0, 3), slice(3, 8))):
        scales += [448 / inputs[:, part].abs().max(), 448 / weights[g].abs().max(), torch.ones(())]
        backward += [torch.tensor(57344 / part.stop), torch.ones(())]
    meta = layer.fp8_meta
    assert meta["num_gemms"] == 2
    assert torch.allclose(meta["scaling_fwd"].scale, torch.stack(scales), rtol=1e-6)
    assert torch.allclose(meta["scaling_bwd"].scale, torch.stack(backward), rtol=1e-6)
    assert meta["scaling_fwd"].amax_history.shape == (4, 6)
    made = layer.quantizers
    assert [len(one) for one in made.values()] == [6, 4]
    read = [made["scaling_fwd"][i].scale.item() for i in (0, 1, 3, 4)]
    assert torch.allclose(torch.tensor(read), torch.stack(scales)[[0, 1, 3, 4]], rtol=1e-6)


@pytest.mark.parametrize("make", [te.GroupedLinear, te.ops.GroupedLinear])
@pytest.mark.parametrize("is_low", [False, True])
def test_checkpoints_have_parameters_of_each_group_or_of_all(make: Any, is_low: bool) -> None:
    single = {"single_grouped_weight": True, "single_grouped_bias": True}
    for options, other in ((single, {}), ({}, single)):
        with te.quantized_model_init(enabled=is_low, recipe=recipe.MXFP8BlockScaling()):
            held = torch.nn.ModuleDict({"experts": make(4, 32, 64, **options)})
            model = torch.nn.ModuleDict({"experts": make(4, 32, 64, **other)})
        with torch.no_grad():
            for one in held.parameters():
                one.normal_()
        model.load_state_dict(held.state_dict())
        x, splits = torch.randn(64, 32), torch.tensor(SPLITS)
        assert torch.equal(model["experts"](x, splits), held["experts"](x, splits))
    wrong = {"experts.weight": torch.zeros(3, 64, 32), "experts.bias": torch.zeros(4, 64)}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .experts.weight"):
        torch.nn.ModuleDict({"experts": make(4, 32, 64)}).load_state_dict(wrong)
