"""SmoothQuant's and AWQ's formulas, and the models that they are folded into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import (
    Fold,
    awq,
    awq_scales,
    folds_of,
    register_folds,
    smooth,
    smooth_scales,
)
from hybridq.calibration.gptq_matrix import Hessian

transformers = pytest.importorskip("transformers")

RECIPE = hybridq.recipe(fprop="nvfp4")
SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
HEADS = SIZES | {"num_attention_heads": 4}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2}
#: Family of transformers: options of its config, products that fold, and those that do not.
FAMILIES = {
    "llama": (GROUPED | {"attention_bias": True, "mlp_bias": True}, 14, 0),
    "mistral": (GROUPED, 14, 0),
    "qwen2": (GROUPED, 14, 0),
    "qwen3": (GROUPED, 14, 0),
    "granite": (GROUPED | {"residual_multiplier": 0.3}, 14, 0),
    "gemma": (GROUPED, 14, 0),
    "mixtral": (GROUPED | EXPERTS, 8, 0),  # experts in FP64 are none of hybridq's
    "qwen3_moe": (GROUPED | EXPERTS | {"moe_intermediate_size": 48}, 8, 0),
    "bert": (HEADS, 2, 10),
    "roberta": (HEADS, 2, 10),
}


def made(family: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A random FP64 model with uneven norms, biases and channels, and batches."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family][0])
    is_encoder = family in ("bert", "roberta")
    kind = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    model = (
        kind.from_config(config, attn_implementation="eager", experts_implementation="eager")
        .double()
        .eval()
    )
    with torch.no_grad():
        for one in model.parameters():
            spread = 0.5 if one.dim() == 1 else 0.2
            one.add_(torch.randn_like(one) * spread)
    return model, [{"input_ids": torch.randint(3, 48, (2, 12))} for _ in range(2)]


def results(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["smooth", "awq"])
def test_a_folded_model_computes_what_it_did(family, method):
    """FP64: each of the few roundings per parameter is 2^-53, each result a sum of some 100.

    Gemma's norms multiply by their weights in FP32.
    """
    model, batches = made(family)
    want = results(model, batches[0])
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = smooth(model, batches) if method == "smooth" else awq(model, batches, RECIPE)
    _, folded, left = FAMILIES[family]
    names = [name for one in report.inputs for name in one.names]
    assert (len(names), len(report.left)) == (folded, left), report
    assert all(one.is_folded for one in report.inputs)
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = [
        name for name in names if not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])
    ]
    assert len(changed) > len(names) // 2
    got = results(model, batches[0])
    bound = (1e-6 if family == "gemma" else 1e-11) * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0.0, atol=bound)


def test_the_formula_of_smoothquant():
    x, w = torch.tensor([4.0, 9.0, 0.0, 2.0]), torch.tensor([1.0, 0.25, 3.0, 0.0])
    made = smooth_scales(x, w, 0.5)
    assert made.tolist() == [2.0, 6.0, 1.0, 1.0]
    assert smooth_scales(x, w, 1.0).tolist() == [4.0, 9.0, 1.0, 1.0]
    assert smooth_scales(x, w, 0.0).tolist() == [1.0, 4.0, 1.0, 1.0]


def test_smoothing_shares_out_what_is_hard():
    """After it the largest input and the largest weight of a channel are equal, at alpha 1/2."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(24, 16, bias=False)).double()
    x = torch.randn(100, 24).double() * torch.exp(2 * torch.randn(24)).double()
    want = model(x)
    report = smooth(model, [x[:60], x[60:]], in_front=True)
    seen = x * model[0].pre_quant_scale
    torch.testing.assert_close(seen.abs().amax(0), model[0].weight.abs().amax(0))
    torch.testing.assert_close(model(x), want, rtol=1e-12, atol=1e-12)
    assert not report.inputs[0].is_folded and not report.left
    assert "0.pre_quant_scale" in model.state_dict()


def test_the_search_of_awq_takes_the_best_of_its_grid():
    """Against all 21 products of the formula, computed with the inputs themselves."""
    torch.manual_seed(3)
    w, x = torch.randn(20, 32), torch.randn(200, 32) * torch.exp(1.5 * torch.randn(32))
    hessian = Hessian(32)
    hessian.add(x)

    def rounded(matrix):
        return hybridq.quantize(matrix, "nvfp4").dequantize()

    found = awq_scales([w], x.abs().mean(0), hessian.matrix, [rounded])
    errors = []
    for step in range(21):
        scales = x.double().abs().mean(0) ** (step / 20)
        made = rounded((w.double() * scales).float()).double()
        errors.append(((made @ (x.double() / scales).T - w.double() @ x.double().T) ** 2).sum())
    best = int(torch.stack(errors).argmin())
    assert found.alpha == best / 20 and best > 0
    assert found.error == pytest.approx(float(errors[best]), rel=1e-4)
    assert found.plain_error == pytest.approx(float(errors[0]), rel=1e-4)
    torch.testing.assert_close(
        found.scales, x.double().abs().mean(0) ** (best / 20), rtol=1e-6, atol=0
    )


def test_awq_makes_the_outputs_of_outlier_channels_better():
    """A few loud channels, as in the paper: rounded plainly, their weights cost the most."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 48))
    x = torch.randn(256, 64)
    x[:, ::9] *= 20.0
    report = awq(model, [x], RECIPE, in_front=True)
    assert report.inputs[0].error < 0.8 * report.inputs[0].plain_error
    w = model[0].weight.detach()
    got = nn.functional.linear(
        x * model[0].pre_quant_scale, hybridq.quantize(w, "nvfp4").dequantize()
    )
    want = nn.functional.linear(x * model[0].pre_quant_scale, w)
    assert float((got - want).square().sum()) == pytest.approx(report.inputs[0].error, rel=0.01)


def test_gptq_after_scaling_rounds_for_the_scaled_inputs():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 48))
    x = torch.randn(96, 64) * torch.exp(torch.randn(64))
    with torch.no_grad():
        want = model(x)
    smooth(model, [x], in_front=True)
    report = hybridq.calibration.gptq(model, [x], RECIPE)
    error = float(
        (model(x).detach() - want).square().sum() / (want - model[0].bias.detach()).square().sum()
    )
    assert error == pytest.approx(report.weights[0].error, rel=0.01)


class Block(nn.Module):
    """Two layers that a norm feeds, of which the table knows one only."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.beside = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(x)
        return self.up(y) * self.beside(y)


def test_a_table_that_is_wrong_of_a_model_folds_nothing():
    register_folds(Block, (Fold("norm", ("up",)),))
    register_folds(Block, (Fold("norm", ("up",)),))
    with pytest.raises(ValueError, match="Block has other folds already"):
        register_folds(Block, ())
    assert folds_of(Block) == (Fold("norm", ("up",)),) and folds_of(nn.Linear) == ()
    model, x = nn.Sequential(Block()), torch.randn(8, 16)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = smooth(model, [x])
    assert "they alone" in report.left["0.up"] and not report.inputs
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_shared_and_quantized_layers_are_left():
    model, batches = made("llama")
    layers = model.model.layers
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    layers[0].mlp.up_proj.weight = nn.Parameter(
        hybridq.quantize(layers[0].mlp.up_proj.weight.detach().float(), "mxfp8"), False
    )
    report = smooth(model.float(), batches)
    for name in ("0.self_attn.q_proj", "1.self_attn.k_proj"):
        assert "is another module's, too" in report.left[f"model.layers.{name}"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert "quantized already" in report.left[f"model.layers.0.mlp.{name}"]
    assert "left, " in str(report) and "folded" in str(report)


def test_what_a_recipe_leaves_in_high_precision_is_no_reason_to_scale():
    model, batches = made("bert")
    recipe = hybridq.recipes.ByName([("*.value", hybridq.recipe(fprop="nvfp4"))], "bf16")
    report = awq(model, batches, recipe)
    assert not report.inputs
    assert sorted(report.left) == [f"encoder.layer.{n}.attention.self.value" for n in (0, 1)]


def test_wrong_arguments_are_refused():
    x = torch.ones(4)
    for text, call in (
        ("alpha must be from 0 to 1, got 1.5", lambda: smooth_scales(x, x, 1.5)),
        (r"must be \[cols\] both, got \[4\] and \[3\]", lambda: smooth_scales(x, x[:3])),
        ("input_amax must be finite and not negative", lambda: smooth_scales(-x, x)),
        ("grid must be at least 1", lambda: awq_scales([], x, torch.eye(4), [], grid=0)),
        ("kind must be one of", lambda: Fold("norm", ("up",), "conv")),
        ("consumers must be a tuple", lambda: Fold("norm", "up")),
        (
            "awq: the spec must be",
            lambda: awq(nn.Sequential(nn.Linear(16, 16)), [], hybridq.recipe(fprop="nvfp4;sr")),
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="takes Fold records"):
        register_folds(Block, ("norm",))
    with pytest.raises(TypeError, match="kind must be a class"):
        register_folds(Block(), ())
