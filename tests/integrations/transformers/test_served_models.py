"""quantize_model on models of transformers: generation eager and compiled, saving and loading."""

from __future__ import annotations

import pytest
import torch

import hf_models
import hybridq
from compilers import BACKENDS

transformers = pytest.importorskip("transformers", minversion="5.23")

from hybridq.integrations.transformers import HybridQCache, HybridQConfig  # noqa: E402

IDS = hf_models.IDS[:, :6]
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
OPTIONS["attention_mask"] = torch.ones_like(IDS)


def generated(model, cache=None):
    return model.generate(IDS, **{hf_models.CACHE: cache}, **OPTIONS)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_generation_takes_no_context(kind: str) -> None:
    model = hf_models.make(kind).eval()
    plain = hf_models.logits(model)
    hybridq.quantize_model(model, "nvfp4_1d_weight")
    logits = hf_models.logits(model)
    assert not torch.equal(logits, plain)
    twin = hybridq.convert(hf_models.make(kind).eval())
    with hybridq.autocast(recipe="nvfp4_1d_weight"):
        want = generated(twin)
    assert torch.equal(generated(model), want)


@pytest.mark.slow  # two graphs of a whole model
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_generation_gives_the_same_tokens(backend: str) -> None:
    """In FP32: inductor rounds values between the modules to BF16 less often than eager code."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**hf_models.GROUPED, "num_hidden_layers": 1})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    hybridq.quantize_model(model, "nvfp4_1d_weight")
    want = generated(model, HybridQCache(model, "fp8", max_cache_len=16))
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    assert torch.equal(generated(model, HybridQCache(model, "fp8", max_cache_len=16)), want)


def test_planes_of_a_folder_are_served_as_they_are(tmp_path) -> None:
    folder = hf_models.saved("llama", tmp_path / "plain")
    config = HybridQConfig("mxfp8", frozen=True)
    model = hf_models.load(folder, quantization_config=config).eval()
    before = hf_models.quantized(model)
    hybridq.quantize_model(model, "mxfp8")
    assert hf_models.quantized(model) == before, "the very tensors"
    model.save_pretrained(tmp_path / "planes")
    again = hf_models.load(tmp_path / "planes").eval()
    hf_models.assert_same(model, again)
    hybridq.quantize_model(again, "mxfp8")
    assert torch.equal(hf_models.logits(again), hf_models.logits(model))


def test_a_model_without_a_config_saves_decoded_weights(tmp_path) -> None:
    model = hybridq.quantize_model(hf_models.make("llama"), "mxfp8")
    model.save_pretrained(tmp_path)
    again = hf_models.load(tmp_path).eval()
    want = hybridq.dequantized_state_dict(model)
    for name, value in again.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_a_calibration_covers_the_model() -> None:
    model = hf_models.make("mixtral").eval()
    found = hybridq.calibrate(model, [hf_models.IDS])
    hybridq.quantize_model(model, "nvfp4_1d_weight", found)  # a module that is missed would warn
    formats = {dict(one.formats)["input"] for one in hybridq.summary(model).modules if one.formats}
    assert formats == {"nvfp4 static"}
