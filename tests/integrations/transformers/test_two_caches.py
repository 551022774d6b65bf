"""HybridQCache of models of an encoder and a decoder: self-attention and cross-attention apart."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_models
import hybridq
from hybridq.calibration import Calibration
from hybridq.errors import HybridQWarning
from hybridq.formats import PlaneSpec
from oracle.bridge import expected, oracle_spec
from oracle.planes import decode

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402 (after the skip)

from hybridq.integrations.transformers import HybridQCache  # noqa: E402

#: Of the encoder, which calibrate says writes no keys and values.
pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* put nothing into a KV cache")
CACHE = hf_models.CACHE
IDS = torch.arange(4, 24).reshape(2, 10)
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART = {"vocab_size": 96, "d_model": 64, "init_std": 0.2, **HEADS, **LAYERS}
SOUNDS = {"max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BERT = {**hf_models.SIZES, "intermediate_size": 64}
GEMMA = {**hf_models.GROUPED, "head_dim": 16, "sliding_window": 4}


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))


def t5():
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def whisper():
    config = transformers.WhisperConfig(**BART, **SOUNDS, **TOKENS)
    return transformers.WhisperForConditionalGeneration(config)


def bert2bert():
    make = transformers.EncoderDecoderConfig.from_encoder_decoder_configs
    config = make(transformers.BertConfig(**BERT), transformers.BertConfig(**BERT))
    return transformers.EncoderDecoderModel(config)


def t5gemma():
    own = {"cross_attention_hidden_size": 64}
    config = transformers.T5GemmaConfig(encoder=GEMMA, decoder={**GEMMA, **own}, vocab_size=96)
    return transformers.T5GemmaForConditionalGeneration(config)


FAMILIES = {one.__name__: one for one in (bart, t5, whisper, bert2bert, t5gemma)}


@pytest.fixture
def model(request):
    torch.manual_seed(0)
    return FAMILIES[request.param]().eval()


def asked(model, tokens: int = 6) -> dict:
    given = {"decoder_input_ids": IDS[:, :tokens]}
    if model.config.model_type == "whisper":
        sounds = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
        return {"input_features": sounds, **given}
    return {"input_ids": IDS, **given}


def twin(model) -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())


@torch.no_grad()
def filled(model, cache):
    return model(**asked(model), **{CACHE: cache}).logits, cache


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_each_attention_has_a_cache_of_its_own(model) -> None:
    """Of the first layer both see exact states: E4M3 is within 1/16 of them, the largest of 32."""
    reference, exact = filled(model, twin(model))
    logits, cache = filled(model, HybridQCache(model, "mxfp8"))
    assert isinstance(cache, HybridQCache) and isinstance(cache, EncoderDecoderCache)
    assert cache.format == ["mxfp8"] * 4
    for part, want in (
        (cache.self_attention_cache, exact.self_attention_cache),
        (cache.cross_attention_cache, exact.cross_attention_cache),
    ):
        assert part.get_seq_length(1) == want.get_seq_length(1)
        for own, one in (
            (part.layers[0].keys, want.layers[0].keys),
            (part.layers[0].values, want.layers[0].values),
        ):
            assert own.shape == one.shape and not torch.equal(own, one)
            assert bool(((own - one).abs() <= one.abs().amax(-1, True) / 16 + 1e-6).all())
    assert cache.nbytes == sum(part.nbytes for part in (cache.self_attention_cache, part)) > 0
    assert 0 < share(logits, reference) < 0.1


@pytest.mark.parametrize("length", [None, 16])
@pytest.mark.parametrize("model", ["bart", "t5", "whisper", "bert2bert"], indirect=True)
@torch.no_grad()
def test_tokens_may_come_one_by_one(model, length: int | None) -> None:
    """What was made of the encoder's states is read again, and the prompt's keys stay."""
    whole, _ = filled(model, HybridQCache(model, "fp8"))
    cache, made = HybridQCache(model, "fp8", max_cache_len=length), []
    given = asked(model)
    for part in given.pop("decoder_input_ids").split([3, 1, 2], 1):
        made.append(model(**given, decoder_input_ids=part, **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(made, 1), whole, atol=1e-4, rtol=1e-3)
    assert int(cache.get_seq_length()) == 6


@pytest.mark.parametrize("model", ["bart", "t5", "whisper"], indirect=True)
def test_generation_is_that_of_two_caches(model) -> None:
    """The line of the guide gives the scores that two caches give; one for both is off by 0.6."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    given = asked(model)
    del given["decoder_input_ids"]
    more = {"output_scores": True, "return_dict_in_generate": True}
    made = model.generate(**given, **options, **more, **{CACHE: HybridQCache(model, "fp8")})
    want = model.generate(**given, **options, **more)
    first, exact = made.scores[0], want.scores[0]
    seen = exact.isfinite()
    assert 0 < share(first[seen], exact[seen]) < 0.1
    again = HybridQCache(model, "fp8")
    parts = EncoderDecoderCache(again.self_attention_cache, again.cross_attention_cache)
    other = model.generate(**given, **options, **more, **{CACHE: parts})
    assert all(map(torch.equal, made.scores, other.scores))
    static = HybridQCache(model, "fp8", max_cache_len=16)
    again = model.generate(**given, **options, **more, **{CACHE: static})
    assert torch.equal(again.sequences, made.sequences)


@pytest.mark.parametrize("model", ["bart"], indirect=True)
def test_beams_and_guesses(model) -> None:
    options = {"max_new_tokens": 6, "do_sample": False}

    def made(**more):
        return model.generate(IDS[:1], **{CACHE: HybridQCache(model, "fp8")}, **options, **more)

    assert torch.equal(made(prompt_lookup_num_tokens=2), made()), "wrong guesses are cropped"
    assert made(num_beams=3).shape[0] == 1


OPERATIONS = {
    "crop": (lambda c: c.crop(-4), lambda x: x[:, :, :-4], lambda x: x),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 1])), lambda x: x[[1, 1]], None),
    "repeat": (lambda c: c.batch_repeat_interleave(3), lambda x: x.repeat_interleave(3, 0), None),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda x: x[[1]], None),
    "copy": (copy.deepcopy, lambda x: x, None),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("model", ["bart"], indirect=True)
def test_operations_are_those_of_two_plain_caches(model, name: str) -> None:
    change, want, cross = OPERATIONS[name]
    _, cache = filled(model, HybridQCache(model, "nvfp4"))
    parts = [cache.self_attention_cache, cache.cross_attention_cache]
    before = [[(one.keys, one.values) for one in part.layers] for part in parts]
    other = change(cache) or cache
    parts = [other.self_attention_cache, other.cross_attention_cache]
    for part, held, wanted in zip(parts, before, (want, cross or want), strict=True):
        for layer, (keys, values) in zip(part.layers, held, strict=True):
            assert torch.equal(layer.keys, wanted(keys))
            assert torch.equal(layer.values, wanted(values))


@pytest.mark.parametrize("model", ["bart"], indirect=True)
def test_a_reset_cache_begins_anew(model) -> None:
    want, cache = filled(model, HybridQCache(model, "nvfp4"))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(filled(model, cache)[0], want)


KEYS_OF_SELF = ("self_attn.k_proj.weight", "SelfAttention.k.weight", ".attention.self.key.weight")


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("model", ["bart", "t5", "bert2bert"], indirect=True)
def test_each_attention_has_its_own_amax(model, format: str) -> None:
    """Keys of self-attention are made large: planes are the oracle's by that module's amax."""
    for name, parameter in model.named_parameters():
        if name.startswith(("decoder", "model.decoder")) and name.endswith(KEYS_OF_SELF):
            parameter.data.mul_(8)
    found = hybridq.calibrate(model, [asked(model)], slots=("k", "v"))
    cache = HybridQCache(model, format, found)  # a warning would be an error
    assert cache.format == [PlaneSpec.parse(format).short_text] * 4
    _, exact = filled(model, twin(model))
    filled(model, cache)
    tops, spec = [], PlaneSpec.parse(format)
    for part, want in (
        (cache.self_attention_cache, exact.self_attention_cache),
        (cache.cross_attention_cache, exact.cross_attention_cache),
    ):
        for own, one in (
            (part.layers[0].keys, want.layers[0].keys),
            (part.layers[0].values, want.layers[0].values),
        ):
            rows = one.reshape(-1, one.shape[-1])
            tops.append(float(rows.abs().max()))
            buffers = expected(rows, spec, stat=tops[-1])
            made = decode(buffers, oracle_spec(spec), *rows.shape, dtype="float32")
            assert torch.equal(own, torch.from_numpy(made).view(one.shape))
    assert tops[0] > 2 * tops[2]


@pytest.mark.parametrize("model", ["bart"], indirect=True)
def test_layers_that_the_calibration_misses_are_named(model) -> None:
    amaxes = {"k": torch.tensor(3.0), "v": torch.tensor(3.0)}
    names = [f"model.decoder.layers.{i}.self_attn" for i in range(2)]
    names.append("model.decoder.layers.1.encoder_attn")
    with pytest.warns(HybridQWarning, match="cross-attention in layers 0: their rows") as said:
        cache = HybridQCache(model, "fp8", Calibration(dict.fromkeys(names, amaxes), {}, {}))
    assert len(said) == 1 and said[0].filename == __file__
    assert cache.format == ["fp8_e4m3", "fp8_e4m3", "fp8_1x128", "fp8_e4m3"]


def test_modules_with_one_number_are_named() -> None:
    model = hf_models.make("llama")
    layer = model.model.layers[0]
    layer.second_attn = copy.deepcopy(layer.self_attn)
    amaxes = {"k": torch.tensor(3.0), "v": torch.tensor(3.0)}
    names = [f"model.layers.{i}.self_attn" for i in range(2)] + ["model.layers.0.second_attn"]
    with pytest.raises(ValueError, match=r"got .*0\.self_attn and .*0\.second_attn for layer 0"):
        HybridQCache(model, "fp8", Calibration(dict.fromkeys(names, amaxes), {}, {}))


@pytest.mark.parametrize("is_given", [True, False])
@torch.no_grad()
def test_a_decoder_alone_may_be_given_states_of_an_encoder(is_given: bool) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    crossing = transformers.GPT2Config(vocab_size=96, add_cross_attention=True, **sizes)
    states = torch.randn(2, 7, 64) if is_given else None
    for model in (
        transformers.GPT2LMHeadModel(crossing).eval(),
        transformers.BartForCausalLM(transformers.BartConfig(**{**BART, "init_std": 0.05})).eval(),
    ):
        given = {"input_ids": IDS, "encoder_hidden_states": states}
        want, cache = model(**given).logits, HybridQCache(model, "mxfp8")
        assert 0 < share(model(**given, **{CACHE: cache}).logits, want) < 0.1
        assert cache.get_seq_length() == 10
        assert cache.cross_attention_cache.get_seq_length() == (7 if is_given else 0)


@pytest.mark.parametrize("model", ["bart", "t5gemma"], indirect=True)
def test_what_cannot_be_says_what_can(model) -> None:
    inside = EncoderDecoderCache(HybridQCache(model), DynamicCache())
    with pytest.raises(TypeError, match="must be given to the model itself"):
        filled(model, inside)
    inside = EncoderDecoderCache(HybridQCache(model).self_attention_cache, DynamicCache())
    reference, _ = filled(model, twin(model))
    assert 0 < share(filled(model, inside)[0], reference) < 0.1
    if model.config.model_type == "t5gemma":  # whose generate makes a cross cache of its own
        options = {"max_new_tokens": 4, "do_sample": False}
        with pytest.raises(TypeError, match=r"EncoderDecoderCache\(HybridQCache\(model, format\)"):
            model.generate(IDS, **{CACHE: HybridQCache(model)}, **options)
        half = EncoderDecoderCache(HybridQCache(model).self_attention_cache, DynamicCache())
        model.generate(IDS, **{CACHE: half}, **options)
        assert half.get_seq_length() == 4
