"""Weights that two modules hold: scaled and rounded for both, or left and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hybridq
from hybridq.calibration import awq, gptq, smooth
from hybridq.calibration.places import scale_input

transformers = pytest.importorskip("transformers")

RECIPE = hybridq.recipe(fprop="nvfp4")
SHARED = "its weight is another module's, too"
METHODS = {
    "smooth": lambda model, data: smooth(model, data, in_front=True),
    "awq": lambda model, data: awq(model, data, RECIPE, in_front=True),
}
LLAMA = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
ZAMBA2 = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "hybrid", "hybrid"],
    "num_attention_heads": 2,
    "num_mem_blocks": 1,
    "adapter_rank": 16,
    "mamba_d_state": 8,
    "mamba_headdim": 16,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
}
IDS = torch.arange(4, 20)[None]


class Tied(nn.Module):
    """Two layers with one weight, and one of its own on the input of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.own = (nn.Linear(32, 32) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.silu(self.a(x))) + self.own(x)


def loud(model: nn.Module) -> nn.Module:
    """A model with weights that are large, so that each product counts, and uneven channels."""
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(3.0)
        model.get_input_embeddings().weight.mul_(torch.logspace(-1, 1, 32))
    return model.double().eval()


def llama(**options) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**LLAMA, num_attention_heads=2, **options)
    return loud(transformers.LlamaForCausalLM(config))


def zamba2() -> nn.Module:
    """Two hybrid layers whose blocks are modules of their own with the same parameters."""
    torch.manual_seed(2)
    config = transformers.Zamba2Config(**ZAMBA2)
    return loud(transformers.Zamba2ForCausalLM(config))


def results(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_the_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """FP64; norms of Llama's and Zamba2's kind are computed in FP32, 2^-24 of each value."""
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_one_weight_of_two_layers_is_left_and_the_rest_of_the_input_is_scaled(method):
    """Rounded once each in FP64, so 1e-12 of the largest value."""
    torch.manual_seed(3)
    model = Tied().double()
    x = torch.randn(64, 32).double() * torch.logspace(-1, 1, 32).double()
    with torch.no_grad():
        want, before = model(x), model.a.weight.clone()
        report = METHODS[method](model, [x])
        got = model(x)
    assert report.left == {"a": SHARED, "b": SHARED}
    assert [one.names for one in report.inputs] == [("own",)]
    assert hasattr(model.own, "pre_quant_scale") and not hasattr(model.a, "pre_quant_scale")
    assert model.a.weight is model.b.weight and torch.equal(model.a.weight, before)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12 * float(want.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_share_their_weights_are_left_and_named(method):
    model = zamba2()
    want, layers = results(model), model.model.layers
    blocks = [layers[n].shared_transformer.self_attn.q_proj for n in (1, 2)]
    assert blocks[0] is not blocks[1] and blocks[0].weight is blocks[1].weight
    report = METHODS[method](model, [IDS])
    assert_the_same(results(model), want)
    for n in (1, 2):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "feed_forward.down_proj"):
            assert report.left[f"model.layers.{n}.shared_transformer.{name}"] == SHARED
    scaled = {name for one in report.inputs for name in one.names}
    assert {f"model.layers.{n}.linear" for n in (1, 2)} < scaled
    assert not any("shared_transformer" in name for name in scaled)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_with_the_embeddings_weight_is_left(tied):
    model = llama(tie_word_embeddings=tied)
    want, table = results(model), model.model.embed_tokens.weight.detach().clone()
    report = smooth(model, [IDS], in_front=True, also=["heads"])
    assert_the_same(results(model), want)
    assert report.left == ({"lm_head": SHARED} if tied else {})
    assert torch.equal(model.model.embed_tokens.weight, table)
    assert hasattr(model.lm_head, "pre_quant_scale") is not tied


def one_norm(layers: nn.ModuleList) -> None:
    layers[1].input_layernorm = layers[0].input_layernorm


def one_attention(layers: nn.ModuleList) -> None:
    layers[1].self_attn = layers[0].self_attn


@pytest.mark.parametrize(
    ("share", "what"), [(one_norm, "input_layernorm"), (one_attention, "self_attn")]
)
@pytest.mark.parametrize("in_front", [False, True])
def test_a_module_in_two_blocks_takes_the_scales_of_neither(
    share: Callable[[nn.ModuleList], None], what: str, in_front: bool
):
    """Of a module that is in two places there is one parameter, and scales of two inputs."""
    model = llama()
    share(model.model.layers)
    want = results(model)
    report = smooth(model, [IDS], in_front=in_front)
    assert_the_same(results(model), want)
    folded = {name for one in report.inputs if one.is_folded for name in one.names}
    assert not any("q_proj" in name for name in folded)
    assert any("up_proj" in name for name in folded)
    why = f"{what} is in two places of the model"
    assert (report.left.get("model.layers.0.self_attn.q_proj") == why) is not in_front


def test_gptq_leaves_one_weight_of_two_layers_and_says_so():
    torch.manual_seed(4)
    model = Tied()
    before = model.a.weight.detach().clone()
    report = gptq(model, [torch.randn(64, 32)], RECIPE)
    assert report.left == {"a": SHARED, "b": SHARED}
    assert [one.name for one in report.weights] == ["own"]
    assert model.a.weight is model.b.weight and torch.equal(model.a.weight, before)
    assert type(model.own.weight).__name__ == "NVFP4Tensor"


def test_gptq_keeps_the_ties_of_shared_blocks():
    model = zamba2().float()
    report = gptq(model, [IDS], RECIPE)
    blocks = (model.model.layers[n].shared_transformer for n in (1, 2))
    first, second = (dict(one.named_parameters()) for one in blocks)
    assert first.keys() == second.keys()
    assert all(one is second[name] for name, one in first.items())
    assert not any(map(hybridq.tensor.is_quantized, first.values()))
    left = {name.partition("shared_transformer.")[2] for name in report.left}
    assert {"self_attn.q_proj", "feed_forward.gate_up_proj"} < left
    assert set(report.left.values()) == {SHARED}
    assert hybridq.tensor.is_quantized(model.model.layers[1].linear.weight)


def test_a_layer_that_is_called_by_keyword_scales_its_input_too():
    torch.manual_seed(5)
    layer = nn.Linear(32, 16).double()
    x = torch.randn(40, 32).double() * torch.logspace(-1, 1, 32).double()
    model = nn.Sequential(layer)
    with torch.no_grad():
        want = layer(x)
        smooth(model, [x], in_front=True)
        assert not torch.equal(layer.pre_quant_scale, torch.ones(32).double())
        torch.testing.assert_close(layer(input=x), want, rtol=1e-12, atol=1e-12)
        hybridq.convert(model)
        got = layer(is_first_microbatch=None, input=x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        layer()


def test_a_class_with_another_word_for_its_input_is_called_by_it():
    class Plain(nn.Linear):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return factor * super().forward(x)

    layer, x = Plain(8, 4), torch.randn(3, 8)
    want = layer(x * 2.0, 3.0)
    scale_input(layer, torch.full((8,), 2.0))
    assert torch.equal(layer(factor=3.0, x=x), want)
