"""LoRA and DoRA of PEFT on hybridq's modules.

Oracles are written out: the base's own result plus `scaling * B A x`, DoRA's formula on the decoded
weight, and for merges the quantizer's planes of the sum in FP32.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq

peft = pytest.importorskip("peft")

from transformers.pytorch_utils import Conv1D  # noqa: E402 (after the skip)

from hybridq.integrations.peft import (  # noqa: E402
    set_merging,
)
from peft_models import (  # noqa: E402
    RECIPES,
    Net,
    adapted,
    call,
    config,
    inputs,
    layers,
    net,
    same,
)

#: Merges say once what they lose; here that is expected.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_result_is_the_bases_own_plus_the_adapter(recipe) -> None:
    model = adapted(recipe)
    layer = layers(model)[0]
    x = inputs()
    y = call(layer, recipe, x)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == b.dtype == torch.float32
    assert type(layer.lora_A["default"]) is nn.Linear
    own = call(layer.base_layer, recipe, x)
    wanted = own + (x.float() @ a.T) @ b.T * 2.0
    assert torch.equal(y, wanted.bfloat16())
    assert not torch.equal(y, own)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_adapters_learn_and_the_base_has_one_plane(recipe) -> None:
    model = adapted(recipe, target_modules="all-linear")
    # PEFT knows heads of models of transformers; this one is no such model.
    assert [type(one) for one in model.modules() if isinstance(one, nn.Linear)].count(nn.Linear) > 0
    call(model, recipe, inputs()).sum().backward()
    learnt = {name for name, one in model.named_parameters() if one.grad is not None}
    assert learnt == {name for name, _ in model.named_parameters() if "lora_" in name}
    for layer in layers(model):
        weight = layer.get_base_layer().weight
        assert not weight.requires_grad
        if hasattr(weight, "tensor_storage"):
            assert weight.columnwise is None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dora_is_its_formula_on_the_decoded_weight(recipe, dropout) -> None:
    model = adapted(recipe, use_dora=True, lora_dropout=dropout)
    layer = layers(model)[0]
    magnitude = layer.lora_magnitude_vector["default"].weight
    with torch.no_grad():
        magnitude.mul_(1.5)
    base, x = layer.base_layer, inputs()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.manual_seed(2)
    y = call(layer, recipe, x)
    torch.manual_seed(2)
    own = call(base, recipe, x)  # first, since it draws the seed of its gradient
    dropped = layer.lora_dropout["default"](x.float())
    whole = base.weight.dequantize(dtype=torch.float32) + 2.0 * b @ a
    factor = magnitude / whole.norm(dim=1)
    of_dropped = own if dropout == 0.0 else call(base, recipe, dropped.bfloat16())
    low = (dropped @ a.T) @ b.T * 2.0
    wanted = own + (factor - 1) * (of_dropped - base.bias) + factor * low
    # Norms of rows are summed in two orders: some units in the last place of FP32, then BF16.
    torch.testing.assert_close(y.float(), wanted.float(), rtol=2**-7, atol=2**-7)
    y.float().sum().backward()
    assert magnitude.grad.abs().min() > 0


def test_doras_norms_decode_in_pieces(monkeypatch) -> None:
    from hybridq.integrations import peft as ours

    torch.manual_seed(0)
    with hybridq.quantized_model_init("mxfp8", frozen=True):
        base = nn.Sequential(hybridq.Linear(32, 300, dtype=torch.bfloat16))
    model = peft.get_peft_model(base, config(target_modules=["0"], use_dora=True))
    norms = layers(model)[0].lora_magnitude_vector["default"]
    weight, seen = layers(model)[0].base_layer.weight, []
    a, b = torch.randn(4, 32), torch.randn(300, 4)
    whole = norms.norms(weight, a, b, 0.5)
    monkeypatch.setattr(ours, "_PIECE", 1)
    rows = type(weight).dequantize_rows
    monkeypatch.setattr(
        type(weight), "dequantize_rows", lambda *o, **k: seen.append(rows(*o, **k)) or seen[-1]
    )
    pieces = norms.norms(weight, a, b, 0.5)
    assert [len(one) for one in seen] == [128, 128, 44]
    torch.testing.assert_close(whole, pieces, rtol=1e-6, atol=0)
    wanted = (weight.dequantize(dtype=torch.float32) + 0.5 * b @ a).norm(dim=1)
    torch.testing.assert_close(pieces, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_saved_and_loaded(recipe, use_dora, tmp_path) -> None:
    model = adapted(recipe, use_dora=use_dora).eval()
    wanted = call(model, recipe, inputs())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(net(recipe), tmp_path).eval()
    assert len(layers(again)) == 2
    assert torch.equal(call(again, recipe, inputs()), wanted)


def test_batches_of_several_adapters() -> None:
    model = adapted("mxfp8").eval()
    model.add_adapter("second", config(r=2))
    for layer in layers(model):
        nn.init.normal_(layer.lora_B["second"].weight, std=0.2)
    x, names = inputs(3), ["default", "__base__", "second"]
    with torch.no_grad(), hybridq.autocast(recipe="mxfp8"):
        mixed = model(x, adapter_names=names)
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter(), torch.no_grad():
                alone = call(model, "mxfp8", x)
        else:
            model.set_adapter(name)
            with torch.no_grad():
                alone = call(model, "mxfp8", x)
        torch.testing.assert_close(mixed[row], alone[row], rtol=2**-6, atol=2**-6)
        assert torch.equal(mixed[row], alone[row]) or name != "__base__"


def test_modules_to_save_are_trained_in_high_precision() -> None:
    with hybridq.quantized_model_init("nvfp4"):
        base = hybridq.convert(Net(), also=["heads"])
    values = base.lm_head.weight.dequantize()
    model = peft.get_peft_model(base, config(modules_to_save=["lm_head"]))
    trained = model.base_model.model.lm_head.modules_to_save["default"]
    assert type(trained.weight) is nn.Parameter and trained.weight.requires_grad
    assert torch.equal(trained.weight, values)
    call(model, "nvfp4", inputs()).sum().backward()
    assert trained.weight.grad is not None
    assert "base_model.model.lm_head.weight" in peft.get_peft_model_state_dict(model)


def test_the_order_of_convert_and_get_peft_model_is_free() -> None:
    torch.manual_seed(0)
    late = peft.get_peft_model(Net(), config(use_dora=True))
    with hybridq.quantized_model_init("mxfp8", frozen=True):
        hybridq.convert(late)
    early = adapted("mxfp8", use_dora=True)
    with torch.no_grad():
        for name, parameter in late.named_parameters():
            if "lora_" in name:
                assert parameter.dtype == torch.float32 and type(parameter) is nn.Parameter
                parameter.copy_(early.get_parameter(name))
    assert len(layers(late)) == 2
    assert [one.base_layer.name for one in layers(late)] == ["up", "down"]
    assert torch.equal(call(late, "mxfp8", inputs()), call(early, "mxfp8", inputs()))


@pytest.mark.parametrize(
    "kind", ["LoraConfig", "LoHaConfig", "LoKrConfig", "IA3Config", "OFTConfig"]
)
def test_convert_leaves_adapters_of_any_kind_alone(kind) -> None:
    options = {"target_modules": ["up", "down"]}
    if kind == "IA3Config":
        options["feedforward_modules"] = []
    model = peft.get_peft_model(Net(), getattr(peft, kind)(**options))
    adapters = {name for name, one in model.named_parameters() if one.requires_grad}
    assert adapters
    with hybridq.quantized_model_init("mxfp8", frozen=True):
        hybridq.convert(model, least_width=0)
    kinds = {name: type(one) for name, one in model.named_parameters()}
    assert {kinds[name] for name in adapters} == {nn.Parameter}
    assert kinds["base_model.model.up.base_layer.weight"] is not nn.Parameter
    assert {name for name, one in model.named_parameters() if one.requires_grad} == adapters


def test_compiled_in_one_graph_with_the_same_bits() -> None:
    model = adapted("mxfp8").base_model.model

    def gradients(function: object) -> list[torch.Tensor]:
        model.zero_grad()
        x = inputs().requires_grad_()
        y = call(function, "mxfp8", x)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.requires_grad]]

    eager = [one.clone() for one in gradients(model)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, eager, gradients(compiled)))


def test_ia3_multiplies_what_the_weight_decodes_to() -> None:
    base = net("mxfp8")
    model = peft.get_peft_model(
        base, peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])
    )
    layer = model.base_model.model.up
    with torch.no_grad():
        layer.ia3_l["default"].uniform_(0.5, 2)
    weight = layer.base_layer.weight.detach().clone()
    x = inputs()
    own = call(layer.base_layer, "mxfp8", x)
    scale = layer.ia3_l["default"].flatten()
    assert torch.equal(call(layer, "mxfp8", x), (own * scale).bfloat16())
    model.merge_adapter()
    wanted = weight.quantizer.with_usage(columnwise=False).quantize(
        (weight.dequantize() * scale.view(-1, 1)).to(torch.float32)
    )
    got = layer.base_layer.weight.dequantize(dtype=torch.float32)
    torch.testing.assert_close(got, wanted.dequantize(), rtol=2**-3, atol=1e-3)


def test_shira_adds_to_what_the_weight_decodes_to() -> None:
    """Its values are far below a step of the format, and are in the result all the same."""
    model = peft.get_peft_model(net("mxfp8"), peft.ShiraConfig(r=4, target_modules=["up"]))
    layer = model.base_model.model.up
    with torch.no_grad():
        layer.shira_weight["default"].normal_(std=1e-4)
    weight = layer.base_layer.weight.detach().dequantize(dtype=torch.float32)
    delta = layer.get_delta_weight("default").detach().to_dense()
    wanted = (weight + delta).bfloat16()
    assert not torch.equal(wanted, weight.bfloat16())
    x = inputs()
    want = torch.nn.functional.linear(x, wanted, layer.base_layer.bias)
    y = layer(x)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    y.float().square().sum().backward()
    assert layer.shira_weight["default"].grad.count_nonzero() > 0
    model.merge_adapter()
    got = layer.base_layer.weight.dequantize(dtype=torch.float32)
    torch.testing.assert_close(got, weight + delta, rtol=2**-4, atol=1e-3)
    model.unmerge_adapter()


def test_preparing_for_training_in_few_bits_keeps_the_planes() -> None:
    base = net("nvfp4")
    before = base.up.weight.detach().clone()
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    assert same(base.up.weight, before) and base.up.weight.dtype == torch.float32
    model = peft.get_peft_model(base, config())
    y = call(model, "nvfp4", inputs().float())
    y.sum().backward()
    assert y.dtype == torch.float32


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(sizes).bfloat16()
    with hybridq.quantized_model_init("nvfp4", frozen=True):
        return hybridq.convert(model)


def test_all_linear_and_checkpointing_on_a_model_of_transformers(llama) -> None:
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    model = peft.get_peft_model(llama, config(target_modules="all-linear", lora_dropout=0.1))
    assert len(layers(model)) == 14  # the head is none of them
    with torch.no_grad():
        for layer in layers(model):
            layer.lora_B["default"].weight.normal_(std=0.1)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        with hybridq.autocast(recipe="nvfp4"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [
            loss.detach(),
            *[one.grad.clone() for one in model.parameters() if one.requires_grad],
        ]

    kept = gradients()
    assert len(kept) == 29 and all(one.abs().sum() > 0 for one in kept)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert all(map(torch.equal, kept, gradients()))


def test_arguments() -> None:
    model = adapted("mxfp8")
    with pytest.raises(ValueError, match="set_merging: rounding must be one of"):
        set_merging(model, rounding="up")
    with pytest.raises(TypeError, match="set_merging: keep must be a bool, got int"):
        set_merging(model, keep=1)
    with pytest.raises(ValueError, match="set_merging: model must have LoRA layers"):
        set_merging(Net())
    with pytest.raises(ValueError, match="fan_in_fan_out must be False"):
        adapted("mxfp8", fan_in_fan_out=True)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_loaded_without_values_first(recipe, kind, tmp_path) -> None:
    """`low_cpu_mem_usage` gives the bits of the file. Of FP32: PEFT casts to the base's dtype."""

    def base() -> nn.Module:
        torch.manual_seed(0)
        own = nn.Linear(64, 96) if kind == "linear" else Conv1D(96, 64)
        with hybridq.quantized_model_init(recipe, frozen=True):
            return hybridq.convert(nn.Sequential(own))

    options = {"use_dora": True, "fan_in_fan_out": kind == "conv1d", "init_lora_weights": False}
    model = peft.get_peft_model(base(), config(target_modules=["0"], **options))
    assert isinstance(model.base_model.model[0].base_layer.weight, hybridq.QuantizedTensor)
    magnitude = model.base_model.model[0].lora_magnitude_vector["default"].weight
    with torch.no_grad():
        magnitude.mul_(torch.linspace(0.5, 2, 96))
    model.save_pretrained(tmp_path)
    x = inputs().float()
    for is_low in (False, True):
        again = peft.PeftModel.from_pretrained(base(), tmp_path, low_cpu_mem_usage=is_low)
        own = dict(again.named_parameters())
        for name, value in model.named_parameters():
            if "lora_" in name:
                assert own[name].device.type == "cpu" and torch.equal(own[name], value)
        assert torch.equal(again(x), model(x))
