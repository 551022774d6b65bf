"""HybridQCache: keys and values in few bits, by the operations that transformers asks for."""

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

from hybridq.integrations.transformers import HybridQCache  # noqa: E402 (after the skip)

IDS, CACHE = hf_models.IDS, hf_models.CACHE
FORMATS = ["fp8", "nvfp4", "mxfp8", "mxfp4"]


@pytest.fixture(scope="module")
def model():
    return hf_models.make("llama").eval()


def plain(model) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def filled(model, cache):
    return model(IDS, **{CACHE: cache}).logits, cache


def found(model, **amaxes: float) -> Calibration:
    """A calibration of the caches of all layers."""
    slots = {slot: torch.tensor(value) for slot, value in amaxes.items()}
    names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]
    return Calibration(dict.fromkeys(names, slots), {}, dict.fromkeys(amaxes, "max"))


#: Largest error of an element, as a share of the largest of its block of 16, 32 or 64. E4M3 has 4
#: significant bits: half a step is 1/16 of the element, and what is near zero is closer still. E2M1
#: is 6 * scale at most, where half a step is 1 * scale; with a scale E4M3 that is rounded by 1/16,
#: or E8M0 that is rounded up by less than 2.
BOUNDS = {"fp8": 1 / 16, "mxfp8": 1 / 16, "nvfp4": 17 / 96, "mxfp4": 2 / 6}


@pytest.mark.parametrize("format", FORMATS)
def test_what_attention_sees_is_within_the_formats_steps(model, format: str) -> None:
    _, exact = filled(model, plain(model))
    logits, cache = filled(model, HybridQCache(model, format))
    for own, one in (
        (cache.layers[0].keys, exact.layers[0].keys),
        (cache.layers[0].values, exact.layers[0].values),
    ):
        assert own.dtype == one.dtype and own.shape == one.shape and not torch.equal(own, one)
        error = (own.float() - one.float()).abs()
        assert bool((error <= BOUNDS[format] * one.float().abs().amax(-1, True) + 1e-6).all())
    reference, _ = filled(model, plain(model))
    share = float((logits - reference).float().norm() / reference.float().norm())
    assert 0 < share < (0.1 if "8" in format else 0.35)  # weights five times the usual ones


@pytest.mark.parametrize(
    ("format", "nbytes"),
    [
        ("fp8", 128 + 4),  # an FP32 scale
        ("mxfp8", 128 + 4),  # four bytes of scales
        ("nvfp4", 64 + 8 + 4),  # eight scales, an FP32 amax
        ("mxfp4", 64 + 4),
    ],
)
def test_bytes_of_a_token_and_head(format: str, nbytes: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=1, **sizes)
    small = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _, cache = filled(small, HybridQCache(small, format))
    assert cache.nbytes == 2 * 2 * IDS.numel() * nbytes, "keys and values of two heads"
    _, exact = filled(small, plain(small))
    whole = sum(one.nbytes for layer in exact.layers for one in (layer.keys, layer.values))
    assert cache.nbytes / whole == nbytes / 256


@pytest.mark.parametrize("length", [None, 32])
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_a_prompt_may_come_in_parts(model, format: str, length: int | None) -> None:
    want, whole = filled(model, HybridQCache(model, format, max_cache_len=length))
    cache = HybridQCache(model, format, max_cache_len=length)
    made = [model(part, **{CACHE: cache}).logits for part in IDS.split([5, 1, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(made, 1), want, atol=0.1, rtol=0.05)
    assert int(cache.get_seq_length()) == int(whole.get_seq_length()) == IDS.shape[1]


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("amax", [2.0, 100.0])
def test_a_calibrations_amax_is_the_scale(model, format: str, amax: float) -> None:
    _, exact = filled(model, plain(model))
    cache = HybridQCache(model, format, found(model, k=amax, v=2 * amax))
    assert cache.format == [PlaneSpec.parse(format).short_text] * 2
    filled(model, cache)
    spec, layer = PlaneSpec.parse(format), cache.layers[0]
    pairs = (
        (layer.keys, exact.layers[0].keys, amax),
        (layer.values, exact.layers[0].values, 2 * amax),
    )
    for own, one, stat in pairs:
        rows = one.reshape(-1, one.shape[-1])
        buffers = expected(rows, spec, stat=stat)
        want = decode(buffers, oracle_spec(spec), *rows.shape, dtype="bfloat16")
        assert torch.equal(own.float(), torch.from_numpy(want).view(one.shape))
    assert cache.nbytes < HybridQCache.nbytes.fget(filled(model, HybridQCache(model, format))[1])


def test_what_calibrate_finds_covers_all_layers(model, tmp_path) -> None:
    seen = hybridq.calibrate(model, [IDS], slots=("k", "v"))
    seen.save(tmp_path / "amaxes.safetensors")
    cache = HybridQCache(model, "nvfp4", tmp_path / "amaxes.safetensors")  # or it would warn
    assert cache.format == ["nvfp4", "nvfp4"]
    logits, _ = filled(model, cache)
    torch.testing.assert_close(logits, filled(model, plain(model))[0], atol=0.6, rtol=0.3)


def test_a_step_of_static_shapes_is_one_graph(model) -> None:
    """The cache alone: two tokens, then one, compiled, are those of a cache that grows."""
    states = torch.randn(3, 2, 2, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    static = HybridQCache(model, "nvfp4", max_cache_len=8)
    growing = HybridQCache(model, "nvfp4")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(keys, values):
        return static.update(keys, values, 0)

    for call, given in ((static.update, states[0]), (step, states[1]), (step, states[2])):
        keys, values = given[:, :, :1].repeat(2, 1, 1, 1), given[:, :, 1:2].repeat(2, 1, 1, 1)
        made = call(keys, values, 0) if call is not step else step(keys, values)
        want = growing.update(keys, values, 0)
        length = growing.get_seq_length()
        for one, other in zip(made, want, strict=True):
            assert torch.equal(one[:, :, :length], other) and not one[:, :, length:].any()


def test_layers_that_the_calibration_misses_are_named(model) -> None:
    one = Calibration(
        {"model.layers.1.self_attn": {"k": torch.tensor(3.0), "v": torch.tensor(3.0)}}, {}, {}
    )
    with pytest.warns(HybridQWarning, match="layers 0: their rows"):
        cache = HybridQCache(model, "nvfp4", one)
    assert cache.format == ["nvfp4;rows", "nvfp4"]


OPERATIONS = {
    "crop": (lambda c: c.crop(-4), lambda x: x[:, :, :-4]),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 1])), lambda x: x[[1, 1]]),
    "repeat": (lambda c: c.batch_repeat_interleave(3), lambda x: x.repeat_interleave(3, 0)),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda x: x[[1]]),
    "copy": (lambda c: copy.deepcopy(c), lambda x: x),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_operations_are_those_of_a_plain_cache(model, name: str, format: str) -> None:
    change, want = OPERATIONS[name]
    _, cache = filled(model, HybridQCache(model, format))
    before = [(layer.keys, layer.values) for layer in cache.layers]
    other = change(cache) or cache
    for layer, (keys, values) in zip(other.layers, before, strict=True):
        assert torch.equal(layer.keys, want(keys)) and torch.equal(layer.values, want(values))
    assert other.get_seq_length() == want(before[0][0]).shape[2]


@pytest.mark.parametrize("length", [None, 16])
def test_a_reset_cache_begins_anew(model, length: int | None) -> None:
    want, cache = filled(model, HybridQCache(model, "nvfp4", max_cache_len=length))
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(filled(model, cache)[0], want)


@pytest.mark.parametrize("length", [None, 24])
@torch.no_grad()
def test_windows_slide(length: int | None) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**hf_models.GROUPED, sliding_window=6)
    small = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = HybridQCache(small, "mxfp8", max_cache_len=length)
    whole = small(IDS, **{CACHE: HybridQCache(small, "mxfp8")}).logits
    made = [small(part, **{CACHE: cache}).logits for part in IDS.split(1, 1)]
    torch.testing.assert_close(torch.cat(made, 1), whole, atol=1e-3, rtol=1e-3)
    assert cache.layers[0].keys.shape[2] == (5 if length is None else 6)


def test_generation_searches_beams_and_takes_guesses_back(model) -> None:
    prompt, options = IDS[:1, :6], {"max_new_tokens": 6, "do_sample": False}

    def generated(**more):
        return model.generate(prompt, **{CACHE: HybridQCache(model, "fp8")}, **options, **more)

    greedy = generated()
    guessed = generated(prompt_lookup_num_tokens=2)
    assert torch.equal(greedy, guessed), "wrong guesses are cropped"
    beams = generated(num_beams=3)
    assert beams.shape == greedy.shape


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("nvfp4_16x16",), ValueError, "blocks lie in one token"),
        (("nvfp4;sr",), ValueError, "rounded to nearest"),
        (("bf16",), ValueError, "blocks lie in one token"),
        (("mxfp8", Calibration({}, {}, {})), ValueError, "takes no amax of a tensor"),
    ],
)
def test_wrong_arguments(model, arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        HybridQCache(model, *arguments)


@pytest.mark.parametrize("most", [0, -1, 3.5, "8"])
def test_a_number_of_tokens_that_is_none_is_named(model, most) -> None:
    with pytest.raises(ValueError, match=f"max_cache_len must be an integer >= 1 .* got {most!r}"):
        HybridQCache(model, "mxfp8", max_cache_len=most)


def test_other_models_and_layers_are_refused() -> None:
    with pytest.raises(TypeError, match="one of transformers, got Linear"):
        HybridQCache(torch.nn.Linear(2, 2))


@torch.no_grad()
def test_a_cache_without_room_says_so_and_stays(model) -> None:
    length = IDS.shape[1] + 2
    cache = filled(model, HybridQCache(model, "mxfp8", max_cache_len=length))[1]
    other = filled(model, HybridQCache(model, "mxfp8", max_cache_len=length))[1]
    with pytest.raises(ValueError, match=f"got {length} for {IDS.shape[1]} .* and 3 more"):
        model(IDS[:, :3], **{CACHE: cache})
    assert int(cache.get_seq_length()) == IDS.shape[1]  # and what fits is taken
    want = model(IDS[:, :2], **{CACHE: other}).logits
    assert torch.equal(model(IDS[:, :2], **{CACHE: cache}).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("most", [None, 64])
def test_a_cache_is_of_one_batch_and_one_model(model, most: int | None) -> None:
    cache = filled(model, HybridQCache(model, "mxfp8", max_cache_len=most))[1]
    batch = IDS.shape[0]
    with pytest.raises(ValueError, match=f"of {batch} sequences .* got {batch + 1} sequences"):
        model(IDS[:1].repeat(batch + 1, 1), **{CACHE: cache})
    config = copy.deepcopy(model.config)
    config.num_key_value_heads *= 2
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="each model needs a cache of its own"):
        other(IDS, **{CACHE: cache})
    assert int(cache.get_seq_length()) == IDS.shape[1]
