"""Merges of PEFT's adapters into quantized weights: the quantizer's planes of the sum in FP32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq

peft = pytest.importorskip("peft")

from hybridq.integrations import merging  # noqa: E402
from hybridq.integrations.peft import (  # noqa: E402
    LoraEmbedding,
    LoraLinear,
    LoraParameter,
    merge_losses,
    set_merging,
)
from peft_models import (  # noqa: E402
    RECIPES,
    adapted,
    call,
    config,
    inputs,
    layers,
    same,
)

#: Merges say once what they lose; here that is expected.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_merge_rounds_the_sum_once_and_unmerge_restores_the_bits(recipe, frozen) -> None:
    model = adapted(recipe, frozen=frozen)
    model.add_adapter("second", config(r=2))
    torch.manual_seed(3)
    for layer in layers(model):
        nn.init.normal_(layer.lora_B["second"].weight, std=0.2)
    layer = layers(model)[0]
    base = layer.base_layer
    before, bias = base.weight.detach().clone(), base.bias.detach().clone()
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    total = before.dequantize(dtype=torch.float32)
    total = total + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    total = total + layer.lora_B["second"].weight @ layer.lora_A["second"].weight * 4.0
    wanted = before.quantizer.with_usage(**before.get_usages()).quantize(total)
    assert same(base.weight, wanted)
    assert not same(base.weight, before)
    assert set(merge_losses(model)) == {
        f"base_model.model.{name}.base_layer" for name in ("up", "down")
    }
    x = inputs()
    assert torch.equal(call(layer, recipe, x), call(base, recipe, x))
    model.unmerge_adapter()
    assert same(base.weight, before) and torch.equal(base.bias, bias)
    assert not merge_losses(model)


def test_a_merge_with_dora_scales_the_rows() -> None:
    model = adapted("mxfp8", use_dora=True)
    layer = layers(model)[0]
    before = layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        layer.lora_magnitude_vector["default"].weight.mul_(1.5)
    x = inputs()
    model.eval()
    apart = call(layer, None, x)
    model.merge_adapter()
    values = before.dequantize(dtype=torch.float32)
    whole = values + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    magnitude = layer.lora_magnitude_vector["default"].weight
    wanted = before.quantizer.quantize((magnitude / whole.norm(dim=1)).view(-1, 1) * whole)
    got = layer.base_layer.weight.dequantize(dtype=torch.float32)
    # E4M3 in blocks: 2**-4 of a value, which lies below 2**9 times the scale of its block.
    torch.testing.assert_close(got, wanted.dequantize(), rtol=2**-3, atol=1e-3)
    merged = call(layer, None, x)
    assert (merged - apart).norm() < 0.05 * apart.norm()
    model.unmerge_adapter()
    assert same(layer.base_layer.weight, before)
    assert torch.equal(call(layer, None, x), apart)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4_1d_weight"])
def test_stochastic_merge_draws_a_neighbour_and_keeps_the_mean(recipe, frozen) -> None:
    model = set_merging(adapted(recipe, frozen=frozen), rounding="stochastic")
    layer = layers(model)[0]
    weight = layer.base_layer.weight
    values = weight.dequantize(dtype=torch.float32)
    values = values + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    mean = torch.zeros_like(values)
    nearest = weight.quantizer.quantize(values).dequantize(dtype=torch.float32)
    draws = 200
    for seed in range(draws):
        torch.manual_seed(seed)
        layer.merge()
        drawn = weight.dequantize(dtype=torch.float32)
        assert weight.rowwise.spec == layer._kept.storage.rowwise.spec
        mean += drawn / draws
        layer.unmerge()
    assert not torch.equal(drawn, nearest)
    # A draw is off by a step at most, so a mean of n draws by 5 * step / (2 sqrt(n)) at 5 sigma.
    step = (drawn - values).abs().max() * 2
    assert (mean - values).abs().max() < 5 * step / (2 * draws**0.5)


def test_planes_of_a_stochastic_merge_are_of_one_value() -> None:
    model = set_merging(adapted("mxfp8", frozen=False), rounding="stochastic")
    layers(model)[0].merge()
    weight = layers(model)[0].base_layer.weight
    only = weight.quantizer.with_usage(rowwise=False).quantize(weight.dequantize())
    assert torch.equal(weight.columnwise.data, only.columnwise.data)


def test_bits_that_were_not_kept_are_not_made_up() -> None:
    model = set_merging(adapted("nvfp4"), keep=False)
    model.add_adapter("second", config())
    model.merge_adapter(["default"])
    with pytest.raises(RuntimeError, match=r"unmerge: the weight before the merge was not kept"):
        model.unmerge_adapter()
    with pytest.raises(RuntimeError, match=r"merge: default is merged already.*got second"):
        model.merge_adapter(["second"])
    with pytest.raises(RuntimeError, match="unmerge"), model.disable_adapter():
        call(model, None, inputs())


def test_a_merged_weight_that_was_written_is_not_unmerged() -> None:
    model = adapted("mxfp8")
    model.merge_adapter()
    with torch.no_grad():
        layers(model)[0].base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was written since the merge, got default"):
        model.unmerge_adapter()


def test_safe_merge_and_biases() -> None:
    model = adapted("mxfp8", target_modules=["up"], lora_bias=True)
    layer = layers(model)[0]
    with torch.no_grad():
        layer.lora_B["default"].bias.fill_(0.5)
    before = layer.base_layer.weight.detach().clone()
    bias = layer.base_layer.bias.detach().clone()
    model.merge_adapter()
    assert torch.equal(layer.base_layer.bias, (bias + 1.0).bfloat16())
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.bias, bias)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="merged values must be finite"):
        model.merge_adapter(safe_merge=True)
    assert same(layer.base_layer.weight, before) and not layer.merged


def test_what_a_merge_loses_is_said_once() -> None:
    model = adapted("nvfp4")
    with pytest.warns(hybridq.HybridQWarning, match=r"rounded to .* \(nearest\)") as seen:
        model.merge_adapter()
    assert len([one for one in seen if one.category is hybridq.HybridQWarning]) == 1
    losses = merge_losses(model)
    layer = layers(model)[0]
    kept = layer._kept.storage.first.dequantize(torch.float32)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    lost = layer.base_layer.weight.dequantize(dtype=torch.float32) - kept - delta
    assert losses["base_model.model.up.base_layer"] == pytest.approx(
        float(lost.norm() / delta.norm()), rel=1e-3
    )


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_merge_and_unload_gives_the_base_back(recipe) -> None:
    model, twin, x = adapted(recipe), adapted(recipe), inputs()
    twin.merge_adapter()
    merged = call(twin, recipe, x)
    plain = model.merge_and_unload()
    assert type(plain.up) is hybridq.Linear and not layers(plain)
    assert torch.equal(call(plain, recipe, x), merged)


def test_plain_weights_are_merged_as_peft_does_it() -> None:
    model = adapted(None)
    layer = layers(model)[0]
    wanted = layer.base_layer.weight.detach() + layer.get_delta_weight("default").bfloat16()
    model.merge_adapter()
    torch.testing.assert_close(layer.base_layer.weight.detach(), wanted, rtol=2**-8, atol=2**-10)


def test_other_linear_maps_and_tables_are_merged_alike() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.2))
    with hybridq.quantized_model_init("mxfp8", frozen=True):
        hybridq.convert(model.bfloat16().eval(), also=["embeddings"])
    options = {"target_modules": ["c_fc", "wpe"], "init_lora_weights": False, "use_dora": True}
    adapted = peft.get_peft_model(model, config(**options)).eval()
    linear = model.transformer.h[0].mlp.c_fc
    table = model.transformer.wpe
    assert type(linear) is LoraLinear and type(table) is LoraEmbedding
    assert linear.base_layer.weight.shape == (64, 256)  # in, out
    whole = linear.base_layer.weight.dequantize(dtype=torch.float32) + linear.delta("default")
    norms = linear.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(norms, whole.norm(dim=0), rtol=1e-6, atol=0)
    before = [one.base_layer.weight.detach().clone() for one in (linear, table)]
    ids = torch.arange(10)[None]
    apart = call(adapted, None, ids).logits
    adapted.merge_adapter()
    for one, kept in zip((linear, table), before, strict=True):
        values = kept.dequantize(dtype=torch.float32)
        delta = one.get_delta_weight("default").float()
        magnitude = one.lora_magnitude_vector["default"].weight.float()
        factor = magnitude / (values + delta).norm(dim=0)
        wanted = kept.quantizer.with_usage(**kept.get_usages()).quantize(factor * (values + delta))
        assert not same(one.base_layer.weight, kept)
        got = one.base_layer.weight.dequantize(dtype=torch.float32)
        torch.testing.assert_close(
            got, wanted.dequantize(dtype=torch.float32), rtol=0.13, atol=1e-2
        )
    merged = call(adapted, None, ids).logits
    assert 0 < (merged - apart).norm() < 0.2 * apart.norm()
    adapted.unmerge_adapter()
    assert same(linear.base_layer.weight, before[0]) and same(table.base_layer.weight, before[1])
    assert torch.equal(call(adapted, None, ids).logits, apart)


def test_stacks_of_experts_are_merged_alike() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        initializer_range=0.2,
    )
    model = transformers.MixtralForCausalLM(sizes).bfloat16().eval()
    with hybridq.quantized_model_init("nvfp4", frozen=True):
        hybridq.convert(model)
    experts = model.model.layers[0].mlp.experts
    before = experts.gate_up_proj.detach().clone()
    assert before.columnwise is None and not experts.gate_up_proj.requires_grad
    options = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapted = peft.get_peft_model(model, config(**options, init_lora_weights=False)).eval()
    layer = model.model.layers[0].mlp.experts
    assert type(layer) is LoraParameter
    ids = torch.arange(12)[None]
    apart = call(adapted, "nvfp4", ids).logits
    adapted.merge_adapter()
    values = before.dequantize(dtype=torch.float32) + layer.get_delta_weight("default").float()
    own = before.quantizer.with_usage(columnwise=False)
    assert same(experts.gate_up_proj, own.quantize_stack(values))
    adapted.unmerge_adapter()
    assert same(experts.gate_up_proj, before)
    assert torch.equal(call(adapted, "nvfp4", ids).logits, apart)
    set_merging(adapted, rounding="stochastic")
    nearest = own.quantize_stack(values).dequantize(dtype=torch.float32)
    mean, draws = torch.zeros_like(values), 60
    for seed in range(draws):
        torch.manual_seed(seed)
        adapted.merge_adapter()
        drawn = experts.gate_up_proj.dequantize(dtype=torch.float32)
        assert experts.gate_up_proj.rowwise.amax.shape == before.rowwise.amax.shape
        mean += drawn / draws
        adapted.unmerge_adapter()
        assert same(experts.gate_up_proj, before)
    assert all(not torch.equal(drawn[e], nearest[e]) for e in range(3))
    # As of a matrix, by each expert's own largest step; 6 sigma of 60 draws.
    for e in range(3):
        step = (drawn[e] - values[e]).abs().max() * 2
        assert (mean[e] - values[e]).abs().max() < 6 * step / (2 * draws**0.5)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_1d_weight"])
@pytest.mark.parametrize("transposed", [False, True])
def test_stochastic_rounding_of_a_stack_is_that_of_each_matrix(recipe, transposed) -> None:
    """The same draws, in both orientations; the other plane is of what was drawn."""
    slot = hybridq.recipes.bind(hybridq.recipes.get(recipe), "", "grouped_linear").weight
    quantizer = hybridq.Quantizer(
        *(hybridq.formats.PlaneSpec.parse(one.spec) for one in (slot.row, slot.col))
    )
    torch.manual_seed(0)
    weight = quantizer.quantize_stack(torch.randn(3, 64, 48))
    shown = weight.mT if transposed else weight
    values = shown.dequantize() + 0.02 * torch.randn(shown.shape)
    torch.manual_seed(7)
    made = merging.rounded_stochastically(values, shown.tensor_storage)
    assert made.leads == shown.tensor_storage.leads
    torch.manual_seed(7)
    for number in range(3):
        alone = merging.rounded_stochastically(values[number], shown[number].tensor_storage)
        for plane, one in zip(made.planes, alone.planes, strict=True):
            for name, buffer in one.buffers.items():
                assert torch.equal(plane.buffers[name][number], buffer), (number, name)
    target = shown.clone()
    target.copy_(merging.tensor_of(made, target))
    assert torch.equal(target.dequantize(), merging.tensor_of(made, target).dequantize())


ADAPTERS = {
    "lora": lambda **given: peft.LoraConfig(init_lora_weights=False, **given),
    "dora": lambda **given: peft.LoraConfig(use_dora=True, **given),
    "loha": lambda **given: peft.LoHaConfig(init_weights=False, **given),
}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_base_that_scales_its_input_first_is_not_merged_into(kind, converted) -> None:
    """`W diag(s) x + B A x` is no `(W + B A) diag(s) x`: before, the merge changed the result."""
    torch.manual_seed(11)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
    hybridq.calibration.smooth(model, [x], lambda _, name: name == "0", in_front=True)
    if converted:
        hybridq.convert(model)
    before = model[0].weight.detach().clone()
    plain = model(x)
    whole = peft.get_peft_model(model, ADAPTERS[kind](target_modules=["0", "2"]))
    y, layer = whole(x), whole.base_model.model[0]
    if kind == "lora":
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        own = nn.functional.linear(x * layer.base_layer.pre_quant_scale, before, layer.bias)
        torch.testing.assert_close(layer(x), own + x @ a.T @ b.T * layer.scaling["default"])
    for merge in (whole.merge_adapter, whole.merge_and_unload):
        with pytest.raises(RuntimeError, match="got pre_quant_scale of 0; leave the adapters"):
            merge()
        assert torch.equal(whole(x), y) and torch.equal(layer.get_base_layer().weight, before)
    if converted and kind != "loha":  # a layer of hybridq's says it by itself, too
        with pytest.raises(RuntimeError, match="got pre_quant_scale of this layer"):
            layer.merge()
    assert torch.equal(whole.unload()(x), plain)
    beside = peft.get_peft_model(model, ADAPTERS[kind](target_modules=["2"]))
    y = beside(x)
    torch.testing.assert_close(beside.merge_and_unload()(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forward", [["0"], []])
def test_factors_of_ia3_are_merged_beside_those_of_the_input(forward) -> None:
    """Factors of the input's channels commute, and those of the outputs come afterwards."""
    torch.manual_seed(12)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    hybridq.calibration.smooth(model, [x], in_front=True)
    given = peft.IA3Config(target_modules=["0"], feedforward_modules=forward)
    plain, whole = model(x), peft.get_peft_model(model, given)
    with torch.no_grad():
        whole.base_model.model[0].ia3_l["default"].uniform_(0.5, 2.0)
    y = whole(x)
    assert not torch.allclose(y, plain, rtol=0.1)
    whole.merge_adapter()
    torch.testing.assert_close(whole(x), y, rtol=1e-5, atol=1e-5)


def test_mixed_adapters_are_asked_for_factors_too() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    hybridq.calibration.smooth(model, [x], in_front=True)
    mixed = peft.get_peft_model(model, ADAPTERS["loha"](target_modules=["0"]), mixed=True)
    y = mixed(x)
    with pytest.raises(RuntimeError, match="got pre_quant_scale of 0"):
        mixed.merge_and_unload()
    assert torch.equal(mixed(x), y)
