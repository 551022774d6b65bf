"""`save_pretrained` of models with quantized parameters, and safetensors given such tensors."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq import QuantizedTensor
from hybridq.nn.weights.pretrained import keep_planes

safetensors = pytest.importorskip("safetensors.torch")
SafetensorError = pytest.importorskip("safetensors").SafetensorError

RECIPES = ("mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd", "fp8_block")


class PreTrained(nn.Module):
    """A model whose `save_pretrained` makes the calls of Hugging Face's, in their order."""

    _tied_weights_keys = ("head.weight",)

    def __init__(self, make=nn.Linear, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.body = nn.Sequential(make(64, 64), nn.SiLU(), make(64, 64, bias=False))
        self.head = nn.Linear(64, 48, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))

    def save_pretrained(self, folder, is_main_process: bool = True, state_dict=None, **options):
        """Write `model.safetensors`.

        Args:
            folder, is_main_process, state_dict, options: as there.
        """
        state_dict = self.state_dict() if state_dict is None else state_dict
        shared = defaultdict(list)
        for name, tensor in state_dict.items():
            shared[tensor.device, tensor.untyped_storage().data_ptr()].append(name)
        for names in shared.values():
            for name in sorted(names)[1:]:
                assert name in self._tied_weights_keys
                del state_dict[name]
        state = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        safetensors.save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
        return folder


#: As it is defined, before a model has been made.
SAVE = PreTrained.save_pretrained


class Derived(PreTrained):
    """What users see: the method is its base's."""


def quantized(recipe: str, kind=Derived, **options) -> nn.Module:
    with hybridq.quantized_model_init(recipe):
        model = hybridq.convert(kind(**options))
    assert isinstance(model.body[0].weight, QuantizedTensor)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_saves_its_values_under_standard_keys(recipe, dtype, tmp_path) -> None:
    torch.set_default_dtype(dtype)
    try:
        model = quantized(recipe)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    want = hybridq.dequantized_state_dict(model)
    assert state.keys() == want.keys() == PreTrained().state_dict().keys()
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert all(value.dtype == dtype for value in state.values())
    PreTrained().load_state_dict(state)
    again = quantized(recipe)
    again.load_state_dict(state)
    # Only while it is saved: other checkpoints keep the planes.
    assert isinstance(model.state_dict()["body.0.weight"], QuantizedTensor)


@pytest.mark.parametrize("how", ["keyword", "position"])
def test_a_given_state_dict_is_decoded_and_left_as_it_is(how, tmp_path) -> None:
    model = quantized("mxfp8")
    given = model.state_dict()
    if how == "keyword":
        model.save_pretrained(tmp_path, state_dict=given)
    else:
        model.save_pretrained(tmp_path, True, given)
    assert isinstance(given["body.0.weight"], QuantizedTensor)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["body.0.weight"], model.body[0].weight.dequantize())


def test_a_parameter_with_two_names_is_saved_once(tmp_path) -> None:
    model = quantized("mxfp8", tied=True)
    model.body[2].weight = model.body[0].weight
    model._tied_weights_keys = ("head.weight", "body.2.weight")
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(state) == {"embed.weight", "body.0.weight", "body.0.bias"}


def test_a_model_built_of_hybridqs_modules_is_known_as_well(tmp_path) -> None:
    class Own(nn.Module):
        save_pretrained = SAVE

        def __init__(self) -> None:
            super().__init__()
            self.layer = hybridq.Linear(64, 64)

    with hybridq.quantized_model_init("nvfp4"):
        model = Own()
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["layer.weight"], model.layer.weight.dequantize())


def test_the_method_is_made_anew_once_and_says_what_it_did(tmp_path) -> None:
    model = quantized("mxfp8")
    first = PreTrained.save_pretrained
    hybridq.convert(model)
    assert PreTrained.save_pretrained is first and "save_pretrained" not in vars(Derived)
    assert list(inspect.signature(first).parameters)[:3] == ["self", "folder", "is_main_process"]
    assert first.__doc__.startswith("Write `model.safetensors`.")
    assert model.save_pretrained(tmp_path) == tmp_path
    copy.deepcopy(model).save_pretrained(tmp_path)
    PreTrained().save_pretrained(tmp_path)
    with pytest.raises(SafetensorError):
        model.save_pretrained(tmp_path / "none" / "such")
    assert isinstance(model.state_dict()["body.0.weight"], QuantizedTensor)


@pytest.mark.parametrize("write", ["save_file", "save_model"])
def test_parts_that_a_model_saves_by_themselves_are_decoded(write, tmp_path) -> None:
    class Parts(nn.Sequential):
        """Saves a file of each module below it, as SentenceTransformer does."""

        def save_pretrained(self, folder):
            for name, part in self.named_children():
                state = {"save_file": part.state_dict(), "save_model": part}[write]
                getattr(safetensors, write)(state, folder / f"{name}.safetensors")

    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(Parts(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))))
    model.save_pretrained(tmp_path)
    for name, key in {"0": "weight", "1": "0.weight"}.items():
        saved = safetensors.load_file(tmp_path / f"{name}.safetensors")[key]
        assert torch.equal(saved, model.get_parameter(f"{name}.{key}").dequantize())
        part = model.get_submodule(name)
        assert isinstance(part.state_dict()[key], QuantizedTensor)  # only while it is saved


def test_a_part_whose_library_writes_planes_keeps_them() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = quantized("mxfp8")

        def save_pretrained(self):
            inner, body = self.inner.state_dict(), self.inner.body.state_dict()
            return inner["body.0.weight"], body["0.weight"]

    model = hybridq.convert(Whole())
    assert not any(isinstance(one, QuantizedTensor) for one in model.save_pretrained())
    keep_planes(model.inner, True)
    assert all(isinstance(one, QuantizedTensor) for one in model.save_pretrained())


@pytest.mark.parametrize("how", ["save_file", "save", "save_model"])
def test_safetensors_itself_is_told_why_it_cannot(how, tmp_path) -> None:
    model = quantized("mxfp8")
    file = tmp_path / "x.safetensors"
    calls = {
        "save_file": lambda: safetensors.save_file(model.state_dict(), file),
        "save": lambda: safetensors.save(model.state_dict()),
        "save_model": lambda: safetensors.save_model(model, str(file)),
    }
    with pytest.raises(RuntimeError, match=r"planes and no memory.*dequantized_state_dict"):
        calls[how]()
    assert not file.exists()


def test_transformers_saves_and_loads_a_quantized_model(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    with hybridq.quantized_model_init("mxfp8"):
        model = hybridq.convert(transformers.LlamaForCausalLM(config))
    assert any(isinstance(p, QuantizedTensor) for p in model.parameters())
    ids = torch.arange(12)[None] % 96
    for options in ({}, {"max_shard_size": "60KB"}, {"state_dict": model.state_dict()}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model.save_pretrained(folder, **options)
        plain, told = transformers.LlamaForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys"))
        with torch.no_grad():
            torch.testing.assert_close(plain(ids).logits, model(ids).logits)
        for name, value in hybridq.dequantized_state_dict(model).items():
            assert torch.equal(plain.state_dict()[name], value)
