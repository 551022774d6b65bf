"""hybridq.quantized_model_init: modules whose weights are quantized tensors from the start.

The oracle is the module with the same initial values in high precision: its forward and backward
quantize the weight anew each time, by the same recipe.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hybridq
from hybridq import IdentityQuantizer, QuantizedTensor
from hybridq.nn import QuantizedModule
from hybridq.recipes import CustomRecipe
from tensor_tools import same_planes

#: fp8_delayed apart: there a weight in high precision has a scale of earlier steps.
RECIPES = [name for name in hybridq.recipes.names() if name != "fp8_delayed"]
QUANTIZING = [name for name in RECIPES if name not in ("bf16", "high_precision")]

MODULES = {
    "linear": lambda **o: hybridq.Linear(96, 40, **o),
    "layernorm_linear": lambda **o: hybridq.LayerNormLinear(96, 40, **o),
    "mlp": lambda **o: hybridq.LayerNormMLP(96, 64, activation="swiglu", **o),
    "layer": lambda **o: hybridq.TransformerLayer(
        96, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=o["dtype"]
    ),
}


class Experts(nn.Module):
    """A GroupedLinear with its splits, so that it is called like the others."""

    def __init__(self, splits=(3, 0, 13), **options) -> None:
        super().__init__()
        self.inner = hybridq.GroupedLinear(3, 96, 40, **options)
        self.splits = list(splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = self.splits if self.splits[0] >= 0 else torch.tensor([3, 0, 13])
        return self.inner(x.reshape(-1, 96), splits)


MODULES["grouped"] = Experts
MODULES["grouped, splits on the device"] = lambda **o: Experts((-1, 0, 0), **o)


def make(kind: str, recipe: str | None, seed: int = 0, **options) -> nn.Module:
    """A module of that kind; of a recipe: with weights that it has quantized."""
    torch.manual_seed(seed)
    options = {"dtype": torch.bfloat16, **options}
    if recipe is None:
        return MODULES[kind](**options)
    with hybridq.quantized_model_init(recipe, preserve_high_precision_init_val=True):
        return MODULES[kind](**options)


def run(module: nn.Module, recipe: str | None, seed: int = 1) -> list[torch.Tensor]:
    """Output, gradient of the input, and of all parameters."""
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    x = torch.randn(16, 1, 96).to(dtype).requires_grad_()
    module.zero_grad()
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    torch.manual_seed(seed)
    y.backward(torch.randn_like(y))
    return [y, x.grad, *(p.grad for p in module.parameters())]


def weights(module: nn.Module) -> dict[str, QuantizedTensor]:
    return {n: p for n, p in module.named_parameters() if isinstance(p, QuantizedTensor)}


def assert_equal(a: list, b: list) -> None:
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), i


# ---- construction and training


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_what_weights_in_high_precision_compute(kind, recipe) -> None:
    ours, plain = make(kind, recipe), make(kind, None)
    found = weights(ours)
    assert bool(found) == (recipe in QUANTIZING)
    high = dict(plain.named_parameters())
    assert list(high) == list(dict(ours.named_parameters()))
    for name, parameter in ours.named_parameters():
        if name in found:
            assert isinstance(parameter, nn.Parameter) and parameter.dtype == torch.bfloat16
            same_planes(parameter, parameter.quantizer(high[name].detach()))
            assert torch.equal(parameter.get_high_precision_init_val(), high[name])
        else:
            assert torch.equal(parameter, high[name])
    assert_equal(run(ours, recipe), run(plain, recipe))


@pytest.mark.parametrize(
    ("recipe", "nbytes"),
    [("fp8_current", 1.0), ("fp8_block", 1.0), ("nvfp4", 0.5), ("mxfp8_fwd_nvfp4_bwd", 1.59375)],
)
def test_one_plane_is_stored_where_it_determines_the_other(recipe, nbytes) -> None:
    """MXFP8 takes 1 + 1/32 bytes, NVFP4 1/2 + 1/16, blocks of 16x16 1/2 + 1/256."""
    with hybridq.quantized_model_init(recipe):
        weight = hybridq.Linear(1024, 512).weight
    derives = nbytes <= 1
    assert weight.get_usages() == {"rowwise": True, "columnwise": not derives}
    assert nbytes <= weight.nbytes / weight.numel() < nbytes + 0.005


def test_delayed_scaling_takes_the_own_amax() -> None:
    module = make("linear", "fp8_delayed")
    plain = make("linear", None)
    same_planes(
        module.weight, hybridq.quantize(plain.weight.detach(), "fp8_e4m3", columnwise=False)
    )
    y, *_ = run(module, "fp8_delayed")
    with hybridq.autocast(recipe="fp8_delayed"):
        z = module(torch.zeros(4, 96).bfloat16())
    assert torch.equal(z, module.bias.expand(4, 40)) and y.isfinite().all()


@pytest.mark.parametrize("kind", list(MODULES))
def test_weights_that_the_recipe_leaves_alone_are_wrapped_where_that_is_asked(kind) -> None:
    plain = make(kind, None)
    torch.manual_seed(0)
    with hybridq.quantized_model_init("high_precision"):
        left = MODULES[kind](dtype=torch.bfloat16)
    torch.manual_seed(0)
    with hybridq.quantized_model_init("high_precision", wraps_plain=True):
        made = MODULES[kind](dtype=torch.bfloat16)
    wrapped = [name for name, one in made.named_parameters() if isinstance(one, QuantizedTensor)]
    assert wrapped and set(wrapped) == set(weights(make(kind, "mxfp8")))
    assert not any(isinstance(one, QuantizedTensor) for one in left.parameters())
    x = torch.randn(16, 2, 96, dtype=torch.bfloat16)
    x = x[:, 0] if kind != "layer" else x
    results = []
    for module in (plain, made):
        own = x.clone().requires_grad_()
        with hybridq.autocast(recipe="high_precision"):
            y = module(own)
        y.backward(torch.ones_like(y))
        results.append([y, own.grad, *(one.grad for one in module.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for name in wrapped:
        parameter = made.get_parameter(name)
        assert isinstance(parameter, hybridq.tensor.IdentityTensor) and parameter.requires_grad
        assert torch.equal(parameter.dequantize(), plain.get_parameter(name))


def test_it_nests_is_restored_and_decorates() -> None:
    @hybridq.quantized_model_init("nvfp4")
    def build() -> hybridq.Linear:
        return hybridq.Linear(32, 32)

    with hybridq.quantized_model_init("mxfp8"):
        with hybridq.quantized_model_init(enabled=False):
            assert not weights(hybridq.Linear(32, 32))
        assert type(build().weight) is hybridq.NVFP4Tensor
        assert type(hybridq.Linear(32, 32).weight) is hybridq.MXFP8Tensor
    with pytest.raises(RuntimeError, match="x"), hybridq.fp8_model_init(True, "fp8_current"):
        assert type(hybridq.Linear(32, 32).weight) is hybridq.Float8Tensor
        raise RuntimeError("x")
    assert not weights(hybridq.Linear(32, 32))
    for wrong in ({"recipe": 3}, {"enabled": 1}, {"preserve_high_precision_init_val": None}):
        with pytest.raises(TypeError):
            hybridq.quantized_model_init(**wrong)


def test_a_recipe_that_reads_names_is_asked_by_the_name() -> None:
    recipe = hybridq.recipes.ByName([("first", "bf16")], "nvfp4")
    with hybridq.quantized_model_init(recipe):
        assert not weights(hybridq.Linear(32, 32, name="first"))
        assert weights(hybridq.Linear(32, 32, name="second"))


def test_convert_inside_quantizes_what_is_not_tied() -> None:
    model = nn.ModuleDict(
        {"emb": nn.Embedding(32, 32), "a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}
    )
    model["b"].weight = model["emb"].weight
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(model)
    assert list(weights(model)) == ["a.weight"]


def test_convert_inside_says_what_was_converted_before(recwarn) -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    added = nn.Sequential(model, nn.Linear(32, 32))
    with hybridq.quantized_model_init("mxfp8"):
        hybridq.convert(added)
        hybridq.convert(added)
    assert list(weights(added)) == ["1.weight"]
    said = [str(one.message) for one in recwarn if "hybridq's before" in str(one.message)]
    assert len(said) == 1
    assert said[0].startswith("convert: weights of 2 modules stay in high precision, as of '0.0'")


def test_convert_inside_is_silent_of_what_is_quantized_or_stays_by_the_recipe(recwarn) -> None:
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(nn.Sequential(nn.Linear(32, 32)))
        hybridq.convert(model)
    with hybridq.quantized_model_init(CustomRecipe(lambda role: IdentityQuantizer())):
        hybridq.convert(hybridq.convert(nn.Sequential(nn.Linear(32, 32))))
    assert not [one for one in recwarn if "hybridq's before" in str(one.message)]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_current"])
def test_a_single_grouped_weight_has_planes_for_each_group(recipe) -> None:
    """Under the recipe the bits of a weight in high precision, whose groups are quantized alone."""
    x, found = torch.randn(10, 64), []
    for is_low in (True, False):
        torch.manual_seed(0)
        with hybridq.quantized_model_init(recipe, enabled=is_low):
            module = hybridq.GroupedLinear(3, 64, 48, single_grouped_weight=True)
        assert isinstance(module.weight, hybridq.QuantizedTensor) == is_low
        own = x.clone().requires_grad_()
        torch.manual_seed(1)
        with hybridq.autocast(recipe=recipe):
            y = module(own, [4, 0, 6])
        y.square().sum().backward()
        found.append((y, own.grad, module.weight.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_another_recipe_requantizes_and_none_decodes(recipe) -> None:
    module, plain = make("linear", recipe), make("linear", None)
    with torch.no_grad():
        plain.weight.copy_(module.weight.dequantize())
    assert_equal(run(module, "fp8_block"), run(plain, "fp8_block"))
    y, z = run(module, None)[0].float(), run(plain, None)[0].float()
    # NVFP4's second-level scale multiplies the product, and is in plain's values, rounded to BF16:
    # 2^-8 of each of 96 products, whose sum may be smaller than they are.
    bound = 2**-7 * (1 + 96 * plain.weight.abs().max() * 4) * (recipe == "nvfp4")
    assert (y - z).abs().max() <= bound


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd"])
def test_under_torch_autocast(recipe) -> None:
    module, plain = make("linear", recipe, dtype=torch.float32), make("linear", None)
    plain = make("linear", None, dtype=torch.float32)
    x = torch.randn(8, 96)
    for one in (module, plain):
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16), hybridq.autocast(recipe=recipe):
            y = one(x)
        y.sum().backward()
    assert y.dtype == torch.bfloat16 and module.weight.grad.dtype == torch.float32
    if recipe != "nvfp4":  # there the planes of FP32 values are not those of the rounded ones
        scale = plain.weight.grad.abs().max()
        assert (module.weight.grad - plain.weight.grad).abs().max() < 0.05 * scale


def test_a_write_between_forward_and_backward_is_seen() -> None:
    for recipe in ("fp8_current", "mxfp8_fwd_nvfp4_bwd"):
        module = make("linear", recipe)
        x = torch.randn(4, 96).bfloat16().requires_grad_()
        with hybridq.autocast(recipe=recipe):
            y = module(x)
        with torch.no_grad():
            module.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_microbatches_recomputation_and_no_grad() -> None:
    module, plain = make("linear", "nvfp4"), make("linear", None)
    x = torch.randn(4, 96).bfloat16()
    results = []
    for one in (module, plain):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with hybridq.autocast(recipe="nvfp4"):
            for first in (True, False):
                y = hybridq.checkpoint(one, leaf, first)
                y.sum().backward()
            with torch.inference_mode():
                z = one(x)
        results.append([y, leaf.grad, one.weight.grad, z])
    assert_equal(*results)


@pytest.mark.thinned(1, "slow", few=2)
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped, splits on the device"])
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_compiled_it_has_the_bits_of_eager(kind, recipe) -> None:
    torch._dynamo.reset()
    module = make(kind, recipe)
    want = run(module, recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, recipe), want)
    with torch.no_grad():
        for weight in weights(module).values():
            weight.mul_(0.5)
    assert_equal(run(compiled, recipe), run(module, recipe))


# ---- initialization


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "mlp", "grouped"])
def test_meta_device(kind) -> None:
    module = make(kind, "mxfp8_fwd_nvfp4_bwd", device="meta")
    assert all(p.is_meta for p in module.parameters()) and weights(module)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for one in module.modules():
        if isinstance(one, QuantizedModule):
            one.reset_parameters()
    other = make(kind, "mxfp8_fwd_nvfp4_bwd")
    for name, weight in weights(module).items():
        same_planes(weight, weights(other)[name])
        assert torch.equal(
            weight.get_high_precision_init_val(),
            weights(other)[name].get_high_precision_init_val(),
        )


def test_reset_quantizes_once_whatever_the_initializer_does() -> None:
    def init(weight: torch.Tensor) -> None:
        nn.init.normal_(weight)
        weight.mul_(0.1)
        weight.add_(0.01)

    torch.manual_seed(0)
    with hybridq.quantized_model_init("nvfp4", preserve_high_precision_init_val=True):
        module = hybridq.LayerNormLinear(64, 32, init_method=init)
    torch.manual_seed(0)
    plain = hybridq.LayerNormLinear(64, 32, init_method=init).weight.detach()
    for _ in range(2):
        same_planes(module.weight, module.weight.quantizer(plain))
        assert torch.equal(module.weight.get_high_precision_init_val(), plain)
        with torch.no_grad():
            module.weight.zero_()
        torch.manual_seed(0)
        module.reset_parameters()


def test_the_initial_value_lives_until_a_write_or_a_clear() -> None:
    def fresh() -> hybridq.Linear:
        with hybridq.quantized_model_init("mxfp8", preserve_high_precision_init_val=True):
            return hybridq.Linear(64, 32)

    layer = fresh()
    value = layer.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and type(value) is torch.Tensor
    for moved in (copy.deepcopy(layer), fresh().to(torch.bfloat16), fresh().to("cpu")):
        kept = moved.weight.get_high_precision_init_val()
        assert kept.dtype == torch.float32 and kept.shape == (32, 64)
    layer.weight.clear_high_precision_init_val()
    for cleared in (layer, copy.deepcopy(layer), copy.deepcopy(layer).to(torch.bfloat16)):
        assert cleared.weight.get_high_precision_init_val() is None
        assert not hasattr(cleared.weight.detach() + 0, "get_high_precision_init_val")
        with torch.no_grad():
            cleared.weight.zero_()
        assert cleared.weight.get_high_precision_init_val() is None

    writes = {
        "copy_": lambda w: w.copy_(torch.ones(32, 64)),
        "bytes": lambda w: w.copy_(hybridq.MXFP8Quantizer()(torch.ones(32, 64))),
        "alias": lambda w: w.detach().zero_(),
        "part": lambda w: w[:16].zero_(),
        "data": lambda w: setattr(w, "data", torch.ones(32, 64)),
        "update": lambda w: w.quantizer.update_quantized(torch.ones(32, 64), w),
        "load": None,
    }
    for name, write in writes.items():
        layer = fresh()
        if write is None:
            layer.load_state_dict(nn.Linear(64, 32).state_dict())
        else:
            with torch.no_grad():
                write(layer.weight)
        # Libraries ask with `hasattr`, and take what the method returns without another look.
        assert not hasattr(layer.weight, "get_high_precision_init_val"), name
        layer.weight.clear_high_precision_init_val()
        assert layer.weight.get_high_precision_init_val() is None, name
    assert not hasattr(hybridq.quantize(torch.ones(1, 32), "mxfp8"), "get_high_precision_init_val")


# ---- checkpoints and copies


def test_state_dict_is_exact_and_takes_plain_checkpoints() -> None:
    recipe = "mxfp8_fwd_nvfp4_bwd"
    module, other, plain = make("mlp", recipe), make("mlp", recipe, 7), make("mlp", None, 8)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for name, weight in weights(module).items():
        same_planes(weight, weights(other)[name])
    other.load_state_dict(plain.state_dict())
    for name, weight in weights(other).items():
        same_planes(weight, weight.quantizer(dict(plain.named_parameters())[name].detach()))
    state = hybridq.dequantized_state_dict(module)
    assert all(type(value) is torch.Tensor for value in state.values())
    plain.load_state_dict(state)
    for name, weight in weights(module).items():
        assert torch.equal(dict(plain.named_parameters())[name], weight.dequantize())


def test_copies_pickles_and_conversions_stay_quantized() -> None:
    module = make("linear", "nvfp4")
    want = run(module, "nvfp4")
    module.zero_grad()
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to("cpu")):
        assert_equal(run(same, "nvfp4"), want)
    half = copy.deepcopy(module).half()
    assert half.weight.dtype == torch.float16 and isinstance(half.weight, QuantizedTensor)
    assert torch.equal(half.weight.rowwise.data, module.weight.rowwise.data)
    double = copy.deepcopy(module)
    assert hybridq.convert(nn.ModuleDict({"m": double}))["m"].weight is double.weight


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_a_forward_on_the_meta_device_gives_shapes(recipe) -> None:
    with hybridq.quantized_model_init(recipe):
        layer = hybridq.Linear(64, 96, device="meta")
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    with hybridq.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()
    assert y.is_meta and y.shape == (8, 96)
    assert x.grad.shape == (8, 64) and layer.weight.grad.shape == (96, 64)


def test_a_weight_that_is_not_quantized_is_named_before_any_other_is() -> None:
    plain = [nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64)]
    model = nn.Sequential(*plain, nn.MultiheadAttention(32, 4, dtype=torch.float64))
    text = "weights must be float32, bfloat16 or float16, got torch.float64 of 1.weight"
    with hybridq.quantized_model_init("mxfp8"), pytest.raises(TypeError, match=text):
        hybridq.convert(model)
    assert type(model[0].weight) is nn.Parameter
    text = "got torch.float64 of 2.out_proj.weight"
    with hybridq.quantized_model_init("mxfp8"), pytest.raises(TypeError, match=text):
        hybridq.convert(model, lambda _, name: name != "1")
    assert type(model[0].weight) is nn.Parameter
    with hybridq.quantized_model_init("mxfp8"), pytest.raises(TypeError, match="float64 of up"):
        hybridq.Linear(32, 32, dtype=torch.float64, name="up")
