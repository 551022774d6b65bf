"""calibrate on models of transformers: experts as their own forward gives them tokens."""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import hf_models
import hybridq
from hybridq.calibration import products
from hybridq.errors import HybridQWarning

BATCHES = [{"input_ids": hf_models.IDS}, {"input_ids": hf_models.IDS.flip(1)}]


class Spy(TorchFunctionMode):
    """Notes what `F.linear` multiplies by matrices of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, list[np.ndarray]] = {}
        self.of: dict[bytes, str] = {}
        for name, one in model.named_parameters():
            stack = one.detach()[None] if one.dim() == 2 else one.detach()
            for e, matrix in enumerate(stack if one.dim() > 1 else ()):
                key = name.removesuffix(".weight") if one.dim() == 2 else f"{name}.{e}"
                self.of[self.key(matrix)] = key

    @staticmethod
    def key(matrix: torch.Tensor) -> bytes:
        return matrix.detach().float().numpy().tobytes()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[0].numel():
            name = self.of[self.key(args[1])]
            self.found.setdefault(name, []).append(np.abs(args[0].float().numpy()).max())
        return func(*args, **(kwargs or {}))

    def amax(self, name: str) -> float | None:
        return max(self.found[name]) if name in self.found else None


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_each_expert_has_the_amax_of_its_own_tokens(kind: str) -> None:
    model = hf_models.make(kind).eval()
    model.set_experts_implementation("eager")
    with Spy(model) as spy, torch.no_grad():
        for batch in BATCHES:
            model(**batch)
    found = hybridq.calibrate(model, BATCHES, per_expert=True)
    stacks = [name for name, count in found.tokens.items() if count.dim()]
    assert len(stacks) == 4
    for name in found.tokens:
        if name not in stacks:
            assert float(found.amax(name, "input")) == spy.amax(name), name
            continue
        own = [spy.amax(f"{name}.{e}") for e in range(4)]
        got = found.amaxes[name]["expert_input"]
        # Of the second product gate and up are rounded twice there, once here, to BF16.
        bound = 0 if "gate_up" in name else 2.0**-7
        for e, want in enumerate(own):
            if want is None:
                assert torch.isneginf(got[e]) and not int(found.tokens[name][e])
            else:
                assert float(got[e]) == pytest.approx(float(want), rel=bound)
        assert found.amax(name, "input") == got.max()
        weight = model.get_parameter(name).detach().float()
        assert torch.equal(found.amax(name, "weight"), weight.abs().amax((1, 2)))
    assert int(found.tokens[stacks[0]].sum()) == 2 * 24 * 2  # two experts of each token


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_results_stay_the_routers_where_all_experts_are_shown_all(kind, implementation) -> None:
    model = hf_models.make(kind).eval()
    model.set_experts_implementation(implementation)
    want, seen = hf_models.logits(model), []

    def loop(one) -> None:
        seen.append(one(hf_models.IDS).logits)

    found = hybridq.calibrate(model, loop, all_experts=True)
    assert torch.equal(seen[0], want) and torch.equal(hf_models.logits(model), want)
    native = hybridq.calibrate(model, loop)
    for name, count in found.tokens.items():
        if count.dim():
            assert count.tolist() == [24] * 4
            assert found.amax(name, "input") >= native.amax(name, "input")
        else:
            assert found.amax(name, "input") == native.amax(name, "input")


def test_a_converted_model_has_the_same_amaxes() -> None:
    model = hf_models.make("qwen3_moe").eval()
    want = hybridq.calibrate(model, BATCHES)
    got = hybridq.calibrate(hybridq.convert(model), BATCHES)
    assert [one[:2] for one in got.entries()] == [one[:2] for one in want.entries()]
    for (name, slot, mine), (_, _, other) in zip(got.entries(), want.entries(), strict=True):
        assert torch.equal(mine, other), (name, slot)


def test_conv1d_has_its_matrix() -> None:
    model = hf_models.make("gpt2").eval()
    found = hybridq.calibrate(model, BATCHES[:1])
    for product in products(model):
        assert product.weight().shape == tuple(product.module.weight.shape)[::-1]
        want = product.module.weight.detach().float().abs().max()
        assert found.amax(product.name, "weight") == want


def fp8_config(**options) -> types.SimpleNamespace:
    sizes = {"hidden_size": 160, "num_experts": 3, "moe_intermediate_size": 144}
    return types.SimpleNamespace(**sizes, hidden_act="silu", **options)


def with_random_codes(module: nn.Module) -> nn.Module:
    """A module of transformers' FP8 with random codes and scales."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dtype == torch.int8:
            codes = torch.randint(-128, 128, parameter.shape, generator=generator)
            parameter.data = codes.to(torch.int8)
        else:
            parameter.data = (values.abs() + 0.1 if values.dim() < 3 else values).to(
                parameter.dtype
            )
    for name, parameter in module.named_parameters():
        if "scale_inv" in name:
            parameter.data = parameter.data.abs()
    return module


@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
def test_fp8_weights_of_transformers_count_as_they_decode(block, monkeypatch) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = with_random_codes(fp8.FP8Linear(160, 144, block_size=block))
    want = fp8._dequantize_fp8_weight(layer.weight, layer.weight_scale_inv, block, torch.float32)
    monkeypatch.setattr(  # its kernels run on GPUs only
        fp8.FP8Linear, "forward", lambda self, input: F.linear(input, want)
    )
    net = nn.ModuleDict({"up": layer, "gate": with_random_codes(fp8.FP8Linear(160, 8))})
    x = torch.randn(4, 160)
    found = hybridq.calibrate(net, lambda one: one["up"](x))
    assert set(found.tokens) == {"up"}, "a router is left alone"
    assert found.amax("up", "weight") == want.abs().max()
    assert found.amax("up", "input") == x.abs().max()


def test_fp8_experts_of_transformers_count_as_they_decode(monkeypatch) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    experts = with_random_codes(fp8.FP8Experts(fp8_config(), block_size=(32, 32)))
    matrices = {
        name: fp8._dequantize_fp8_weight(
            getattr(experts, name), getattr(experts, f"{name}_scale_inv"), (32, 32), torch.float32
        )
        for name in ("gate_up_proj", "down_proj")
    }
    seen = {}

    def linear(self, input, weight, weight_scale_inv, activation_scale=None):
        name = "gate_up_proj" if weight.shape == experts.gate_up_proj.shape[1:] else "down_proj"
        e = next(
            e for e in range(3) if torch.equal(getattr(experts, name)[e].float(), weight.float())
        )
        seen[f"{name}.{e}"] = input.abs().max()
        return F.linear(input, matrices[name][e])

    monkeypatch.setattr(fp8.FP8Experts, "linear", linear)
    x, top = torch.randn(6, 160), torch.tensor([[0, 2]] * 6)
    net = nn.ModuleDict({"experts": experts})
    found = hybridq.calibrate(
        net, lambda one: one["experts"](x, top, torch.ones(6, 2)), per_expert=True
    )
    assert len(seen) == 4
    for name, stack in matrices.items():
        assert torch.equal(found.amax(f"experts.{name}", "weight"), stack.abs().amax((1, 2)))
        for e in (0, 2):
            got = found.amax(f"experts.{name}.{e}", "input")
            assert torch.allclose(got, seen[f"{name}.{e}"], rtol=1e-5)
        assert found.amax(f"experts.{name}.1", "expert_input") is None


def test_fp4_experts_of_transformers_count_as_they_decode() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    experts = with_random_codes(fp8.FP8Experts(fp8_config(), expert_dtype="fp4"))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    for product in products(nn.ModuleDict({"experts": experts})):
        codes = getattr(experts, product.parameter)[product.expert].numpy().view(np.uint8)
        table = np.stack([values[codes & 15], values[codes >> 4]], -1).reshape(len(codes), -1)
        scale = getattr(experts, f"{product.parameter}_scale_inv")[product.expert].detach()
        want = table * np.repeat(scale.double().numpy(), 32, 1)[:, : table.shape[1]]
        assert np.allclose(product.weight().numpy(), want, rtol=1e-6)


def test_what_cannot_be_read_is_named() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    config = types.SimpleNamespace(num_local_experts=2, intermediate_size=32, hidden_size=32)
    net = nn.ModuleDict({"up": nn.Linear(32, 32), "experts": mxfp4.Mxfp4GptOssExperts(config)})
    with pytest.warns(HybridQWarning, match=r"experts \(Mxfp4GptOssExperts: .*dequantize=True"):
        hybridq.calibrate(net, lambda one: one["up"](torch.ones(1, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.calibrate(net["up"], [torch.ones(1, 32)])


def own_cache(model: nn.Module, batches) -> list[tuple[float, float]]:
    """Of each layer the largest key and value that transformers' own cache holds."""
    found = []
    for batch in batches:
        with torch.no_grad():
            cache = model(**batch, use_cache=True)[hf_models.CACHE]
        found.append([(one.keys.abs().max(), one.values.abs().max()) for one in cache.layers])
    return [tuple(map(max, zip(*layer, strict=True))) for layer in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral"])
def test_keys_and_values_are_those_of_the_cache(kind: str) -> None:
    model = hf_models.make(kind).eval()
    want = own_cache(model, BATCHES)
    found = hybridq.calibrate(model, BATCHES)
    cached = [name for name, slots in found.amaxes.items() if "k" in slots]
    assert len(cached) == len(want) == 2
    for name, (k, v) in zip(cached, want, strict=True):
        assert hasattr(model.get_submodule(name), "layer_idx")
        assert found.amax(name, "k") == k and found.amax(name, "v") == v
        assert "input" not in found.amaxes[name] and name not in found.tokens
    assert found.observers["k"] == "max"


def test_keys_and_values_of_generated_tokens() -> None:
    model = hf_models.make("llama").eval()
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(hf_models.IDS, **options)
    kept = []
    found = hybridq.calibrate(
        model, lambda one: kept.append(one.generate(hf_models.IDS, **options)), slots=("k", "v")
    )
    assert torch.equal(kept[0].sequences, made.sequences)
    for number, layer in enumerate(made[hf_models.CACHE].layers):
        name = f"model.layers.{number}.self_attn"
        assert found.amax(name, "k") == layer.keys.abs().max()
        assert found.amax(name, "v") == layer.values.abs().max()
    assert "update" not in vars(kept[0][hf_models.CACHE])


def test_a_cache_is_left_alone_after_an_error(monkeypatch) -> None:
    model = hf_models.make("llama").eval()
    cache = hf_models.transformers.DynamicCache()
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention.o_proj, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hybridq.calibrate(model, [{"input_ids": hf_models.IDS, hf_models.CACHE: cache}])
    assert "update" not in vars(cache)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_a_model_without_a_cache_is_named_where_it_was_asked_for() -> None:
    model = hf_models.make("llama").eval()
    batch = [{"input_ids": hf_models.IDS, "use_cache": False}]
    with pytest.warns(HybridQWarning, match=r"self_attn put nothing into a KV cache"):
        hybridq.calibrate(model, batch, slots=("input", "k", "v"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hybridq.calibrate(model, batch)
    assert not any("k" in slots for slots in found.amaxes.values())
    with pytest.raises(ValueError, match=r"one amax for the tensor, got .* per channel"):
        hybridq.calibrate(model, batch, observer={"k": hybridq.calibration.Max("channel")})


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    """As DeepSeek-V3 has them: numbers behind the model's own, or a name that says so."""
    model = hf_models.make("llama").eval()
    other = hf_models.make("llama", seed=1)
    model.model.layers.append(other.model.layers[0])
    model.model.layers[2].self_attn.layer_idx = 2
    model.mtp_layers = nn.ModuleList([other.model.layers[1]])
    names = list(hybridq.calibration.attentions(model))
    assert names == [f"model.layers.{number}.self_attn" for number in range(2)]


def test_a_decoder_of_more_layers_than_its_encoder_is_seen_whole() -> None:
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "vocab_size": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf_models.transformers.BartConfig(encoder_layers=1, decoder_layers=3, **sizes, **heads)
    found = hybridq.calibration.attentions(hf_models.transformers.BartModel(config))
    assert [name for name in found if name.startswith("decoder")] == [
        f"decoder.layers.{layer}.{one}"
        for layer in range(3)
        for one in ("self_attn", "encoder_attn")
    ]
