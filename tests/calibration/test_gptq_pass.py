"""GPTQ of a model: which inputs each weight is rounded for, and what becomes of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hybridq
from hybridq.calibration import gptq, products, watch
from hybridq.calibration.gptq_matrix import Hessian, gptq_plane
from hybridq.formats import PlaneSpec
from oracle.bridge import assert_bits_equal, encode_plane

SPEC = PlaneSpec.parse("nvfp4")
RECIPE = hybridq.recipe(fprop="nvfp4")


def hessian_of(*parts: torch.Tensor) -> torch.Tensor:
    made = Hessian(parts[0].shape[-1])
    for part in parts:
        made.add(part)
    return made.matrix


def assert_plane(weight: torch.Tensor, want: dict) -> None:
    """A frozen quantized parameter of one rowwise plane with these buffers."""
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    for name, buffer in want.items():
        assert_bits_equal(weight.rowwise.buffers[name], buffer, name)


@pytest.fixture
def pair():
    """Two layers with an activation in between, copies of their weights, and batches."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    batches = [torch.randn(24, 8) @ torch.randn(8, 64) for _ in range(3)]
    return model, [model[0].weight.detach().clone(), model[2].weight.detach().clone()], batches


@pytest.mark.parametrize("step", ["block", "input", "model"])
def test_a_part_has_its_inputs_from_rounded_parts_before_it(pair, step):
    model, (first, second), batches = pair
    hidden = [model[:2](x) for x in batches]
    report = gptq(model, batches, RECIPE, step=step)
    made = gptq_plane(first, hessian_of(*batches), SPEC)
    assert_plane(model[0].weight, made.buffers)
    if step != "model":
        bias = model[0].bias
        hidden = [nn.functional.linear(x, made.dequantize(), bias).relu() for x in batches]
    want = gptq_plane(second, hessian_of(*hidden), SPEC)
    assert_plane(model[2].weight, want.buffers)
    assert [one.tokens for one in report.weights] == [72, 72]
    assert all(0.0 < one.error < one.plain_error < 0.1 for one in report.weights)
    assert not report.left and "error" in str(report)


def test_the_planes_are_what_a_forward_under_the_recipe_multiplies(pair):
    model, _, batches = pair
    gptq(model, batches, RECIPE)
    layer, x = model[0], batches[0]
    plane = layer.weight.rowwise
    hybridq.convert(model)
    with hybridq.autocast(recipe=RECIPE), torch.no_grad():
        y = layer(x)
    assert layer.weight.rowwise is plane
    want = hybridq.gemm(hybridq.quantize(x, "nvfp4"), layer.weight, bias=layer.bias)
    assert torch.equal(y, want)


@pytest.mark.parametrize("activations", ["quantized", "high_precision"])
def test_a_served_model_takes_the_planes_as_they_are(pair, activations):
    model, _, batches = pair
    gptq(model, batches, RECIPE)
    before = [dict(model[n].weight.rowwise.buffers) for n in (0, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.quantize_model(model, RECIPE, activations=activations)
    for n, buffers in zip((0, 2), before, strict=True):
        assert_plane(model[n].weight, buffers)
    x = batches[0] if activations == "high_precision" else hybridq.quantize(batches[0], "nvfp4")
    want = hybridq.gemm(x, model[0].weight, bias=model[0].bias)
    assert torch.equal(model[0](batches[0]), want)


def test_a_run_stops_behind_the_part_that_is_observed(pair):
    model, _, batches = pair
    calls = [0, 0]
    for number, place in enumerate((0, 2)):

        def count(module, args, number=number):
            calls[number] += 1

        model[place].register_forward_pre_hook(count)
    gptq(model, batches, RECIPE)
    # All once for the order; then the first alone, then both.
    assert calls == [9, 6]
    assert len(model[2]._forward_pre_hooks) == 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) * self.k_proj(x))


@pytest.mark.parametrize("text", ["nvfp4", "fp8_e4m3"])
def test_weights_that_readers_multiply_as_one_share_the_scale_of_the_tensor(text):
    torch.manual_seed(2)
    spec = PlaneSpec.parse(text)
    model = Attention()
    with torch.no_grad():
        model.k_proj.weight *= 3.0
    q, largest = model.q_proj.weight.detach().clone(), model.k_proj.weight.abs().max()
    x = torch.randn(40, 64)
    gptq(model, [x], hybridq.recipe(fprop=text))
    want = gptq_plane(q, hessian_of(x), spec, amax=largest.detach().reshape(1))
    assert_plane(model.q_proj.weight, want.buffers)
    name = "amax" if text == "nvfp4" else "scale"
    shared = [one.weight.rowwise.buffers[name] for one in (model.q_proj, model.k_proj)]
    assert torch.equal(*shared) and shared[0] is not shared[1]
    assert not torch.equal(model.o_proj.weight.rowwise.buffers[name], shared[0])


class Experts(nn.Module):
    """Four experts in stacks, of which the router never takes the last."""

    def __init__(self, is_transposed: bool):
        super().__init__()
        up, down = torch.randn(4, 64, 32), torch.randn(4, 32, 64)
        if is_transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.is_transposed = is_transposed

    def forward(self, x, top, weights):
        y = torch.zeros_like(x)
        up, down = self.up, self.down
        for e in range(4):
            w1, w2 = (up[e].t(), down[e].t()) if self.is_transposed else (up[e], down[e])
            tokens, place = (top == e).nonzero(as_tuple=True)
            hidden = nn.functional.linear(x[tokens], w1).relu()
            y[tokens] += weights[tokens, place, None] * nn.functional.linear(hidden, w2)
        return y


class ExpertsRows(Experts):
    """Held `[E, out, in]`."""


class ExpertsCols(Experts):
    """Held `[E, in, out]`."""


for kind, is_transposed in ((ExpertsRows, False), (ExpertsCols, True)):
    hybridq.converters.register_experts(
        kind,
        hybridq.moe.ExpertsLayout(
            "up", "down", has_gate=False, activation="relu", is_transposed=is_transposed
        ),
    )


@pytest.mark.parametrize("kind", [ExpertsRows, ExpertsCols])
@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "fp8_e4m3"])
def test_experts_have_hessians_of_the_tokens_that_they_are_given(kind, text):
    torch.manual_seed(3)
    spec = PlaneSpec.parse(text)
    model = nn.ModuleDict({"experts": kind(kind is ExpertsCols)})
    experts = model["experts"]
    model.forward = lambda *args: experts(*args)
    top = torch.randint(0, 3, (30, 1))
    batch = (torch.randn(30, 32), top, torch.ones(30, 1))
    matrices = [one.weight().detach().clone() for one in products(model)]
    seen: dict[str, torch.Tensor] = {}
    with watch(products(model), lambda p: lambda rows: seen.setdefault(p.name, rows.clone())):
        model(*batch)
    with pytest.warns(hybridq.HybridQWarning, match="gptq: no token reached 2 of 8 weights"):
        report = gptq(model, [batch], hybridq.recipe(fprop=text), step="model")
    assert report.without_tokens == ("experts.up.3", "experts.down.3")
    for number, product in enumerate(products(model)):
        rows = seen.get(product.name)
        if rows is None:
            want = hybridq.storage.Plane(
                spec,
                "rowwise",
                *matrices[number].shape,
                encode_plane(matrices[number].contiguous(), spec),
            )
        else:
            assert rows.shape[0] == int((top == int(product.name[-1])).sum())
            want = gptq_plane(matrices[number], hessian_of(rows), spec)
        assert torch.equal(product.weight(), want.dequantize()), product.name
    assert hybridq.tensor.is_quantized(experts.up) and experts.up.shape[0] == 4
    y = model(*batch)
    assert y.shape == (30, 32) and y.isfinite().all()


class Saving(nn.Sequential):
    """What a library's models have; `safetensors` reads the memory of each tensor."""

    def save_pretrained(self, folder):
        save_file(self.state_dict(), folder / "model.safetensors")


def test_a_rounded_model_that_nobody_converted_saves_what_its_planes_decode_to(tmp_path):
    model = Saving(nn.Linear(64, 32))
    weight, x = model[0].weight.detach().clone(), torch.randn(96, 64)
    gptq(model, [x], RECIPE)
    model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    want = gptq_plane(weight, hessian_of(x), SPEC).dequantize()
    assert found.keys() == {"0.weight", "0.bias"}
    assert torch.equal(found["0.weight"], want) and not torch.equal(want, weight)
    assert hybridq.tensor.is_quantized(model[0].weight)


def test_a_matrix_held_transposed_is_rounded_along_its_inputs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    layer = transformers.pytorch_utils.Conv1D(32, 64)
    w, x = layer.weight.detach().clone(), torch.randn(40, 64)
    model = nn.Sequential(layer)
    report = gptq(model, [x], RECIPE)
    assert [one.name for one in report.weights] == ["0"], report.left
    want = gptq_plane(w.t(), hessian_of(x), SPEC)
    assert torch.equal(model[0].weight.dequantize(), want.dequantize().t())
    assert torch.allclose(model(x), x @ want.dequantize().t() + layer.bias, atol=1e-4)


def test_what_cannot_be_rounded_is_left_and_named():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(4, 8, 2, stride=2), nn.Flatten(), nn.Linear(32, 32))
    recipe = hybridq.recipes.ByName([("2", hybridq.recipe(fprop="nvfp4"))], "bf16")
    kernel = model[0].weight.detach().clone()
    report = gptq(model, [torch.randn(6, 4, 4, 4)], recipe)
    assert [one.name for one in report.weights] == ["2"]
    assert report.left == {"0": "the recipe leaves its weight in high precision"}
    again = gptq(model, [torch.randn(6, 4, 4, 4)], "mxfp8")
    assert again.left["2"] == "its weight is quantized already"
    assert again.left["0"] == "its weight is no matrix, but [8, 4, 2, 2]"
    assert torch.equal(model[0].weight, kernel) and not again.weights


def test_a_layer_that_no_batch_reaches_is_rounded_plainly():
    torch.manual_seed(6)
    model = nn.ModuleDict({"used": nn.Linear(32, 32), "unused": nn.Linear(32, 32)})
    model.forward = lambda x: model["used"](x)
    plain = model["unused"].weight.detach().clone()
    with pytest.warns(hybridq.HybridQWarning, match="no token reached 1 of 2 weights"):
        report = gptq(model, [torch.randn(8, 32)], "mxfp8")
    assert report.without_tokens == ("unused",) and "rounded plainly" in str(report)
    spec = model["unused"].weight.rowwise.spec
    assert_plane(model["unused"].weight, encode_plane(plain, spec))


def test_wrong_arguments_are_refused_and_nothing_is_changed(pair):
    model, (first, _), batches = pair
    for given, error, text in (
        ({"data": []}, ValueError, "at least one batch"),
        ({"data": lambda model: None}, TypeError, "must be an iterable of batches"),
        ({"step": "layer"}, ValueError, "step must be one of"),
        ({"recipe": hybridq.recipe(fprop="nvfp4;sr")}, ValueError, "gptq: the spec must be"),
        ({"data": [torch.full((2, 64), float("nan"))]}, ValueError, "inputs must be finite"),
    ):
        arguments = {"data": batches, "recipe": RECIPE} | given
        with pytest.raises(error, match=text):
            gptq(model, arguments.pop("data"), arguments.pop("recipe"), **arguments)
        assert torch.equal(model[0].weight, first)
        assert not model[0]._forward_pre_hooks and not model[2]._forward_pre_hooks


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_models_of_transformers_keep_what_they_say(family):
    """4-bit weights change logits by a few percent, and less by GPTQ than by plain rounding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    options = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    options |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    options |= {"initializer_range": 0.15}
    if family == "llama":
        config = transformers.LlamaConfig(**options)
    else:
        config = transformers.MixtralConfig(**options, num_local_experts=2, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    batches = [{"input_ids": torch.randint(0, 64, (8, 24))} for _ in range(2)]
    held_out = torch.randint(0, 64, (4, 24))
    with torch.no_grad():
        want = model(held_out).logits
        plain = type(model)(config).eval()
        plain.load_state_dict(model.state_dict())
        for product in products(plain):
            own = product.weight()
            own.copy_(hybridq.quantize(own.contiguous(), "nvfp4").dequantize())
        by_rounding = (plain(held_out).logits - want).norm() / want.norm()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = gptq(model, batches, RECIPE)
        by_gptq = (model(held_out).logits - want).norm() / want.norm()
    assert len(report.weights) == (14 if family == "llama" else 16) and not report.left
    assert 0.001 < by_gptq < by_rounding
